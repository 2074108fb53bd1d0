"""From a `RunResult` to what people and programs read: a summary, tables, a JSON file.

Owns the names and units of the published numbers: times in milliseconds, rates a second. Failed requests count in the
error table only; their latencies and tokens are in no other number, except that the gaps of a stream that broke later
were real gaps and stay in "between stream events".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.client import RequestRecord
from baton.bench.load import RunResult
from baton.bench.stats import Distribution, describe

SCHEMA = 1


class LatencySummary(msgspec.Struct, frozen=True):
    """Milliseconds; None where nothing was measured."""

    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    start_delay_ms: Distribution | None
    """Open loop: how long after it was due a request was sent. Large means that the generator's bound was reached."""


class ServeThroughput(msgspec.Struct, frozen=True):
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


class ServeCounts(msgspec.Struct, frozen=True):
    sent: int
    succeeded: int
    failed: int
    retries: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    usage_missing: int


class ErrorKind(msgspec.Struct, frozen=True):
    count: int
    example: str


class ServeSummary(msgspec.Struct, frozen=True):
    duration_s: float
    counts: ServeCounts
    throughput: ServeThroughput
    latency: LatencySummary
    errors: dict[str, ErrorKind]
    cut_short: bool


class ServeReport(msgspec.Struct, frozen=True):
    """The JSON file of `baton bench serve`."""

    schema: int
    made: str
    config: dict[str, str | int | float | bool | None]
    machine: dict[str, str | int | float]
    summary: ServeSummary


def summarise(result: RunResult) -> ServeSummary:
    good = [record for record in result.records if record.error is None]
    duration_s = _duration_s(result.records)
    output = sum(record.output_tokens for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    return ServeSummary(
        duration_s=duration_s,
        counts=ServeCounts(
            sent=len(result.records),
            succeeded=len(good),
            failed=len(result.records) - len(good),
            retries=sum(record.retries for record in result.records),
            prompt_tokens=prompt,
            cached_tokens=sum(cached) if cached else None,
            output_tokens=output,
            usage_missing=sum(record.usage_missing for record in good),
        ),
        throughput=ServeThroughput(len(good) * per_s, output * per_s, (output + prompt) * per_s),
        latency=_latency(good, result),
        errors=_errors(result.records),
        cut_short=result.cut_short,
    )


def _duration_s(records: Iterable[RequestRecord]) -> float:
    """From the first request sent to the last that ended."""
    spans = [(record.sent_s, record.end_s) for record in records]
    return max(end for _, end in spans) - min(sent for sent, _ in spans) if spans else 0.0


def _latency(good: list[RequestRecord], result: RunResult) -> LatencySummary:
    return LatencySummary(
        ttft_ms=_describe_ms(record.ttft_s for record in good),
        itl_ms=_describe_ms(result.gaps.values),
        tpot_ms=_describe_ms(record.tpot_s for record in good),
        e2e_ms=_describe_ms(record.e2e_s for record in good),
        start_delay_ms=_describe_ms(record.sent_s - record.due_s for record in good),
    )


def _describe_ms(values_s: Iterable[float | None]) -> Distribution | None:
    return describe([value * 1000.0 for value in values_s if value is not None])


def _errors(records: Iterable[RequestRecord]) -> dict[str, ErrorKind]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            counts[record.error] += 1
            examples.setdefault(record.error, record.error_message or "")
    return {kind: ErrorKind(count, examples[kind]) for kind, count in sorted(counts.items())}


def show(console: Console, summary: ServeSummary, title: str, open_loop: bool) -> None:
    """The tables that `baton bench serve` ends with."""
    console.print(_latency_table(summary.latency, title, open_loop))
    console.print(_totals_table(summary))
    if summary.errors:
        console.print(_error_table(summary.errors))
    if summary.cut_short:
        console.print("[yellow]The run was ended by its time limit (--max-seconds).[/]")
    if summary.counts.usage_missing:
        console.print(
            f"[yellow]{summary.counts.usage_missing} answers carried no usage: their tokens are counted as stream events.[/]"
        )


def _latency_table(latency: LatencySummary, title: str, open_loop: bool) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("latency, ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows = [
        ("time to first token", latency.ttft_ms),
        ("between stream events", latency.itl_ms),
        ("per output token", latency.tpot_ms),
        ("end to end", latency.e2e_ms),
    ]
    if open_loop:
        rows.append(("start delay", latency.start_delay_ms))
    for name, values in rows:
        if values is None:
            table.add_row(name, *["–"] * 5)
        else:
            table.add_row(name, *(f"{v:,.1f}" for v in (values.mean, values.p50, values.p90, values.p99, values.max)))
    return table


def _totals_table(summary: ServeSummary) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    counts, throughput = summary.counts, summary.throughput
    table.add_row("requests", f"{counts.succeeded:,} succeeded, {counts.failed:,} failed, {counts.retries:,} retries")
    table.add_row("duration", f"{summary.duration_s:,.2f} s")
    table.add_row("request throughput", f"{throughput.requests_per_s:,.2f} /s")
    table.add_row("output throughput", f"{throughput.output_tokens_per_s:,.1f} tokens/s")
    table.add_row("total throughput", f"{throughput.total_tokens_per_s:,.1f} tokens/s")
    cached = "" if counts.cached_tokens is None else f" ({counts.cached_tokens:,} cached)"
    table.add_row("tokens", f"{counts.prompt_tokens:,} in{cached}, {counts.output_tokens:,} out")
    return table


def _error_table(errors: dict[str, ErrorKind]) -> Table:
    table = Table(title="errors", title_justify="left")
    for column in ("kind", "count", "for example"):
        table.add_column(column, overflow="fold")
    for kind, error in errors.items():
        table.add_row(kind, str(error.count), error.example)
    return table


def write_json(path: Path, value: msgspec.Struct) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
