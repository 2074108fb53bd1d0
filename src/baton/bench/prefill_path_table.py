"""What `baton bench prefill-path` prints: both paths beside the original's figures, and where the difference comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from rich.console import Console
from rich.table import Table

from baton.bench.prefill_path import PATHS, PathReport, PathRun
from baton.core.config import PrefillPath

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
    settings, seeds = report.settings, len(report.of(PrefillPath.SHORT))
    table = Table(
        title=f"{settings['givers']}P{settings['takers']}D, {settings['clients']} clients, {settings['sessions']} sessions, "
        f"{seeds} seeds: mean (least–most)",
        title_justify="left",
    )
    for name in ("", "general path", "short path", "change", "the original", "its change"):
        table.add_column(name, justify="right" if name else "left")
    for title, (name, form) in FIGURES.items():
        cells = [_spread([run.figure(name) for run in report.of(path)], form) for path in PATHS]
        reported = report.reported[name]
        before = f"{reported.general:,.1f} → {reported.short:,.1f}" if name != "tokens_per_s" else ""
        table.add_row(title, *cells, _spread(report.changes(name), "{:+.2%}"), before, f"{reported.change:+.1%}")
    return table


def _parts(report: PathReport) -> Table:
    table = Table(title="Where a wait for the first token goes, mean of the seeds", title_justify="left")
    for name in ("", "general path", "short path", "difference"):
        table.add_column(name, justify="right" if name else "left")
    for title, (value, form) in PARTS.items():
        general, short = (mean(map(value, report.of(path))) for path in PATHS)
        sign = form.replace("{:", "{:+")
        table.add_row(title, form.format(general), form.format(short), sign.format(short - general))
    return table


def _spread(values: Sequence[float], form: str) -> str:
    middle, least, most = (form.format(value) for value in (mean(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} – {most})"


def explained(report: PathReport) -> Iterator[str]:
    passes = {path: report.passes[path] for path in PATHS}
    told = "; ".join(
        f"{path} {report.pass_us(path):.0f} µs ({', '.join(f'{one.us:.0f}' for one in passes[path])})" for path in PATHS
    )
    yield f"A pass (plan and settle) in CPU time on this machine, each path {len(passes[PATHS[0]])} times in turns: {told}."
    settings = report.settings
    yield (
        f"Step times: {settings['step_times']}, a roofline. Rounds and answers as in {report.trace}; what clients add is × "
        f"{settings['input_scale']:g} as long, so that the general path's mean TTFT is near the reported one."
    )
