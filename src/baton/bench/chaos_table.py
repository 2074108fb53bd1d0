"""The tables that `baton chaos` prints at the end."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from baton.bench.chaos import SHOWN_DIFFERENCES, ChaosReport
from baton.bench.chaos_constraints import ConstraintCounts, ConstraintVerdict
from baton.bench.stats import Distribution

SATISFIED, CUT, UNKNOWN = ConstraintVerdict.SATISFIED, ConstraintVerdict.CUT, ConstraintVerdict.UNKNOWN


def show(console: Console, report: ChaosReport) -> None:
    table = Table(title=f"chaos: {sum(report.faults.values())} faults in {report.took_s:.0f} s", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for kind, count in sorted(report.faults.items()):
        table.add_row(kind, str(count))
    table.add_section()
    table.add_row("requests", f"{report.requests:,}")
    table.add_row("  streamed", f"{report.streamed:,}")
    table.add_row("  moved in mid-answer", f"{report.moved:,} ({report.moves:,} moves)")
    table.add_row("  different from the undisturbed run", _count(len(report.differences)))
    table.add_section()
    _add_constrained(table, report.constrained)
    table.add_section()
    table.add_row("longest gap of a stream, p50 / p99 / max", _seconds(report.gaps_s))
    table.add_row("  of one that moved", _seconds(report.moved_gaps_s))
    for kind, gaps in sorted(report.gaps_by_kind_s.items()):
        table.add_row(f"  {kind}", _seconds(gaps))
    table.add_section()
    for what, count in sorted(report.held.items()):
        table.add_row(f"{what}, with a reason", str(count))
    table.add_row("suspected or lost without a reason", _count(len(report.false)))
    console.print(table)
    broken = (f"constraint of {text}" for text in report.constrained.broken)
    wrong = [*report.differences, *broken, *(f"without a reason: {text}" for text in report.false)]
    for line in wrong[:SHOWN_DIFFERENCES]:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    if len(wrong) > SHOWN_DIFFERENCES:
        console.print(f"… and {len(wrong) - SHOWN_DIFFERENCES} more", style="red")
    if report.cut_short is not None:
        console.print(f"cut short: {report.cut_short}", style="red", markup=False, highlight=False, soft_wrap=True)
    if report.long_gap is not None:
        console.print(report.long_gap, style="red", markup=False, highlight=False, soft_wrap=True)
    if report.is_clean:
        console.print("every request completed, with the tokens and the text of the undisturbed run", style="green")


def _add_constrained(table: Table, counts: ConstraintCounts) -> None:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.requests.items()))
    table.add_row("requests with a constraint", f"{sum(counts.requests.values()):,}" + (f" ({kinds})" if kinds else ""))
    table.add_row("  moved in mid-answer", f"{counts.moved:,}")
    satisfied, cut, unknown = (counts.verdicts.get(verdict, 0) for verdict in (SATISFIED, CUT, UNKNOWN))
    table.add_row("  choices that satisfy it", f"{satisfied:,}")
    table.add_row("  cut by max_tokens, not judged", f"{cut:,}")
    if unknown:
        table.add_row("  not judged: jsonschema-rs is not installed", f"{unknown:,}")
    table.add_row("  that do not satisfy it", _count(len(counts.broken)))


def _count(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else "0"


def _seconds(gaps: Distribution | None) -> str:
    return "–" if gaps is None else f"{gaps.p50:.2f} / {gaps.p99:.2f} / {gaps.max:.2f} s"
