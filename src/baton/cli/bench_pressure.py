"""`baton bench pressure`: serving with too small a KV pool, beside vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.pressure import Pressure, PressureOptions, contenders_of, show
from baton.bench.report import write_json
from baton.cli.bench_compare import OurArgs, Pairs, PeerArgs, PeerOption, Seed
from baton.cli.bench_screen import model_folder, progress_bar, stop_servers_on_sigterm, voice_of, wide_console

PressureJson = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]
# Hidden: another load is another benchmark. They are there to try the command out quickly.
Requests = Annotated[int, typer.Option(min=1, max=1024, hidden=True)]
Tokens = Annotated[int, typer.Option(min=1, max=2048, hidden=True)]


def pressure(
    model: Annotated[str, typer.Argument(help="Model folder, or the name of a built-in model.")] = "smollm2",
    peer: PeerOption = None,
    pairs: Pairs = 3,
    our_args: OurArgs = "",
    peer_args: PeerArgs = "",
    seed: Seed = 0,
    requests: Requests = 64,
    input_tokens: Tokens = 128,
    output_tokens: Tokens = 192,
    json_file: PressureJson = Path("bench-results/pressure.json"),
) -> None:
    """Measure output tokens a second under KV pressure, Baton beside vLLM on this machine.

    64 requests of 128 tokens in and 192 out at once, with KV for all of them, for half and for a quarter. Starts a server
    for each side and pool, keeps them up and loads one at a time. Takes about twenty-five minutes on two cores.
    """
    console = wide_console()
    stop_servers_on_sigterm()
    folder = model_folder(console, model)
    options = PressureOptions(folder, peer, pairs, requests, input_tokens, output_tokens, our_args, peer_args, seed)
    with progress_bar(console) as bar:
        task = bar.add_task("starting")
        work = Pressure(options, contenders_of(options), voice_of(console, bar, task))
        bar.update(task, total=work.measurements)
        report = work.run()
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
    if report.failures:
        raise typer.Exit(1)
