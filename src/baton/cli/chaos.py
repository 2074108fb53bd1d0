"""`baton chaos`: random faults in a fleet under load; every answer is compared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from baton.cli.bench_screen import refuse, stop_servers_on_sigterm, wide_console
from baton.cli.option_forwarding import given_for, taking_options_of
from baton.cli.up import up
from baton.node.settings import ExecutorKind

CHAOS = "Chaos"
NOT_TAKEN = frozenset(
    ["router_port", "host", "api_key", "admin_key", "demo", "drain_timeout", "restart_delay_max", "config"]
)
"""Options of `baton up` that `baton chaos` sets itself."""
OWN = frozenset(["model", "prefill", "decode", "mixed", "executor"])
"""Options of `baton up` that are passed on in another way."""


def _option(name: str, text: str, least: float | None = None) -> Any:
    return typer.Option(f"--{name}", help=text, rich_help_panel=CHAOS, min=least)


Model = Annotated[str, typer.Argument(help="As for baton up. Default: a tiny random model in float64, made on the spot.")]
FaultCount = Annotated[int, _option("faults", "How many faults.", 0)]
Requests = Annotated[int, _option("requests", "At least so many requests.", 1)]
Prefill = Annotated[int, _option("prefill", "Instances that prefill; a role with only one is left alone.", 0)]
Decode = Annotated[int, _option("decode", "Instances that decode.", 0)]
Mixed = Annotated[int, _option("mixed", "Instances that do both.", 0)]
Seed = Annotated[int, _option("seed", "Other faults, other victims, other requests.")]
Concurrency = Annotated[int, _option("concurrency", "Requests at once.", 1)]
Cases = Annotated[int, _option("cases", "Different requests.", 1)]
Calm = Annotated[float | None, _option("calm", "Minutes of the same load without a fault: nobody may be suspected.", 0)]
GapMax = Annotated[
    float | None, _option("gap-max", "Limit in seconds for the longest gap of a stream, at p99. Default: none.", 0)
]
Limit = Annotated[float, _option("minutes-max", "Give up after so many minutes.", 0.1)]
FleetLog = Annotated[Path | None, typer.Option("--fleet-log", help="Leave the fleet's log here.", rich_help_panel=CHAOS)]


def _chaos(
    context: typer.Context,
    model: Model = "tiny",
    faults: FaultCount = 100,
    requests: Requests = 1000,
    prefill: Prefill = 2,
    decode: Decode = 2,
    mixed: Mixed = 0,
    seed: Seed = 1,
    concurrency: Concurrency = 12,
    cases: Cases = 100,
    calm: Calm = None,
    gap_max: GapMax = None,
    minutes_max: Limit = 60.0,
    fleet_log: FleetLog = None,
) -> None:
    """Kill, stop, drain, restart and cut off instances of a fleet at random under load, and compare every answer.

    Starts a fleet of its own, records the answers to a mixed load while nothing happens, then asks again and again while
    faults happen, a new one as soon as each role has a ready spare. Ends with a code that is not 0 where a request fails, an
    answer differs, an instance is suspected to which nothing was done, or gaps are longer than [dim]--gap-max[/dim].

    Every option of [dim]baton up[/dim] can be given too, such as [dim]--executor scripted --step-ms 5[/dim].
    """
    # Imported late: `baton --help` must not wait for them.
    from baton.bench.chaos import ChaosFailed, ChaosOptions, ChaosProgress, run_chaos
    from baton.bench.chaos_table import show
    from baton.bench.child_processes import ChildFailed
    from baton.bench.client import ServerUnreachable

    console = wide_console()
    stop_servers_on_sigterm()
    is_scripted = context.params["executor"] is ExecutorKind.SCRIPTED
    try:
        options = ChaosOptions(
            model, faults, requests, prefill, decode, mixed, seed, concurrency, cases, calm, minutes_max, is_scripted,
            given_for(context, up, keep_back=OWN), fleet_log, gap_max,
        )  # fmt: skip
    except ChaosFailed as error:
        raise refuse(console, error) from None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        injected = bar.add_task("faults", total=faults if calm is None else 0)
        asked = bar.add_task("requests", total=requests)

        def done(faults_done: int, requests_done: int) -> None:
            bar.update(injected, completed=faults_done)
            bar.update(asked, completed=requests_done)

        progress = ChaosProgress(doing=lambda what: bar.update(injected, description=what), done=done)
        try:
            report = asyncio.run(run_chaos(options, progress))
        except (ChaosFailed, ChildFailed, ServerUnreachable) as error:
            raise refuse(console, error) from error
    show(console, report)
    raise typer.Exit(0 if report.is_clean else 1)


chaos = taking_options_of(_chaos, (up,), leave_out=NOT_TAKEN)
