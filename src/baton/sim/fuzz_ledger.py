"""The ledger of fuzzed ranges: which seeds were run on which code, and what they did, since the last law was mended.

Owns the file, one JSON line an entry, and the page that shows it. Seeds that were run before a law was mended, or a cause
removed, say little about the code after it; they stay in the file and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.core.errors import BatonError
from baton.sim.fuzz import EVERY_FAULT, EVERY_MOVE
from baton.sim.fuzz_range import RangeReport, faults_by_class

LEDGER_FILE = Path("docs/fuzzing-ledger.jsonl")
PAGE_FILE = Path("docs/fuzzing.md")
BEGIN, END = "<!-- ledger: begin -->", "<!-- ledger: end -->"


class LedgerRefused(BatonError):
    """A file that is no ledger, or an entry that cannot be added."""


class LawMended(msgspec.Struct, frozen=True, tag="mended"):
    """From here on other promises are checked, or the same ones on mended code: counting starts again."""

    ended: str
    commit: str
    what: str


LedgerEntry = RangeReport | LawMended


@dataclass(frozen=True, slots=True)
class FuzzLedger:
    entries: tuple[LedgerEntry, ...] = ()

    @classmethod
    def read(cls, file: Path) -> FuzzLedger:
        """The ledger in the file; an empty one where there is no file."""
        if not file.exists():
            return cls()
        try:
            lines = file.read_bytes().splitlines()
            return cls(tuple(msgspec.json.decode(line, type=LedgerEntry) for line in lines))
        except (OSError, msgspec.DecodeError) as error:
            raise LedgerRefused(f"{file} is no ledger: {error}") from error

    def write(self, file: Path) -> None:
        file.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in self.entries))

    def with_ranges(self, reports: Iterable[RangeReport]) -> FuzzLedger:
        """Raises LedgerRefused for seeds that were already counted on the same code."""
        ledger = self
        for report in reports:
            for other in ledger.counted:
                if other.source == report.source and _overlap(other, report):
                    raise LedgerRefused(
                        f"seeds {report.first_seed}–{_last(report)} were run on the same code before: "
                        f"{other.first_seed}–{_last(other)} are in the ledger"
                    )
            ledger = FuzzLedger((*ledger.entries, report))
        return ledger

    def with_mended(self, mended: LawMended) -> FuzzLedger:
        return FuzzLedger((*self.entries, mended))

    @property
    def mended(self) -> LawMended | None:
        """The last mending."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry, LawMended)), None)

    @property
    def counted(self) -> tuple[RangeReport, ...]:
        """Ranges since the last mending."""
        ranges: list[RangeReport] = []
        for entry in self.entries:
            if isinstance(entry, LawMended):
                ranges.clear()
            else:
                ranges.append(entry)
        return tuple(ranges)


def rendered(ledger: FuzzLedger) -> str:
    """The ledger in Markdown."""
    counted, mended = ledger.counted, ledger.mended
    since = "" if mended is None else f" since {mended.ended} ({mended.commit}: {mended.what})"
    if not counted:
        return f"No range was run{since}.\n"
    fired, moves = Counter[str](), Counter[str]()
    for report in counted:
        fired.update(report.fired)
        moves.update(report.moves)
    parts = [
        _summary(counted, since),
        _ranges(counted),
        _table(("class of faults", "times"), ((name, f"{times:,}") for name, times in faults_by_class(fired).items())),
        _never("fault", EVERY_FAULT, fired),
        f"{sum(moves.values()):,} transitions. {_never('transition', EVERY_MOVE, moves)}",
        _table(("transition", "times"), ((name, f"{moves[name]:,}") for name in EVERY_MOVE)),
    ]
    return "\n\n".join(parts) + "\n"


def shown_on(page: str, ledger: FuzzLedger) -> str:
    """The page with what stands between its two marks replaced by the ledger."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LedgerRefused(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{rendered(ledger)}\n{END}{after}"


def _summary(counted: Sequence[RangeReport], since: str) -> str:
    seeds, broken = sum(report.seeds for report in counted), sum(len(report.broken) for report in counted)
    hours, cpu_hours = (sum(times) / 3600 for times in ([r.seconds for r in counted], [r.cpu_seconds for r in counted]))
    laws = "no law was broken" if not broken else f"**{broken} worlds broke a law**"
    events, requests = sum(report.events for report in counted), sum(report.requests for report in counted)
    virtual_us = sum(report.virtual_us for report in counted)
    return (
        f"{seeds:,} seeds in {len(counted)} ranges{since}: {laws}. {hours:.2f} hours, {cpu_hours:.2f} of processor time; "
        f"{events:,} events, {requests:,} requests, {virtual_us / 1e6:,.0f} s of virtual time."
    )


def _ranges(counted: Sequence[RangeReport]) -> str:
    head = (
        "first seed",
        "seeds",
        "commit",
        "source",
        "ended (UTC)",
        "seconds",
        "seeds/s",
        "faults",
        "transitions",
        "laws broken",
    )
    rows = (
        (
            str(report.first_seed),
            f"{report.seeds:,}",
            report.commit,
            report.source,
            report.ended,
            f"{report.seconds:,.0f} on {report.jobs}",
            f"{report.seeds_per_second:.1f}",
            f"{sum(report.fired.values()):,}",
            f"{sum(report.moves.values()):,}",
            "; ".join(f"{broken.seed}: {broken.law}" for broken in report.broken) or "none",
        )
        for report in counted
    )
    return _table(head, rows)


def _never(what: str, names: Sequence[str], counts: Counter[str]) -> str:
    never = [name for name in names if not counts[name]]
    return f"Every {what} occurred." if not never else f"Never: {', '.join(never)}."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _last(report: RangeReport) -> int:
    return report.first_seed + report.seeds - 1


def _overlap(one: RangeReport, other: RangeReport) -> bool:
    return one.first_seed <= _last(other) and other.first_seed <= _last(one)
