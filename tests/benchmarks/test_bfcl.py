"""The functions of BFCL: which are read, how their types are renamed, and why some are refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.bfcl import bfcl_counts, distinct, replaced
from benchmarks.runner import BadBenchmarkOptions

LOOK = {"name": "look", "parameters": {"type": "dict", "properties": {"at": {"type": "float"}, "type": {"type": "String"}}}}
EMPTY = {"name": "empty", "parameters": {"type": "dict", "properties": {"x": {"type": ""}}}}


def _wheel(folder: Path) -> Path:
    """As the package is laid out: rows a line, functions a line, one value over many lines, and what is left out."""
    path = folder / "bfcl_eval-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        rows = [{"id": "1", "function": [LOOK, EMPTY]}, {"id": "2", "function": LOOK}]
        wheel.writestr("bfcl_eval/data/questions.json", "\n".join(map(json.dumps, rows)))
        wheel.writestr("bfcl_eval/data/multi_turn_func_doc/api.json", json.dumps(LOOK) + "\n" + json.dumps(LOOK))
        wheel.writestr("bfcl_eval/data/ids.json", json.dumps({"simple": ["1"]}, indent=1))
        for name in ("possible_answer", "unused_datasets"):
            wheel.writestr(f"bfcl_eval/data/{name}/rows.json", json.dumps({"function": {"name": name, "parameters": {}}}))
    return path


def test_functions_are_counted_once_and_refusals_have_reasons(tmp_path: Path) -> None:
    counts = bfcl_counts(_wheel(tmp_path))
    assert (counts.functions, counts.compiled_as_they_are, counts.compiled) == (2, 0, 1)
    assert counts.refused_functions == ["empty"]
    assert list(counts.refused.values()) == [1]


def test_an_unpacked_wheel_has_the_same_functions(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "unpacked")
    assert distinct(tmp_path / "unpacked") == distinct(wheel)


def test_only_names_of_types_are_replaced() -> None:
    parameters = {"type": "object", "properties": {"at": {"type": "number"}, "type": {"type": "string"}}}
    assert replaced(LOOK["parameters"]) == parameters


def test_a_file_that_is_no_wheel_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadBenchmarkOptions, match="neither a wheel"):
        bfcl_counts(tmp_path / "none.whl")
