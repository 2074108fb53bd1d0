"""`baton bench scheduler`: what a step costs in deciding, with no model behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.bench.scheduler import SchedulerTiming, growth_ns_per_row, time_scheduler

console = Console(highlight=False)

Rows = Annotated[int, typer.Option(min=1, max=100_000, help="Decoding requests.")]
Steps = Annotated[int, typer.Option(min=16, max=100_000, help="Steps to time.")]
Sweep = Annotated[bool, typer.Option(help="Also 256 to 4,096 rows, and what a row adds.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers here.")]

SWEEP = (256, 1024, 4096)


def scheduler(rows: Rows = 1024, steps: Steps = 320, sweep: Sweep = False, json: JsonFile = None) -> None:
    """Time plan, settle and delivery for decoding requests.

    A step includes block growth, stop checks, naming full blocks for the prefix cache, and the message to the front end.
    """
    timings = [time_scheduler(size, steps) for size in (SWEEP if sweep else (rows,))]
    _show(timings)
    if sweep:
        console.print(f"a row adds {growth_ns_per_row(timings):.0f} ns a step from {SWEEP[0]} to {SWEEP[-1]} rows")
    if json is not None:
        first = next((timing for timing in timings if timing.rows == rows), timings[0])
        report = {
            "rows": first.rows,
            "us_per_step": first.us_per_step,
            "timings": [msgspec.to_builtins(timing) for timing in timings],
            "ns_per_added_row": growth_ns_per_row(timings) if sweep else None,
        }
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _show(timings: list[SchedulerTiming]) -> None:
    table = Table("rows", "µs a step", "p99 µs", "ns a row", title="scheduler")
    for timing in timings:
        values = (timing.rows, timing.us_per_step, timing.us_per_step_p99, timing.ns_per_row)
        table.add_row(*(f"{value:,.0f}" for value in values))
    console.print(table)
