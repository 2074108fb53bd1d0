"""Plots one run: latency distributions, and throughput over time.

Owns the drawing. matplotlib is an optional extra (`plot`) and is imported only here, only when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.bench.client import RequestRecord
from baton.bench.load import RunResult
from baton.bench.stats import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS_MAX = 2000
MARKED = (0.5, 0.9, 0.99)
BLUE, ORANGE = "#2166ac", "#d95f02"


class PlotUnavailable(Exception):
    """matplotlib is not installed; the message says how to get it."""


def require_matplotlib() -> None:
    """Raise PlotUnavailable before a run instead of after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotUnavailable("--plot needs matplotlib: pip install 'baton-serve[plot]'") from None


def draw(result: RunResult, title: str, path: Path) -> None:
    """Write a PNG: three CDFs above, token rate and requests in flight below on one time axis."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(3, 3, height_ratios=[1.3, 1, 1])
    good = [record for record in result.records if record.error is None]
    first = [record.ttft_s for record in good if record.ttft_s is not None]
    _cdf(figure.add_subplot(grid[0, 0]), "time to first token", first)
    _cdf(figure.add_subplot(grid[0, 1]), "between stream events", result.gaps.values)
    _cdf(figure.add_subplot(grid[0, 2]), "end to end", [record.e2e_s for record in good])
    rate = figure.add_subplot(grid[1, :])
    _token_rate(rate, result, good)
    _in_flight(figure.add_subplot(grid[2, :], sharex=rate), result.records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _cdf(axes: Axes, name: str, values_s: Sequence[float]) -> None:
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of values")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if not values_s:
        axes.set_title(f"{name}\nnothing measured", fontsize=11)
        return
    ordered = sorted(value * 1000.0 for value in values_s)
    points = min(len(ordered), CURVE_POINTS_MAX)
    shares = [i / max(1, points - 1) for i in range(points)]
    axes.plot([percentile(ordered, share) for share in shares], shares, color=BLUE)
    marks = [percentile(ordered, share) for share in MARKED]
    axes.plot(marks, MARKED, "o", color=ORANGE, markersize=5)
    percentiles = " · ".join(f"p{share * 100:.0f} {mark:,.0f}" for share, mark in zip(MARKED, marks, strict=True))
    axes.set_title(f"{name}\n{percentiles} ms", fontsize=11)
    axes.set_xlim(0, ordered[-1] * 1.05)


def _token_rate(axes: Axes, result: RunResult, good: list[RequestRecord]) -> None:
    axes.set_ylabel("output tokens/s")
    axes.grid(alpha=0.3)
    events = sum(record.events for record in good)
    # A stream event may carry several tokens and does not say how many; usage does, for the whole answer.
    scale = sum(record.output_tokens for record in good) / events if events else 1.0
    width_s = result.tokens.bucket_s
    counts = result.tokens.counts
    axes.step(
        [i * width_s for i in range(len(counts))],
        [n * scale / width_s for n in counts],
        where="post",
        color=BLUE,
        linewidth=1,
    )
    axes.set_ylim(bottom=0)


def _in_flight(axes: Axes, records: list[RequestRecord]) -> None:
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("requests in flight")
    axes.grid(alpha=0.3)
    steps = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    alive, xs, ys = 0, [0.0], [0]
    for at_s, change in steps:
        alive += change
        xs.append(at_s)
        ys.append(alive)
    axes.step(xs, ys, where="post", color=ORANGE, linewidth=1)
    axes.set_ylim(bottom=0)
