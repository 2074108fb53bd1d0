"""`baton sim ledger …`: the ranges of seeds that were fuzzed, kept in a file and shown on a page of the source tree."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.bench_screen import refuse, wide_console
from baton.sim.fuzz_ledger import LEDGER_FILE, PAGE_FILE, FuzzLedger, LawMended, LedgerRefused, rendered, shown_on
from baton.sim.fuzz_range import UnreadableReport, commit_of_source, read_report

ledger_app = typer.Typer(no_args_is_help=True, add_completion=False, help="Ranges of seeds that were fuzzed.")

Reports = Annotated[list[Path], typer.Argument(dir_okay=False, help="Files of `baton sim fuzz --report`.")]
LedgerFile = Annotated[Path, typer.Option("--ledger", dir_okay=False, help="The ledger.")]
Page = Annotated[Path, typer.Option("--page", dir_okay=False, help="The page that shows it; rewritten where there is one.")]
What = Annotated[str, typer.Argument(help="The law or the cause that was mended, in a few words.")]


@ledger_app.command()
def add(reports: Reports, ledger: LedgerFile = LEDGER_FILE, page: Page = PAGE_FILE) -> None:
    """Add finished ranges. Seeds that were run on the same code before are refused."""
    try:
        _keep(FuzzLedger.read(ledger).with_ranges([read_report(file) for file in reports]), ledger, page)
    except (LedgerRefused, UnreadableReport) as error:
        raise refuse(wide_console(), error) from error


@ledger_app.command()
def mended(what: What, ledger: LedgerFile = LEDGER_FILE, page: Page = PAGE_FILE) -> None:
    """Say that a law, or the cause of a broken one, was mended: counting starts again."""
    entry = LawMended(datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), commit_of_source(), what)
    try:
        _keep(FuzzLedger.read(ledger).with_mended(entry), ledger, page)
    except LedgerRefused as error:
        raise refuse(wide_console(), error) from error


@ledger_app.command()
def show(ledger: LedgerFile = LEDGER_FILE) -> None:
    """Print ranges, time, faults by class and transitions since the last law was mended."""
    try:
        typer.echo(rendered(FuzzLedger.read(ledger)), nl=False)
    except LedgerRefused as error:
        raise refuse(wide_console(), error) from error


def _keep(ledger: FuzzLedger, file: Path, page: Path) -> None:
    text = shown_on(page.read_text(), ledger) if page.exists() else None
    ledger.write(file)
    if text is not None:
        page.write_text(text)
    typer.echo(rendered(ledger).partition("\n")[0])
