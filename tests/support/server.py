"""A real `baton serve` for tests: real processes on a free port of loopback, always stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx2 as httpx
from typer.testing import CliRunner

from baton.cli.main import app

READY_S_MAX = 120


class ServerProcess:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""
        self.join = ""
        """A router's: where instances join."""

    def output(self) -> str:
        return self.log.read_text()

    def wait_until_served(self) -> None:
        """The banner names the port; it appears when the server accepts connections."""
        deadline = time.monotonic() + READY_S_MAX
        with self.log.open() as lines:
            while time.monotonic() < deadline:
                line = lines.readline()
                found = re.search(r"is served at (https?://\S+)", line)
                if found and line.endswith("\n"):
                    self.url = found[1]
                    break
                if not line:
                    try:
                        self.process.wait(0.02)
                    except subprocess.TimeoutExpired:
                        continue
                    raise RuntimeError(f"the server ended:\n{self.output()}")
            else:
                raise RuntimeError(f"the server was not ready in {READY_S_MAX} s:\n{self.output()}")
            found = re.search(r"instances join at (\S+),", self.output())
            self.join = found[1] if found else ""

    def engine_pid(self) -> int:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        engines = [int(child) for child in children if b"baton.node.engine" in Path(f"/proc/{child}/cmdline").read_bytes()]
        return engines[0]

    def metric(self, name: str, **labels: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        for line in text.splitlines():
            if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def stop(self, timeout_s: float = 30) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def baton_serve(*options: str, wait: bool = True) -> contextlib.AbstractContextManager[ServerProcess]:
    return baton_process("serve", "--port", "0", *options, wait=wait)


def baton_router(*options: str, wait: bool = True) -> contextlib.AbstractContextManager[ServerProcess]:
    return baton_process("router", "--port", "0", "--join-port", "0", *options, wait=wait)


def refused_by_serve(*options: str) -> tuple[int, str]:
    """Exit status and output of a `baton serve` that must not come to serving; only its engine is a process of its own."""
    accepted = AssertionError(f"these options are accepted: {' '.join(options)}")
    with patch("baton.node.service.HttpServer", side_effect=accepted), patch("baton.node.service.block_torch_import"):
        result = CliRunner().invoke(app, ["serve", "--port", "0", *options], env={"COLUMNS": "300"})
    return result.exit_code, result.output


@contextlib.contextmanager
def baton_process(*arguments: str, wait: bool = True, program: tuple[str, ...] = ("-m", "baton")) -> Iterator[ServerProcess]:
    """`program`: of Python, in place of baton."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdout=sink, stderr=sink, env={**os.environ, "COLUMNS": "300"},
            )  # fmt: skip
        server = ServerProcess(process, log)
        try:
            if wait:
                server.wait_until_served()
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
