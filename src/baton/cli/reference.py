"""`python -m baton.cli.reference FOLDER`: writes its PAGES, from the commands, collectors, bodies and errors themselves.

Without a folder it writes docs/reference of the checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from prometheus_client import Counter, Gauge

from baton.api.metric_names import COUNTERPARTS
from baton.api.metrics import Metrics
from baton.api.tracing.span_counts import SpanCounts
from baton.cli.main import app
from baton.cli.reference_errors import errors_page
from baton.cli.reference_fields import fields_page
from baton.core.routing.config import RouterConfig
from baton.core.routing.router import Router
from baton.node.dashboard_state import DashboardState
from baton.router.fleet_engine import FleetEngine
from baton.router.fleet_log import FleetEventLog
from baton.router.instance_connections import InstanceConnections
from baton.wire.router_sessions import RouterSessions

BENCHMARKS = ("bench serve", "bench gpu", "bench calibrate")
"""Benchmarks that are commands of an installed Baton; the others are experiments."""
TYPERS_OWN = ("help", "install_completion", "show_completion")


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option or argument of one command."""

    command: str
    name: str
    flags: tuple[str, ...]
    """Empty for an argument."""
    key: str | None
    """Key in a TOML file; None when the command takes no file."""
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
    theirs: tuple[str, ...] = ()
    """vLLM's names for it."""


def option_rows() -> Iterator[OptionRow]:
    """Options of all commands, in the order of `--help`."""
    for name, command in _commands("", typer.main.get_command(app)):
        if name.startswith("bench ") and name not in BENCHMARKS:
            continue
        has_file = any(parameter.name == "config" for parameter in command.params)
        for parameter in command.params:
            if parameter.name not in TYPERS_OWN:
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


def router_parts(vocabulary: int = 320) -> tuple[FleetEngine, InstanceConnections, Metrics, DashboardState]:
    """A router without instances, which has every metric."""
    sessions = InstanceConnections(RouterSessions(Router(RouterConfig(), bytes(16), 1), "router"), bytes(32), "router")
    state = DashboardState(0)
    engine = FleetEngine(sessions, state, vocabulary)
    metrics = Metrics(engine, "model")
    metrics.add(SpanCounts())
    return engine, sessions, metrics, state


def metric_rows() -> tuple[list[MetricRow], list[MetricRow]]:
    """Metrics that instances and routers both have, and those of a router alone."""
    engine, sessions, metrics, _ = router_parts()
    registered = metrics._registry._collector_to_names
    both = [row for collector in registered for row in _rows_of(collector)]
    return both, _rows_of(FleetEventLog(sessions, engine))


def _rows_of(collector: Any) -> list[MetricRow]:
    if isinstance(collector, Counter | Gauge):
        return [_family(one, tuple(collector._labelnames)) for one in collector.collect()]
    # A gauge without labels has no such list.
    return [_family(one, tuple(getattr(one, "_labelnames", ()))) for one in collector.collect()]


def _family(family: Any, labels: tuple[str, ...]) -> MetricRow:
    if family.type == "info":
        labels += tuple(name for sample in family.samples for name in sample.labels if name not in labels)
    theirs = tuple(_full(name, family.type) for name in COUNTERPARTS.get(family.name, ()))
    return MetricRow(_full(family.name, family.type), family.type, labels, family.documentation, theirs)


def _full(name: str, kind: str) -> str:
    """The name of the series in the exposition format."""
    return name + {"counter": "_total", "info": "_info"}.get(kind, "")


# ── as Markdown ──────────────────────────────────────────────────────────────────────────────────────────────────────────

GENERATED = "Generated by `python -m baton.cli.reference`; a test compares it with the code."
REPEATS = {"up": ("serve", "router"), "chaos": ("up", "serve", "router")}
"""Commands that take the options of others too; only differing options are listed again."""
TABLE_HEAD = "| Option | Variable | Key | Value | Default | Meaning |\n|---|---|---|---|---|---|"


def options_page() -> str:
    parts = [
        "# Options",
        GENERATED,
        "A flag goes before the environment, that before the file given with `--config`, that before the default. Keys are "
        "those of that file, such as `max-num-seqs = 64`; commands without keys take no file.",
    ]
    by_command: dict[str, list[OptionRow]] = {}
    for row in option_rows():
        by_command.setdefault(row.command, []).append(row)
    for command, rows in by_command.items():
        parts += _command_section(command, rows, by_command)
    return "\n\n".join(parts) + "\n"


def _command_section(command: str, rows: list[OptionRow], by_command: dict[str, list[OptionRow]]) -> Iterator[str]:
    yield f"## baton {command}".rstrip()
    others = REPEATS.get(command, ())
    if others:
        named = ", ".join(f"`baton {other}`" for other in others)
        taken = {row.name for row in rows}
        left_out = sorted({_flag(row) for other in others for row in by_command[other] if row.name not in taken})
        yield f"It also takes the options of {named}, except {', '.join(left_out)}."
    listed = {_meaning(row) for other in others for row in by_command[other]}
    for panel in dict.fromkeys(row.panel for row in rows):
        lines = [_shown(row) for row in rows if row.panel == panel and _meaning(row) not in listed]
        if lines:
            heading = f"### {panel}\n\n" if panel else ""
            yield heading + "\n".join((TABLE_HEAD, *lines))


def _meaning(row: OptionRow) -> OptionRow:
    """The option without its command."""
    return replace(row, command="", key=None)


def _flag(row: OptionRow) -> str:
    return " ".join(_code(flag) for flag in row.flags) or _code(row.name.upper())


def _shown(row: OptionRow) -> str:
    default = {"True": "on", "False": "off"}.get(row.default or "", _code(row.default))
    cells = (
        _flag(row),
        _code(row.variable),
        _code(row.key),
        _value(row),
        "needed" if row.required else default,
        _cell(row.help),
    )
    return f"| {' | '.join(cells)} |"


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def _codes(texts: Sequence[str]) -> str:
    return ", ".join(map(_code, texts))


def _value(row: OptionRow) -> str:
    if row.choices:
        return ", ".join(f"`{choice}`" for choice in row.choices)
    kinds = {"str": row.metavar.strip() or "text", "Path": "file", "bool": "on or off" if len(row.flags) > 1 else "flag"}
    kind = kinds.get(row.kind, row.kind)
    if row.least is not None and row.most is not None:
        kind += f", {row.least:g} to {row.most:g}"
    elif row.least is not None or row.most is not None:
        kind += f", at least {row.least:g}" if row.least is not None else f", at most {row.most:g}"
    return _cell(kind) + (", repeatable" if row.repeatable else "")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def metrics_page() -> str:
    both, router = metric_rows()
    parts = [
        "# Metrics",
        GENERATED,
        "At `/metrics`, in the text format of Prometheus. With `--metrics-names vllm`, what has a name in the last column "
        "is shown under it, with the label `engine` as well; with `both`, under ours too.",
    ]
    for heading, rows in (("Of instances and routers", both), ("Of a router alone", router)):
        lines = [
            f"| `{row.name}` | {row.kind} | {_codes(row.labels)} | {_cell(row.help)} | {_codes(row.theirs)} |"
            for row in rows
        ]
        head = ("| Name | Type | Labels | Meaning | In vLLM |", "|---|---|---|---|---|")
        parts += [f"## {heading}", "\n".join((*head, *lines))]
    return "\n\n".join(parts) + "\n"


def _fields_page() -> str:
    return fields_page(GENERATED)


def _errors_page() -> str:
    return errors_page(GENERATED)


PAGES = {
    "options.md": options_page,
    "metrics.md": metrics_page,
    "fields.md": _fields_page,
    "errors.md": _errors_page,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference"))
