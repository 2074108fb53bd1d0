"""The numbers of a comparison, pair by pair, and how they are shown.

Owns `Comparison`, the JSON file of `baton bench compare`, and the table at its end. One `Row` is one measurement taken
on both sides in pairs; its ratio is made pair by pair, so that slow drift of the machine cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def pair_by_pair(ours: Sequence[Measured], others: Sequence[Measured]) -> RatioSpread | None:
    """Each value over the other of the same pair; None without a complete pair."""
    by_pair = {measured.pair: measured.value for measured in others}
    pairs = [measured.value / by_pair[measured.pair] for measured in ours if by_pair.get(measured.pair)]
    return RatioSpread(median(pairs), min(pairs), max(pairs)) if pairs else None


def ratio(row: Row) -> RatioSpread | None:
    """Ours over the peer's."""
    return pair_by_pair(row.ours, row.peer)


def show(console: Console, comparison: Comparison) -> None:
    title = machine_title(comparison.model, comparison.machine, comparison.versions)
    table = Table(title=title, title_justify="left")
    table.add_column("measurement")
    for column in ("Baton", "vLLM", "Baton / vLLM"):
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("better")
    for row in comparison.rows:
        name = f"{row.name}, {row.unit}" if row.unit else row.name
        ours, peer = shown_values(row.ours, row.ours_absent), shown_values(row.peer, row.peer_absent)
        table.add_row(name, ours, peer, shown_ratio(ratio(row)), row.better)
    console.print(table)
    print_remarks(console, comparison.notes, comparison.failures)


def machine_title(model: str, machine: Mapping[str, str | int | float], versions: Mapping[str, str]) -> str:
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{model} on {machine['cpu']}, {machine['cores']} cores; {told}"


def print_remarks(console: Console, notes: Sequence[str], failures: Sequence[str]) -> None:
    """What goes below every table of pairs."""
    console.print(
        "Median of the pairs (smallest – largest). Only the ratio means something on a shared machine.", style="dim"
    )
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)


def shown_values(measured: Sequence[Measured], absent: str) -> str:
    if not measured:
        return absent or "–"
    values = [each.value for each in measured]
    return _spread(*(short(value) for value in (median(values), min(values), max(values))))


def shown_ratio(spread: RatioSpread | None) -> str:
    return "–" if spread is None else _spread(f"{spread.median:.3g}", f"{spread.min:.3g}", f"{spread.max:.3g}")


def _spread(middle: str, least: str, most: str) -> str:
    """What is all the same is said once."""
    return middle if least == middle == most else f"{middle} ({least} – {most})"


def short(value: float) -> str:
    """Three digits that matter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
