"""What `baton bench split` prints: goodput by cluster and speed, what each cluster's peak is made of, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from baton.bench.split import STEP_TIMES, STEP_TOKENS, SplitReport, SplitRun
from baton.sim.steptime import load_step_times

ABSENT = "–"


def show(console: Console, report: SplitReport) -> None:
    console.print(_goodput(report))
    console.print(_peaks(report))
    for line in explained(report):
        console.print(line, style="dim", highlight=False, markup=False)


def _goodput(report: SplitReport) -> Table:
    settings = report.settings
    table = Table(
        title=f"Good requests a second (share): TTFT ≤ {settings['ttft_s']:g} s and TPOT ≤ {settings['tpot_ms']:g} ms; "
        f"first {report.requests:,} requests of {report.trace}",
        title_justify="left",
    )
    table.add_column("offered requests/s")
    speeds = list(dict.fromkeys(run.speed for run in report.runs))
    for speed in speeds:
        offered = _mean([run for run in report.runs if run.speed == speed], lambda run: run.offered_per_s)
        table.add_column(f"{offered:.2f} (× {speed:g})", justify="right")
    best = [report.best(split=split) for split in (False, True)]
    for cluster in report.clusters:
        peak = report.peak(cluster)
        cells = [_goodput_cell(report.of(cluster, speed), bold=cluster in best and speed == peak) for speed in speeds]
        table.add_row(cluster, *cells)
    return table


def _goodput_cell(runs: Sequence[SplitRun], *, bold: bool) -> str:
    text = f"{_mean(runs, lambda run: run.good_per_s):.2f} ({_mean(runs, lambda run: run.good_share):.0%})"
    return f"[bold]{text}[/bold]" if bold else text


COLUMNS: dict[str, tuple[Callable[[SplitRun], float | None], str]] = {
    "offered/s": (lambda run: run.offered_per_s, "{:.2f}"),
    "good/s": (lambda run: run.good_per_s, "{:.2f}"),
    "late": (lambda run: run.late_share, "{:.0%}"),
    "slow": (lambda run: run.slow_share, "{:.0%}"),
    "both": (lambda run: run.both_share, "{:.0%}"),
    "TTFT p50": (lambda run: run.ttft_s.p50, "{:.2f}"),
    "p90 s": (lambda run: run.ttft_s.p90, "{:.1f}"),
    "TPOT p50": (lambda run: run.tpot_ms.p50, "{:.0f}"),
    "p90 ms": (lambda run: run.tpot_ms.p90, "{:.0f}"),
    "busy P": (lambda run: run.busy_givers, "{:.0%}"),
    "busy D": (lambda run: run.busy_takers, "{:.0%}"),
    "cached": (lambda run: run.hit_rate, "{:.0%}"),
    "KV on its way ms": (lambda run: run.transfer_ms.mean if run.transfer_ms else None, "{:.1f}"),
}


def _peaks(report: SplitReport) -> Table:
    table = Table(title="At the speed at which each is best", title_justify="left")
    table.add_column("cluster")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for cluster in report.clusters:
        runs = report.of(cluster, report.peak(cluster))
        table.add_row(cluster, *(_cell(runs, value, form) for value, form in COLUMNS.values()))
    return table


def _cell(runs: Sequence[SplitRun], value: Callable[[SplitRun], float | None], form: str) -> str:
    values = [seen for seen in map(value, runs) if seen is not None]
    return form.format(sum(values) / len(values)) if values else ABSENT


def _mean(runs: Sequence[SplitRun], value: Callable[[SplitRun], float]) -> float:
    return sum(map(value, runs)) / len(runs)


def explained(report: SplitReport) -> Iterator[str]:
    """What the tables mean, and what decided."""
    settings = report.settings
    ttft_s, tpot_ms, lane = settings["ttft_s"], settings["tpot_ms"], settings["lane_gbytes_per_s"]
    yield (
        f"late: first token after {ttft_s:g} s; slow: then more than {tpot_ms:g} ms a token; both. Requests of the first "
        f"{settings['warm_share']:.0%} of the time are served and not judged. Step times of {settings['step_times']}; KV "
        f"over {lane:g} GB/s out of and into each instance, layer by layer. Who decodes is busy while anybody does."
    )
    yield (
        f"{report.bunched:,} requests share the timestamp of the one before; they are spread until the next. "
        f"{report.hopeless_share:.0%} of the prompts alone take longer than {ttft_s:g} s on an idle instance with a cold "
        "cache: where the cache does not help, no cluster serves those in time."
    )
    mixed, split = report.best(split=False), report.best(split=True)
    if mixed is not None and split is not None:
        yield from _verdict(report, mixed, split)


def _verdict(report: SplitReport, mixed: str, split: str) -> Iterator[str]:
    ours, theirs = report.of(mixed, report.peak(mixed)), report.of(split, report.peak(split))
    ratio = _mean(theirs, lambda run: run.good_per_s) / _mean(ours, lambda run: run.good_per_s)
    yield f"Best split {split}, best without {mixed}: × {ratio:.2f} in goodput at the peak of each."
    placed = {run.cluster for run in report.runs if run.by_load}
    for name in sorted(placed):
        placed_ratio = report.goodput(split, report.peak(split)) / report.goodput(name, report.peak(name))
        yield f"Against {name}, which needs somebody who knows all queues: × {placed_ratio:.2f}."
    chunk_ms = load_step_times(STEP_TIMES).step_us(0, 0, STEP_TOKENS, STEP_TOKENS * 8192) / 1e3
    yield (
        f"Why: a chunk of {STEP_TOKENS:,} tokens at 8k of context takes {chunk_ms:.0f} ms, and whoever decodes in that step "
        f"waits for it. {mixed}: {_mean(ours, _late):.0%} too late and {_mean(ours, _slow):.0%} too slow, busy "
        f"{_mean(ours, lambda run: run.busy_takers):.0%}. {split}: {_mean(theirs, _late):.0%} too late and "
        f"{_mean(theirs, _slow):.0%} too slow; those that prefill are busy "
        f"{_mean(theirs, lambda run: run.busy_givers or 0.0):.0%}, and KV is on its way for "
        f"{_mean(theirs, lambda run: run.transfer_ms.mean if run.transfer_ms else 0.0):.1f} ms."
    )


def _slow(run: SplitRun) -> float:
    return run.slow_share + run.both_share


def _late(run: SplitRun) -> float:
    return run.late_share + run.both_share
