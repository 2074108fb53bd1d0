"""The rules of style that a machine can keep."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "baton"
BENCHMARKS = ROOT / "benchmarks"
FUNCTION_LINES_MAX = 60
CLASS_LINES_MAX = 400
CLASS_METHODS_MAX = 30

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
"""Layer → the other layers of ours that it may import. `benchmarks` and `__main__` may import them all."""

SHARED_BY_BENCHMARKS = {"benchmarks.options", "benchmarks.runner"}
"""Modules under every experiment. They import no other module of `benchmarks`."""

API_SEES_OF_CORE = {
    "baton.core.bounds",
    "baton.core.engine.ended",
    "baton.core.engine.gauges",
    "baton.core.engine.request",
    "baton.core.errors",
    "baton.core.handover.faults",
    "baton.core.routing.timeline_stage",
}
MSGSPEC_IN_CORE = {"msgspec": {"Meta", "Struct"}, "msgspec.structs": {"replace"}}
"""Core declares values that travel. Encoding and decoding them is for `wire`."""

BANNED_IN_CORE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "pickle", "random", "secrets", "select",
    "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch", "uuid", "zmq",
}  # fmt: skip
"""Deciding code has no clock, thread, socket, file, logger or random source."""

BANNED_ANYWHERE = {"pickle", "marshal", "shelve"}

TEXT = {".cpp", ".css", ".html", ".js", ".json", ".md", ".mjs", ".py", ".sh", ".toml", ".txt", ".yml", ""}
TEXT_FOLDERS = (".ci", "benchmarks", "docs", "src", "tests", "tools")
ISSUE_NUMBER = re.compile(r"\bissues? #?\d|(?<![\w&])#\d{1,5}\b", re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|mnt|root|work|Users)/")
REGISTRY = re.compile(r"[-]index-url\b|\bPIP[_]INDEX|\bpythonhosted[.]|\bpypi[.]|\b(?:docker|gcr|ghcr|quay)[.]io\b")
ADDRESS = re.compile(r"\bhttps?://([\w-]+(?:\.[\w-]+)+)")
ADDRESSES_ALLOWED = re.compile(r"127\.0\.0\.1|10\.0\.0\.\d|.*\.example|www\.apache\.org|www\.w3\.org|json-schema\.org")
"""Loopback, addresses in examples, the licence, the namespace of SVG and the names of JSON schema's drafts."""


def _files() -> list[Path]:
    return sorted([*SOURCE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])


def _layer(path: Path) -> str:
    """`benchmarks` beside the package, or the first part of the module's name in it."""
    return path.relative_to(SOURCE).parts[0] if path.is_relative_to(SOURCE) else BENCHMARKS.name


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in ("baton", "benchmarks"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in _files():
        yield path, _tree(path)


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_layer_has_a_row_in_the_table() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", _files(), ids=_ids)
def test_imports_point_one_way(path: Path) -> None:
    layer, tree = _layer(path), _tree(path)
    relative = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, f"{path}:{relative} imports from a dot"
    for name in _imports(tree):
        package, _, rest = name.partition(".")
        assert package != "tests", f"{path} must not import {name}"
        if layer == BENCHMARKS.name:
            if f"{layer}.{path.stem}" in SHARED_BY_BENCHMARKS:
                assert package != layer, f"{path.name} is under the experiments and must not import {name}"
            continue
        assert package != BENCHMARKS.name, f"{path} must not import {name}"
        if package == "baton" and rest and layer in MAY_IMPORT:
            _may_import(layer, name)


def _may_import(layer: str, name: str) -> None:
    other = name.split(".")[1]
    if other not in (layer, "__version__"):
        assert other in MAY_IMPORT[layer], f"{layer} must not import {name}"
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


MAKES_PYTHON_COMMANDS = "executor/python_command.py"
"""The only file that names the interpreter: a child started otherwise has the current folder on its module path."""


def test_python_processes_are_started_by_one_command() -> None:
    for path, tree in _parsed():
        named = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "executable"]
        if path.is_relative_to(SOURCE) and not str(path).endswith(MAKES_PYTHON_COMMANDS):
            assert not named, f"{path}:{named}: use python_command"


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


def test_classes_are_small() -> None:
    large = []
    for path, tree in _parsed():
        if path.name.startswith("kernels_"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                methods = sum(isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) for inner in node.body)
                if lines > CLASS_LINES_MAX or methods > CLASS_METHODS_MAX:
                    large.append(f"{_ids(path)} {node.name}: {lines} lines, {methods} methods")
    assert not large


def test_no_two_public_classes_of_the_package_share_a_name() -> None:
    defined = defaultdict(list)
    for path, tree in _parsed():
        if path.is_relative_to(SOURCE):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    defined[node.name].append(_ids(path))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def test_no_bare_assert_in_the_source() -> None:
    for path, tree in _parsed():
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: python -O removes it"


COMPARES_WHAT_IS_RAISED = "wire/replaying.py"
"""A replay compares whatever a call raises with what was recorded of it, and says where they differ."""


def test_a_broad_except_always_raises_again() -> None:
    for path, tree in _parsed():
        if str(path).endswith(COMPARES_WHAT_IS_RAISED):
            continue
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


def _texts() -> Iterator[Path]:
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.suffix in TEXT - {""})
    yield ROOT / "Makefile"
    for folder in TEXT_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in TEXT and not {"__pycache__", "store"} & set(path.parts):
                yield path


def test_the_tree_stands_alone() -> None:
    """No numbers of issues, no paths or addresses of the machine where it was written, no registry of packages."""
    found = []
    for path in _texts():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            hosts = [host for host in ADDRESS.findall(line) if not ADDRESSES_ALLOWED.fullmatch(host)]
            if hosts or ISSUE_NUMBER.search(line) or MACHINE_PATH.search(line) or REGISTRY.search(line):
                found.append(f"{_ids(path)}:{number} {line.strip()[:100]}")
    assert not found
