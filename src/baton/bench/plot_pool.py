"""A picture of `baton bench policies`: how full each policy keeps the pool, one panel below the other on one time axis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baton.bench.plot import BLUE, ORANGE, require_matplotlib
from baton.bench.policies import PolicyReport, PoolUse

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_pool(report: PolicyReport, path: Path) -> None:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(report.pool)
    figure = Figure(figsize=(12, 1.2 + 1.9 * count), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{report.requests:,} requests of {report.trace}: share of {report.pool_blocks:,} KV blocks in use\n"
        "dashed: mean while requests wait"
    )
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)
    for axes, use in zip(panels[:, 0], report.pool, strict=True):
        _panel(axes, report, use)
    panels[-1, 0].set_xlabel("seconds of virtual time")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def _panel(axes: Axes, report: PolicyReport, use: PoolUse) -> None:
    run = next(run for run in report.runs if run.policy == use.policy)
    axes.fill_between(use.at_s, use.share, step="post", color=BLUE, alpha=0.25, linewidth=0)
    axes.step(use.at_s, use.share, where="post", color=BLUE, linewidth=0.8)
    axes.axhline(run.pool_use, color=ORANGE, linewidth=1.2, linestyle="--")
    told = f"{run.pool_use:.0%} while requests wait, {run.preemptions:,} preemptions, done after {run.finish_s:,.1f} s"
    axes.set_title(f"{use.policy}:  {told}", fontsize=10, loc="left")
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
