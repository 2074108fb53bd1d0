from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from baton.bench.policies import POLICIES, Policies, Policy, PolicyOptions, PolicyReport
from baton.bench.virtual import Arrival, Clock, CountingExecutor, StepTime
from baton.cli.main import app
from baton.core.config import ReservePolicy, VictimPolicy, WorkerConfig
from baton.core.errors import InvariantViolated
from baton.core.plan import Chunk, Outcome, Start, StepPlan, Stop
from baton.core.request import Sampling
from baton.executor.contract import ExecutorShape


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "AzureLLMInferenceTrace_small_conv.csv"
    rows = (f"2023-11-16 18:15:{n // 5:02d}.{n % 5}00000,{200 + 37 * n % 400},{40 + 53 * n % 300}\n" for n in range(120))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows) + "2023-11-16 18:16:00.0,9000,5\n")
    return path


EAGER = Policy(ReservePolicy.NONE, VictimPolicy.NEWEST)


def run(trace: Path, policies: Sequence[Policy] = (EAGER,), **more: object) -> PolicyReport:
    options = PolicyOptions(trace, requests=80, seeds=(0,), slots=128, pool_share=0.3, speed=40.0)
    return Policies(replace(options, **more), policies).run(lambda _what: None, lambda _ended: None)  # type: ignore[arg-type]


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


def test_the_step_time_is_near_what_was_measured() -> None:
    for sequences, measured_us in ((1, 4_980), (32, 6_290), (128, 10_150), (256, 16_810)):
        assert StepTime().of(0, sequences, sequences * 1024) == pytest.approx(measured_us, rel=0.08)


def test_time_passes_as_the_steps_say() -> None:
    config = WorkerConfig(slots=4, blocks=64, context_tokens=512, reserve=ReservePolicy.NONE)
    seen = Clock(config, [Arrival(1_000_000, 100, 5, 50)], StepTime(1000, 10, 0, 0)).to_the_end()
    assert seen.ttft_us == [2000]  # a step, and 100 tokens of 10 µs
    assert seen.end_us >= 1_000_000 + 2000 + 4 * 1000
    assert [ended.generated_tokens for ended in seen.ended] == [5]


def test_the_counting_executor_keeps_the_contract() -> None:
    executor = CountingExecutor(ExecutorShape(2, 8, 4, 32), [2], StepTime())
    blocks = np.array([3, 1], dtype=np.int32)
    start = Start(0, 1, np.arange(5, dtype=np.int32), 5, 0, 16, Sampling(seed=0), blocks)
    executor.launch(StepPlan(1, 0, starts=(start,), chunks=(Chunk(0, 1, 0, 3, False), Chunk(1, 1, 0, 2, True))))
    first = executor.collect()
    assert first.outcomes.tolist() == [Outcome.NOTHING_CHUNK_UNFINISHED, Outcome.NOTHING_EMPTY_SLOT]
    executor.launch(StepPlan(2, 1, chunks=(Chunk(0, 1, 3, 5, True),)))
    assert executor.collect().tokens.tolist() == [7]
    decode = {"decode_slots": np.array([0], dtype=np.int32), "decode_epochs": np.array([1])}
    executor.launch(StepPlan(3, 2, **decode))
    second = executor.collect()
    assert (second.tokens.tolist(), second.known.tolist()) == ([2], [7])  # the answer's second token is its last
    executor.launch(StepPlan(4, 3, **decode))
    executor.launch(StepPlan(5, 4, **decode))
    executor.launch(StepPlan(6, 5, **decode))
    assert [executor.collect().outcomes[0] for _ in range(3)] == [
        Outcome.TOKENS,
        Outcome.TOKENS,
        Outcome.NOTHING_OUT_OF_BLOCKS,
    ]
    executor.launch(StepPlan(7, 6, stops=(Stop(0, 1),)))
    stopped = executor.collect()
    assert (stopped.outcomes[0], stopped.known[0]) == (Outcome.PREEMPTED, 9)
    with pytest.raises(InvariantViolated, match="built on step 3"):
        executor.launch(StepPlan(8, 3))


def test_the_command_draws_and_writes(trace: Path, tmp_path: Path) -> None:
    more = ["--requests", "20", "--seeds", "2", "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png")]
    ran = CliRunner().invoke(app, ["bench", "policies", "--traces", str(trace.parent), *more])
    assert ran.exit_code == 0, ran.output
    assert "fixed-blocks" in ran.output
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "o.json").stat().st_size > 1000


def test_an_absent_trace_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_TRACES", raising=False)
    for more in ([], ["--traces", str(tmp_path)]):
        ran = CliRunner().invoke(app, ["bench", "policies", *more])
        assert ran.exit_code == 2
        assert "BATON_TRACES" in ran.output
