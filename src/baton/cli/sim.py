"""`baton sim …`: the commands of the simulator."""

from __future__ import annotations

import typer

from baton.cli.sim_fuzz import fuzz, replay
from baton.cli.sim_run import run

sim_app = typer.Typer(
    help="Run a whole cluster in virtual time: the scheduler that serves, with machines that are only modelled.",
    no_args_is_help=True,
)


sim_app.command()(run)
sim_app.command()(fuzz)
sim_app.command()(replay)
