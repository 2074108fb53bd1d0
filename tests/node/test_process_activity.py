"""A second sign beside silence: whether a process runs, as the kernel tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.node.process_activity import ProcessActivity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None:
                raise RuntimeError
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def until_runs(activity: ProcessActivity, wanted: bool) -> None:
    deadline_s = time.monotonic() + 30
    while activity.runs() is not wanted:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
        if wanted:
            continue
        activity.spoke()  # what it did before it came to rest does not count
        activity.runs()
        time.sleep(0.05)


def test_a_process_that_computes_runs_at_every_look() -> None:
    with running("while True: pass") as process:
        activity = ProcessActivity(process.pid)
        assert all(activity.runs() for _ in range(20))


def test_a_stopped_process_does_not_run_whatever_it_did_before() -> None:
    with running("while True: pass") as process:
        activity = ProcessActivity(process.pid)
        assert activity.runs()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not activity.runs()
        os.kill(process.pid, signal.SIGCONT)
        until_runs(activity, True)


def test_a_process_whose_threads_all_sleep_does_not_run_from_the_second_look_on() -> None:
    with running("import time; time.sleep(1000)") as process:
        activity = ProcessActivity(process.pid)
        assert activity.runs(), "the first look has nothing to compare with"
        until_runs(activity, False)
        activity.spoke()
        assert activity.runs()


def test_where_nobody_can_tell_it_runs() -> None:
    with running("pass") as process:
        activity = ProcessActivity(process.pid)
    assert activity.runs()
