"""The numbers of a comparison, pair by pair, and how they are shown.

Owns `Comparison`, the JSON file of `baton bench compare`, and the table at its end. One `Row` is one measurement taken
on both sides in pairs; its ratio is made pair by pair, so that slow drift of the machine cancels.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.machine import OtherLoad
from baton.bench.stats import median

SCHEMA = 1


class Measured(msgspec.Struct, frozen=True):
    """One side of one pair."""

    pair: int
    value: float
    load: OtherLoad
    detail: str = ""


class Row(msgspec.Struct):
    section: str
    name: str
    unit: str
    better: str
    """"higher" or "lower"."""
    ours: list[Measured] = []
    peer: list[Measured] = []
    ours_absent: str = ""
    """Why there are no values of ours."""
    peer_absent: str = ""


class RatioSpread(msgspec.Struct, frozen=True):
    median: float
    min: float
    max: float


class Comparison(msgspec.Struct):
    schema: int
    made: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    model: str
    commands: dict[str, str]
    """How each server was started, with its environment: a fair fight is one that others can repeat."""
    idle_busy_cores: dict[str, float]
    rows: list[Row]
    ratios: dict[str, RatioSpread]
    notes: list[str]
    failures: list[str]


def ratio(row: Row) -> RatioSpread | None:
    """Ours over the peer's, pair by pair; None without a complete pair."""
    peer = {measured.pair: measured.value for measured in row.peer}
    pairs = [measured.value / peer[measured.pair] for measured in row.ours if peer.get(measured.pair)]
    return RatioSpread(median(pairs), min(pairs), max(pairs)) if pairs else None


def show(console: Console, comparison: Comparison) -> None:
    machine = comparison.machine
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    table = Table(
        title=f"{comparison.model} on {machine['cpu']}, {machine['cores']} cores; {versions}", title_justify="left"
    )
    table.add_column("measurement")
    for column in ("Baton", "vLLM", "Baton / vLLM"):
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("better")
    for row in comparison.rows:
        spread = ratio(row)
        shown = "–" if spread is None else f"{spread.median:.3g} ({spread.min:.3g} – {spread.max:.3g})"
        name = f"{row.name}, {row.unit}" if row.unit else row.name
        table.add_row(name, _cell(row.ours, row.ours_absent), _cell(row.peer, row.peer_absent), shown, row.better)
    console.print(table)
    console.print(
        "Median of the pairs (smallest – largest). Only the ratio means something on a shared machine.", style="dim"
    )
    for note in comparison.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for failure in comparison.failures:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)


def _cell(measured: Sequence[Measured], absent: str) -> str:
    if not measured:
        return absent or "–"
    values = [each.value for each in measured]
    return f"{short(median(values))} ({short(min(values))} – {short(max(values))})"


def short(value: float) -> str:
    """Three digits that matter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
