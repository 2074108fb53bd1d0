"""`baton sim run`: a load on a cluster that is only modelled, and what it would see there.

Owns option names, help and exit codes; the work is in `baton.bench.sim_run` and `baton.sim`. Exit codes: 0 all went well,
1 requests ended as they never should without faults, 2 the command was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.bench.plot import PlotUnavailable, require_matplotlib
from baton.bench.profile_by_layer import Share, profiled, show_shares
from baton.bench.report import write_json
from baton.bench.sim_options import SimOptions
from baton.bench.sim_run import BadSimOptions, Simulation
from baton.bench.traces import TraceMalformed
from baton.cli.bench_screen import progress_bar, refuse, wide_console
from baton.cli.declared_options import GivenOptions, taking_settings
from baton.core.setting import BadConfig, Panel
from baton.sim.perfetto import write_timeline
from baton.sim.plots import draw
from baton.sim.report import SimReport
from baton.sim.report_tables import show
from baton.sim.run_records import RunRecord
from baton.sim.step_times import BadStepTimes
from baton.sim.workload import BadWorkload


def _file(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", dir_okay=False, rich_help_panel=Panel.RESULTS.value, metavar="FILE", help=text)


Trace = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, rich_help_panel=Panel.TRACED.value, help="Mooncake, Azure or ShareGPT trace; also .gz."
    ),
]
JsonFile = Annotated[Path | None, _file("json", "Write the numbers here.")]
PlotFile = Annotated[Path | None, _file("plot", "Draw a PNG of the first seed (extra: plot).")]
TimelineFile = Annotated[Path | None, _file("timeline", "First policy and seed, step by step, for ui.perfetto.dev.")]
ProfileRun = Annotated[
    bool,
    typer.Option("--profile", rich_help_panel=Panel.RESULTS.value, help="Show which layer the time went to. Twice as slow."),
]


@taking_settings(SimOptions, is_brief=False)
def run(
    *, trace: Trace = None, given: GivenOptions, json_file: JsonFile = None, plot_file: PlotFile = None,
    timeline_file: TimelineFile = None, profile: ProfileRun = False,
) -> None:  # fmt: skip
    """Run a load on a modelled cluster in virtual time, with the scheduler that serves.

    A trace:        baton sim run --trace mooncake.jsonl.gz --speed 6 --instances 16 --plot run.png

    Made up:        baton sim run --requests 2000 --input-tokens 2048 --output-tokens 256 --rate 20 --instances 4

    Split:          baton sim run --trace mooncake.jsonl.gz --split 5P3D --ttft-slo-s 2 --tpot-slo-ms 50

    Conversations:  baton sim run --sessions 200 --rounds 5 --think-s 2 --concurrency 64

    With a router:  baton sim run --sessions 78 --rounds 6 --concurrency 24 --instances 3 --route cache-aware

    Policies:       baton sim run --kv-blocks 12000 --rate 9 --max-tokens 2048 --compare none,new-token-ratio --seeds 3
    """
    options = SimOptions(trace=trace, **given.fields_of(SimOptions))
    console = wide_console()
    simulation = _prepare(console, options, plot_file)
    keep = plot_file is not None or timeline_file is not None
    (report, kept), found = _profiled(lambda: _run(console, simulation, keep), profile)
    show(console, report, simulation.title)
    if found:
        show_shares(console, found)
    if json_file is not None:
        write_json(json_file, report)
    if plot_file is not None:
        draw(kept, simulation.targets, simulation.title, plot_file)
    if timeline_file is not None:
        _write_timeline(console, timeline_file, kept[0])
    _say_written(console, json_file, plot_file, timeline_file)
    if broken := sum(summary.counts.broken for summary in report.runs):
        console.print(f"{broken:,} requests did not end as they should: a bug of Baton.", style="red", highlight=False)
        raise typer.Exit(1)


def _prepare(console: Console, options: SimOptions, plot_file: Path | None) -> Simulation:
    try:
        if plot_file is not None:
            require_matplotlib()
        return Simulation(options)
    except (BadSimOptions, BadWorkload, BadConfig, BadStepTimes, TraceMalformed, PlotUnavailable) as error:
        raise refuse(console, error) from error


def _run(console: Console, simulation: Simulation, keep: bool) -> tuple[SimReport, list[RunRecord]]:
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=simulation.requests)
        return simulation.run(
            lambda what: bar.update(task, description=what), lambda ended: bar.update(task, advance=ended), keep
        )


def _profiled(
    work: Callable[[], tuple[SimReport, list[RunRecord]]], profile: bool
) -> tuple[tuple[SimReport, list[RunRecord]], list[Share]]:
    return profiled(work) if profile else (work(), [])


def _write_timeline(console: Console, path: Path, record: RunRecord) -> None:
    if told := write_timeline(path, record).told:
        console.print(told, style="dim", highlight=False)


def _say_written(console: Console, *paths: Path | None) -> None:
    written = [str(path) for path in paths if path is not None]
    if written:
        console.print(f"Written: {', '.join(written)}.", style="dim", highlight=False, markup=False, soft_wrap=True)
