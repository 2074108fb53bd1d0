"""Steps that forced tokens save, counted with a tiny model of bytes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from baton.bench.tiny_model import make_tiny
from benchmarks.forced_tokens import CallCounter, agent_calls, bfcl_calls, shown_saving


def test_forced_names_and_punctuation_take_fewer_steps_than_tokens(tmp_path: Path) -> None:
    make_tiny(tmp_path, 1024)
    counter = CallCounter(tmp_path, max_tokens=256, temperature=1.0)
    try:
        calls = [counter.counted(wanted) for wanted in agent_calls()]
    finally:
        counter.close()
    assert [call.tool for call in calls] == ["weather", "search", "note"]
    for call in calls:
        assert 0 < call.steps < 0.8 * call.tokens, call
    assert shown_saving(calls).endswith("%")


def test_functions_of_bfcl_that_cannot_be_called_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "bfcl_eval-1-py3-none-any.whl"
    look = {"name": "look", "description": "Look", "parameters": {"type": "dict", "properties": {"at": {"type": "float"}}}}
    empty = {"name": "empty", "parameters": {"type": "dict", "properties": {"x": {"type": ""}}}}
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("bfcl_eval/data/questions.json", json.dumps({"id": "1", "function": [look, empty]}))
    assert [(wanted.call.tool, wanted.call.source) for wanted in bfcl_calls(path, 5)] == [("look", "BFCL")]
