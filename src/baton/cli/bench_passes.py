"""`baton bench passes`: what a store costs the scheduler, whatever the store does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.passes import Kind, PassOptions, measure
from baton.bench.passes_table import missed, show
from baton.bench.report import write_json
from baton.bench.turns import MeasurementFailed
from baton.cli.bench_screen import progress_bar, voice_of, wide_console

Rounds = Annotated[int, typer.Option(min=1, max=100, help="How often each is measured, in turns.")]
Steps = Annotated[int, typer.Option(min=100, max=1_000_000, help="Steps to time in each run.")]
Folder = Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Where stores are made [temporary files].")]
Check = Annotated[bool, typer.Option(help="Exit 1 when a store costs more than 10 % at p50 or 50 % at p99.")]
JsonFile = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]
# Hidden: another load is another benchmark. It is there to try the command out quickly.
Rows = Annotated[int, typer.Option(min=8, max=4096, hidden=True)]


def passes(
    rounds: Rounds = 5,
    steps: Steps = 1000,
    folder: Folder = None,
    check: Check = False,
    rows: Rows = 128,
    json_file: JsonFile = Path("bench-results/passes.json"),
) -> None:
    """Time scheduler passes while KV is saved all the time: without a store, with one, with a slow and with a dead one.

    The engine is the real one, without a model. Takes about three minutes.
    """
    console = wide_console()
    options = _sized(replace(PassOptions(), rounds=rounds, steps=steps, folder=folder), rows)
    with _errors_only("baton.store"), progress_bar(console) as bar:
        task = bar.add_task("starting", total=rounds * len(Kind))
        try:
            report = measure(options, voice_of(console, bar, task))
        except MeasurementFailed as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
    if check and missed(report):
        raise typer.Exit(1)


@contextmanager
def _errors_only(logger: str) -> Iterator[None]:
    """It says when a store begins to fail, which is what two of these do."""
    ours = logging.getLogger(logger)
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)


def _sized(options: PassOptions, rows: int) -> PassOptions:
    """As many blocks and clients to a row, whatever its number."""
    each = options.pool_blocks // options.rows
    return replace(options, rows=rows, clients=2 * rows, pool_blocks=each * rows, host_rows=each * rows)
