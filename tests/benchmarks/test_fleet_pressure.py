"""The benchmark of a fleet under KV pressure, in virtual time and over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.bench.chaos_cases import ChaosCase
from baton.bench.chaos_request import SeenAnswer, StreamedParts
from baton.core.config import OnPreempt, ReservePolicy, VictimPolicy
from benchmarks.__main__ import app
from benchmarks.fleet_overload import OverloadOptions, judged, run_overload
from benchmarks.fleet_pressure import (
    SHAPES,
    FleetPressureJob,
    FleetPressureReport,
    FleetPressureRun,
    FleetShape,
    LostRequest,
    jobs_of,
    planned_requests,
    run_fleet,
    show,
    verdict,
)
from benchmarks.runner import MeasurementFailed, Progress

QUIET = Progress(say=lambda _line: None, doing=lambda _what: None, done=lambda: None)
SHRINK = 20


def job(on_preempt: OnPreempt, *, is_split: bool = False, seed: int = 0) -> FleetPressureJob:
    shape = FleetShape(30, 2, is_split)
    return FleetPressureJob(shape, ReservePolicy.NONE, VictimPolicy.NEWEST, on_preempt, seed, SHRINK)


def test_every_fleet_meets_every_policy_and_seed_once() -> None:
    jobs = list(jobs_of(SHAPES, 2, SHRINK))
    assert len(jobs) == len(set(jobs)) == len(SHAPES) * len(ReservePolicy) * len(VictimPolicy) * len(OnPreempt) * 2


def test_seeds_draw_the_lengths_and_the_largest_fits_the_pool() -> None:
    assert planned_requests(20, 1, 5) == planned_requests(20, 1, 5) != planned_requests(20, 2, 5)
    assert all(10 <= call.input_tokens <= 80 and 60 <= call.output_tokens <= 300 for call in planned_requests(500, 0, 5))


@pytest.mark.parametrize("is_split", [False, True])
def test_a_fleet_under_pressure_preempts_and_where_requests_resume_loses_none(is_split: bool) -> None:
    run = run_fleet(job(OnPreempt.RESUME, is_split=is_split))
    assert run.preemptions > 0
    assert run.lost == []
    assert len(run.duration_s) == 30
    assert run == msgspec.structs.replace(run_fleet(job(OnPreempt.RESUME, is_split=is_split)), wall_s=run.wall_s)


def test_what_moves_is_counted() -> None:
    assert run_fleet(job(OnPreempt.RESCHEDULE)).moves > 0


def run_with(lost: list[LostRequest]) -> FleetPressureRun:
    return FleetPressureRun(job(OnPreempt.RESCHEDULE), 10, lost, 3, 2, 4, 3, 1, [1.0, 2.0], 5.0, 10, 0.1)


def test_a_report_says_how_many_were_lost_and_in_how_many_rows() -> None:
    clean = FleetPressureReport(seeds=1, shrink=1, runs=[run_with([])])
    assert verdict(clean) == "0 of all 30 requests lost."
    lost = FleetPressureReport(seeds=1, shrink=1, runs=[run_with([LostRequest(1, "lost", "no blocks", 5, 3, 4)])])
    assert verdict(lost) == "1 of all 30 requests lost, in 1 of 1 rows."
    console = Console(width=200, record=True)
    show(console, lost)
    assert "1 of 30" in console.export_text()


@pytest.mark.slow
def test_the_command_runs_one_fleet(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = CliRunner().invoke(
        app, ["fleet-pressure", "--seeds", "1", "--shrink", "50", "--fleets", "0", "--json", str(path)]
    )
    assert result.exit_code in (0, 1), result.output
    assert len(msgspec.json.decode(path.read_bytes(), type=FleetPressureReport).runs) == 12


def test_a_fleet_that_does_not_exist_is_refused() -> None:
    assert CliRunner().invoke(app, ["fleet-pressure", "--fleets", "7"]).exit_code == 2


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


def answer(tokens: int, fault: str | None = None) -> SeenAnswer:
    return SeenAnswer(200, {0: StreamedParts(tokens=list(range(tokens)), finish="length")}, fault=fault)


def test_an_answer_is_held_to_the_undisturbed_one_or_to_its_own_length() -> None:
    case = ChaosCase(0, "/v1/completions", {"max_tokens": 5})
    assert judged(case, answer(5), None) == []
    assert judged(case, answer(4), None) == ["4 tokens of 5"]
    assert judged(case, answer(5, "503: no blocks"), None) == ["503: no blocks"]
    assert judged(case, answer(5), answer(5)) == []
    assert judged(case, answer(4), answer(5)) == ["choice 0: tokens differ from number 4 on"]


def test_a_request_that_fits_no_pool_is_refused_before_anything_starts() -> None:
    with pytest.raises(MeasurementFailed, match="needs 119 blocks"):
        OverloadOptions(kv_blocks=100)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["scripted", "tiny"])
def test_an_overloaded_fleet_ends_no_accepted_request(model: str) -> None:
    """As `python -m benchmarks fleet-overload`, for some seconds and with a fifth of the lengths and pools."""
    options = OverloadOptions(model, 0.1, 24, 24, (10, 80), (60, 300), kv_blocks=48)
    report = asyncio.run(run_overload(options, QUIET))
    assert report.failures == []
    assert report.accepted >= 24
    assert report.preemptions > 0
