"""Stages on a terminal: one line that is written over, and what each took when it has ended."""

from __future__ import annotations

import io
import re

import pytest

from baton.cli.stage_display import BAR_COLUMNS, LiveStages
from baton.node.stage_progress import PartUnit, StageProgress
from baton.node.start_stages import StageLines, StartStages

FULL = "━"


def shown(out: io.StringIO) -> list[str]:
    return re.sub(r"\033\[[0-9;]*[mK]", "", out.getvalue()).split("\n")


def drawn(out: io.StringIO) -> str:
    """The line that is on the terminal."""
    return shown(out)[-1].rstrip("\r").rpartition("\r")[2]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")  # then a full piece of a bar is another letter than an empty one


def test_a_stage_is_replaced_by_what_it_took() -> None:
    out = io.StringIO()
    stages = LiveStages(out)
    stages.began("loading the weights", 1.0)
    stages.ended("loading the weights", 2.5)
    stages.close()
    line, rest = shown(out)
    assert re.fullmatch(r"   0\.0 s  [━ ]{20}  loading the weights …", line.split("\r")[0])
    assert line.split("\r")[-1] == "   2.5 s  loading the weights"
    assert rest == ""


def test_a_stage_fits_on_one_line_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = io.StringIO()
    stages = LiveStages(out)
    stages.began("compiling the CPU kernels", 0.0)
    stages.close()
    assert shown(out)[0].split("\r")[0] == "   0.0 s  compiling"


def test_a_stage_in_which_the_start_fails_leaves_nothing_on_its_line() -> None:
    out = io.StringIO()
    stages = LiveStages(out)
    stages.began("loading the weights", 0.0)
    stages.close()
    stages.close()
    before = out.getvalue()
    assert before.endswith("\r\033[2K")
    stages._show()
    assert out.getvalue() == before, "it counts no more"


@pytest.mark.parametrize(("done", "filled"), [(0, 0), (25, 5), (50, 10), (100, 20)])
def test_a_bar_is_filled_as_far_as_the_stage_has_come(done: int, filled: int) -> None:
    out = io.StringIO()
    stages = LiveStages(out)
    stages.began("fetching the package", 0.0)
    stages.advanced(StageProgress(done * 1_000_000, 100_000_000, PartUnit.BYTES))
    stages._show()
    stages.close()
    line = drawn(out)
    found = re.fullmatch(r" *[0-9.]+ s  (.{20})  (\d+) of 100 MB  fetching the package …", line)
    assert found, line
    assert found[1].count(FULL) == filled
    assert int(found[2]) == done


def test_tensors_are_counted() -> None:
    assert str(StageProgress(12, 272, PartUnit.TENSORS)) == "12 of 272 tensors"


def test_what_a_stage_had_done_is_not_shown_of_the_next() -> None:
    out = io.StringIO()
    stages = LiveStages(out)
    stages.began("unpacking the model", 0.0)
    stages.advanced(StageProgress(1, 2, PartUnit.TENSORS))
    stages.began("loading the weights", 1.0)
    stages.close()
    assert "1 of 2" not in out.getvalue()


def test_a_bar_of_which_nobody_knows_the_end_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = LiveStages(io.StringIO())
    stages.began("compiling the CPU kernels", 0.0)
    stages.close()
    stages._stage = "compiling the CPU kernels"
    assert len({stages._line(seconds)[10 : 10 + BAR_COLUMNS] for seconds in (0.0, 0.2, 0.4)}) == 3


@pytest.mark.parametrize("columns", [10, 20, 59, 60, 61, 80, 300])
def test_a_line_is_never_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    stages = LiveStages(out)
    stages.began("compiling the CPU kernels (once for this machine, some tens of seconds)", 0.0)
    stages.advanced(StageProgress(1, 2, PartUnit.BYTES))
    stages._show()
    stages.close()
    assert all(len(line) < columns for line in shown(out)[0].split("\r"))


def test_in_a_log_a_stage_is_one_line_however_often_it_has_come_further() -> None:
    lines: list[str] = []
    stages = StartStages(StageLines(lines.append), lambda: 0.0)
    stages.begin("fetching the package")
    for done in range(100):
        stages.advance(StageProgress(done, 100, PartUnit.BYTES))
    stages.summary()
    assert lines == ["[  0.0 s] fetching the package"]
