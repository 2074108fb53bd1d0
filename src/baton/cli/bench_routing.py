"""`baton bench routing`: policies of the router on conversations of several rounds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.children import ChildFailed
from baton.bench.fleet import RequestsFailed
from baton.bench.report import write_json
from baton.bench.routing import RoutingReport, Talks, measure, modelled, show
from baton.bench.talks import NoTalks, find_talks, read_talks
from baton.bench.traces import TraceMalformed
from baton.cli.bench_screen import progress_bar, refuse, voice_of, wide_console
from baton.sim.workload import BadWorkload

TraceFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Lengths of conversations; also .gz.")]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Or the ShareGPT lengths in this folder.")
]
Model = Annotated[str, typer.Option(help="A folder of safetensors, a GGUF file, or smollm2.")]
Policies = Annotated[str, typer.Option(help="Policies, in this order.", metavar="NAME,NAME,…")]
Instances = Annotated[int, typer.Option(min=1, max=64, help="Mixed instances of each fleet.")]
SessionsCount = Annotated[int, typer.Option(min=1, max=10_000, help="Conversations.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Conversations at once.")]
Scale = Annotated[float, typer.Option(min=0.01, max=10, help="What clients say, × this.")]
Seed = Annotated[int, typer.Option(min=0)]
Real = Annotated[bool, typer.Option(help="Also start real instances here; without them it is a matter of seconds.")]
JsonFile = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]


def routing(
    trace: TraceFile = None,
    traces: TracesFolder = None,
    model: Model = "smollm2",
    policies: Policies = "round-robin,cache-aware",
    instances: Instances = 3,
    sessions: SessionsCount = 78,
    concurrency: Concurrency = 12,
    input_scale: Scale = 0.5,
    seed: Seed = 0,
    real: Real = True,
    json_file: JsonFile = Path("bench-results/routing.json"),
) -> None:
    """How much of each prompt an instance had cached, and the time to the first token, by the router's policy.

    In virtual time on modelled GPUs, and with real instances on this machine, a fresh fleet for each policy.
    """
    console = wide_console()
    talks = Talks(count=sessions, concurrency=concurrency, input_scale=input_scale, seed=seed)
    try:
        said = read_talks(find_talks(trace, traces))
        drawn = talks.drawn(said)
    except (NoTalks, BadWorkload, TraceMalformed) as error:
        raise refuse(console, error) from error
    names = policies.split(",")
    with progress_bar(console) as bar:
        asked = sum(len(session.rounds) for session in drawn) if real else 0
        task = bar.add_task("starting", total=len(names) * (asked + 1))
        voice = voice_of(console, bar, task)
        try:
            modelled_runs = modelled(names, instances, talks, said, voice)
            runs = asyncio.run(measure(model, names, instances, talks, drawn, voice)) if real else []
        except (ChildFailed, RequestsFailed) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    report = RoutingReport(talks, instances, runs, modelled_runs)
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
