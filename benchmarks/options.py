"""Options shared by several experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[str, typer.Argument(help="Model folder, or the name of a built-in model.")]
ModelOrScripted = Annotated[str, typer.Argument(help="Model folder, a built-in model, or scripted for none.")]
PeerOption = Annotated[
    str | None,
    typer.Option(envvar="BATON_PEER_VLLM", help="Command prefix that runs in vLLM's environment; absent: skipped."),
]
Pairs = Annotated[int, typer.Option(min=1, max=20, help="Times that each side is measured.")]
OurArgs = Annotated[str, typer.Option(help="More options for baton serve.")]
PeerArgs = Annotated[str, typer.Option(help="More options for vLLM's server.")]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds send equal prompts.")]
StoreFolder = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="Where stores are made [temporary files].")
]
JsonFile = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]
JsonIfGiven = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers here.")]
ConversationFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Lengths of conversations, a row a turn; also .gz.")
]
ShareGptFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Or the ShareGPT lengths in this folder.")
]
LinkGbytes = Annotated[float, typer.Option(min=0.001, help="KV between instances, GB/s each way.")]
Processes = Annotated[int | None, typer.Option(min=1, max=1024, help="Runs at once [one a core].")]
