"""`baton bench tiers`: serving with too small a KV pool, with and without host memory and a store behind it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from baton.bench.report import write_json
from baton.bench.tier_sides import SCRIPTED
from baton.bench.tiers import Load, TierBench, TierOptions, show
from baton.cli.bench_compare import OurArgs, Pairs, Seed
from baton.cli.bench_screen import model_folder, progress_bar, stop_servers_on_sigterm, voice_of, wide_console

ModelName = Annotated[str, typer.Argument(help="Model folder, a built-in model, or scripted for none.")]
Loads = Annotated[list[Load] | None, typer.Option("--load", help="Only this one; repeat for several.")]
Folder = Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Where stores are made [temporary files].")]
Link = Annotated[float, typer.Option("--link-mbytes", min=0.1, max=10_000, help="MB/s of the slow store's link, each way.")]
JsonFile = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]
# Hidden: another load is another benchmark. They are there to try the command out quickly.
Requests = Annotated[int | None, typer.Option(min=1, max=1024, hidden=True)]
Tokens = Annotated[int | None, typer.Option(min=1, max=2048, hidden=True)]


def tiers(
    model: ModelName = "smollm2",
    load: Loads = None,
    pairs: Pairs = 3,
    our_args: OurArgs = "",
    folder: Folder = None,
    link_mbytes: Link = 12.0,
    seed: Seed = 0,
    requests: Requests = None,
    input_tokens: Tokens = None,
    output_tokens: Tokens = None,
    json_file: JsonFile = Path("bench-results/tiers.json"),
) -> None:
    """Measure what host memory and a store are worth when the KV pool is too small, beside computing again.

    Three loads, in each of which all requests come at once and the pool holds half of what they fill. The last has a store
    that is slower than the model. Takes about half an hour on two cores.
    """
    console = wide_console()
    stop_servers_on_sigterm()
    options = TierOptions(
        model=None if model == SCRIPTED else model_folder(console, model),
        loads=tuple(load or Load),
        pairs=pairs,
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        args=tuple(shlex.split(our_args)),
        folder=folder,
        link_bytes_per_s=link_mbytes * 1e6,
        seed=seed,
    )
    with progress_bar(console) as bar:
        task = bar.add_task("starting")
        work = TierBench(options, voice_of(console, bar, task))
        bar.update(task, total=work.measurements)
        report = work.run()
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
    if report.failures:
        raise typer.Exit(1)
