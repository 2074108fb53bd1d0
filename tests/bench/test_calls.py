from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.trace_calls import read_load
from baton.sim.workload import BadWorkload


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Two bunches of two, then one alone; one request is empty and one is far too long."""
    path = tmp_path / "small.jsonl"
    rows = [
        (0, 600, 20, "0, 1"),
        (0, 700, 30, "0, 2"),
        (3000, 10, 0, "3"),
        (3000, 90_000, 5, "4"),
        (3000, 50, 10, "5"),
        (6000, 40, 8, "6"),
    ]
    path.write_text(
        "".join(
            f'{{"timestamp": {at}, "input_length": {inputs}, "output_length": {outputs}, "hash_ids": [{ids}]}}\n'
            for at, inputs, outputs, ids in rows
        )
    )
    return path


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{n},{n + 1}\n" for n in range(10, 20)))
    return path


def test_bunches_are_spread_and_what_cannot_run_is_counted(mooncake: Path) -> None:
    load = read_load(mooncake, None, None, 8192)
    assert (len(load.requests), load.skipped, load.bunched) == (4, 2, 3)
    calls = load.at_their_times(seed=0, speed=2.0)
    assert [call.at_us for call in calls] == [0, 750_000, 2_500_000, 3_000_000]
    assert [call.prefix_ids for call in calls[:2]] == [(0, 1), (0, 2)]
    assert all(call.max_tokens == call.output_tokens and call.session is None for call in calls)


def test_what_clients_declare_counts_towards_the_limit(mooncake: Path) -> None:
    load = read_load(mooncake, None, 25, 715)
    assert [request.input_tokens for request in load.requests] == [600, 50, 40]
    assert [call.max_tokens for call in load.when_a_client_is_free()] == [25, 25, 25]


def test_the_limit_counts_requests_that_run(mooncake: Path) -> None:
    assert [request.input_tokens for request in read_load(mooncake, 3, None, 8192).requests] == [600, 700, 50]


def test_other_seeds_move_arrivals_a_little_and_keep_the_rest(mooncake: Path) -> None:
    load = read_load(mooncake, None, None, 8192)
    plain, first, again, second = (load.at_their_times(seed, 1.0) for seed in (0, 1, 1, 2))
    assert first == again
    assert [call.at_us for call in first] != [call.at_us for call in second]
    assert sorted(call.input_tokens for call in first) == sorted(call.input_tokens for call in plain)
    times_us = [call.at_us or 0 for call in first]
    assert times_us == sorted(times_us)
    assert max(times_us) <= 6_000_000 + 2 * load.gap_s * 1e6


def test_a_trace_without_times_needs_a_rate_or_clients(sharegpt: Path) -> None:
    load = read_load(sharegpt, None, None, 8192)
    assert not load.is_timed
    with pytest.raises(BadWorkload, match="no times"):
        load.at_their_times(0, 1.0)
    assert all(call.at_us is None for call in load.when_a_client_is_free())
    assert [call.input_tokens for call in load.when_a_client_is_free()] == list(range(10, 20))
    assert all(call.at_us is not None for call in load.at_rate(0, 5.0))


def test_a_trace_of_which_nothing_fits_is_refused(mooncake: Path) -> None:
    with pytest.raises(BadWorkload, match="no request that fits 10 tokens"):
        read_load(mooncake, None, None, 10)
