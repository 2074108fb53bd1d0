"""The `baton` command: one module a subcommand, imported when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from baton import __version__
from baton.cli.lazy_commands import loading

COMMANDS = {
    "serve": "baton.cli.serve:serve",
    "up": "baton.cli.up:up",
    "router": "baton.cli.router:router",
    "drain": "baton.cli.drain:drain",
    "chat": "baton.cli.chat:chat",
    "chaos": "baton.cli.chaos:chaos",
    "replay": "baton.cli.replay:replay",
    "bench": "baton.cli.bench:bench_app",
    "sim": "baton.cli.sim:sim_app",
    "store": "baton.cli.store:store_app",
    "models": "baton.cli.models:models_app",
}

app = typer.Typer(
    cls=loading(COMMANDS),
    help="Baton serves language models. Start with [bold]baton serve[/bold], or a fleet with [bold]baton up --demo[/bold]; "
    "then talk to it with [bold]baton chat[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Nothing to do before a subcommand."""


def run() -> None:
    app()
