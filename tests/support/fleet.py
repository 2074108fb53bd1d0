"""A real `baton up` for tests: a router and instances on free ports of loopback, always stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

READY_S_MAX = 120
WAIT_S_MAX = 60
MARK = "BATON_TEST_FLEET"
Body = dict[str, Any]


class FleetProcess:
    def __init__(self, process: subprocess.Popen[bytes], log: Path, mark: str) -> None:
        self.process = process
        self.log = log
        self.mark = mark
        self.url = ""

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_served(self) -> None:
        self.until(lambda: "API " in self.output(), "the banner", READY_S_MAX)
        found = re.search(r"API\s+(https?://\S+)/v1\n", self.output())
        assert found, self.output()
        self.url = found[1]

    def until(self, holds: Callable[[], bool], what: str, seconds: float = WAIT_S_MAX) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if self.process.poll() is not None and not holds():
                raise AssertionError(f"baton up ended before: {what}\n{self.output()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {what}\n{self.output()}")
            time.sleep(0.02)

    def instances(self) -> dict[str, Body]:
        """By name, as the router tells."""
        return {one["name"]: one for one in httpx.get(f"{self.url}/v1/instances").json()["data"]}

    def commands(self) -> dict[int, list[str]]:
        """Command lines of all processes of the fleet, by process id; the dead are not among them."""
        return {pid: words for pid in _processes() if (words := self._words(pid))}

    def _words(self, pid: int) -> list[str]:
        try:
            if f"{MARK}={self.mark}".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return []
            return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        except OSError:
            return []

    def complete(self, **fields: object) -> httpx.Response:
        body = {
            "model": "scripted",
            "prompt": [104, 101, 108, 108, 111],
            "max_tokens": 24,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


@contextlib.contextmanager
def baton_up(*options: str, wait: bool = True) -> Iterator[FleetProcess]:
    with tempfile.TemporaryDirectory() as folder:
        log, mark = Path(folder) / "log", uuid.uuid4().hex
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton", "up", "--router-port", "0", *options],
                stdout=sink, stderr=sink, env={**os.environ, MARK: mark},
            )  # fmt: skip
        fleet = FleetProcess(process, log, mark)
        try:
            if wait:
                fleet.wait_until_served()
            yield fleet
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pid in fleet.commands():  # nothing, unless that is what the test found
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
