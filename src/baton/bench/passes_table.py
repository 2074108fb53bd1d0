"""How the times of `baton bench passes` are shown, and what they are held against."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from baton.bench.passes import PARTS, Kind, PassReport, PassRun, value
from baton.bench.stats import median
from baton.bench.verdict import shown_ratio

LIMITS = {"p50": 1.10, "p99": 1.50}
"""What a store may cost a pass, whatever it does."""
COUNTED: dict[str, Callable[[PassRun], float]] = {
    "preempted": lambda run: run.preemptions,
    "blocks saved": lambda run: run.saved,
    "loaded": lambda run: run.loaded,
    "stored": lambda run: run.stored,
    "fetched": lambda run: run.fetched,
    "late": lambda run: run.late,
    "given up": lambda run: run.breaker_opened,
    "steps/s": lambda run: run.steps / run.took_s,
}


def show(console: Console, report: PassReport) -> None:
    told, machine = report.settings, report.machine
    title = (
        f"scheduler passes beside a store, {machine['cpu']}, {machine['cores']} cores\n"
        f"{told['rows']} rows, {told['clients']} requests open ({told['prompt_tokens']} in, {told['answer_tokens']} out), "
        f"pool {told['pool_blocks']:,} and host {told['host_rows']:,} blocks of {int(told['block_bytes']) >> 10} KiB, "
        f"steps of {told['step_ms']:g} ms; {told['rounds']} rounds of {told['steps']:,} steps"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("behind host memory")
    table.add_column("µs of")
    for name in ("p50", "÷ no store", "p99", "÷ no store", *COUNTED):
        table.add_column(name, justify="right")
    for kind in Kind:
        for part in PARTS:
            first = part == PARTS[0]
            counts = _counts(report.of(kind)) if first else []
            table.add_row(kind if first else "", part, *_times(report, kind, part), *counts, end_section=part == PARTS[-1])
    console.print(table)
    console.print(
        "Medians of the rounds; ratios are taken within a round (smallest – largest). Counts are of one run.", style="dim"
    )
    for note in (*report.notes, *missed(report)):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def missed(report: PassReport) -> list[str]:
    """Where a store cost more than it may: planning and settling count."""
    found = []
    for kind in (kind for kind in Kind if kind is not Kind.NONE):
        for part in ("plan", "settle"):
            for which, limit in LIMITS.items():
                middle = report.ratios(kind, part, which).median
                if middle > limit:
                    found.append(f"{kind}: {part} {which} is {middle:.2f} of no store, and may be {limit:.2f}")
    return found


def _times(report: PassReport, kind: Kind, part: str) -> list[str]:
    cells = []
    for which in LIMITS:
        cells.append(f"{median([value(run, part, which) for run in report.of(kind)]):,.0f}")
        cells.append("" if kind is Kind.NONE else shown_ratio(report.ratios(kind, part, which)))
    return cells


def _counts(runs: list[PassRun]) -> list[str]:
    return [f"{median([read(run) for run in runs]):,.0f}" for read in COUNTED.values()]
