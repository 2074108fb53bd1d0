"""Stages of a start: told when they begin, and summed up in the end."""

from __future__ import annotations

from baton.node.start_stages import StageLines, StartStages, stage_of, summary_in


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def told() -> tuple[StartStages, Clock, list[str]]:
    clock, lines = Clock(), list[str]()
    return StartStages(StageLines(lines.append), clock), clock, lines


def test_each_stage_is_one_line_with_the_seconds_at_which_it_begins() -> None:
    stages, clock, lines = told()
    stages.begin("importing torch")
    clock.now_s += 6.25
    stages.begin("loading the weights")
    assert lines == ["[  0.0 s] importing torch", "[  6.2 s] loading the weights"]


def test_the_summary_has_the_whole_time_and_that_of_each_verb() -> None:
    stages, clock, _ = told()
    for stage, took_s in (("fetching a package (once)", 2.0), ("loading the weights", 3.0), ("loading more", 1.0)):
        stages.begin(stage)
        clock.now_s += took_s
    assert stages.summary() == "started in 6.0 s: fetching 2.0 s, loading 4.0 s"
    clock.now_s += 5
    assert stages.summary() == "started in 11.0 s: fetching 2.0 s, loading 4.0 s", "the last stage has ended"


def test_the_lines_of_another_process_are_read() -> None:
    stages, clock, lines = told()
    stages.begin("loading the weights")
    clock.now_s += 1
    assert stage_of(lines[0]) == "loading the weights"
    assert summary_in(f"a warning\n{stages.summary()}\nm is served at …") == "started in 1.0 s: loading 1.0 s"
    assert stage_of("loading the weights") is None
    assert summary_in("it started in vain") is None
