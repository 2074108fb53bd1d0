"""`baton up`: a router and instances on this machine, as one command.

Owns which options go to whom. Those of `baton serve` and `baton router` can all be given, as flags or in a file; what this
command decides itself (ports, roles, names, the key between them) cannot.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.cli.declared_options import GivenOptions, taking_settings
from baton.cli.option_forwarding import given_for, source_of, taking_options_of
from baton.cli.options import config_file
from baton.cli.router import router
from baton.cli.serve import serve
from baton.core.errors import BatonError
from baton.node.settings import EngineSettings, ExecutorKind
from baton.up.fleet_plan import FleetPlan

DECIDED = frozenset(
    ["model", "port", "role", "name", "router", "peer", "peer_port", "join_host", "join_port", "cluster_key",
     "cluster_key_file"]
)  # fmt: skip
"""Options of `serve` and `router` that `baton up` sets itself."""
HANDLED = frozenset([*DECIDED, "demo", "threads", "drain_timeout", "config", "api_key", "admin_key", "kv_store", "record"])
SETTLED = {name.replace("_", "-"): "is not an option of baton up, which settles it for each process" for name in DECIDED}
SETTLED["port"] += "; the port of the API is 'router-port'"
OF_THE_ROUTER = frozenset(["host", "max_waiting", "chat_template"])
"""Options for the router only: instances stay on loopback, and queueing is the router's."""
DEMO_KV = "128M"
"""A small KV pool, so that the dashboard shows the use of one answer."""
QUIET = ("--log-level", "warning")
"""Log level of instances; the router logs requests."""


Config = Annotated[Path | None, config_file(lambda: up, SETTLED)]


@taking_settings(FleetPlan)
def _up(
    *,
    context: typer.Context,
    given: GivenOptions,
    config: Config = None,  # noqa: ARG001  its callback has made it the defaults of all the others
) -> None:
    """Serve a model by several instances on this machine behind one router.

    [dim]baton up --demo[/dim] shows it with the built-in model: one instance prefills, two decode, and a button on the
    dashboard kills the one that serves you; [dim]baton up ./my-model --prefill 1 --decode 3 --dtype float32[/dim] serves
    a folder of safetensors.

    What ends is started again. Every option of [dim]baton serve[/dim] and [dim]baton router[/dim] can be given too, here or
    in the file of [dim]--config[/dim]; each process gets those that it has.
    """
    fleet = given.fields_of(FleetPlan)
    if fleet["demo"] and not (fleet["prefill"] or fleet["decode"] or "mixed" in fleet):
        fleet |= {"prefill": 1, "decode": 2}
    fleet.setdefault("mixed", 0 if fleet["prefill"] or fleet["decode"] else 1)
    to_instances = given_for(context, serve, HANDLED | OF_THE_ROUTER)
    to_router = given_for(context, router, HANDLED)
    if fleet["demo"] and all(source_of(context, name) == "DEFAULT" for name in ("kv_memory", "kv_blocks")):
        to_instances = ("--kv-memory", DEMO_KV, *to_instances)
    quiet = () if "--log-level" in to_instances else QUIET
    record = _recording(context.params["record"])
    store = context.params["kv_store"] or None
    try:
        _check_model(fleet["model"], context.params)
        plan = FleetPlan(
            **fleet, serve_options=(*quiet, *record, *to_instances), router_options=(*record, *to_router),
            api_keys=tuple(context.params["api_key"] or ()), admin_key=context.params["admin_key"],
            kv_store=store, cluster_key=_cluster_key(store),
        )  # fmt: skip
        check_port(context.params["host"], plan.router_port)
        code = _run(plan, needs_model=context.params["executor"] is not ExecutorKind.SCRIPTED)
    except BatonError as error:
        Console(stderr=True, highlight=False).print(f"baton up: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


def _check_model(model: str, given: Mapping[str, Any]) -> None:
    """Report once what every instance would refuse."""
    from baton.node.devices import check_device
    from baton.node.models import check_load_format

    check_load_format(model, given["load_format"])
    named = ("device", "dtype", "attention", "batch_invariant", "speculate", "draft_tokens", "ngram_max")
    check_device(EngineSettings("", None, b"", **{name: given[name] for name in named}))


def _recording(folder: str | None) -> tuple[str, ...]:
    """Each process writes a file of its own: what is given here is their folder."""
    return () if folder is None else ("--record", f"{folder.rstrip(os.sep)}{os.sep}")


def _cluster_key(store: str | None) -> str | None:
    """The key kept for a store; None without one. Equal at every start, since names of stored objects depend on it."""
    if store is None:
        return None
    from baton.executor.cache_folder import cache_folder
    from baton.node.secrets import store_key

    return store_key(store, cache_folder())


def check_port(host: str, port: int) -> None:
    """Check the port here, so that the error has this command's option name."""
    from baton.node.http_server import bind

    bind(host, port, "--router-port").close()


def _run(plan: FleetPlan, needs_model: bool) -> int:
    from baton.node.models import resolve_model
    from baton.up.merged_log import MergedLog
    from baton.up.supervisor import ROUTER, Supervisor

    with MergedLog((ROUTER, *(member.name for member in plan.members))) as log:
        if needs_model:
            resolve_model(plan.model, log.say)  # once, and not by every instance at the same time

        async def supervise() -> int:
            return await Supervisor(plan, log, cores=len(os.sched_getaffinity(0))).run()

        return asyncio.run(supervise())


up = taking_options_of(_up, (serve, router), leave_out=DECIDED)
