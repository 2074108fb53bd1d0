"""Derives what users hold from the code, one line an item: options, routes, error codes, metrics, the board, the store."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.api.app import create_app
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.cli.reference import metric_rows, option_rows, router_parts
from baton.core.engine.prefix import KEY_BYTES
from baton.core.engine.request import FinishReason
from baton.core.errors import RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.kv.object_folder import ObjectFolder
from baton.kv.store import parse_url
from baton.node.dashboard import Dashboard
from baton.router.app import create_router_app
from baton.router.fleet_log import FleetEventLog
from baton.wire import envelope, keyfile
from tests.api.tokenizers_made_here import TEMPLATE, byte_level

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "docs" / "grafana-dashboard.json"


def surface() -> list[str]:
    parts = (_options(), _routes(), _error_codes(), _metrics(), _board(), _store())
    return sorted({line for part in parts for line in part})


def _options() -> Iterator[str]:
    for row in option_rows():
        facts = dataclasses.asdict(row)
        name = " ".join(row.flags) or facts["name"].upper()
        shown = ("key", "variable", "kind", "choices", "default", "least", "most", "repeatable", "required")
        said = " ".join(f"{fact}={_said(facts[fact])}" for fact in shown if not _is_nothing(facts[fact]))
        yield f"option: {' '.join(('baton', row.command)).strip()} {name}: {said}"


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value == ()


def _said(value: object) -> str:
    return "|".join(value) if isinstance(value, tuple) else str(value)


def _routes() -> Iterator[str]:
    engine, sessions, metrics, state = router_parts()
    text = ModelText(byte_level(), chat_template=TEMPLATE, eos_ids=[300])
    settings = ApiSettings(("tiny",))
    dashboard = Dashboard(state, lambda: 0, engine.views)
    event_log = FleetEventLog(sessions, engine)
    apps = {
        "serve": create_app(engine, text, settings),
        "router": create_router_app(engine, sessions, event_log, dashboard, text, settings, metrics, 10.0),
    }
    for name, app in apps.items():
        for route in app.routes:
            for method in sorted(getattr(route, "methods", None) or ()):
                yield f"route: {name} {method} {route.path}"  # type: ignore[attr-defined]
        yield from _schema_lines(f"http: {name}", app.openapi())


def _schema_lines(path: str, node: Any) -> Iterator[str]:
    """Every field of the API's description but its prose."""
    if isinstance(node, dict):
        for key, below in node.items():
            if key not in ("description", "summary", "operationId", "title", "version") or isinstance(below, dict):
                yield from _schema_lines(f"{path}.{key}", below)
    elif isinstance(node, list) and any(isinstance(below, dict | list) for below in node):
        for number, below in enumerate(node):
            yield from _schema_lines(f"{path}[{number}]", below)
    else:
        yield f"{path} = {json.dumps(node)}"


def _error_codes() -> Iterator[str]:
    yield from (f"refusal: {code.name} {code.value}" for code in RefusalCode)
    yield from (f"finish reason: {reason.value}" for reason in FinishReason)
    yield from (f"pd code: {code.name} {code.value}" for code in PdCode)
    yield from (f"pd stage: {stage.value}" for stage in PdStage)
    yield f"pd message: {PdFault(PdCode.REFUSED, PdStage.OFFER, 'REASON').message}"
    for folder in ("api", "node", "router"):
        for path in sorted((ROOT / "src" / "baton" / folder).glob("*.py")):
            yield from (f"api code: {code}" for code in _codes_in(ast.parse(path.read_text())))


def _codes_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if isinstance(node.func, ast.Name) and node.func.id == "invalid":
                given += node.args[2:3]
            yield from (text for one in given for text in _texts(one))
        elif isinstance(node, ast.Assign) and any(isinstance(name, ast.Name) and name.id == "code" for name in node.targets):
            yield from _texts(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "invalid":
            yield from (text for one in node.args.defaults for text in _texts(one))


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)


def _metrics() -> Iterator[str]:
    both, router = metric_rows()
    for where, rows in (("serve and router", both), ("router", router)):
        for row in rows:
            theirs = f" = {', '.join(row.theirs)}" if row.theirs else ""
            yield f"metric: {where}: {row.name} {row.kind} {{{','.join(row.labels)}}}{theirs}"


def _board() -> Iterator[str]:
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield f"board: {panel['title']}: {target['expr']}"


def _store() -> Iterator[str]:
    key, layout = bytes(range(KEY_BYTES)), bytes(range(100, 100 + envelope.LAYOUT_BYTES))
    whole = memoryview(bytearray(envelope.HEADER_BYTES + 4))
    envelope.seal(key, layout, memoryview(b"kept"), whole)
    yield f"store: name of a block: {envelope.object_name(layout, key)}"
    yield f"store: envelope of a block: {bytes(whole).hex()}"
    yield from (f"store: flaw: {flaw.value}" for flaw in envelope.EnvelopeFlaw)
    yield f"store: path of a block: {ObjectFolder('DIR').path(envelope.object_name(layout, key))}"
    for url in ("file:/kv?limit=1G", "valkey://:secret@host:6379/0", "mooncake://host:50051"):
        yield f"store: address {url}: {sorted(dataclasses.asdict(parse_url(url)).items(), key=str)}"
    yield f"store: key file: {keyfile.write_key(bytes(keyfile.KEY_BYTES)).hex()}"
