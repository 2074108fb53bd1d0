"""`baton bench chat-tiers`: conversations of several rounds with more or less behind the KV pool."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.chat_tiers import TALKS, ChatBench, ChatOptions, show
from baton.bench.report import write_json
from baton.bench.talks import NoTalks, find_talks, read_talks
from baton.bench.tier_sides import SCRIPTED
from baton.bench.traces import TraceMalformed
from baton.cli.bench_compare import OurArgs, Pairs, Seed
from baton.cli.bench_routing import TraceFile, TracesFolder
from baton.cli.bench_screen import model_folder, progress_bar, refuse, stop_servers_on_sigterm, voice_of, wide_console
from baton.sim.workload import BadWorkload

ModelName = Annotated[str, typer.Argument(help="Model folder, a built-in model, or scripted for none.")]
Sessions = Annotated[int, typer.Option(min=1, max=10_000, help="Conversations.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Conversations at once.")]
Think = Annotated[float, typer.Option("--think", min=0.0, max=600.0, help="Seconds before each next round.")]
Pool = Annotated[int, typer.Option("--kv-blocks", min=1, help="Blocks of 32 tokens in the pool.")]
Folder = Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Where stores are made [temporary files].")]
JsonFile = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]


def chat_tiers(
    model: ModelName = "smollm2",
    trace: TraceFile = None,
    traces: TracesFolder = None,
    pairs: Pairs = 3,
    sessions: Sessions = 78,
    concurrency: Concurrency = 39,
    think: Think = 2.0,
    kv_blocks: Pool = 96,
    our_args: OurArgs = "",
    folder: Folder = None,
    seed: Seed = 0,
    json_file: JsonFile = Path("bench-results/chat-tiers.json"),
) -> None:
    """How much of each prompt need not be computed, and the time to the first token, when the pool holds few conversations.

    One instance with nothing behind its pool, with host memory, with a file store and with Valkey; lengths from a trace.
    """
    console = wide_console()
    stop_servers_on_sigterm()
    talks = replace(TALKS, count=sessions, concurrency=concurrency, seed=seed)
    try:
        drawn = talks.drawn(read_talks(find_talks(trace, traces)))
    except (NoTalks, BadWorkload, TraceMalformed) as error:
        raise refuse(console, error) from error
    options = ChatOptions(
        model=None if model == SCRIPTED else model_folder(console, model),
        talks=talks,
        pairs=pairs,
        think_s=think,
        pool_blocks=kv_blocks,
        args=tuple(shlex.split(our_args)),
        folder=folder,
    )
    with progress_bar(console) as bar:
        task = bar.add_task("starting")
        work = ChatBench(options, drawn, voice_of(console, bar, task))
        bar.update(task, total=work.measurements)
        report = work.run()
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
    if report.failures:
        raise typer.Exit(1)
