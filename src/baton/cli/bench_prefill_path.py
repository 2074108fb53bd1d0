"""`baton bench prefill-path`: what the short path of a prefilling instance is worth, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.crew import cores
from baton.bench.prefill_path import GIVER_BLOCKS, INPUT_SCALE, PathOptions, Paths
from baton.bench.prefill_path_table import show
from baton.bench.report import write_json
from baton.bench.simulated import LANE_GBYTES_PER_S
from baton.bench.talks import NoTalks, find_talks
from baton.bench.traces import TraceMalformed
from baton.cli.bench_screen import progress_bar, refuse, wide_console
from baton.sim.workload import BadWorkload

TraceFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Lengths of conversations, a row a turn; also .gz.")
]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Or the ShareGPT lengths in this folder.")
]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Draws of conversations; both paths meet each.")]
SessionCount = Annotated[int, typer.Option("--sessions", min=1, max=10_000, help="Conversations of several rounds.")]
Clients = Annotated[int, typer.Option("--concurrency", min=1, max=10_000, help="Clients at once.")]
InputScale = Annotated[float, typer.Option(min=0.01, max=10_000, help="What clients add, × this as long as in the file.")]
ThinkS = Annotated[float, typer.Option(min=0, max=86_400, help="Pause before each further round.")]
LinkGbytes = Annotated[float, typer.Option(min=0.001, help="KV between instances, GB/s each way.")]
GiverBlocks = Annotated[int, typer.Option(min=1, help="KV pool of the instance that prefills, in blocks of 64.")]
Processes = Annotated[int | None, typer.Option(min=1, max=1024, help="Runs at once [one a core].")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers here.")]


def prefill_path(
    trace: TraceFile = None,
    traces: TracesFolder = None,
    seeds: Seeds = 10,
    sessions: SessionCount = 78,
    concurrency: Clients = 39,
    input_scale: InputScale = INPUT_SCALE,
    think_s: ThinkS = 0.0,
    link_gbytes: LinkGbytes = LANE_GBYTES_PER_S,
    giver_blocks: GiverBlocks = GIVER_BLOCKS,
    processes: Processes = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the two ways in which an instance that only prefills may plan: its own short path, and the general one.

    One instance prefills for three; machines are a roofline of GLM-4.5-Air on eight GPUs. The figures of the system for
    which such a path was first reported stand beside ours, with where the difference comes from. Takes some minutes.
    """
    console = wide_console()
    try:
        options = PathOptions(
            trace=find_talks(trace, traces),
            seeds=seeds,
            sessions=sessions,
            clients=concurrency,
            input_scale=input_scale,
            think_s=think_s,
            lane_gbytes_per_s=link_gbytes,
            giver_blocks=giver_blocks,
        )
        work = Paths(options)
    except (NoTalks, BadWorkload, TraceMalformed) as error:
        raise refuse(console, error) from error
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=work.runs)
        report = work.run(lambda what: bar.update(task, description=what), lambda: bar.advance(task), processes or cores())
    show(console, report)
    if json_file is not None:
        write_json(json_file, report)
