from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from baton.sim.workload import BadWorkload, SyntheticLoad, poisson_us

PLAIN = SyntheticLoad(conversations=4, input_tokens=100, output_tokens=20)


def test_plain_requests_are_equal_and_wait_for_a_client() -> None:
    calls = PLAIN.calls(0)
    assert [(call.at_us, call.input_tokens, call.output_tokens, call.max_tokens, call.session) for call in calls] == [
        (None, 100, 20, 20, None)
    ] * 4
    assert PLAIN.sequence_tokens_max == 120


def test_clients_declare_at_least_what_they_will_get() -> None:
    assert replace(PLAIN, max_tokens=500).calls(0)[0].max_tokens == 500
    assert replace(PLAIN, max_tokens=5).calls(0)[0].max_tokens == 20


def test_a_session_sends_its_history_along_and_pauses() -> None:
    load = SyntheticLoad(2, 100, 20, rounds=3, think_us=7_000, rate_per_s=1.0)
    calls = load.calls(0)
    assert [call.session for call in calls] == [0, 0, 0, 1, 1, 1]
    assert [call.input_tokens for call in calls[:3]] == [100, 100, 100]  # new ones; the history is the client's to send
    assert [call.think_us for call in calls[:3]] == [0, 7_000, 7_000]
    assert [call.at_us is None for call in calls] == [False, True, True] * 2
    assert (load.requests, load.sequence_tokens_max) == (6, 360)


def test_arrivals_follow_the_rate_and_the_seed() -> None:
    first, again, other = (list(islice(poisson_us(50.0, seed), 5_000)) for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(first)
    assert first[-1] / 5_000 == pytest.approx(20_000, rel=0.05)


@pytest.mark.parametrize(
    "bad",
    [
        {"conversations": 0},
        {"input_tokens": 0},
        {"output_tokens": -1},
        {"rounds": 0},
        {"think_us": -1},
        {"rate_per_s": 0.0},
        {"rate_per_s": float("nan")},
        {"conversations": 1_000_000, "rounds": 2},
    ],
)
def test_nonsense_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadWorkload):
        replace(PLAIN, **bad)  # type: ignore[arg-type]
