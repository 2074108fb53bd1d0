from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.bench.sim_run import BadSimOptions
from benchmarks.__main__ import app
from benchmarks.split import (
    SplitJob,
    SplitOptions,
    SplitReport,
    SplitRun,
    Splits,
    run_split,
    show,
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake_conversation_small.jsonl"
    rows = [
        {
            "timestamp": 300 * n,
            "input_length": 900 + 150 * (n % 7),
            "output_length": 20 + n % 5,
            "hash_ids": [n % 4, 100 + n],
        }
        for n in range(40)
    ]
    path.write_text("".join(msgspec.json.encode(row).decode() + "\n" for row in rows))
    return path


def job(trace: Path, givers: int, by_load: bool = False) -> SplitJob:
    return SplitJob(SplitOptions(str(trace), 40, instances=3, givers=(1,)), 1.0, 0, givers, by_load=by_load)


def aiming(job: SplitJob, **targets: float) -> SplitJob:
    return msgspec.structs.replace(job, options=msgspec.structs.replace(job.options, **targets))


def test_a_light_load_is_good_with_and_without_a_split(trace: Path) -> None:
    mixed, split = run_split(job(trace, 0)), run_split(job(trace, 1))
    for run in (mixed, split):
        assert run.good_share == 1.0
        assert run.good_per_s == pytest.approx(run.offered_per_s)
        assert run.judged == 32
        assert run.unanswered == 0
    assert mixed.busy_givers is None
    assert split.handovers == 40
    assert split.transfer_ms is not None
    assert split.transfer_ms.mean < 5.0
    assert run_split(job(trace, 1)).ttft_s == split.ttft_s, "one job has one result"


def test_shares_say_which_target_was_missed(trace: Path) -> None:
    late = run_split(aiming(job(trace, 1), ttft_s=0.001))
    slow = run_split(aiming(job(trace, 1), tpot_ms=0.001))
    both = run_split(aiming(job(trace, 1), ttft_s=0.001, tpot_ms=0.001))
    assert (late.late_share, late.slow_share, late.both_share, late.good_share) == (1.0, 0.0, 0.0, 0.0)
    assert (slow.late_share, slow.slow_share, slow.both_share) == (0.0, 1.0, 0.0)
    assert (both.late_share, both.slow_share, both.both_share) == (0.0, 0.0, 1.0)


def test_by_load_a_long_prompt_keeps_others_away_from_its_instance(tmp_path: Path) -> None:
    path = tmp_path / "mooncake_conversation_uneven.jsonl"
    lengths = [60_000 if n % 3 == 0 else 500 for n in range(12)]
    path.write_text(
        "".join(f'{{"timestamp": {n}, "input_length": {length}, "output_length": 5}}\n' for n, length in enumerate(lengths))
    )
    in_turn, by_load = (run_split(job(path, 0, by_load=by_load)) for by_load in (False, True))
    assert by_load.ttft_s.mean < in_turn.ttft_s.mean


@pytest.mark.slow
def test_all_clusters_are_run_at_all_speeds_and_told_of(trace: Path) -> None:
    options = SplitOptions(str(trace), 40, speeds=(1.0, 2.0), instances=3, givers=(1, 2), mixed_step_tokens=(512,))
    seen: list[SplitRun] = []
    report = Splits(options).run(seen.append, processes=2)
    assert len(seen) == len(report.runs) == 8
    assert report.clusters == ["mixed ×3, in turn, 512", "mixed ×3, by load, 2,048", "1P2D", "2P1D"]
    assert report.best(split=False) == "mixed ×3, in turn, 512"
    assert report.best(split=True) in ("1P2D", "2P1D")
    assert msgspec.json.decode(msgspec.json.encode(report), type=SplitReport) == report
    out = io.StringIO()
    show(Console(file=out, width=200), report)
    assert "2P1D" in out.getvalue()
    assert "in goodput at the peak of each" in " ".join(out.getvalue().split())


def test_a_split_that_leaves_nobody_to_decode_is_refused(trace: Path) -> None:
    with pytest.raises(BadSimOptions, match="8 of 8"):
        SplitOptions(str(trace), givers=(8,))


def test_a_missing_trace_is_said_with_how_to_name_one(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["split", "--traces", str(tmp_path)])
    assert ran.exit_code == 2
    assert "BATON_TRACES" in ran.output


def test_the_command_writes_numbers_and_refuses_nonsense(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "split.json"
    usual = ["split", "--trace", str(trace), "--requests", "40", "--instances", "2", "--mixed-chunks", "1024"]
    ran = CliRunner().invoke(app, [*usual, "--speeds", "1", "--givers", "1", "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    assert len(msgspec.json.decode(out.read_bytes(), type=SplitReport).runs) == 3
    assert CliRunner().invoke(app, [*usual, "--speeds", "fast", "--givers", "1"]).exit_code == 2
