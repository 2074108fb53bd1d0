"""Plots of simulated runs: latencies over time and as distributions, the KV pool, queues, and busy shares of instances.

Owns the drawing: 1400 × 1000 pixels, colours that colour-blind readers can tell apart, legends outside the data. One run is
drawn in full; several, one per policy, are overlaid with one legend for all panels, and then the pool shows only the blocks
that requests hold. matplotlib is an optional extra (`plot`) and is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from baton.sim.report import FINISHED, LatencyTargets, busy_shares
from baton.sim.run_records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#777777"
POLICY_COLOURS = (BLUE, RED, GREEN, PINK, ORANGE, SKY)
Style = Literal["-", "--", "-.", ":"]
POLICY_STYLES: tuple[Style, ...] = ("-", "--", "-.", ":")
RUNS_MAX = len(POLICY_COLOURS)
WINDOWS_MAX, WINDOW_ARRIVALS = 60, 20
"""Percentiles over time are taken in equal windows, of at least about 20 arrivals on average."""
MOMENTS_MAX = 240
CURVE_POINTS_MAX = 2000
DOTS_MAX = 20_000
BARS_LEAST, BARS_MAX, TICKS_MAX = 6, 64, 16
LEAST_SHOWN_S = 1e-4
"""The lower bound of values on logarithmic axes."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunStyle:
    """The line style of one run in all panels."""

    label: str
    colour: str
    style: Style
    width: float
    """Runs drawn first are thicker, so that they stay visible under later ones."""


@dataclass(frozen=True, slots=True)
class InstanceLevels:
    """Instances over time: one row per time, one column per instance; NaN without a sample."""

    at_s: Floats
    held: Floats
    cached: Floats
    free: Floats
    running: Floats
    waiting: Floats


def draw(records: Sequence[RunRecord], targets: LatencyTargets, title: str, path: Path) -> None:
    """Write a PNG of one run, or of one run per policy."""
    if not 1 <= len(records) <= RUNS_MAX:
        raise ValueError(f"a picture shows 1 to {RUNS_MAX} runs, not {len(records)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    pens = [
        RunStyle(
            record.label,
            POLICY_COLOURS[place],
            POLICY_STYLES[place % len(POLICY_STYLES)],
            1.4 + 0.7 * (len(records) - 1 - place),
        )
        for place, record in enumerate(records)
    ]
    figure = Figure(figsize=(14, 10), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    panels = figure.subplots(3, 2)
    _first_tokens(panels[0, 0], records, pens, targets)
    _busy_bars(panels[0, 1], records, pens)
    levels = [_levels(record) for record in records]
    _pool(panels[1, 0], levels, pens)
    _queues(panels[1, 1], levels, pens)
    first = [_finished_us(record, "ttft") / 1e6 for record in records]
    between = [_finished_us(record, "tpot") / 1e3 for record in records]
    _cdf(panels[2, 0], "time to first token", "s", first, targets.ttft_s, pens)
    _cdf(panels[2, 1], "time per output token", "ms", between, targets.tpot_ms, pens)
    end_s = max(record.end_us for record in records) / 1e6
    for axes in (panels[0, 0], panels[1, 0], panels[1, 1]):
        axes.set_xlim(0, max(end_s, LEAST_SHOWN_S))
        axes.set_xlabel("seconds of simulated time" if axes is not panels[0, 0] else "arrival, seconds of simulated time")
    if len(records) > 1:
        lines = [Line2D([], [], color=pen.colour, linestyle=pen.style, linewidth=2.5, label=pen.label) for pen in pens]
        figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False, handlelength=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")


def _retitle(axes: Axes, name: str) -> None:
    axes.set_title(name, loc="left", fontsize=11, fontweight="bold")


def _log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:,.9g}"))
    axis.set_minor_formatter(NullFormatter())


def _frame(axes: Axes, name: str, y_label: str) -> None:
    _retitle(axes, name)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(axes: Axes, columns: int = 4) -> None:
    """Place the legend above the panel, beside its title."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, frameon=False, fontsize=9, borderaxespad=0.1,
            columnspacing=1.2, handlelength=1.8, markerscale=4,
        )  # fmt: skip


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing was seen", transform=axes.transAxes, ha="center", va="center", color=GREY)


def _finished_us(record: RunRecord, what: str) -> Floats:
    finished = (request for request in record.requests if request.outcome in FINISHED)
    values = (request.ttft_us if what == "ttft" else request.tpot_us for request in finished)
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _first_tokens(axes: Axes, records: Sequence[RunRecord], pens: Sequence[RunStyle], targets: LatencyTargets) -> None:
    _frame(axes, "TTFT by arrival", "seconds")
    _log_scale(axes, "y")
    alone = len(records) == 1
    for record, pen in zip(records, pens, strict=True):
        arrived_s, ttft_s = _arrivals(record)
        if not len(arrived_s):
            _nothing(axes)
            continue
        if alone:
            every = -(-len(arrived_s) // DOTS_MAX)
            size = 2.5 if len(arrived_s) > CURVE_POINTS_MAX else 5.0
            axes.plot(
                arrived_s[::every], ttft_s[::every], ".", color=SKY, markersize=size, alpha=0.45, markeredgewidth=0,
                label="request",
            )  # fmt: skip
        middle_s, p50, p90 = _windows(arrived_s, ttft_s)
        axes.plot(middle_s, p50, color=pen.colour, linewidth=pen.width, label="p50" if alone else None)
        axes.plot(
            middle_s,
            p90,
            color=RED if alone else pen.colour,
            linewidth=pen.width,
            linestyle="--",
            label="p90" if alone else None,
        )
    axes.axhline(targets.ttft_s, color=GREY, linewidth=1.2, linestyle=":", label=f"target {targets.ttft_s:g} s")
    if not alone:
        _retitle(axes, "TTFT by arrival: p50, dashed p90")
    _legend(axes)


def _arrivals(record: RunRecord) -> tuple[Floats, Floats]:
    seen = [
        (request.arrived_us / 1e6, max(LEAST_SHOWN_S, request.ttft_us / 1e6))
        for request in record.requests
        if request.outcome in FINISHED and request.ttft_us is not None
    ]
    table = np.array(sorted(seen), dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _windows(at_s: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Middle, p50 and p90 of each stretch of time that has arrivals."""
    windows = max(1, min(WINDOWS_MAX, len(at_s) // WINDOW_ARRIVALS))
    edges = np.linspace(at_s[0], at_s[-1], windows + 1)
    place = np.clip(np.searchsorted(edges, at_s, side="right") - 1, 0, windows - 1)
    rows = []
    for window in range(windows):
        inside = values[place == window]
        if len(inside):
            p50, p90 = np.percentile(inside, (50, 90)).tolist()
            rows.append((float(edges[window] + edges[window + 1]) / 2, p50, p90))
    table = np.array(rows, dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _levels(record: RunRecord) -> InstanceLevels | None:
    if not record.samples:
        return None
    samples = np.array(
        [
            (
                o.at_us,
                o.instance,
                (o.running_blocks + o.leased_blocks) / record.pool_of(o.instance),
                o.evictable_blocks / record.pool_of(o.instance),
                o.free_blocks / record.pool_of(o.instance),
                o.running,
                o.waiting,
            )
            for o in record.samples
        ],
        dtype=np.float64,
    )
    moments = min(MOMENTS_MAX, len(np.unique(samples[:, 0])))
    edges = np.linspace(0.0, max(1.0, samples[:, 0].max()), moments + 1)
    row = np.clip(np.searchsorted(edges, samples[:, 0], side="right") - 1, 0, moments - 1)
    cell = row * record.instances + samples[:, 1].astype(np.int64)
    cells = moments * record.instances
    seen = np.bincount(cell, minlength=cells)
    kept = np.where(seen.reshape(moments, record.instances).any(axis=1))[0]

    def mean_of(column: int) -> Floats:
        total = np.bincount(cell, weights=samples[:, column], minlength=cells)
        means = np.divide(total, seen, out=np.full(cells, np.nan), where=seen > 0)
        return np.asarray(means.reshape(moments, record.instances)[kept])

    at_s = (edges[:-1] + edges[1:])[kept] / 2 / 1e6
    return InstanceLevels(at_s, mean_of(2), mean_of(3), mean_of(4), mean_of(5), mean_of(6))


def _pool(axes: Axes, levels: Sequence[InstanceLevels | None], pens: Sequence[RunStyle]) -> None:
    alone = len(levels) == 1
    _frame(axes, "KV pool" if alone else "KV pool held by requests", "share of the pool")
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    for level, pen in zip(levels, pens, strict=True):
        if level is None:
            _nothing(axes)
        elif alone:
            _stack(axes, level)
        else:
            axes.plot(level.at_s, np.nanmean(level.held, axis=1), pen.style, color=pen.colour, linewidth=pen.width)
    _legend(axes)


def _stack(axes: Axes, level: InstanceLevels) -> None:
    parts = [np.nanmean(part, axis=1) for part in (level.held, level.cached, level.free)]
    axes.stackplot(
        level.at_s, *parts, labels=["requests", "cached", "free"], colors=[BLUE, ORANGE, "#e8e8e8"], alpha=0.75, linewidth=0
    )
    if level.held.shape[1] > 1:
        for bound, name in (
            (np.nanmin(level.held, axis=1), "requests: least, most instance"),
            (np.nanmax(level.held, axis=1), None),
        ):
            axes.plot(level.at_s, bound, color="black", linewidth=0.7, alpha=0.8, label=name)


def _queues(axes: Axes, levels: Sequence[InstanceLevels | None], pens: Sequence[RunStyle]) -> None:
    alone = len(levels) == 1
    _frame(axes, "requests" if alone else "requests: running, dashed waiting", "mean of instances")
    for level, pen in zip(levels, pens, strict=True):
        if level is None:
            _nothing(axes)
        elif alone:
            _running_and_waiting(axes, level)
        else:
            axes.plot(level.at_s, np.nanmean(level.running, axis=1), "-", color=pen.colour, linewidth=pen.width)
            axes.plot(level.at_s, np.nanmean(level.waiting, axis=1), "--", color=pen.colour, linewidth=pen.width)
    axes.set_ylim(bottom=0)
    _legend(axes)


def _running_and_waiting(axes: Axes, level: InstanceLevels) -> None:
    several = level.running.shape[1] > 1
    for part, colour, style, name in ((level.running, BLUE, "-", "running"), (level.waiting, RED, "--", "waiting")):
        axes.plot(level.at_s, np.nanmean(part, axis=1), style, color=colour, linewidth=2, label=name)
        if several:
            axes.plot(level.at_s, np.nanmax(part, axis=1), style, color=colour, linewidth=0.7, alpha=0.7)
    if several:
        _retitle(axes, "requests (thin: the instance with most)")


def _busy_bars(axes: Axes, records: Sequence[RunRecord], pens: Sequence[RunStyle]) -> None:
    _frame(axes, "busy share", "share of the span")
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    for place, (record, pen) in enumerate(zip(records, pens, strict=True)):
        found = busy_shares(record)
        if found is None:
            _nothing(axes)
            continue
        shares = np.clip(found, 0.0, 1.0)
        if len(shares) > BARS_MAX:
            shares = np.sort(shares)
            axes.plot(np.arange(len(shares)), shares, pen.style, color=pen.colour)
        else:
            width = 0.8 / len(records)
            middle = np.arange(len(shares)) + (place - (len(records) - 1) / 2) * width
            axes.bar(middle, shares, width * 0.92, color=pen.colour)
    many = records[0].instances > BARS_MAX
    axes.set_xlabel("instances, least busy first" if many else "instance")
    count = records[0].instances
    ticks = range(0, count, -(-count // TICKS_MAX))
    roles = records[0].roles
    axes.set_xticks(ticks, [f"{tick}\n{roles[tick]}" if roles else str(tick) for tick in ticks])
    around = max(0.0, (BARS_LEAST - count) / 2)  # one bar must not fill the panel
    axes.set_xlim(-0.6 - around, count - 0.4 + around)
    _legend(axes)


def _cdf(axes: Axes, name: str, unit: str, groups: Sequence[Floats], target: float, pens: Sequence[RunStyle]) -> None:
    _frame(axes, name, "share of requests")
    axes.set_xlabel({"s": "seconds", "ms": "milliseconds"}[unit])
    _log_scale(axes, "x")
    axes.set_ylim(0, 1.01)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1], ["0 %", "25 %", "50 %", "75 %", "90 %", "100 %"])
    for values, pen in zip(groups, pens, strict=True):
        if not len(values):
            _nothing(axes)
            continue
        shares = np.linspace(0.0, 1.0, min(max(2, len(values)), CURVE_POINTS_MAX))
        at = np.maximum(np.percentile(values, shares * 100), LEAST_SHOWN_S)
        axes.plot(at, shares, pen.style, color=pen.colour, linewidth=pen.width)
    if len(groups) == 1 and len(groups[0]):
        p50, p90, p99 = np.percentile(groups[0], (50, 90, 99)).tolist()
        _retitle(axes, f"{name}: p50 {p50:,.3g}, p90 {p90:,.3g}, p99 {p99:,.3g} {unit}")
    axes.axvline(target, color=GREY, linewidth=1.2, linestyle=":", label=f"target {target:g} {unit}")
    _legend(axes)
