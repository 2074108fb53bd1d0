"""Stages on a terminal: one line that is written over, and what each took when it has ended."""

from __future__ import annotations

import io

import pytest

from baton.cli.stage_display import LiveStages


def shown(out: io.StringIO) -> list[str]:
    return out.getvalue().replace("\033[2K", "").replace("\033[2m", "").replace("\033[0m", "").split("\n")


def test_a_stage_is_replaced_by_what_it_took() -> None:
    out = io.StringIO()
    stages = LiveStages(out)
    stages.began("loading the weights", 1.0)
    stages.ended("loading the weights", 2.5)
    stages.close()
    line, rest = shown(out)
    assert line.split("\r")[0] == "   0.0 s  loading the weights …"
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
