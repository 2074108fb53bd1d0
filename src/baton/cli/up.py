"""`baton up`: a router and instances on this machine, as one command.

Owns which options go to whom. Those of `baton serve` and `baton router` can all be given, as flags or in a file; what this
command decides itself (ports, roles, names, the key between them) cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.declared_options import GivenOptions, taking_settings
from baton.cli.option_forwarding import given_for, source_of, taking_options_of
from baton.cli.options import config_file
from baton.cli.router import router
from baton.cli.serve import is_live, serve, stage_view, told_in_one_line
from baton.cli.stage_display import LiveStages
from baton.node.settings import EngineSettings, ExecutorKind, HttpSettings, LogFormat
from baton.up.fleet_plan import FleetPlan
from baton.up.process_environment import DECIDED, OF_ONE_INSTANCE, OF_THE_ROUTER, TLS_OPTIONS

HANDLED = frozenset(
    [*DECIDED, "demo", "threads", "drain_timeout", "config", "api_key", "admin_key", "metrics_key", "kv_store",
     "record"]
)  # fmt: skip
SETTLED = {name.replace("_", "-"): "is not an option of baton up, which settles it for each process" for name in DECIDED}
SETTLED |= {name.replace("_", "-"): "is for one instance: give it to baton serve" for name in OF_ONE_INSTANCE}
SETTLED["port"] += "; the port of the API is 'router-port'"
DEMO_KV = "192M"
"""A small KV pool, so that the dashboard shows the use of one answer. The longest sequence of the built-in model fits."""
DEMO_SAMPLING = '{"max_new_tokens": 256}'
"""A length for answers to those who name none: a small model may not find an end."""
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
    to_instances = given_for(context, serve, HANDLED | OF_THE_ROUTER | OF_ONE_INSTANCE)
    to_router = given_for(context, router, HANDLED)
    if fleet["demo"] and all(source_of(context, name) == "DEFAULT" for name in ("kv_memory", "kv_blocks")):
        to_instances = ("--kv-memory", DEMO_KV, *to_instances)
    if fleet["demo"] and source_of(context, "override_generation_config") == "DEFAULT":
        to_router = ("--override-generation-config", DEMO_SAMPLING, *to_router)
    quiet = QUIET if source_of(context, "log_level") == "DEFAULT" else ()
    record = _recording(context.params["record"])
    store, log_format = context.params["kv_store"] or None, context.params["log_format"]
    with told_in_one_line("baton up", context.params):
        _check_model(fleet["model"], context.params)
        plan = FleetPlan(
            **fleet, serve_options=(*quiet, *record, *to_instances), router_options=(*record, *to_router),
            api_keys=tuple(context.params["api_key"] or ()), admin_key=context.params["admin_key"],
            metrics_key=context.params["metrics_key"], kv_store=store, cluster_key=_cluster_key(store),
        )  # fmt: skip
        check_port(context.params["host"], plan.router_port)
        code = _run(plan, log_format, _ways(context))
    raise typer.Exit(code)


def _check_model(model: str, given: Mapping[str, Any]) -> None:
    """Report once what the processes would refuse."""
    from baton.api.generation_config import given_defaults, overrides
    from baton.node.devices import check_device
    from baton.node.models import check_load_format
    from baton.node.network_trust import check_trust
    from baton.node.otlp import check_endpoint
    from baton.node.server_certificate import check_certificate

    check_endpoint(given["otlp_endpoint"])
    given_defaults(given["generation_config"])
    overrides(given["override_generation_config"])
    check_certificate(HttpSettings(**{name: given[name] for name in TLS_OPTIONS}))
    check_load_format(model, given["load_format"])
    check_trust(given["transfer"], given["kv_store"], given["trust_network"])
    named = ("device", "dtype", "quantization", "attention", "batch_invariant", "speculate", "draft_tokens", "ngram_max")
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


def _ways(context: typer.Context) -> set[bool]:
    """In which forms its processes need the model: whether as safetensors. A router takes the tokeniser of the other one."""
    from baton.node.devices import wants_safetensors

    if context.params["executor"] is ExecutorKind.SCRIPTED:
        return set()
    named = {name: context.params[name] for name in ("device", "dtype", "quantization")}
    return {False, wants_safetensors(EngineSettings("", None, b"", **named))}


def _run(plan: FleetPlan, log_format: LogFormat, ways: set[bool]) -> int:
    from baton.executor.torch_build import need_torch
    from baton.node.leftovers import sweep_leftovers
    from baton.node.models import resolve_model
    from baton.node.start_stages import StartStages, Unseen
    from baton.node.stderr_queue import queue_stderr
    from baton.up.merged_log import JsonMergedLog, MergedLog
    from baton.up.supervisor import ROUTER, Supervisor

    queue_stderr(log_format)
    merged = JsonMergedLog if log_format is LogFormat.JSON else MergedLog
    log = merged((ROUTER, *(member.name for member in plan.members)))
    if ways:
        need_torch()
        with contextlib.closing(StartStages(stage_view(log_format, log.say))) as stages:
            for way in sorted(ways):
                resolve_model(plan.model, stages, as_safetensors=way)  # once, and not by every instance at the same time
            stages.end()
    # In a log their own lines tell how far the processes have come.
    starting = StartStages(LiveStages() if is_live(log_format) else Unseen())

    async def supervise() -> int:
        return await Supervisor(plan, log, len(os.sched_getaffinity(0)), starting).run()

    try:
        return asyncio.run(supervise())
    finally:
        starting.close()
        sweep_leftovers()  # of instances that were killed: the next start would, and may not come


up = taking_options_of(_up, (serve, router), leave_out=DECIDED | OF_ONE_INSTANCE)
