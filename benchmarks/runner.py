"""The runner that all experiments share: rounds in turns, spreads, the machine's other load, JSON, tables, progress.

An experiment is a command with its options, a load and a table. It gives `run_benchmark` a function that prepares the work.
This module owns the progress bar, the exit code, and the report on the screen and in a JSON file. Exit codes: 0 success,
1 a measurement failed, 2 the command was wrong.

Sides are measured in turns and the order reverses each round, so that a drifting machine favours none. A ratio is computed
within a round. The load by other processes is sampled before a measurement and stored beside its value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.bench.child_processes import ChildFailed
from baton.bench.machine import OtherLoad, describe_machine, other_load
from baton.bench.plot import PlotUnavailable
from baton.bench.report import write_json
from baton.bench.sim_run import BadSimOptions
from baton.bench.stats import median
from baton.bench.traces import TraceMalformed
from baton.cli.bench_screen import progress_bar, stop_servers_on_sigterm, wide_console
from baton.core.errors import BatonError, SetupError
from baton.kv.store import BadStore
from baton.node.models import resolve_model
from baton.node.stage_progress import StageNames
from baton.sim.step_times import BadStepTimes
from baton.sim.workload import BadWorkload

T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R", bound=msgspec.Struct)

OTHERS_CORES_MAX = 0.2
ABSENT = "–"


class MeasurementFailed(Exception):
    """A run gave no valid measurement; the message says why."""


class BadBenchmarkOptions(Exception):
    """Invalid options; the message says why."""


class NoTrace(BadBenchmarkOptions):
    """No trace found; the message says how to name one."""


WRONG_COMMAND = (
    BadBenchmarkOptions, BadSimOptions, BadStepTimes, BadStore, BadWorkload, PlotUnavailable, SetupError,
    TraceMalformed,
)  # fmt: skip
FAILED = (BatonError, ChildFailed, MeasurementFailed)


# ── a command ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Progress:
    """Callbacks for the progress of an experiment."""

    say: Callable[[str], None]
    """Print a line."""
    doing: Callable[[str], None]
    """Show the current activity."""
    done: Callable[[], None]
    """Count one more measurement."""


@dataclass(frozen=True, slots=True)
class Experiment(Generic[R]):
    """A prepared experiment."""

    measurements: int | None
    """Number of planned measurements; None when not known beforehand."""
    run: Callable[[], R]


def run_benchmark(
    prepare: Callable[[Progress], Experiment[R]], show: Callable[[Console, R], None], json_file: Path | None
) -> R:
    """Prepare and run an experiment, show its report and write it to a file; raises typer.Exit where it failed."""
    console = wide_console()
    stop_servers_on_sigterm()
    try:
        with progress_bar(console) as bar:
            task = bar.add_task("starting", total=None)
            say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            progress = Progress(say, lambda what: bar.update(task, description=what), lambda: bar.advance(task))
            work = prepare(progress)
            bar.update(task, total=work.measurements)
            report = work.run()
    except (*WRONG_COMMAND, *FAILED) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(2 if isinstance(error, WRONG_COMMAND) else 1) from error
    show(console, report)
    if json_file is not None:
        write_json(json_file, report)
        console.print(f"Written to {json_file}.", style="dim")
    if isinstance(report, Report) and report.failures:
        raise typer.Exit(1)
    return report


def model_folder(model: str, progress: Progress) -> Path:
    """As safetensors, which peers read too."""
    return resolve_model(model, StageNames(progress.say), as_safetensors=True)


def find_trace(trace: Path | None, folder: Path | None, glob: str, what: str) -> Path:
    """The named trace, or the first file in `folder` that matches `glob`."""
    if trace is not None:
        return trace
    found = sorted(folder.glob(glob)) if folder is not None else []
    if not found:
        where = f"{folder} has no {glob}" if folder is not None else "no trace was named"
        raise NoTrace(f"{where}: use --trace FILE, or set BATON_TRACES to a folder with {what}")
    return found[0]


@contextlib.contextmanager
def failures_noted(failures: list[str], progress: Progress) -> Iterator[None]:
    """A failed server or measurement ends the block and is appended to `failures`; the rest of the report is still made."""
    try:
        yield
    except (ChildFailed, MeasurementFailed) as error:
        failures.append(str(error))
        progress.say(f"failed: {error}")


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Measured(msgspec.Struct, frozen=True):
    """One measurement of one side in one round."""

    pair: int
    """The round, from 0."""
    value: float
    load: OtherLoad
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredSide:
    name: str
    take: Callable[[int], tuple[float, str]]
    """Measure in this round: (value, detail for the log)."""
    values: list[Measured]
    """Measurements are appended here."""


def alternating(sides: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, side) for each side once a round; every other round is in reverse order."""
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            yield number, side


@dataclass(frozen=True, slots=True)
class Rounds:
    """Measures sides in rounds and reports progress."""

    progress: Progress
    count: int
    look_s: float = 1.0
    """Seconds for which other load is sampled before each measurement."""
    loads: list[OtherLoad] = field(default_factory=list)
    """Samples of the load by other processes."""

    def measure(self, name: str, unit: str, side: str, number: int, take: Callable[[], tuple[float, str]]) -> Measured:
        """Sample other load, take one measurement and print it."""
        what = f"{name}: round {number + 1} of {self.count}, {side}"
        self.progress.doing(what)
        load = self.look()
        value, detail = take()
        shown = " ".join((short(value), unit)).strip()
        self.progress.say(f"{what}: {shown}" + (f", {detail}" if detail else "") + f"  [{shown_load(load)}]")
        self.progress.done()
        return Measured(number, value, load, detail)

    def compare(self, name: str, unit: str, sides: Sequence[MeasuredSide]) -> None:
        """Measure each side once a round."""
        for number, side in alternating(sides, self.count):
            side.values.append(self.measure(name, unit, side.name, number, partial(side.take, number)))

    def repeat(self, about: str, sides: Mapping[str, Callable[[], V]]) -> dict[str, list[V]]:
        """Warm up each side, then measure each once a round; other load is sampled before each round."""
        taken: dict[str, list[V]] = {name: [] for name in sides}
        for name, take in sides.items():
            self.progress.doing(f"{about}: warming up {name}")
            take()
        for number, name in alternating(list(sides), self.count):
            if sum(map(len, taken.values())) % len(sides) == 0:
                self.look()
            self.progress.doing(f"{about}: round {number + 1} of {self.count}, {name}")
            taken[name].append(sides[name]())
            self.progress.done()
        return taken

    def look(self) -> OtherLoad:
        self.loads.append(other_load(self.look_s))
        return self.loads[-1]


def shown_load(load: OtherLoad) -> str:
    return f"load {load.loadavg_1m:.2f}, others {load.busy_cores:.2f} cores, steal {load.steal_percent:.1f} %"


# ── what is reported ─────────────────────────────────────────────────────────────────────────────────────────────────────


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Report(msgspec.Struct, kw_only=True):
    """Common first fields of JSON reports."""

    schema: int = 1
    made: str = msgspec.field(default_factory=now)
    machine: dict[str, str | int | float] = msgspec.field(default_factory=describe_machine)
    notes: list[str] = []
    failures: list[str] = []


class Spread(msgspec.Struct, frozen=True):
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def ratio_of(ours: Sequence[Measured], others: Sequence[Measured]) -> Spread | None:
    """Ratios within each round; None without a complete pair."""
    by_round = {measured.pair: measured.value for measured in others}
    pairs = [measured.value / by_round[measured.pair] for measured in ours if by_round.get(measured.pair)]
    return Spread.of(pairs) if pairs else None


def median_ratio(values: Sequence[float], of: Sequence[float]) -> float:
    """Median over the rounds of each value ÷ the other of the same round."""
    return median([value / other for value, other in zip(values, of, strict=True)])


def notes_on_other_load(loads: Sequence[OtherLoad]) -> list[str]:
    """A warning if other processes were busy when measurements began."""
    busy = sum(load.busy_cores > OTHERS_CORES_MAX for load in loads)
    if not busy:
        return []
    return [
        f"{busy} of {len(loads)} measurements began while others kept more than {OTHERS_CORES_MAX:g} cores busy: "
        "repeat on a quieter machine before believing them."
    ]


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────────


Columns = Sequence[tuple[str, Callable[[T], str]]]
"""(heading, cell text of a row) for each column."""


def table_of(title: str, columns: Columns[T], rows: Iterable[T]) -> Table:
    """A table whose first column is left-aligned and names the row."""
    table = Table(title=title, title_justify="left")
    for place, (head, _) in enumerate(columns):
        table.add_column(head, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def short(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def three_digits(value: float) -> str:
    return f"{value:.3g}"


def shown_spread(values: Sequence[float], form: Callable[[float], str] = short) -> str:
    """Median (smallest – largest), or one value when all are formatted alike."""
    return shown_ratio(Spread.of(values), form) if values else ABSENT


def shown_ratio(spread: Spread | None, form: Callable[[float], str] = three_digits) -> str:
    if spread is None:
        return ABSENT
    middle, least, most = form(spread.median), form(spread.min), form(spread.max)
    return middle if least == middle == most else f"{middle} ({least} – {most})"


def shown_values(measured: Sequence[Measured], absent: str = "") -> str:
    return shown_spread([each.value for each in measured]) if measured else absent or ABSENT


def machine_title(model: str, machine: Mapping[str, str | int | float], versions: Mapping[str, str]) -> str:
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{model} on {machine['cpu']}, {machine['cores']} cores; {shown}"


IN_PAIRS = "Median of the pairs (smallest – largest). Only the ratio means something on a shared machine."


def print_remarks(console: Console, report: Report, legend: str = IN_PAIRS) -> None:
    """Print the legend, notes and failures below a table."""
    console.print(legend, style="dim", highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for failure in report.failures:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)


def print_other_load(console: Console, loads: Sequence[OtherLoad], absent: Mapping[str, str]) -> None:
    """Print the load by other processes, and what could not be measured."""
    busy = [load.busy_cores for load in loads]
    cores = describe_machine()["cores"]
    console.print(f"others kept {median(busy):.2f} cores busy (at most {max(busy):.2f}) of {cores}", style="dim")
    for name, reason in absent.items():
        console.print(f"{name} is absent: {reason}", style="yellow", markup=False)
