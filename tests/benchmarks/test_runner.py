"""The runner that all experiments share: turns, ratios, tables, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from baton.bench.machine import OtherLoad
from baton.core.errors import BatonError
from benchmarks import runner
from benchmarks.__main__ import COMMANDS, app
from benchmarks.runner import (
    BadBenchmarkOptions,
    Experiment,
    Measured,
    MeasuredSide,
    MeasurementFailed,
    NoTrace,
    Progress,
    Report,
    Rounds,
    Spread,
    alternating,
    find_trace,
    median_ratio,
    ratio_of,
    run_benchmark,
    shown_ratio,
    shown_spread,
    table_of,
)

IDLE = OtherLoad(0.0, 0.0, 0.0)


class Told:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = 0
        self.progress = Progress(self.said.append, lambda _what: None, self._count)

    def _count(self) -> None:
        self.done += 1


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "other_load", lambda _look_s: IDLE)


def test_every_other_round_goes_backwards() -> None:
    assert list(alternating("abc", 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a")]


def test_sides_are_measured_in_turns_and_told_with_the_load_of_others() -> None:
    told, values = Told(), {"a": [], "b": []}  # type: ignore[var-annotated]
    sides = [MeasuredSide(name, lambda number, name=name: (len(name) + number, name), values[name]) for name in "ab"]
    Rounds(told.progress, 2).compare("speed", "tokens/s", sides)
    assert values["a"] == [Measured(0, 1, IDLE, "a"), Measured(1, 2, IDLE, "a")]
    assert [line.split(", ")[1].split(":")[0] for line in told.said] == ["a", "b", "b", "a"]
    assert told.said[0] == "speed: round 1 of 2, a: 1 tokens/s, a  [load 0.00, others 0.00 cores, steal 0.0 %]"
    assert told.done == 4


def test_a_repeated_side_is_warmed_up_and_the_machine_is_looked_at_once_a_round() -> None:
    taken: list[str] = []
    told = Told()
    rounds = Rounds(told.progress, 3)
    found = rounds.repeat("copying", {name: lambda name=name: taken.append(name) or len(taken) for name in "ab"})
    assert "".join(taken) == "ababbaab"
    assert found == {"a": [3, 6, 7], "b": [4, 5, 8]}
    assert len(rounds.loads) == 3
    assert told.done == 6


def test_a_ratio_is_taken_within_a_round() -> None:
    ours = [Measured(0, 2.0, IDLE), Measured(1, 30.0, IDLE), Measured(2, 9.0, IDLE)]
    assert ratio_of(ours, [Measured(1, 10.0, IDLE), Measured(0, 1.0, IDLE)]) == Spread(2.5, 2.0, 3.0)
    assert ratio_of(ours, []) is None
    assert median_ratio([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == 1.0


def test_what_is_all_the_same_is_shown_once() -> None:
    assert shown_spread([1200.0, 1000.0, 1400.0]) == "1,200 (1,000 – 1,400)"
    assert shown_spread([2.0, 2.0]) == "2"
    assert (shown_spread([]), shown_ratio(None)) == ("–", "–")


def test_a_table_shows_a_cell_of_each_row_under_each_head() -> None:
    console = Console(record=True, width=60)
    console.print(table_of("words", (("word", str), ("letters", lambda word: str(len(word)))), ["one", "three"]))
    text = console.export_text()
    assert [word in text for word in ("words", "letters", "three", "5")] == [True] * 4


def _conducted(tmp_path: Path, outcome: Report | Exception) -> Path:
    def run() -> Report:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    run_benchmark(lambda _progress: Experiment(1, run), lambda _console, _report: None, tmp_path / "new" / "o.json")
    return tmp_path / "new" / "o.json"


def test_a_report_is_written_with_when_and_where_it_was_made(tmp_path: Path) -> None:
    report = json.loads(_conducted(tmp_path, Report()).read_text())
    assert set(report) == {"schema", "made", "machine", "notes", "failures"}
    assert report["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (BadBenchmarkOptions("no"), 2),
        (NoTrace("no"), 2),
        (MeasurementFailed("no"), 1),
        (BatonError("no"), 1),
        (Report(failures=["no"]), 1),
    ],
)
def test_the_exit_code_says_whether_the_command_or_the_measurement_was_wrong(
    tmp_path: Path, outcome: Report | Exception, code: int
) -> None:
    with pytest.raises(typer.Exit) as ended:
        _conducted(tmp_path, outcome)
    assert ended.value.exit_code == code


def test_a_trace_is_found_by_its_pattern_or_missed_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(NoTrace, match=r"no \*conv\*: use --trace FILE, or set BATON_TRACES to a folder with conversations"):
        find_trace(None, tmp_path, "*conv*", "conversations")
    (tmp_path / "conv.csv").touch()
    assert find_trace(None, tmp_path, "*conv*", "conversations") == tmp_path / "conv.csv"
    assert find_trace(Path("named"), tmp_path, "*conv*", "conversations") == Path("named")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_experiment_is_found_under_its_name(name: str) -> None:
    ran = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert f"{name} [OPTIONS]" in ran.output


def test_all_are_listed() -> None:
    listed = CliRunner().invoke(app, [], env={"COLUMNS": "200"}).output
    assert [name for name in COMMANDS if name not in listed] == []
