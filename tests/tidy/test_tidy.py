"""The rules of style that a machine can keep."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "baton"
BENCHMARKS = ROOT / "benchmarks"
FUNCTION_LINES_MAX = 60

MAY_IMPORT = {
    "core": set(),
    "executor": {"core"},
    "kv": {"core", "wire"},
    "wire": {"core"},
    "api": {"core"},
    "node": {"core", "executor", "kv", "wire", "api"},
    "router": {"core", "wire", "api", "node"},
    "up": {"core", "api", "node"},
    "sim": {"core", "wire", "executor"},
    "bench": {"core", "executor", "kv", "wire", "api", "node", "sim", "router", "up"},
    "cli": {"core", "executor", "kv", "wire", "api", "node", "bench", "sim", "router", "up"},
}
"""Layer → the other layers of ours that it may import."""

API_SEES_OF_CORE = {
    "baton.core.engine.ended",
    "baton.core.engine.gauges",
    "baton.core.engine.request",
    "baton.core.errors",
    "baton.core.handover.faults",
}
MSGSPEC_IN_CORE = {"msgspec": {"Meta", "Struct"}, "msgspec.structs": {"replace"}}
"""Core declares values that travel. Encoding and decoding them is for `wire`."""

BANNED_IN_CORE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "pickle", "random", "secrets", "select",
    "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch", "uuid", "zmq",
}  # fmt: skip
"""Deciding code has no clock, thread, socket, file, logger or random source."""

BANNED_ANYWHERE = {"pickle", "marshal", "shelve"}


def _files() -> list[Path]:
    return sorted([*SOURCE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])


def _layer(path: Path) -> str:
    """`benchmarks` beside the package, or the first part of the module's name in it."""
    return path.relative_to(SOURCE).parts[0] if path.is_relative_to(SOURCE) else BENCHMARKS.name


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in _files():
        yield path, ast.parse(path.read_text())


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", _files(), ids=_ids)
def test_imports_point_one_way(path: Path) -> None:
    layer = _layer(path)
    if layer == BENCHMARKS.name:
        return  # may import everything
    for name in _imports(ast.parse(path.read_text())):
        parts = name.split(".")
        assert parts[0] != BENCHMARKS.name, f"{path} must not import {name}"
        if layer in ("__init__.py", "__main__.py"):
            continue
        if parts[0] != "baton" or len(parts) == 1 or parts[1] == layer:
            continue
        assert parts[1] in MAY_IMPORT[layer], f"{layer} must not import {name}"
        if layer == "api":
            assert name in API_SEES_OF_CORE, f"api knows the values of core, not {name}"


def test_deciding_code_imports_nothing_that_acts() -> None:
    for path, tree in _parsed():
        if _layer(path) == "core":
            used = {name.split(".")[0] for name in _imports(tree)} & BANNED_IN_CORE
            assert not used, f"{path.name} imports {used}"


def test_deciding_code_uses_msgspec_for_values_only() -> None:
    for path, tree in _parsed():
        if _layer(path) != "core":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("msgspec") for alias in node.names), f"{path.name}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msgspec"):
                used = {alias.name for alias in node.names}
                assert used <= MSGSPEC_IN_CORE.get(node.module or "", set()), f"{path.name} takes {used} of msgspec"


def test_nothing_unpickles() -> None:
    for path, tree in _parsed():
        used = {name.split(".")[0] for name in _imports(tree)} & BANNED_ANYWHERE
        assert not used, f"{path} imports {used}"


def test_the_scripted_executor_and_everything_under_it_work_without_torch() -> None:
    trees = {path: tree for path, tree in _parsed() if _layer(path) in ("core", "wire") or path.name == "scripted.py"}
    assert len(trees) > 5
    for path, tree in trees.items():
        assert not any(name.split(".")[0] in ("torch", "transformers") for name in _imports(tree)), path


def test_functions_fit_on_a_screen() -> None:
    for path, tree in _parsed():
        if path.name.startswith("kernels_"):
            continue  # what runs on a GPU as one kernel is one function
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                assert lines <= FUNCTION_LINES_MAX, f"{path.name}:{node.lineno} {node.name} has {lines} lines"


def test_no_bare_assert_in_the_source() -> None:
    for path, tree in _parsed():
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: python -O removes it"


def test_a_broad_except_always_raises_again() -> None:
    for path, tree in _parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), f"{path}:{node.lineno} swallows bugs"


def _is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))


def test_every_module_says_what_it_owns() -> None:
    for path, tree in _parsed():
        if path.name != "__init__.py":
            assert ast.get_docstring(tree), f"{path} has no docstring"


def test_nothing_is_left_unfinished() -> None:
    for path in _files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for mark in ("TODO", "FIXME", "XXX", "NotImplementedError"):
                assert mark not in line, f"{path}:{number}"
