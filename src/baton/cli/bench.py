"""`baton bench …`: the benchmark commands.

Owns option names, help and exit codes; the work is in `baton.bench`. Experiments that need the repository are in
`benchmarks/`, beside the package. Exit codes: 0 all went well, 1 requests or parts failed, 2 the command was wrong.
"""

from __future__ import annotations

import typer

from baton.cli.lazy_commands import loading

COMMANDS = {
    "serve": "baton.cli.bench_serve:serve",
    "calibrate": "baton.cli.bench_calibrate:calibrate",
    "gpu": "baton.cli.bench_gpu:gpu",
}

MOVED = {
    name: f"run `python -m benchmarks {name}` in a checkout of the repository"
    for name in (
        "compare", "pressure", "tiers", "chat-tiers", "passes", "policies", "scheduler", "predict", "handover", "store",
        "split", "prefill-path", "router", "routing",
    )
}  # fmt: skip

bench_app = typer.Typer(cls=loading(COMMANDS, MOVED), no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


@bench_app.callback()
def bench() -> None:
    """Measure a server, beside another one if you like."""
