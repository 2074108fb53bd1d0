"""The `baton` command: one module a subcommand, mounted here."""

from __future__ import annotations

from typing import Annotated

import typer

from baton import __version__
from baton.cli.bench import bench_app
from baton.cli.bench_calibrate import calibrate
from baton.cli.bench_chat_tiers import chat_tiers
from baton.cli.bench_gpu import gpu
from baton.cli.bench_handover import handover
from baton.cli.bench_passes import passes
from baton.cli.bench_policies import policies
from baton.cli.bench_predict import predict
from baton.cli.bench_prefill_path import prefill_path
from baton.cli.bench_pressure import pressure
from baton.cli.bench_router import router as router_cost
from baton.cli.bench_routing import routing
from baton.cli.bench_scheduler import scheduler
from baton.cli.bench_split import split
from baton.cli.bench_store import store as bench_store
from baton.cli.bench_tiers import tiers
from baton.cli.chaos import chaos
from baton.cli.chat import chat
from baton.cli.drain import drain
from baton.cli.router import router
from baton.cli.serve import serve
from baton.cli.sim import sim_app
from baton.cli.store import store_app
from baton.cli.up import up

app = typer.Typer(
    help="Baton serves language models. Start with [bold]baton serve[/bold], or a fleet with [bold]baton up --demo[/bold]; "
    "then talk to it with [bold]baton chat[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
app.command()(serve)
app.command()(up)
app.command()(router)
app.command()(drain)
app.command()(chat)
app.command()(chaos)
bench_app.command()(pressure)
bench_app.command()(tiers)
bench_app.command()(chat_tiers)
bench_app.command()(passes)
bench_app.command()(policies)
bench_app.command()(scheduler)
bench_app.command()(calibrate)
bench_app.command()(predict)
bench_app.command()(handover)
bench_app.command("store")(bench_store)
bench_app.command()(split)
bench_app.command()(prefill_path)
bench_app.command("router")(router_cost)
bench_app.command()(gpu)
bench_app.command()(routing)
app.add_typer(bench_app, name="bench")
app.add_typer(sim_app, name="sim")
app.add_typer(store_app, name="store")


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
