"""`baton bench store`: how fast KV goes to a store and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.children import ChildFailed
from baton.bench.report import write_json
from baton.bench.stores import BLOCK_BYTES, StoreMisbehaved, run, show
from baton.cli.bench_screen import progress_bar, refuse, stop_servers_on_sigterm, voice_of, wide_console
from baton.kv.store import BadStore, StoreFailed

StoreAddress = Annotated[
    str | None,
    typer.Option("--url", help="Only this store, such as valkey://HOST:PORT/0 [default: all that can be started]."),
]
Megabytes = Annotated[int, typer.Option(min=8, max=4096, help="KV to store each time, in MB.")]
Rounds = Annotated[int, typer.Option(min=3, max=100, help="Times that each store is measured.")]
Folder = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="Where files are written [the temporary folder].")
]
StoreJson = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]


def store(
    url: StoreAddress = None,
    megabytes: Megabytes = 64,
    rounds: Rounds = 5,
    folder: Folder = None,
    json_file: StoreJson = Path("bench-results/store.json"),
) -> None:
    """Measure put and get of each store in MB/s, beside a plain file and memcpy.

    file in a folder of its own, and valkey and mooncake with servers that it starts where their packages are installed.
    Blocks are sealed, checked and copied as when they are served. Of a store that is named by --url only what was put
    is dropped again. Exits with 1 when a store failed.
    """
    console = wide_console()
    stop_servers_on_sigterm()
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=None)
        try:
            report = run(megabytes * 1_000_000, rounds, voice_of(console, bar, task), folder, url, BLOCK_BYTES)
        except BadStore as error:
            raise refuse(console, error) from error
        except (StoreFailed, StoreMisbehaved, ChildFailed) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
