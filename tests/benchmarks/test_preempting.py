from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.preempting import time_preempting


def test_every_step_preempts_and_the_quiet_run_never_does() -> None:
    timing = time_preempting(256, 64)  # raises if the quiet side preempts
    assert timing.steps == 64
    assert 0.8 * timing.steps <= timing.preemptions <= 2 * timing.steps
    assert timing.steps_without <= 0.2 * timing.steps
    assert timing.ratio_min <= timing.ratio <= timing.ratio_max


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        time_preempting(8, 16)
    assert CliRunner().invoke(app, ["scheduler", "--preempting", "--rows", "8"]).exit_code == 2


def test_the_command_prints_the_ratio(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    command = ["scheduler", "--preempting", "--rows", "128", "--steps", "16", "--json", str(out)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert [timing["rows"] for timing in json.loads(out.read_text())["preempting"]] == [128, 256]
