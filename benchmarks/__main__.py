"""`python -m benchmarks`: the experiments of the repository, one module each, imported when it is called.

Run from the root of a checkout. Exit codes: 0 all went well, 1 a measurement failed, 2 the command was wrong.
"""

from __future__ import annotations

import typer

from baton.cli.lazy_commands import loading

COMMANDS = {
    "agents": "benchmarks.agents:agents",
    "compare": "benchmarks.compare:compare",
    "constraints": "benchmarks.constraints:constraints",
    "constrained-rows": "benchmarks.constrained_rows:constrained_rows",
    "formats": "benchmarks.formats:formats",
    "forced-tokens": "benchmarks.forced_tokens:forced_tokens",
    "pressure": "benchmarks.pressure:pressure",
    "fleet-pressure": "benchmarks.fleet_pressure:fleet_pressure",
    "fleet-overload": "benchmarks.fleet_overload:fleet_overload",
    "tiers": "benchmarks.tiers:tiers",
    "chat-tiers": "benchmarks.chat_tiers:chat_tiers",
    "passes": "benchmarks.passes:passes",
    "policies": "benchmarks.policies:policies",
    "scheduler": "benchmarks.scheduler:scheduler",
    "recording": "benchmarks.recording:recording",
    "predict": "benchmarks.predict:predict",
    "handover": "benchmarks.handover:handover",
    "store": "benchmarks.store:store",
    "split": "benchmarks.split:split",
    "prefill-path": "benchmarks.prefill_path:prefill_path",
    "router": "benchmarks.router:router",
    "routing": "benchmarks.routing:routing",
    "health": "benchmarks.health:health",
    "hostile": "benchmarks.hostile:hostile",
    "hostile-schemas": "benchmarks.hostile_schemas:hostile_schemas",
    "idempotency": "benchmarks.idempotency:idempotency",
    "soak": "benchmarks.soak:soak",
}

app = typer.Typer(
    cls=loading(COMMANDS),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


@app.callback()
def benchmarks() -> None:
    """Experiments on Baton, beside another system where there is one."""


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
