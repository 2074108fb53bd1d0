"""Tables of a report, as `baton sim run` prints them.

Owns the format. A cell is the median of the seeds, with the least and the most if they differ; "–" stands for no value. One
policy gets a table of latencies with a column per percentile; several get one table with a column per policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from baton.sim.report import RoleSummary, RunSummary, SimReport, ValueDistribution

ABSENT = "–"
PERCENTILES: dict[str, Callable[[ValueDistribution], float]] = {
    "mean": lambda values: values.mean,
    "p50": lambda values: values.p50,
    "p90": lambda values: values.p90,
    "p99": lambda values: values.p99,
    "max": lambda values: values.max,
}
T = TypeVar("T")

Value = Callable[[RunSummary], float | None]


def _cell(values: Sequence[float], form: str) -> str:
    if not values:
        return ABSENT
    middle, least, most = (form.format(value) for value in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least}–{most})"


@dataclass(frozen=True, slots=True)
class RunRow:
    name: str
    value: Value
    form: str

    def cell(self, runs: Sequence[RunSummary]) -> str:
        return _cell([value for value in map(self.value, runs) if value is not None], self.form)


@dataclass(frozen=True, slots=True)
class LatencyRow:
    name: str
    of: Callable[[RunSummary], ValueDistribution | None]
    form: str

    def row(self, percentile: str) -> RunRow:
        return RunRow(f"{self.name}, {percentile}", _part(self.of, PERCENTILES[percentile]), self.form)


@dataclass(frozen=True, slots=True)
class RoleRow:
    name: str
    value: Callable[[RoleSummary], float | None]
    form: str

    def cell(self, roles: Sequence[RoleSummary]) -> str:
        return _cell([value for value in map(self.value, roles) if value is not None], self.form)


def _part(part: Callable[[RunSummary], T | None], value: Callable[[T], float]) -> Value:
    """A value of a part of the summary; None if the part is None."""

    def found(run: RunSummary) -> float | None:
        seen = part(run)
        return None if seen is None else value(seen)

    return found


LATENCIES = (
    LatencyRow("TTFT s", lambda run: run.ttft_s, "{:,.3f}"),
    LatencyRow("TPOT ms", lambda run: run.tpot_ms, "{:,.2f}"),
    LatencyRow("end to end s", lambda run: run.e2e_s, "{:,.2f}"),
    LatencyRow("in the queue s", lambda run: run.queue_s, "{:,.3f}"),
)

COUNTS = (
    RunRow("requests", lambda run: run.counts.requests, "{:,.0f}"),
    RunRow("finished", lambda run: run.counts.finished, "{:,.0f}"),
    RunRow("refused", lambda run: run.counts.refused, "{:,.0f}"),
    RunRow("aborted", lambda run: run.counts.aborted, "{:,.0f}"),
    RunRow("ended with an error", lambda run: run.counts.errors, "{:,.0f}"),
    RunRow("lost with their instance", lambda run: run.counts.lost, "{:,.0f}"),
    RunRow("never ended", lambda run: run.counts.unfinished, "{:,.0f}"),
)
USUAL_COUNTS = 2
"""The first rows of `COUNTS`, shown even when zero."""

RATES = (
    RunRow("goodput, requests/s", lambda run: run.rates.good_per_s, "{:,.2f}"),
    RunRow("goodput, share of requests", lambda run: run.rates.good_share, "{:.1%}"),
    RunRow("finished, requests/s", lambda run: run.rates.requests_per_s, "{:,.2f}"),
    RunRow("output tokens/s", lambda run: run.rates.output_tokens_per_s, "{:,.0f}"),
    RunRow("input tokens/s, cached included", lambda run: run.rates.input_tokens_per_s, "{:,.0f}"),
    RunRow("prefix hit rate", lambda run: run.tokens.hit_rate, "{:.1%}"),
)

PRESSURE = (
    RunRow("preemptions", lambda run: run.preemptions, "{:,.0f}"),
    RunRow("requests preempted", lambda run: run.preempted_requests, "{:,.0f}"),
    RunRow("recomputed tokens", lambda run: run.tokens.recomputed_tokens, "{:,.0f}"),
    RunRow("recomputed, share of computed", lambda run: run.tokens.recomputed_share, "{:.2%}"),
    RunRow("KV pool held, mean", _part(lambda run: run.ledger, lambda ledger: ledger.held_mean), "{:.1%}"),
    RunRow("KV pool held, peak", _part(lambda run: run.ledger, lambda ledger: ledger.held_peak), "{:.1%}"),
    RunRow("KV pool cached, mean", _part(lambda run: run.ledger, lambda ledger: ledger.cached_mean), "{:.1%}"),
    RunRow("KV pool free, mean", _part(lambda run: run.ledger, lambda ledger: ledger.free_mean), "{:.1%}"),
    RunRow("running an instance, mean", _part(lambda run: run.queues, lambda queues: queues.running_mean), "{:,.1f}"),
    RunRow("running an instance, peak", _part(lambda run: run.queues, lambda queues: queues.running_peak), "{:,.0f}"),
    RunRow("waiting an instance, mean", _part(lambda run: run.queues, lambda queues: queues.waiting_mean), "{:,.1f}"),
    RunRow("waiting an instance, peak", _part(lambda run: run.queues, lambda queues: queues.waiting_peak), "{:,.0f}"),
)

BUSY_ALONE = (RunRow("busy", _part(lambda run: run.busy, lambda busy: busy.median), "{:.1%}"),)
BUSY = (
    RunRow("busy, least instance", _part(lambda run: run.busy, lambda busy: busy.least), "{:.1%}"),
    RunRow("busy, median instance", _part(lambda run: run.busy, lambda busy: busy.median), "{:.1%}"),
    RunRow("busy, most instance", _part(lambda run: run.busy, lambda busy: busy.most), "{:.1%}"),
)

HANDOVERS = (
    RunRow("hand-over s, mean", _part(lambda run: run.handover_s, lambda values: values.mean), "{:,.3f}"),
    RunRow("hand-over s, p90", _part(lambda run: run.handover_s, lambda values: values.p90), "{:,.3f}"),
    RunRow("of it transfer s, mean", _part(lambda run: run.transfer_s, lambda values: values.mean), "{:,.4f}"),
    RunRow("of it transfer s, p90", _part(lambda run: run.transfer_s, lambda values: values.p90), "{:,.4f}"),
)
"""Shown if a run has roles."""

PACE = (
    RunRow("span s", lambda run: run.span_s, "{:,.1f}"),
    RunRow("steps", lambda run: run.steps, "{:,.0f}"),
    RunRow("simulated s", lambda run: run.simulated_s, "{:,.1f}"),
    RunRow("wall s", lambda run: run.wall_s, "{:,.2f}"),
    RunRow("simulated ÷ wall", lambda run: run.simulated_per_wall, "{:,.1f} ×"),
)


ROLE_ROWS = (
    RoleRow("instances", lambda role: role.instances, "{:,.0f}"),
    RoleRow("busy, least instance", lambda role: role.busy.least if role.busy else None, "{:.1%}"),
    RoleRow("busy, median instance", lambda role: role.busy.median if role.busy else None, "{:.1%}"),
    RoleRow("busy, most instance", lambda role: role.busy.most if role.busy else None, "{:.1%}"),
    RoleRow("KV pool held, mean", lambda role: role.ledger.held_mean if role.ledger else None, "{:.1%}"),
    RoleRow("KV pool held, peak", lambda role: role.ledger.held_peak if role.ledger else None, "{:.1%}"),
    RoleRow("KV pool leased, mean", lambda role: role.ledger.leased_mean if role.ledger else None, "{:.1%}"),
    RoleRow("KV pool cached, mean", lambda role: role.ledger.cached_mean if role.ledger else None, "{:.1%}"),
    RoleRow("KV pool free, mean", lambda role: role.ledger.free_mean if role.ledger else None, "{:.1%}"),
    RoleRow("running an instance, mean", lambda role: role.queues.running_mean if role.queues else None, "{:,.1f}"),
    RoleRow("waiting an instance, mean", lambda role: role.queues.waiting_mean if role.queues else None, "{:,.1f}"),
    RoleRow("hand-overs", lambda role: role.handovers, "{:,.0f}"),
    RoleRow("refused", lambda role: role.refused, "{:,.0f}"),
    RoleRow("failed", lambda role: role.failed, "{:,.0f}"),
    RoleRow("KV sent or received, GB", lambda role: role.gigabytes, "{:,.1f}"),
    RoleRow("link busy", lambda role: role.link_busy, "{:.2%}"),
)


def show(console: Console, report: SimReport, title: str) -> None:
    console.print(title, style="bold", highlight=False, markup=False)
    if len(report.labels) == 1:
        console.print(_latency_table(report.runs))
    console.print(_policy_table(report))
    for label in report.labels:
        runs = report.of(label)
        if any(run.roles for run in runs):
            console.print(_role_table(label if len(report.labels) > 1 else "", runs))
    for line in _explained(report):
        console.print(line, style="dim", highlight=False, markup=False)


def _latency_table(runs: Sequence[RunSummary]) -> Table:
    table = Table()
    table.add_column("latency")
    for percentile in PERCENTILES:
        table.add_column(percentile, justify="right")
    for latency in LATENCIES:
        table.add_row(latency.name, *(latency.row(percentile).cell(runs) for percentile in PERCENTILES))
    return table


def _policy_table(report: SimReport) -> Table:
    table = Table()
    table.add_column("")
    for label in report.labels:
        table.add_column(label, justify="right", overflow="fold")
    for section in _sections(report):
        for row in section:
            table.add_row(row.name, *(row.cell(report.of(label)) for label in report.labels))
        table.add_section()
    return table


def _role_table(label: str, runs: Sequence[RunSummary]) -> Table:
    """One column per role."""
    roles = list(dict.fromkeys(role.role for run in runs for role in run.roles))
    table = Table(title=label or None, title_justify="left")
    table.add_column("by role")
    for name in roles:
        table.add_column(name, justify="right")
    for row in ROLE_ROWS:
        table.add_row(row.name, *(row.cell([role for run in runs for role in run.roles if role.role == n]) for n in roles))
    return table


def _sections(report: SimReport) -> Iterator[Sequence[RunRow]]:
    usual, rare = COUNTS[:USUAL_COUNTS], COUNTS[USUAL_COUNTS:]
    yield (*usual, *(row for row in rare if any(map(row.value, report.runs))))
    if len(report.labels) > 1:
        for latency in LATENCIES:
            yield [latency.row(percentile) for percentile in PERCENTILES if percentile != "max"]
    yield RATES
    yield (*PRESSURE, *(BUSY if any(run.instances > 1 for run in report.runs) else BUSY_ALONE))
    if any(run.roles for run in report.runs):
        yield HANDOVERS
    yield PACE


def _explained(report: SimReport) -> Iterator[str]:
    yield (
        f"Goodput: finished with TTFT ≤ {report.ttft_target_s:g} s and TPOT ≤ {report.tpot_target_ms:g} ms. "
        "Latencies and tokens are of finished requests; rates are over the span from first arrival to last end."
    )
    seeds = len({run.seed for run in report.runs})
    if seeds > 1:
        yield f"Median of {seeds} seeds (least–most)."
    yield from report.notes
