"""A picture of `baton bench split`: good requests a second against those offered, one line a cluster."""

from __future__ import annotations

from pathlib import Path

from baton.bench.plot import require_matplotlib
from baton.bench.split import SplitReport
from baton.sim.plots import POLICY_COLOURS, POLICY_STYLES


def draw_split(report: SplitReport, path: Path) -> None:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, cluster in enumerate(report.clusters):
        speeds = sorted({run.speed for run in report.of(cluster)})
        offered = [report.of(cluster, speed)[0].offered_per_s for speed in speeds]
        good = [report.goodput(cluster, speed) for speed in speeds]
        style = POLICY_STYLES[(place // len(POLICY_COLOURS)) % len(POLICY_STYLES)]
        axes.plot(offered, good, style, marker="o", color=POLICY_COLOURS[place % len(POLICY_COLOURS)], label=cluster)
    settings = report.settings
    axes.set_title(
        f"{report.requests:,} requests of {report.trace}:\n"
        f"TTFT ≤ {settings['ttft_s']:g} s, TPOT ≤ {settings['tpot_ms']:g} ms",
        loc="left",
    )
    axes.set_xlabel("requests offered a second")
    axes.set_ylabel("good requests a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
