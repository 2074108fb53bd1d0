"""What `baton bench prefill-path` prints: both paths beside the original's figures, and where the difference comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from rich.console import Console
from rich.table import Table

from baton.bench.prefill_path import PATHS, Kind, PathReport, PathRun

FIGURES = {
    "total time s": ("total_s", "{:,.1f}"),
    "TTFT mean s": ("ttft_mean_s", "{:,.2f}"),
    "TTFT P90 s": ("ttft_p90_s", "{:,.2f}"),
    "output tokens/s": ("tokens_per_s", "{:,.1f}"),
}
PARTS: dict[str, tuple[Callable[[PathRun], float], str]] = {
    "waiting at the giver s": (lambda run: run.wait.queue_s, "{:,.3f}"),
    "being prefilled there s": (lambda run: run.wait.prefill_s, "{:,.3f}"),
    "on its way s": (lambda run: run.wait.transfer_s, "{:,.4f}"),
    "the rest s": (lambda run: run.wait.rest_s, "{:,.4f}"),
    "giver busy": (lambda run: run.giver_busy, "{:.1%}"),
    "giver's pool held, peak": (lambda run: run.giver_held_peak, "{:.1%}"),
    "giver's steps": (lambda run: run.giver_steps, "{:,.0f}"),
    "its passes, charged in all s": (lambda run: run.charged_s, "{:,.3f}"),
    "prompt tokens computed": (lambda run: run.computed_tokens, "{:,.0f}"),
    "prompt tokens cached": (lambda run: run.cached_share, "{:.1%}"),
    "takers busy": (lambda run: run.takers_busy, "{:.1%}"),
    "TPOT mean ms": (lambda run: run.tpot_ms.mean, "{:,.2f}"),
    "hand-overs refused": (lambda run: run.refused, "{:,.1f}"),
    "preemptions": (lambda run: run.preemptions, "{:,.1f}"),
}


def show(console: Console, report: PathReport) -> None:
    console.print(_figures(report))
    console.print(_parts(report))
    for line in explained(report):
        console.print(line, style="dim", highlight=False, markup=False)


def _figures(report: PathReport) -> Table:
    settings, seeds = report.settings, len(report.of(Kind.SHORT))
    table = Table(
        title=f"{settings['givers']}P{settings['takers']}D, {settings['clients']} clients, {settings['sessions']} sessions, "
        f"{seeds} seeds: mean (least – most)",
        title_justify="left",
    )
    for name in ("", "general path", "short path", "change", "from the lossy one", "the original", "its change"):
        table.add_column(name, justify="right" if name else "left")
    for title, (name, form) in FIGURES.items():
        cells = [_spread([run.figure(name) for run in report.of(kind)], form) for kind in PATHS]
        cells += [_spread(report.changes(name, before), "{:+.2%}") for before in (Kind.GENERAL, Kind.LOSSY)]
        reported = report.reported[name]
        before = f"{reported.general:,.1f} → {reported.short:,.1f}" if name != "tokens_per_s" else ""
        table.add_row(title, *cells, before, f"{reported.change:+.1%}")
    return table


def _parts(report: PathReport) -> Table:
    table = Table(title="Where a wait for the first token goes, mean of the seeds", title_justify="left")
    for name in ("", "general path", "short path", "difference", "lossy path"):
        table.add_column(name, justify="right" if name else "left")
    for title, (value, form) in PARTS.items():
        general, short, lossy = (mean(map(value, report.of(kind))) for kind in Kind)
        sign = form.replace("{:", "{:+")
        table.add_row(title, form.format(general), form.format(short), sign.format(short - general), form.format(lossy))
    return table


def _spread(values: Sequence[float], form: str) -> str:
    middle, least, most = (form.format(value) for value in (mean(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} – {most})"


def explained(report: PathReport) -> Iterator[str]:
    told = "; ".join(
        f"{kind} {report.pass_us(kind):.0f} µs ({', '.join(f'{one.us:.0f}' for one in report.passes[kind])})"
        for kind in PATHS
    )
    general = report.of(Kind.GENERAL)
    step_ms = mean(run.giver_busy * run.total_s / run.giver_steps for run in general) * 1e3
    yield (
        f"A pass (plan and settle) in CPU time on this machine, each path {len(report.passes[Kind.SHORT])} times in turns: "
        f"{told}; a step of the giver takes {step_ms:.0f} ms. A pass is charged as if nothing hid it."
    )
    yield from _verdict(report)
    settings = report.settings
    yield (
        f"Step times: {settings['step_times']}, a roofline. Rounds and answers as in {report.trace}; what clients add is × "
        f"{settings['input_scale']:g} as long and the giver's pool {settings['giver_blocks']:,} blocks of "
        f"{settings['block_size']}, so that the general path's mean TTFT is near the reported one."
    )


def _verdict(report: PathReport) -> Iterator[str]:
    """What our two paths differ in, and what the original's must have."""
    general, short = report.of(Kind.GENERAL), report.of(Kind.SHORT)
    more = sum(run.giver_steps for run in general) - sum(run.giver_steps for run in short)
    saved_ms = (report.pass_us(Kind.GENERAL) - report.pass_us(Kind.SHORT)) / 1e3
    steps = sum(run.giver_steps for run in general)
    yield (
        f"Our two paths plan nearly the same steps ({more:+,} of {steps:,} on the general one), and a pass differs by "
        f"{saved_ms:.2f} ms. There is little to gain, because our general path does not do what costs time elsewhere: "
        "requests end with their prompts here, so nothing is reserved for outputs; blocks are taken once, for the whole "
        "prompt; no prefill is ever preempted; and a row that only sends is in no plan."
    )
    yield (
        f"For the reported gain in total time a general path would have to lose {report.lost_us / 1e3:.0f} ms in each pass "
        "of the giver (lossy). The original's change came with others (a race of layer signals, sampling buffers), and "
        "its parts were not measured apart."
    )
