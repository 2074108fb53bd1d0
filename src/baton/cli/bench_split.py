"""`baton bench split`: what splitting prefill and decode is worth on a trace, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.crew import cores
from baton.bench.plot import PlotUnavailable, require_matplotlib
from baton.bench.plot_split import draw_split
from baton.bench.report import write_json
from baton.bench.simulated import LANE_GBYTES_PER_S, BadSimOptions
from baton.bench.split import NoSplitTrace, SplitOptions, Splits, find_mooncake
from baton.bench.split_table import show
from baton.bench.traces import TraceMalformed
from baton.cli.bench_screen import progress_bar, refuse, wide_console
from baton.sim.workload import BadWorkload

TraceFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Trace with times, lengths and prefixes; also .gz.")
]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Or the Mooncake conversations in this folder.")
]
Requests = Annotated[int, typer.Option(min=10, max=1_000_000, help="First requests of the trace that fit.")]
Speeds = Annotated[str, typer.Option(help="The trace's times, × these.", metavar="X,X,…")]
Instances = Annotated[int, typer.Option(min=2, max=1024, help="Machines of every cluster.")]
Givers = Annotated[str, typer.Option(help="How many of them prefill for the others, one split each.", metavar="N,N,…")]
Chunks = Annotated[str, typer.Option(help="Chunk sizes of the cluster that is not split.", metavar="N,N,…")]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="Runs of each; others than the first move arrivals a little.")]
TtftSlo = Annotated[float, typer.Option(min=0.001, help="Good: first token within.")]
TpotSlo = Annotated[float, typer.Option(min=0.001, help="Good: and then a token within, on the mean.")]
LinkGbytes = Annotated[float, typer.Option(min=0.001, help="KV between instances, GB/s each way.")]
Processes = Annotated[int | None, typer.Option(min=1, max=1024, help="Runs at once [one a core].")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers here.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw a PNG (extra: plot).")]


def split(
    trace: TraceFile = None,
    traces: TracesFolder = None,
    requests: Requests = 800,
    speeds: Speeds = "1,1.3,1.6,1.9,2.2",
    instances: Instances = 8,
    givers: Givers = "4,5,6,7",
    mixed_chunks: Chunks = "512,1024,2048",
    seeds: Seeds = 1,
    ttft_slo_s: TtftSlo = 2.0,
    tpot_slo_ms: TpotSlo = 50.0,
    link_gbytes: LinkGbytes = LANE_GBYTES_PER_S,
    processes: Processes = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Goodput of clusters that split prefill and decode, beside one that does not, with the schedulers that serve.

    Machines are modelled (an 8B model on one H200 each) and so is the network; everything that decides is what serves. Takes
    about a quarter of an hour on two cores; fewer --requests, --speeds or --givers make it shorter.
    """
    console = wide_console()
    try:
        if plot_file is not None:
            require_matplotlib()
        options = SplitOptions(
            trace=find_mooncake(trace, traces),
            requests=requests,
            speeds=tuple(_numbers(speeds, "--speeds")),
            instances=instances,
            givers=tuple(round(number) for number in _numbers(givers, "--givers")),
            mixed_step_tokens=tuple(round(number) for number in _numbers(mixed_chunks, "--mixed-chunks")),
            seeds=seeds,
            ttft_s=ttft_slo_s,
            tpot_ms=tpot_slo_ms,
            lane_gbytes_per_s=link_gbytes,
        )
        work = Splits(options)
    except (NoSplitTrace, BadSimOptions, BadWorkload, TraceMalformed, PlotUnavailable) as error:
        raise refuse(console, error) from error
    with progress_bar(console) as bar:
        task = bar.add_task("clusters × speeds", total=len(work.jobs))
        report = work.run(lambda _run: bar.advance(task), processes or cores())
    show(console, report)
    if json_file is not None:
        write_json(json_file, report)
    if plot_file is not None:
        draw_split(report, plot_file)


def _numbers(text: str, option: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise BadSimOptions(f"{option} {text!r}: write numbers with commas between") from None
    if not all(0 < number < 1e9 for number in numbers) or len(set(numbers)) < len(numbers):
        raise BadSimOptions(f"{option} {text!r}: numbers above 0, each once")
    return numbers
