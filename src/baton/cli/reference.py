"""Lists every option and every metric, from the commands and the collectors themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args, get_origin

import typer
from prometheus_client import Counter, Histogram

from baton.api.metrics import Metrics
from baton.cli.main import app
from baton.core.routing.events import RouterConfig
from baton.core.routing.router import Router
from baton.router.dashboard_state import RouterState
from baton.router.fleet_engine import FleetEngine
from baton.router.fleet_log import Chronicle
from baton.router.instance_connections import Sessions
from baton.wire.router_sessions import Switch


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option or argument of one command, as a user gives it."""

    command: str
    name: str
    flags: tuple[str, ...]
    """Empty for an argument."""
    key: str | None
    """In a TOML file; None where the command takes no file."""
    variable: str | None
    kind: str
    choices: tuple[str, ...]
    default: str | None
    least: float | None
    most: float | None
    repeatable: bool
    required: bool
    panel: str
    help: str
    metavar: str


@dataclass(frozen=True, slots=True)
class MetricRow:
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def option_rows() -> Iterator[OptionRow]:
    """Options of all commands, in the order of `--help`."""
    for name, command in _commands("", typer.main.get_command(app)):
        has_file = any(parameter.name == "config" for parameter in command.params)
        for parameter in command.params:
            if parameter.name != "help":
                yield _row(name, parameter, has_file)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    if command.params:
        yield name, command
    context = typer.Context(command)
    for below in command.list_commands(context):
        yield from _commands(f"{name} {below}".strip(), command.get_command(context, below))


def _row(command: str, parameter: Any, has_file: bool) -> OptionRow:
    is_option = parameter.param_type_name == "option"
    kind = parameter.type_descriptor.annotation
    alone = get_args(kind)[0] if get_origin(kind) is list else kind
    return OptionRow(
        command=command,
        name=parameter.name,
        flags=(*parameter.opts, *parameter.secondary_opts) if is_option else (),
        key=parameter.name.replace("_", "-") if has_file and parameter.name != "config" else None,
        variable=parameter.envvar,
        kind="choice" if issubclass(alone, Enum) else alone.__name__,
        choices=tuple(_text(choice) for choice in alone) if issubclass(alone, Enum) else (),
        default=_default(parameter.default),
        least=parameter.min,
        most=parameter.max,
        repeatable=get_origin(kind) is list,
        required=bool(parameter.required),
        panel=parameter.rich_help_panel or "",
        help=parameter.help or "",
        metavar=parameter.metavar or "",
    )


def _default(value: Any) -> str | None:
    if value is None or callable(value):
        return None
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else _text(value)


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def router_parts(vocabulary: int = 320) -> tuple[FleetEngine, Sessions, Metrics, RouterState]:
    """A router that serves nobody, which has every metric there is."""
    sessions = Sessions(Switch(Router(RouterConfig(), bytes(16), 1), "router"), bytes(32), "router")
    state = RouterState(0)
    engine = FleetEngine(sessions, state, vocabulary)
    return engine, sessions, Metrics(engine, "model"), state


def metric_rows() -> tuple[list[MetricRow], list[MetricRow]]:
    """Metrics that instances and routers both have, and those of a router alone."""
    engine, sessions, metrics, _ = router_parts()
    registered = metrics._registry._collector_to_names
    both = [row for collector in registered for row in _rows_of(collector)]
    return both, _rows_of(Chronicle(sessions, engine))


def _rows_of(collector: Any) -> list[MetricRow]:
    if isinstance(collector, Counter | Histogram):
        labels = tuple(collector._labelnames)
        return [MetricRow(_full(one.name, one.type), one.type, labels, one.documentation) for one in collector.collect()]
    return [_family(one) for one in collector.collect()]


def _family(family: Any) -> MetricRow:
    labels = tuple(getattr(family, "_labelnames", ()))  # as above; a gauge without labels has no such list
    if family.type == "info":
        labels += tuple(name for sample in family.samples for name in sample.labels if name not in labels)
    return MetricRow(_full(family.name, family.type), family.type, labels, family.documentation)


def _full(name: str, kind: str) -> str:
    """The name of the series."""
    return name + {"counter": "_total", "info": "_info"}.get(kind, "")
