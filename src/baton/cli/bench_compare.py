"""`baton bench compare`: Baton beside vLLM; the work is in `baton.bench.compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.bench.compare import Compare, CompareOptions, Section, sides_of
from baton.bench.report import write_json
from baton.bench.verdict import Comparison
from baton.bench.verdict import show as show_verdict
from baton.cli.bench_screen import model_folder, progress_bar, stop_servers_on_sigterm, voice_of, wide_console

PeerOption = Annotated[
    str | None,
    typer.Option(envvar="BATON_PEER_VLLM", help="Command prefix that runs in vLLM's environment; absent: skipped."),
]
PeerScript = Annotated[
    Path | None,
    typer.Option(envvar="BATON_PEER_SCHEDULER", exists=True, dir_okay=False, help="Script that times vLLM's scheduler."),
]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Folder of request traces; absent: skipped.")
]
SectionNames = Annotated[list[Section] | None, typer.Option("--section", help="Only this part; repeat for more [all].")]
Pairs = Annotated[int, typer.Option(min=1, max=20, help="Times that each side is measured.")]
OurArgs = Annotated[str, typer.Option(help="More options for baton serve.")]
PeerArgs = Annotated[str, typer.Option(help="More options for vLLM's server.")]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds send equal prompts.")]
CompareJson = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]


def compare(
    model: Annotated[str, typer.Argument(help="Model folder, or the name of a built-in model.")] = "smollm2",
    peer: PeerOption = None,
    peer_scheduler_script: PeerScript = None,
    traces: TracesFolder = None,
    section: SectionNames = None,
    pairs: Pairs = 3,
    our_args: OurArgs = "",
    peer_args: PeerArgs = "",
    seed: Seed = 0,
    json_file: CompareJson = Path("bench-results/compare.json"),
) -> None:
    """Measure Baton beside vLLM on this machine: start-up, serving, prefix cache, a trace, the scheduler.

    Starts both servers itself, takes turns, prints the spread and what else the machine was doing. Takes about fifteen
    minutes on two cores; --section and --pairs make it shorter. Ctrl-C stops everything that was started.
    """
    console = wide_console()
    stop_servers_on_sigterm()
    folder = model_folder(console, model)
    options = CompareOptions(
        folder, peer, peer_scheduler_script, traces, tuple(section or Section), pairs, our_args, peer_args, seed
    )
    comparison = _compare(console, options)
    show_verdict(console, comparison)
    write_json(json_file, comparison)
    console.print(f"Written to {json_file}.", style="dim")
    if comparison.failures:
        raise typer.Exit(1)


def _compare(console: Console, options: CompareOptions) -> Comparison:
    with progress_bar(console) as bar:
        task = bar.add_task("starting")
        work = Compare(options, sides_of(options), voice_of(console, bar, task))
        bar.update(task, total=work.measurements)
        return work.run()
