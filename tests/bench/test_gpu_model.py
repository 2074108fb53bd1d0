"""From a report to the simulator's model of that machine, and the command that does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench import gpu
from baton.bench.gpu_floor import GpuRates, decode_operations, floor_s, prefill_operations, sizes_of
from baton.bench.gpu_model import TooFewPoints, step_times_of
from baton.bench.gpu_parts import Scale
from baton.bench.gpu_report import GpuReport, GpuRow, PartResult, StepPoint, write_report
from baton.cli.main import app
from baton.executor.model_shapes import SHAPES
from baton.sim.step_times import StepTimes, load_step_times

RATES = GpuRates(4.34e12, 790e12)
QWEN = sizes_of(SHAPES["qwen3-8b"])
SCALE = Scale()


def decode_point(batch: int, context: int) -> StepPoint:
    floor_us = floor_s(decode_operations(QWEN, batch, context), RATES) * 1e6
    return StepPoint("qwen3-8b", floor_us * 1.15 + 200, decodes=batch, context_tokens=context)


def prefill_point(sequences: int, tokens: int, begin: int) -> StepPoint:
    us = floor_s(prefill_operations(QWEN, sequences, tokens, begin), RATES) * 1e6 / 0.65 + 300
    return StepPoint("qwen3-8b", us, sequences=sequences, chunk_tokens=tokens, begin_tokens=begin)


def report() -> GpuReport:
    """Of a machine that keeps a little above its floors."""
    decodes = [*((batch, SCALE.context) for batch in SCALE.batches), SCALE.long, *SCALE.grid]
    prefills = [(1, 8192, 0), (8, 1024, 0), *SCALE.prefills]
    points = [*(decode_point(*one) for one in decodes), *(prefill_point(*one) for one in prefills)]
    other = StepPoint("qwen3-30b-a3b", 1.0, decodes=1, context_tokens=1024)
    rows = [GpuRow("batch 1", 4.1, "ms", "floor 3.52 ms", 1.165, at_most=1.25)]
    return GpuReport("2026-11-16", {"gpu": "NVIDIA H200"}, [PartResult("decode", RATES, rows, [*points, other])])


def test_the_model_says_what_was_measured() -> None:
    times = StepTimes(step_times_of(report(), "qwen3-8b", "h200-8b"))
    assert times.file.layers == 36
    assert len(times.file.points) == 5 + len(SCALE.grid) + 2 + len(SCALE.prefills)
    for point in times.file.points:
        said = times.step_us(point.decodes, point.decode_context, point.prefill_tokens, point.prefill_pairs)
        assert said == pytest.approx(point.us, rel=0.02)


def test_between_the_points_it_stays_near_the_truth() -> None:
    times = StepTimes(step_times_of(report(), "qwen3-8b", "h200-8b"))
    for batch, context in ((4, 700), (16, 2000), (100, 1500), (200, 1024), (256, 1200)):
        assert times.step_us(batch, batch * context, 0, 0) == pytest.approx(decode_point(batch, context).us, rel=0.1)
    assert times.step_us(0, 0, 4096, 4096 * 2048) == pytest.approx(prefill_point(1, 4096, 0).us, rel=0.1)


def test_without_decodes_or_prefills_there_is_no_model() -> None:
    bare = report()
    bare.parts[0].points[:] = [point for point in bare.parts[0].points if point.decodes]
    with pytest.raises(TooFewPoints, match="no prefills of qwen3-8b"):
        step_times_of(bare, "qwen3-8b", "h200-8b")


def test_page_and_model_are_made_from_a_file_on_any_machine(tmp_path: Path) -> None:
    kept, page, model = tmp_path / "gpu.json", tmp_path / "benchmarks.md", tmp_path / "mine.json"
    write_report(kept, report())
    ran = CliRunner().invoke(app, ["bench", "gpu", "--from", str(kept), "--markdown", str(page), "--step-times", str(model)])
    assert ran.exit_code == 0, ran.output
    assert "batch 1" in ran.output
    assert page.read_text().startswith("# GPU benchmark record")
    assert load_step_times(str(model)).name == "mine"
    assert json.loads(model.read_text())["layers"] == 36


def test_what_the_command_cannot_do_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = CliRunner().invoke(app, ["bench", "gpu", "--only", "decod"])
    assert ran.exit_code == 2
    assert "no part 'decod'" in ran.output
    assert gpu.main(["--from", str(tmp_path / "none.json")]) == gpu.WRONG
    assert "is no report" in capsys.readouterr().err


def test_a_missed_target_or_a_failed_part_shows_in_the_exit_code() -> None:
    good = report()
    assert gpu.exit_code(good) == gpu.DONE
    missed = GpuReport(good.made, good.machine, [PartResult("a", rows=[GpuRow("x", 1.0, "", ratio=2.0, at_most=1.0)])])
    failed = GpuReport(good.made, good.machine, [PartResult("a", error="no")])
    assert gpu.exit_code(missed) == gpu.exit_code(failed) == gpu.MISSED
