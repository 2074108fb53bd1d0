"""Server processes that a benchmark starts, and always stops.

Owns child processes: each gets a session of its own, so that everything it starts can be stopped, paused and metered
with it; its output goes to a file whose last lines explain a failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from baton.bench.machine import session_cpu_s

STOP_GRACE_S = 20.0
LOG_TAIL_BYTES = 64 * 1024
LOG_TAIL_LINES = 25


class ChildFailed(Exception):
    """A child failed; the message ends with the last lines of its log."""


class Child:
    """A running process and all that it started. Make one with `started`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, started_s: float) -> None:
        self.name = name
        self.started_s = started_s
        """perf_counter at the moment before the process was made."""
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise ChildFailed(f"{self.name} ended with code {code}\n{self.last_lines()}")

    def wait(self, limit_s: float) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""
        return self._process.wait(limit_s)

    def output(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="replace")

    def last_lines(self) -> str:
        size = self._log.stat().st_size
        with self._log.open("rb") as log:
            log.seek(max(0, size - LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def busy_cores(self, look_s: float) -> float:
        """Busy cores over the next `look_s` seconds; blocks that long."""
        before_s = session_cpu_s(self._process.pid)
        time.sleep(look_s)
        return max(0.0, session_cpu_s(self._process.pid) - before_s) / look_s

    def cpu_s(self) -> float:
        """CPU seconds used so far by the processes of its session."""
        return session_cpu_s(self._process.pid)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, wait, SIGKILL. Also ends other processes of its group."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def started(name: str, command: Sequence[str], env: Mapping[str, str]) -> Iterator[Child]:
    """Start a child that is stopped when the block ends."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            started_s = time.perf_counter()
            try:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ChildFailed(f"{name} cannot be started: {error}") from error
        child = Child(name, process, log, started_s)
        try:
            yield child
        finally:
            child.stop()


def run_to_end(name: str, command: Sequence[str], env: Mapping[str, str], limit_s: float) -> str:
    """Run a command that ends by itself; its output. Raises ChildFailed on failure or after `limit_s`."""
    with started(name, command, env) as child:
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{name} did not end within {limit_s:g} s\n{child.last_lines()}") from None
        if code != 0:
            raise ChildFailed(f"{name} ended with code {code}\n{child.last_lines()}")
        return child.last_lines()


def free_port() -> int:
    """A loopback port that was free at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
