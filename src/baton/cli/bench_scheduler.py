"""`baton bench scheduler`: what a step costs in deciding, with no model behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.bench.preempting import ROWS_MIN, PreemptingTiming, time_preempting, windows_of
from baton.bench.report import write_json
from baton.bench.scheduler import SchedulerTiming, growth_ns_per_row, time_scheduler
from baton.cli.bench_screen import progress_bar

console = Console(highlight=False)

Rows = Annotated[int, typer.Option(min=1, max=100_000, help="Decoding requests.")]
Steps = Annotated[int, typer.Option(min=16, max=100_000, help="Steps to time.")]
Sweep = Annotated[bool, typer.Option(help="Also 256 to 4,096 rows, and what a row adds.")]
Preempting = Annotated[bool, typer.Option(help="Instead: a preemption in every step, beside a quiet run.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers here.")]

SWEEP = (256, 1024, 4096)


class SchedulerReport(msgspec.Struct, frozen=True):
    rows: int
    us_per_step: float
    timings: list[SchedulerTiming]
    ns_per_added_row: float | None


class PreemptingReport(msgspec.Struct, frozen=True):
    preempting: list[PreemptingTiming]


def scheduler(
    rows: Rows = 1024, steps: Steps = 320, sweep: Sweep = False, preempting: Preempting = False, json: JsonFile = None
) -> None:
    """Time plan, settle and delivery for decoding requests.

    A step includes block growth, stop checks, naming full blocks for the prefix cache, and the message to the front end.
    With --preempting the pool is full and every step makes a request yield; 256 rows are timed beside --rows.
    """
    if preempting:
        _time_preempting(rows, steps, json)
        return
    timings = [time_scheduler(size, steps) for size in (SWEEP if sweep else (rows,))]
    _show(timings)
    if sweep:
        console.print(f"a row adds {growth_ns_per_row(timings):.0f} ns a step from {SWEEP[0]} to {SWEEP[-1]} rows")
    first = next((timing for timing in timings if timing.rows == rows), timings[0])
    added = growth_ns_per_row(timings) if sweep else None
    _write(json, SchedulerReport(first.rows, first.us_per_step, timings, added))


def _time_preempting(rows: int, steps: int, json: Path | None) -> None:
    if rows < ROWS_MIN:
        raise typer.BadParameter(f"a preemption in every step takes at least {ROWS_MIN} rows", param_hint="--rows")
    sizes = sorted({256, rows})
    with progress_bar(console) as bar:
        task = bar.add_task("windows", total=sum(2 * windows_of(size, steps) for size in sizes))
        timings = [time_preempting(size, steps, lambda: bar.advance(task)) for size in sizes]
    table = Table(
        "rows", "quiet µs", "p99", "preempting µs", "p99", "ratio", "preemptions a step", title="scheduler, CPU time"
    )
    for timing in timings:
        times = (timing.quiet_us, timing.quiet_us_p99, timing.preempting_us, timing.preempting_us_p99)
        spread = f"{timing.ratio:.2f} ({timing.ratio_min:.2f} – {timing.ratio_max:.2f})"
        share = f"{timing.preemptions / timing.steps:.2f}; none in {timing.steps_without} of {timing.steps} steps"
        table.add_row(f"{timing.rows:,}", *(f"{value:,.0f}" for value in times), spread, share)
    console.print(table)
    _write(json, PreemptingReport(timings))


def _write(path: Path | None, report: SchedulerReport | PreemptingReport) -> None:
    if path is not None:
        write_json(path, report)


def _show(timings: list[SchedulerTiming]) -> None:
    table = Table("rows", "µs a step", "p99 µs", "ns a row", title="scheduler")
    for timing in timings:
        values = (timing.rows, timing.us_per_step, timing.us_per_step_p99, timing.ns_per_row)
        table.add_row(*(f"{value:,.0f}" for value in values))
    console.print(table)
