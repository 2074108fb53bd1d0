"""What an engine on a CPU does not import, and that what it leaves out can be imported afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiny import family_config, save_random

from baton.node.scripted_text import write_byte_tokenizer

LEFT_OUT = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "triton", "sympy")

LOADS = f"""
import logging, sys
from pathlib import Path
from baton.node.engine_setup import build_executor
from baton.node.settings import EngineSettings
logging.basicConfig(level=logging.INFO)
settings = EngineSettings("", sys.argv[1], bytes(32), dtype="float32", blocks=8, context_tokens=32)
build_executor(settings).executor.close()
print([name for name in {LEFT_OUT} if name in sys.modules])
import torch
print(torch.distributed.is_available(), torch._dynamo.disable, torch.compiler.disable.__module__)
"""

NEEDS_MORE = """
import logging, sys
from baton.executor.light_transformers import without_compiler
logging.basicConfig(level=logging.INFO)
kept = []
def work():
    import sympy
    kept.append(sympy)
    return sympy.Integer(2) + 1
print(without_compiler(work), len(kept), kept[0] is kept[1], kept[0].Basic is kept[1].Basic)
"""

FAILS = """
import logging
from baton.executor.light_transformers import without_compiler
calls = []
def work():
    calls.append(1)
    raise ValueError("of its own")
try:
    without_compiler(work)
except ValueError as error:
    print(error, len(calls))
"""


def _printed(program: str, *arguments: str) -> tuple[list[str], str]:
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_an_engine_on_a_cpu_loads_a_model_without_the_compiler_of_torch(family: str, tmp_path: Path) -> None:
    save_random(family_config(family), tmp_path)
    write_byte_tokenizer(tmp_path)
    (left_in, now), log = _printed(LOADS, str(tmp_path))
    assert left_in == "[]", log
    assert "all of torch is imported" not in log
    assert now.startswith("True <function disable")
    assert now.endswith("torch.compiler")


def test_work_that_needs_more_is_done_again_and_what_kept_a_stand_in_reaches_the_real_module() -> None:
    printed, log = _printed(NEEDS_MORE)
    assert printed == ["3 2 False True"]
    assert "all of torch is imported, for sympy.Integer" in log


def test_work_that_fails_by_itself_fails_at_once() -> None:
    assert _printed(FAILS)[0] == ["of its own 1"]
