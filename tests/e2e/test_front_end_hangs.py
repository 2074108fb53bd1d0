"""The front end of an instance passes SIGUSR1 on to its engine while its own event loop hangs."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx

from baton.wire.recording_file import Recording
from tests.support.server import ServerProcess, baton_process
from tests.support.waiting import wait_until

HANGS_AT_METRICS = """
import time
from baton.api.metrics import Metrics
from baton.cli.main import run

Metrics.page = lambda self: time.sleep(1000)
run()
"""


def test_an_engine_writes_its_last_decisions_by_order_of_a_front_end_that_hangs(tmp_path: Path) -> None:
    options = ("--port", "0", "--executor", "scripted", "--record-folder", str(tmp_path))
    with baton_process("serve", *options, program=("-c", HANGS_AT_METRICS)) as server, ThreadPoolExecutor(1) as client:
        client.submit(_ask, server, "/metrics", 60.0)
        wait_until(lambda: not _ask(server, "/health", 1.0), "it hangs")
        server.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "SIGUSR1: the last decisions" in server.output(), "the recording")
        server.process.kill()
    (path,) = tmp_path.iterdir()
    assert Recording(path.read_bytes()).header.of == "engine"


def _ask(server: ServerProcess, path: str, seconds: float) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{server.url}{path}", timeout=seconds).status_code == 200
    return False
