"""`baton replay`: makes the decisions of a recording again, and compares each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton import __version__
from baton.core.errors import BatonError

PANEL = "Replay"
DIFFERS = 1
UNREADABLE = 2

File = Annotated[
    Path, typer.Argument(help="A recording: of --record, or written on a crash or SIGUSR1.", exists=True, dir_okay=False)
]
From = Annotated[int, typer.Option("--from", help="First call to tell of.", rich_help_panel=PANEL, min=1)]
To = Annotated[int | None, typer.Option("--to", help="Last call to tell of.", rich_help_panel=PANEL, min=1)]
Request = Annotated[
    str | None, typer.Option("--request", help="Tell only of this request: its id or number.", rich_help_panel=PANEL)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Tell only of differences.", rich_help_panel=PANEL)]
Laws = Annotated[
    bool, typer.Option("--laws/--no-laws", help="Check the invariants of an engine after each call.", rich_help_panel=PANEL)
]
GoOn = Annotated[bool, typer.Option("--go-on", help="Go on after the first difference.", rich_help_panel=PANEL)]


def replay(
    file: File,
    first: From = 1,
    last: To = None,
    request: Request = None,
    quiet: Quiet = False,
    laws: Laws = True,
    go_on: GoOn = False,
) -> None:
    """Make the decisions of a recorded engine or router again, compare each with the recording, and tell of them.

    [dim]baton replay engine.baton[/dim] prints one line a decision. It ends with code 1 at the first decision that comes out
    otherwise than recorded, or breaks an invariant, and with code 2 where the file cannot be read.
    """
    from baton.sim.replay_story import Story
    from baton.wire.recording_file import Recording
    from baton.wire.replaying import Replay

    console = Console(highlight=False, soft_wrap=True)
    try:
        recording = Recording(file.read_bytes())
        header, story = recording.header, Story(request)
        console.print(
            f"{header.of} {header.name}, written {header.written} by Baton {header.version}: {header.reason}", markup=False
        )
        if header.version != __version__:
            console.print(f"this is Baton {__version__}: its decisions may differ", style="yellow", markup=False)
        run, calls, differences = Replay(recording, with_laws=laws), 0, 0
        for call in run.steps():
            calls, wrong = call.number, call.difference
            line = story.line(call)
            if wrong is not None or (line is not None and not quiet and first <= call.number <= (last or call.number)):
                console.print(line or f"{call.number:7}", markup=False)
            if wrong is not None:
                differences += 1
                console.print(f"         ^ differs: {wrong}", style="red", markup=False)
                if not go_on:
                    break
    except BatonError as error:
        Console(stderr=True, highlight=False).print(f"baton replay: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(UNREADABLE) from None
    notes = ", the file is cut off" * recording.is_cut + f", {run.left_out} were left out" * bool(run.left_out)
    verdict = "all as recorded" if not differences else f"{differences} differ from the recording"
    console.print(f"{calls} calls in {run.segments} segments{notes}: {verdict}", markup=False)
    raise typer.Exit(DIFFERS if differences else 0)
