from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.sim.scenario import FlatTimes
from benchmarks.__main__ import app
from benchmarks.jobs import JobFailed, run_jobs
from benchmarks.prefill_path import (
    REPORTED,
    ChargedStepTimes,
    PathJob,
    PathKind,
    PathOptions,
    PathReport,
    PathRun,
    Paths,
    show,
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


def options(trace: Path) -> PathOptions:
    return PathOptions(str(trace), seeds=2, sessions=6, clients=3, input_scale=200.0, giver_blocks=3000)


def test_both_paths_answer_the_same_sessions_and_are_compared_seed_by_seed(trace: Path) -> None:
    report = Paths(options(trace)).run(QUIET, processes=2)
    assert [len(report.of(kind)) for kind in PathKind] == [2, 2, 2]
    for general, short, lossy in zip(*(report.of(kind) for kind in PathKind), strict=True):
        assert general.requests == short.requests == lossy.requests == general.handovers
        assert general.seed == short.seed
        assert lossy.total_s > general.total_s
        waited = general.wait
        parts = waited.queue_s + waited.prefill_s + waited.transfer_s + waited.rest_s
        assert parts == pytest.approx(general.ttft_s.mean)
        assert waited.rest_s >= 0
    assert all(len(report.passes[kind]) == 3 and report.pass_us(kind) > 0 for kind in (PathKind.GENERAL, PathKind.SHORT))
    assert msgspec.json.decode(msgspec.json.encode(report), type=PathReport) == report
    out = io.StringIO()
    show(Console(file=out, width=200), report)
    assert "-14.3%" in out.getvalue()


def test_the_charge_is_added_to_every_step() -> None:
    times = FlatTimes(1_000, 10)
    assert ChargedStepTimes(times, 250.4).step_us(0, 0, 7, 28) == times.step_us(0, 0, 7, 28) + 250


def test_what_was_reported_agrees_with_its_percentages() -> None:
    changes = {name: f"{figure.change:+.1%}" for name, figure in REPORTED.items()}
    assert changes == {"total_s": "-14.3%", "ttft_mean_s": "-19.7%", "ttft_p90_s": "-24.4%", "tokens_per_s": "+16.7%"}


def test_a_job_that_fails_says_why(trace: Path) -> None:
    broken = PathJob(msgspec.structs.replace(options(trace), trace=str(trace) + ".gone"), PathKind.SHORT, 0)
    with pytest.raises(JobFailed, match="No such file"):
        run_jobs("prefill-path", [broken], PathRun, lambda _run: None, processes=1)


def test_the_command_refuses_what_cannot_be_drawn(trace: Path) -> None:
    ran = CliRunner().invoke(app, ["prefill-path", "--trace", str(trace), "--sessions", "500"])
    assert ran.exit_code == 2
    assert "500 sessions" in ran.output
