"""`baton bench …`: what the benchmarks are called on the command line.

Owns option names, help and exit codes; the work is in `baton.bench`. Exit codes: 0 all went well, 1 requests or parts
failed, 2 the command was wrong.
"""

from __future__ import annotations

import typer

from baton.cli.lazily import loading

COMMANDS = {
    "serve": "baton.cli.bench_serve:serve",
    "compare": "baton.cli.bench_compare:compare",
    "pressure": "baton.cli.bench_pressure:pressure",
    "tiers": "baton.cli.bench_tiers:tiers",
    "chat-tiers": "baton.cli.bench_chat_tiers:chat_tiers",
    "passes": "baton.cli.bench_passes:passes",
    "policies": "baton.cli.bench_policies:policies",
    "scheduler": "baton.cli.bench_scheduler:scheduler",
    "calibrate": "baton.cli.bench_calibrate:calibrate",
    "predict": "baton.cli.bench_predict:predict",
    "handover": "baton.cli.bench_handover:handover",
    "store": "baton.cli.bench_store:store",
    "split": "baton.cli.bench_split:split",
    "prefill-path": "baton.cli.bench_prefill_path:prefill_path",
    "router": "baton.cli.bench_router:router",
    "gpu": "baton.cli.bench_gpu:gpu",
    "routing": "baton.cli.bench_routing:routing",
}

bench_app = typer.Typer(cls=loading(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


@bench_app.callback()
def bench() -> None:
    """Measure a server, beside another one if you like."""
