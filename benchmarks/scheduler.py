"""The scheduler's time per step, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.scheduler import SchedulerTiming, growth_ns_per_row, time_scheduler
from benchmarks.options import JsonIfGiven
from benchmarks.preempting import ROWS_MIN, PreemptingTiming, time_preempting, windows_of
from benchmarks.runner import Columns, Experiment, Progress, Spread, run_benchmark, shown_ratio, table_of

Rows = Annotated[int, typer.Option(min=1, max=100_000, help="Decoding requests.")]
Steps = Annotated[int, typer.Option(min=16, max=100_000, help="Steps to time.")]
Sweep = Annotated[bool, typer.Option(help="Also 256 to 4,096 rows, and what a row adds.")]
Preempting = Annotated[bool, typer.Option(help="Instead: a preemption in every step, beside a quiet run.")]

SWEEP = (256, 1024, 4096)


class SchedulerReport(msgspec.Struct, frozen=True):
    rows: int
    us_per_step: float
    timings: list[SchedulerTiming]
    ns_per_added_row: float | None


class PreemptingReport(msgspec.Struct, frozen=True):
    preempting: list[PreemptingTiming]


def scheduler(
    rows: Rows = 1024,
    steps: Steps = 320,
    sweep: Sweep = False,
    preempting: Preempting = False,
    json: JsonIfGiven = None,
) -> None:
    """Time plan, settle and delivery for decoding requests.

    A step includes block growth, stop checks, naming full blocks for the prefix cache, and the message to the front end.
    With --preempting the pool is full and every step makes a request yield; 256 rows are timed beside --rows.
    """
    if preempting:
        if rows < ROWS_MIN:
            raise typer.BadParameter(f"a preemption in every step takes at least {ROWS_MIN} rows", param_hint="--rows")
        run_benchmark(partial(_preempting, sorted({256, rows}), steps), show_preempting, json)
    else:
        run_benchmark(partial(_steps, SWEEP if sweep else (rows,), rows, steps), show, json)


def _steps(sizes: Sequence[int], rows: int, steps: int, progress: Progress) -> Experiment[SchedulerReport]:
    def run() -> SchedulerReport:
        timings = []
        for size in sizes:
            progress.doing(f"{size:,} rows")
            timings.append(time_scheduler(size, steps))
            progress.done()
        first = next((timing for timing in timings if timing.rows == rows), timings[0])
        added = growth_ns_per_row(timings) if len(timings) > 1 else None
        return SchedulerReport(first.rows, first.us_per_step, timings, added)

    return Experiment(len(sizes), run)


def _preempting(sizes: Sequence[int], steps: int, progress: Progress) -> Experiment[PreemptingReport]:
    windows = sum(2 * windows_of(size, steps) for size in sizes)
    return Experiment(windows, lambda: PreemptingReport([time_preempting(size, steps, progress.done) for size in sizes]))


COLUMNS: Columns[SchedulerTiming] = (
    ("rows", lambda timing: f"{timing.rows:,}"),
    ("µs a step", lambda timing: f"{timing.us_per_step:,.0f}"),
    ("p99 µs", lambda timing: f"{timing.us_per_step_p99:,.0f}"),
    ("ns a row", lambda timing: f"{timing.ns_per_row:,.0f}"),
)

PREEMPTING_COLUMNS: Columns[PreemptingTiming] = (
    ("rows", lambda timing: f"{timing.rows:,}"),
    ("quiet µs", lambda timing: f"{timing.quiet_us:,.0f}"),
    ("p99", lambda timing: f"{timing.quiet_us_p99:,.0f}"),
    ("preempting µs", lambda timing: f"{timing.preempting_us:,.0f}"),
    ("p99", lambda timing: f"{timing.preempting_us_p99:,.0f}"),
    ("ratio", lambda timing: shown_ratio(Spread(timing.ratio, timing.ratio_min, timing.ratio_max), "{:.2f}".format)),
    (
        "preemptions a step",
        lambda timing: f"{timing.preemptions / timing.steps:.2f}; none in {timing.steps_without} of {timing.steps} steps",
    ),
)


def show(console: Console, report: SchedulerReport) -> None:
    console.print(table_of("scheduler", COLUMNS, report.timings))
    if report.ns_per_added_row is not None:
        console.print(f"a row adds {report.ns_per_added_row:.0f} ns a step from {SWEEP[0]} to {SWEEP[-1]} rows")


def show_preempting(console: Console, report: PreemptingReport) -> None:
    console.print(table_of("scheduler, CPU time", PREEMPTING_COLUMNS, report.preempting))
