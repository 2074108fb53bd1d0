"""The bandwidth benchmark measures what it says, and its ratios are taken within rounds."""

from __future__ import annotations

import pytest
from rich.console import Console

from baton.kv.transfer_contract import KINDS, available
from benchmarks.handover import MEMCPY, SOCKET, ModelKv, TransferMeasured, run, show, speeds_of, transfers_to_measure
from benchmarks.runner import Progress

TINY = ModelKv("tiny", 3, 4096)


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    taken_s = {
        TransferMeasured(MEMCPY): [1.0, 10.0, 2.0],
        TransferMeasured(SOCKET): [4.0, 40.0, 8.0],
        TransferMeasured("shm"): [2.0, 10.0, 4.0],
    }
    speeds = speeds_of(TINY, 8_000_000_000, taken_s)
    found = speeds.speeds[2]
    assert found.gb_per_s == [4.0, 0.8, 2.0]
    assert found.of_memcpy == 0.5
    assert found.of_socket == 2.0
    assert speeds.goals == {"shm": 0.5}


@pytest.mark.parametrize("verified", [False, True])
def test_every_kind_is_measured_with_and_without_checks(verified: bool) -> None:
    assert {way.name for way in transfers_to_measure(KINDS) if way.verified == verified} >= set(KINDS)


def test_a_short_run_measures_every_kind_that_works_here() -> None:
    counted: list[str] = []
    quiet = Progress(say=counted.append, doing=lambda _: None, done=lambda: counted.append("one"))
    report = run(1_000_000, 1, quiet, (TINY,))
    usable = [kind for kind in KINDS if available(kind) is None]
    (model,) = report.models
    assert [speed.way for speed in model.speeds] == transfers_to_measure(usable)
    assert len(counted) == len(transfers_to_measure(usable))
    assert all(rate > 0.0 for speed in model.speeds for rate in speed.gb_per_s)
    assert set(report.absent) == set(KINDS) - set(usable)
    console = Console(record=True, width=150, quiet=False)
    with console.capture() as shown:
        show(console, report)
    assert "of a bare socket" in shown.get()
