from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench.sim_run import POLICIES, ReserveAndVictims
from baton.core.config import ReservePolicy, VictimPolicy
from baton.sim.cluster import RunFailed
from baton.sim.step_times import load_step_times
from benchmarks.__main__ import app
from benchmarks.policies import NETWORK_US, Policies, PolicyOptions, PolicyReport
from benchmarks.runner import Progress


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "AzureLLMInferenceTrace_small_conv.csv"
    rows = (f"2023-11-16 18:15:{n // 5:02d}.{n % 5}00000,{200 + 37 * n % 400},{40 + 53 * n % 300}\n" for n in range(120))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows) + "2023-11-16 18:16:00.0,9000,5\n")
    return path


QUIET = Progress(say=lambda _line: None, doing=lambda _what: None, done=lambda: None)
EAGER = ReserveAndVictims(ReservePolicy.NONE, VictimPolicy.NEWEST)


def run(trace: Path, policies: Sequence[ReserveAndVictims] = (EAGER,), **more: object) -> PolicyReport:
    options = PolicyOptions(trace, requests=80, seeds=(0,), slots=128, pool_share=0.3, speed=40.0)
    return Policies(replace(options, **more), QUIET, policies).run()  # type: ignore[arg-type]


def test_every_policy_meets_the_same_requests_and_is_described(trace: Path) -> None:
    report = run(trace, POLICIES)
    assert len(report.runs) == len(report.pool) == 6
    by_name = {run.policy: run for run in report.runs}
    assert by_name["none, newest"].preemptions > by_name["new-token-ratio, newest"].preemptions
    assert by_name["none, newest"].recomputed_tokens > 0
    assert all(0.1 < run.pool_use <= 1.0 and run.ttft_p99_s >= run.ttft_mean_s > 0 for run in report.runs)
    assert all(max(use.share) <= 1.0 for use in report.pool)


def test_equal_seeds_give_equal_runs_and_others_do_not(trace: Path) -> None:
    first, again, other = run(trace), run(trace), run(trace, seeds=(1,))
    assert first == again
    assert first.runs[0].preemptions > 0
    assert [run.finish_s for run in first.runs] != [run.finish_s for run in other.runs]


def test_requests_longer_than_the_context_are_left_out_and_counted(trace: Path) -> None:
    assert run(trace, requests=1000).skipped == 1


def test_time_passes_as_the_step_times_say(tmp_path: Path) -> None:
    alone = tmp_path / "one.csv"
    alone.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00.0,100,3\n")
    report = run(alone)
    times, (seen,) = load_step_times(report.step_times), report.runs
    first_us = times.step_us(0, 0, 100, 100 * 101 // 2)
    way_us = 2 * NETWORK_US
    assert seen.ttft_mean_s == pytest.approx((first_us + way_us) / 1e6)
    answered_us = first_us + times.step_us(1, 101, 0, 0) + times.step_us(1, 102, 0, 0) + way_us
    assert seen.finish_s > answered_us / 1e6  # it came a little after the start of the clock
    assert seen.output_tokens_per_s == pytest.approx(3 / seen.finish_s)
    assert (seen.preemptions, seen.recomputed_tokens, seen.pool_use) == (0, 0, 0.0)


def test_a_very_slow_trace_does_not_fill_memory_with_looks(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.policies.LOOKS_MAX", 100)
    (use,) = run(trace, requests=5, speed=0.001).pool
    assert 50 < len(use.at_s) < 120


def test_a_request_without_an_answer_fails_the_run(trace: Path) -> None:
    work = Policies(PolicyOptions(trace, requests=80, seeds=(0,), speed=40.0), QUIET, (EAGER,))
    work.config = replace(work.config, waiting_max=1)
    with pytest.raises(RunFailed, match="refused"):
        work.run()


def test_the_command_draws_and_writes(trace: Path, tmp_path: Path) -> None:
    more = ["--requests", "20", "--seeds", "2", "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png")]
    ran = CliRunner().invoke(app, ["policies", "--traces", str(trace.parent), *more])
    assert ran.exit_code == 0, ran.output
    assert "fixed-blocks" in ran.output
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "o.json").stat().st_size > 1000


def test_a_trace_in_which_nothing_fits_is_said(tmp_path: Path) -> None:
    long = tmp_path / "long.csv"
    long.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00.0,9000,5\n")
    ran = CliRunner().invoke(app, ["policies", "--trace", str(long)])
    assert ran.exit_code == 2
    assert "no request that fits 8,192 tokens" in " ".join(ran.output.split())


def test_an_absent_trace_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_TRACES", raising=False)
    for more in ([], ["--traces", str(tmp_path)]):
        ran = CliRunner().invoke(app, ["policies", *more])
        assert ran.exit_code == 2
        assert "BATON_TRACES" in ran.output
