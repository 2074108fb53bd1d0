"""The catalogue of errors has every code that the code has, with its statuses, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from baton.api.error_catalogue import Again, ErrorEntry, error_entries
from baton.core.errors import RefusalCode
from baton.core.handover.faults import PdCode
from baton.core.http.connection_clock import Overdue
from baton.core.http.connection_table import NoRoom

SOURCE = Path(__file__).parents[2] / "src" / "baton"
FOLDERS = ("api", "node", "router")
"""Where errors become answers."""
ENTRIES = {entry.code: entry for entry in error_entries()}
COMPUTED = {
    "engine_dead": 503,  # core/errors and api/errors, by function
    **{code.value: 503 for code in NoRoom},
    Overdue.HEADER.value: 408,
    Overdue.BODY.value: 408,
}
"""Codes whose place in the code has no literal, with their status."""
HELPERS = {"_try_again": (1, 503), "_busy": (2, None)}
"""Functions that make an error: where their code stands, and their status; None: it is the first argument."""


def _literal(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _texts(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Dict):
        for value in node.values:
            yield from _texts(value)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(text := _literal(node), str):
        yield text


def _raised(call: ast.Call) -> Iterator[tuple[str, int | None]]:
    name = call.func.id if isinstance(call.func, ast.Name) else None
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in ("ApiError", "__init__") or (isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"):
        status = _literal(call.args[0]) if call.args else None
        code = keywords.get("code") or (call.args[4] if len(call.args) > 4 else None)
        for text in _texts(code):
            yield text, status if isinstance(status, int) else None
    elif name == "invalid":
        for text in _texts(keywords.get("code") or (call.args[2] if len(call.args) > 2 else None)):
            yield text, 400
    elif name in HELPERS and len(call.args) > HELPERS[name][0]:
        at, status = HELPERS[name]
        found = status if status is not None else _literal(call.args[0])
        for text in _texts(call.args[at]):
            yield text, found if isinstance(found, int) else None


@cache
def in_the_code() -> frozenset[tuple[str, int | None]]:
    found: set[tuple[str, int | None]] = set(COMPUTED.items())
    for path in [path for folder in FOLDERS for path in sorted((SOURCE / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                found |= set(_raised(node))
            elif isinstance(node, ast.Assign) and any(
                isinstance(name, ast.Name) and name.id == "code" for name in node.targets
            ):
                value = node.value.func.value if _is_get(node.value) else node.value  # type: ignore[attr-defined]
                found |= {(text, None) for text in _texts(value)}
    return frozenset(found)


def _is_get(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Dict)


def test_every_code_in_the_code_is_in_the_catalogue_with_its_status() -> None:
    for code, status in sorted(in_the_code(), key=str):
        assert code in ENTRIES, f"{code}: say what it means in api/error_catalogue.py, and what to do in docs/runbook.md"
        assert status is None or status in ENTRIES[code].statuses, f"{code} comes with {status} too"


def test_every_code_of_the_catalogue_is_in_the_code() -> None:
    known = {code for code, _ in in_the_code()} | {code.value for code in RefusalCode} | {str(int(code)) for code in PdCode}
    known |= {"invalid_value"}  # the default
    assert set(ENTRIES) == known


def test_the_reader_of_the_code_finds_what_is_raised() -> None:
    found = in_the_code()
    for expected in (("invalid_api_key", 401), ("busy", 503), ("rate_limited", 429), ("unsupported_constraint", 400)):
        assert expected in found


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.code)
def test_what_may_be_sent_again_has_a_status_that_clients_repeat(entry: ErrorEntry) -> None:
    repeated = {408, 409, 429, 500, 503}
    assert (entry.again is not Again.LATER) or set(entry.statuses) <= repeated
    assert len(entry.statuses) > 0
    assert entry.meaning.endswith(".")
