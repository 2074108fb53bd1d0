"""What `baton bench gpu` found, as values, as JSON, as a table and as a page. Needs nothing but the standard library.

Owns the form of the JSON: the step-time model of the simulator and the page in docs/ are made from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.bench.gpu_floor import GpuRates
from baton.core.errors import BatonError

SCHEMA = 1


class BadGpuReport(BatonError):
    """Not a valid report file; the message says why."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One measurement, its reference and its target."""

    what: str
    measured: float
    unit: str
    against: str = ""
    """The reference of the ratio, as text."""
    ratio: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    """Bounds of the ratio."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.ratio is None or (self.at_most is None and self.at_least is None):
            return None
        return (self.at_most is None or self.ratio <= self.at_most) and (
            self.at_least is None or self.ratio >= self.at_least
        )

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A timed step: decodes at a context, or chunks of several sequences that begin at a position."""

    shape: str
    us: float
    decodes: int = 0
    context_tokens: int = 0
    """Of each decode."""
    sequences: int = 0
    chunk_tokens: int = 0
    begin_tokens: int = 0


@dataclass(slots=True)
class PartResult:
    part: str
    rates: GpuRates | None = None
    """Rates measured by the process of this part."""
    rows: list[GpuRow] = field(default_factory=list)
    points: list[StepPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    took_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class GpuReport:
    made: str
    machine: dict[str, str]
    parts: list[PartResult]

    @property
    def rates(self) -> GpuRates | None:
        return next((part.rates for part in self.parts if part.rates is not None), None)

    @property
    def failed(self) -> list[str]:
        return [part.part for part in self.parts if part.error]

    @property
    def missed(self) -> list[str]:
        """Rows whose target is not met."""
        return [f"{part.part}: {row.what}" for part in self.parts for row in part.rows if row.met is False]


def write_report(path: Path, report: GpuReport) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": SCHEMA, **asdict(report)}, indent=1) + "\n")


def read_report(path: Path) -> GpuReport:
    try:
        value = json.loads(path.read_text())
        if value["schema"] != SCHEMA:
            raise BadGpuReport(f"{path} has the schema {value['schema']}, not {SCHEMA}")
        return GpuReport(value["made"], value["machine"], [part_of(part) for part in value["parts"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadGpuReport(f"{path} is no report of baton bench gpu: {error!r}") from None


def part_of(value: dict[str, object]) -> PartResult:
    """From its JSON form."""
    fields = {**value}
    rates, rows, points = fields.pop("rates"), fields.pop("rows"), fields.pop("points")
    return PartResult(
        **fields,  # type: ignore[arg-type]
        rates=None if rates is None else GpuRates(**rates),  # type: ignore[arg-type]
        rows=[GpuRow(**row) for row in rows],  # type: ignore[attr-defined]
        points=[StepPoint(**point) for point in points],  # type: ignore[attr-defined]
    )


def merged(old: GpuReport, new: GpuReport) -> GpuReport:
    """Merge two reports; newer parts replace older ones."""
    again = {part.part for part in new.parts}
    kept = [part for part in old.parts if part.part not in again]
    return GpuReport(new.made, new.machine, [*kept, *new.parts])


# ── for eyes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

HEADER = ("part", "what", "measured", "against", "ratio", "target", "")


def table_of(report: GpuReport) -> str:
    lines = [HEADER, *_cells(report)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    shown = [_line(line, widths) for line in lines]
    shown.insert(1, "─" * len(shown[0]))
    return "\n".join([*shown, *_afterwards(report)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = {2, 4}
    padded = [
        cell.rjust(width) if at in numbers else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _cells(report: GpuReport) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = []
    for part in report.parts:
        name = part.part
        for row in part.rows:
            verdict = {True: "met", False: "MISSED", None: ""}[row.met]
            cells.append((name, row.what, number(row.measured, row.unit), row.against, _ratio(row), row.target, verdict))
            name = ""
        if part.error:
            cells.append((name, "failed: " + part.error.strip().splitlines()[-1][:90], "", "", "", "", "FAILED"))
    return cells


def _afterwards(report: GpuReport) -> list[str]:
    lines = [f"{part.part}: {note}" for part in report.parts for note in part.notes]
    took = ", ".join(f"{part.part} {part.took_s:.0f} s" for part in report.parts)
    return [
        "",
        *lines,
        f"took: {took}",
        f"missed: {', '.join(report.missed) or 'nothing'}; failed: {', '.join(report.failed) or 'nothing'}",
    ]


def _ratio(row: GpuRow) -> str:
    return "" if row.ratio is None else f"{row.ratio:.3f}"


def number(value: float, unit: str) -> str:
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def markdown_of(report: GpuReport) -> str:
    """The page `docs/benchmarks.md`."""
    machine = report.machine
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "triton", "transformers", "python") if name in machine
    )
    rates = report.rates
    measured = "" if rates is None else (
        f"In this run the GPU read {rates.read_bytes_per_s / 1e12:.2f} TB/s and multiplied bf16 matrices at "
        f"{rates.matrix_flop_per_s / 1e12:,.0f} TFLOP/s. "
    )  # fmt: skip
    head = [
        "# GPU benchmark record",
        "",
        f"Measured on {report.made[:10]} with `baton bench gpu` on {_machine(machine)}; {versions}.",
        f"{measured}A floor is the sum over a step's operations of the longer of two times: the bytes it must read at that "
        "rate, and its products at that rate. Weights are random (`--load-format dummy`), numbers are medians.",
        "",
    ]
    return "\n".join([*head, *_sections(report.parts)]).rstrip() + "\n"


def _machine(machine: dict[str, str]) -> str:
    return ", ".join(machine[name] for name in ("gpu", "memory", "driver", "system") if name in machine)


def _sections(parts: Iterable[PartResult]) -> list[str]:
    lines: list[str] = []
    for part in parts:
        lines += [f"## {part.part}", ""]
        if part.error:
            lines += [f"Not measured: {part.error.strip().splitlines()[-1]}", ""]
        if part.rows:
            lines += ["| | measured | against | ratio | target |", "|---|---|---|---|---|"]
            lines += [_markdown_row(row) for row in part.rows] + [""]
        for note in part.notes:
            lines += [*(("```", note, "```") if "\n" in note else (note,)), ""]
    return lines


def _markdown_row(row: GpuRow) -> str:
    verdict = {True: " (met)", False: " (missed)", None: ""}[row.met]
    return f"| {row.what} | {number(row.measured, row.unit)} | {row.against} | {_ratio(row)} | {row.target}{verdict} |"


def middle(values: Sequence[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
