"""`baton sim …`: the commands of the simulator."""

from __future__ import annotations

import typer

from baton.cli.lazy_commands import loading

COMMANDS = {
    "run": "baton.cli.sim_run:run",
    "fuzz": "baton.cli.sim_fuzz:fuzz",
    "replay": "baton.cli.sim_fuzz:replay",
    "ledger": "baton.cli.sim_ledger:ledger_app",
}

sim_app = typer.Typer(cls=loading(COMMANDS), no_args_is_help=True, add_completion=False)


@sim_app.callback()
def sim() -> None:
    """Run a whole cluster in virtual time: the scheduler that serves, with machines that are only modelled."""
