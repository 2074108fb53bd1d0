"""The engine's process before it has its settings."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from baton.executor.python_command import python_command
from baton.node.engine import EXIT_NO_PARENT
from baton.node.engine_client import EngineClient
from baton.node.engine_launch import IMPORT_TORCH, LaunchedEngine
from baton.node.settings import EngineSettings
from tests.node.test_engine_client import ask
from tests.support.server import refused_by_serve

FRONT_END = """
import sys
import baton.node.engine_client, baton.node.service
print("baton.node.engine" in sys.modules)
"""


async def test_a_process_that_was_launched_before_serves_with_the_settings_that_it_is_given() -> None:
    launched = LaunchedEngine()
    settings = EngineSettings(endpoint="", model_folder=None, prefix_secret=b"x" * 32, step_ms=1.0)
    engine = EngineClient(settings, launched=launched)
    await engine.start()
    await engine.wait_ready()
    (stream,) = await engine.submit([ask()])
    assert sum([len(burst.tokens) async for burst in stream]) == 4
    await engine.close()
    assert launched.returncode == EXIT_NO_PARENT
    launched.abandon()


async def test_the_end_of_a_launched_process_is_heard_by_all_who_wait() -> None:
    launched = LaunchedEngine()
    waiting = [asyncio.create_task(launched.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    assert launched.returncode is None
    launched.order_exit()
    assert await asyncio.gather(*waiting) == [EXIT_NO_PARENT] * 2
    launched.abandon()  # without effect


def test_a_process_whose_front_end_gives_it_no_settings_ends_without_a_word() -> None:
    command = python_command("baton.node.engine", IMPORT_TORCH)
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (EXIT_NO_PARENT, b"", b"")


def test_a_front_end_that_cannot_serve_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[LaunchedEngine] = []
    launch = LaunchedEngine.__init__

    def noted(self: LaunchedEngine, *, imports_torch: bool = False) -> None:
        launch(self, imports_torch=imports_torch)
        made.append(self)

    monkeypatch.setattr(LaunchedEngine, "__init__", noted)
    code, output = refused_by_serve(str(tmp_path / "nothing"))
    assert code != 0, output
    (launched,) = made
    assert launched.returncode is not None


def test_a_front_end_does_not_import_the_engine() -> None:
    ran = subprocess.run([sys.executable, "-c", FRONT_END], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
