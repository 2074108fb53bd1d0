"""Every decoder of a border against some thousand inputs: a bounded form of `python -m tests.fuzz`."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from baton.core.engine.progress_watch import EngineBeat
from baton.wire.engine_messages import FromStartingEngine, ToEngine
from tests.fuzz import run
from tests.fuzz.__main__ import run_child
from tests.fuzz.planted import run_planted
from tests.fuzz.registry import BORDERS, SWITCHED_OFF
from tests.fuzz.wire_frames import engine_samples

INPUTS = 4200
"""For each border: 100,000 and some in all."""
SEED = 20261101


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BORDERS if name not in SWITCHED_OFF])
def test_whatever_comes_is_decoded_or_refused_by_name_in_time_and_without_growth(name: str) -> None:
    outcome = run_child(name, INPUTS, SEED)
    assert not outcome.failures
    assert outcome.is_good
    assert outcome.understood > 0, "inputs that are no use are none"
    assert outcome.longest_ms < 1000 * run.INPUT_CPU_S_MAX


@pytest.mark.parametrize("name", BORDERS)
def test_equal_seeds_draw_equal_inputs(name: str) -> None:
    if name in SWITCHED_OFF:
        pytest.skip("needs a library that others load")
    border, again = BORDERS[name](), BORDERS[name]()
    for number in range(20):
        assert border.draw(run.draw_of(3, number)) == again.draw(run.draw_of(3, number))


def test_the_engines_samples_have_each_message_and_all_are_understood() -> None:
    samples = engine_samples()
    assert all(BORDERS["wire-engine"]().decode(sample) for sample in samples)
    tags = {msgspec.msgpack.decode(sample)["type"] for sample in samples}
    assert tags == {kind.__struct_config__.tag for kind in (*get_args(FromStartingEngine), *get_args(ToEngine), EngineBeat)}


# ── the fuzzer itself: what it must catch ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "inputs", "caught"),
    [("raises", 10, "KeyError"), ("hangs", 1, "TookTooLong"), ("takes too much", 4, "MemoryError"), ("grows", 2000, "")],
)
def test_what_is_planted_is_caught(kind: str, inputs: int, caught: str) -> None:
    outcome = run_planted(kind, inputs)
    assert not outcome.is_good
    if caught:
        assert [caught in failure.what for failure in outcome.failures] == [True]
    else:
        assert outcome.growth_bytes > run.GROWTH_BYTES_MAX


def test_a_border_that_refuses_all_is_good() -> None:
    outcome = run_planted("refuses", 50)
    assert outcome.is_good
    assert (outcome.understood, outcome.refusals) == (0, 1)
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=run.Outcome) == outcome
