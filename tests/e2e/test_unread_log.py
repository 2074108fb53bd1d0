"""Servers whose standard error is a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest

from tests.support.waiting import wait_until

PIPE_BYTES = 4096
"""The smallest that the system makes."""
FEW, MANY = 60, 3000
"""Requests whose log lines are more than the pipe holds, and more than pipe and queue do."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _unread(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "baton", *arguments, "--executor", "scripted", "--log-level", "debug"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "BATON_DRAIN_TIMEOUT": "1"}) as process:
        try:
            if process.stderr is not None:
                fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get("/ready").status_code == 200
    return False


def _dropped(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("baton_log_lines_dropped_total"))


def _log_much(client: httpx.Client, requests: int) -> None:
    """Short requests: each has a line in the log, with the id that the client gave it."""

    def completed(number: int) -> int:
        body = {"prompt": "x", "max_tokens": 1}
        return client.post("/v1/completions", json=body, headers={"X-Request-Id": f"{number:0100}"}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(completed, range(requests))) == {200}


def _check(requests: int, *arguments: str) -> None:
    port = _free_port()
    with _unread(*arguments, str(port)) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_until(lambda: _answers(client), "the server", 60)
            _log_much(client, requests)
            assert client.get("/health").status_code == 200
            assert (_dropped(client) > 0) == (requests == MANY)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_an_instance_whose_log_nobody_reads_serves_and_stops() -> None:
    _check(FEW, "serve", "--port")


def test_a_fleet_whose_log_nobody_reads_serves_and_stops() -> None:
    _check(FEW, "up", "--router-port")


@pytest.mark.slow
def test_what_nobody_reads_is_dropped_and_counted() -> None:
    _check(MANY, "serve", "--port")
