from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.core.engine.passes import ShortPrefillPass
from baton.core.engine.step_builder import StepBuilder
from baton.sim.report import ValueDistribution
from baton.sim.scenario import FlatTimes
from benchmarks.__main__ import app
from benchmarks.jobs import JobFailed, run_jobs
from benchmarks.prefill_path import (
    PATHS,
    REPORTED,
    ChargedStepTimes,
    PathJob,
    PathKind,
    PathOptions,
    PathPasses,
    PathReport,
    PathRun,
    Paths,
    PathWaits,
    run_path,
    show,
    verdict,
)
from benchmarks.runner import Progress

QUIET = Progress(say=lambda _line: None, doing=lambda _what: None, done=lambda: None)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "sharegpt_small.csv"
    rows = []
    for talk in range(12):
        said = 0
        for turn in range(2 + talk % 3):
            prompt, answer = said + 40 + 7 * talk + turn, 20 + turn
            rows.append(f"{prompt},{answer}\n")
            said = prompt + answer
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(rows))
    return path


def options(trace: Path, **others: float) -> PathOptions:
    few = PathOptions(str(trace), seeds=1, sessions=6, clients=3, rounds=4, input_scale=200.0, giver_blocks=520)
    return msgspec.structs.replace(few, **others)


@pytest.mark.slow
def test_every_run_answers_the_same_sessions_and_is_compared_seed_by_seed(trace: Path) -> None:
    report = Paths(options(trace)).run(QUIET, processes=2)
    assert [len(report.of(kind)) for kind in PathKind] == [1] * len(PathKind)
    for kind in PathKind:
        for general, other in zip(report.of(PathKind.GENERAL), report.of(kind), strict=True):
            assert (general.seed, general.requests) == (other.seed, other.requests)
            assert other.handovers == other.requests
            assert (other.refused, other.failed) == (0, 0)
            waited = other.wait
            parts = waited.queue_s + waited.prefill_s + waited.transfer_s + waited.rest_s
            assert parts == pytest.approx(other.ttft_s.mean)
            assert waited.rest_s >= 0
    assert all(report.passes[kind].us > 0 for kind in PATHS)
    assert msgspec.json.decode(msgspec.json.encode(report), type=PathReport) == report
    out = io.StringIO()
    show(Console(file=out, width=300), report)
    assert "-14.3%" in out.getvalue()


def crowded(trace: Path) -> PathOptions:
    """The shape of the benchmark's load: histories outgrow the pool late, and a tenth of the waits are much longer."""
    return options(trace, sessions=12, clients=6, rounds=8, input_scale=150.0, token_ms=200.0, giver_blocks=1300)


def short_over_general(trace: Path, seeds: int) -> dict[str, float]:
    """In virtual time, in which passes cost nothing: the short path's order and blocks must not cost anything either."""
    runs = {kind: [run_path(PathJob(crowded(trace), kind, seed)) for seed in range(seeds)] for kind in PATHS}
    assert all(run.ttft_s.p90 > 2.5 * run.ttft_s.mean and run.cached_share < 0.6 for run in runs[PathKind.GENERAL])
    totals = {
        name: [sum(run.figure(name) for run in runs[kind]) for kind in (PathKind.SHORT, PathKind.GENERAL)]
        for name in ("total_s", "ttft_mean_s", "ttft_p90_s")
    }
    return {name: short / general for name, (short, general) in totals.items()}


@pytest.mark.slow
def test_the_short_path_is_not_slower_than_the_general_one(trace: Path) -> None:
    ratios = short_over_general(trace, seeds=4)
    assert max(ratios.values()) <= 1.01, ratios


def plan_half_of_each_step(self: ShortPrefillPass, step: StepBuilder) -> None:
    step.budget //= 2
    SCHEDULE(self, step)


def begin_when_nothing_is_in_flight(self: ShortPrefillPass, step: StepBuilder) -> None:
    if not self._running.in_flight:
        SCHEDULE(self, step)


SCHEDULE = ShortPrefillPass.prefill_schedule


@pytest.mark.slow
@pytest.mark.parametrize("slower", [plan_half_of_each_step, begin_when_nothing_is_in_flight])
def test_a_short_path_that_is_slower_is_seen(trace: Path, monkeypatch: pytest.MonkeyPatch, slower: object) -> None:
    monkeypatch.setattr(ShortPrefillPass, "prefill_schedule", slower)
    ratios = short_over_general(trace, seeds=1)
    assert max(ratios.values()) > 1.01, ratios


def test_each_waste_does_what_it_says(trace: Path) -> None:
    kinds = (PathKind.GENERAL, PathKind.OUTPUTS, PathKind.LOST_SIGNAL)
    general, outputs, lost = (run_path(PathJob(options(trace, giver_blocks=2000), kind, 0)) for kind in kinds)
    assert outputs.giver_held_peak > general.giver_held_peak
    assert lost.wait.transfer_s > general.wait.transfer_s
    assert general.prefills_preempted == 0


def test_a_pass_that_does_not_overlap_costs_its_time(trace: Path) -> None:
    free, charged = (run_path(PathJob(options(trace), PathKind.NO_OVERLAP, 0, us)) for us in (0.0, 5_000.0))
    assert charged.charged_s == pytest.approx(charged.giver_steps * 0.005)
    assert charged.total_s > free.total_s


def test_the_charge_is_added_to_every_step() -> None:
    times = FlatTimes(1_000, 10)
    assert ChargedStepTimes(times, 250.4).step_us(0, 0, 7, 28) == times.step_us(0, 0, 7, 28) + 250


def test_what_was_reported_agrees_with_its_percentages() -> None:
    changes = {name: f"{figure.change:+.1%}" for name, figure in REPORTED.items()}
    assert changes == {"total_s": "-14.3%", "ttft_mean_s": "-19.7%", "ttft_p90_s": "-24.4%", "throughput": "+16.7%"}


# ── the verdict ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def made_up(total_s: dict[PathKind, float], p90_s: dict[PathKind, float]) -> PathReport:
    def run(kind: PathKind) -> PathRun:
        total, p90 = total_s.get(kind, 100.0), p90_s.get(kind, 40.0)
        waits = ValueDistribution(count=10, mean=p90 / 4, p50=1.0, p90=p90, p99=p90, max=p90)
        return PathRun(
            kind=kind, seed=0, requests=10, total_s=total, ttft_s=waits, wait=PathWaits(1.0, 1.0, 0.0, 0.0),
            giver_busy=0.5, giver_held_peak=0.5, giver_steps=100, charged_s=0.0, computed_tokens=1, cached_share=0.5,
            handovers=10, refused=0, failed=0, prefills_preempted=0, passes=None,
        )  # fmt: skip

    passes = dict.fromkeys(PATHS, PathPasses(100, 500.0, 300.0, 0))
    return PathReport(2, "0", "trace", {}, passes, 51_000.0, REPORTED, [run(kind) for kind in PathKind])


def test_the_verdict_follows_the_figures() -> None:
    lossy = {PathKind.LOSSY: 100 / 0.857}
    same = " ".join(verdict(made_up(lossy, {PathKind.LOSSY: 46.0, PathKind.OUTPUTS: 60.0})))
    assert "no difference to speak of" in same
    assert "each alone: outputs +50.0%." in same
    assert "gate, no overlap, preempted, lost signal" in same
    assert "51 ms in each" in same
    assert "P90 changes by -13.0% where -24.4% was reported, so time lost in passes does not explain" in same
    other = " ".join(verdict(made_up(lossy | {PathKind.SHORT: 103.0, PathKind.ALL: 120.0}, {PathKind.LOSSY: 52.9})))
    assert "it is SLOWER" in other
    assert "each alone: none." in other
    assert "all wastes together the short path has total time -14.2%" in other
    assert "99% of that of the total time" in other
    assert "so time lost in passes explains" in other
    assert "it is faster" in " ".join(verdict(made_up(lossy | {PathKind.SHORT: 90.0}, {})))


def test_a_job_that_fails_says_why(trace: Path) -> None:
    broken = PathJob(msgspec.structs.replace(options(trace), trace=str(trace) + ".gone"), PathKind.SHORT, 0)
    with pytest.raises(JobFailed, match="No such file"):
        run_jobs("prefill-path", [broken], PathRun, lambda _run: None, processes=1)


def test_the_command_refuses_what_cannot_be_drawn(trace: Path) -> None:
    ran = CliRunner().invoke(app, ["prefill-path", "--trace", str(trace), "--rounds", "1"])
    assert ran.exit_code == 2
