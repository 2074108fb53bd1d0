"""`baton bench router`: what a router between clients and instances costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.children import ChildFailed
from baton.bench.fleet import RequestsFailed
from baton.bench.report import write_json
from baton.bench.routed import RoutedLoad, measure, show
from baton.cli.bench_screen import progress_bar, voice_of, wide_console

Concurrency = Annotated[int, typer.Option(min=1, max=4096, help="Streams at once.")]
Requests = Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests a round, of each way.")]
InputTokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a prompt.")]
OutputTokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens of an answer.")]
StepMs = Annotated[float, typer.Option(min=0.0, help="How long a step of an instance takes.")]
Instances = Annotated[int, typer.Option(min=1, max=64, help="Scripted instances.")]
Rounds = Annotated[int, typer.Option(min=1, max=100, help="Times that each way is measured.")]
Peer = Annotated[
    str | None,
    typer.Option(
        envvar="BATON_PEER_SGLANG_ROUTER",
        help="Command that starts sglang-router, to be measured in front of the same instances.",
    ),
]
JsonFile = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]


def router(
    concurrency: Concurrency = 64,
    requests: Requests = 384,
    input_tokens: InputTokens = 64,
    output_tokens: OutputTokens = 96,
    step_ms: StepMs = 20.0,
    instances: Instances = 2,
    rounds: Rounds = 3,
    peer: Peer = None,
    json_file: JsonFile = Path("bench-results/router.json"),
) -> None:
    """Time to the first token and CPU time of the router, streaming, beside asking the same instances directly.

    Instances are scripted: they compute nothing and take --step-ms a step, so the difference is the router's.
    """
    console = wide_console()
    load = RoutedLoad(concurrency, requests, input_tokens, output_tokens, step_ms, instances, rounds)
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=rounds * (2 if peer is None else 3))
        try:
            report = asyncio.run(measure(load, peer, voice_of(console, bar, task)))
        except (ChildFailed, RequestsFailed) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
