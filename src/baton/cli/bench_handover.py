"""`baton bench handover`: how fast KV goes from one process to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.handover import MODELS, TransferFailed, run, show, ways_of
from baton.bench.report import write_json
from baton.cli.bench_screen import progress_bar, voice_of, wide_console
from baton.kv.contract import KINDS, available

Megabytes = Annotated[int, typer.Option(min=64, max=4096, help="KV to hand over each time, in MB.")]
Rounds = Annotated[int, typer.Option(min=3, max=100, help="Times that each way is measured.")]
HandoverJson = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]


def handover(
    megabytes: Megabytes = 128, rounds: Rounds = 5, json_file: HandoverJson = Path("bench-results/handover.json")
) -> None:
    """Measure the bandwidth of a hand-over between two processes, beside memcpy and a bare socket.

    shm, tcp and, where it is installed, mooncake, with and without checks, for the KV of a large and of a small model.
    Blocks are scattered and every layer is sent on its own. Exits with 1 when a transfer failed.
    """
    console = wide_console()
    with progress_bar(console) as bar:
        ways = ways_of([kind for kind in KINDS if available(kind) is None])
        task = bar.add_task("starting", total=len(ways) * rounds * len(MODELS))
        try:
            report = run(megabytes * 1_000_000, rounds, voice_of(console, bar, task))
        except TransferFailed as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
