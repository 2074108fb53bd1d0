from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from baton.bench.child_processes import ChildFailed, free_port, run_to_end, started
from baton.bench.machine import describe_machine, other_load
from tests.support.waiting import wait_until


def test_a_child_and_its_children_are_gone_after_the_block(tmp_path: Path) -> None:
    grandchild = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(grandchild)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )

    def interrupted() -> None:
        with started("parent", [sys.executable, "-c", code], {}):
            wait_until(lambda: grandchild.exists() and bool(grandchild.read_text()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    wait_until(lambda: not _alive(int(grandchild.read_text())))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_child_that_ignores_the_request_to_stop_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("baton.bench.child_processes.STOP_GRACE_S", 0.2)
    deaf = tmp_path / "deaf"
    code = (
        f"import pathlib, signal, time; signal.signal({int(signal.SIGTERM)}, signal.SIG_IGN);"
        f"pathlib.Path({str(deaf)!r}).touch(); time.sleep(60)"
    )
    with started("stubborn", [sys.executable, "-c", code], {}) as child:
        wait_until(deaf.exists)
    assert child.wait(10.0) == -signal.SIGKILL


def test_a_paused_child_does_nothing() -> None:
    with started("busy", [sys.executable, "-c", "while True: pass"], {}) as child:
        wait_until(lambda: child.busy_cores(0.05) > 0.1)
        child.pause()
        assert child.busy_cores(0.2) == pytest.approx(0.0, abs=0.06)


def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ChildFailed, match=r"within 0\.2 s"):
        run_to_end("slow", [sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.2)
    with pytest.raises(ChildFailed, match="cannot be started"):
        run_to_end("nothing", ["/no/such/program"], {}, 1.0)


def test_the_machine_is_described() -> None:
    assert describe_machine()["cores"]
    load = other_load(0.05)
    assert load.loadavg_1m >= 0.0
    assert 0.0 <= load.steal_percent <= 100.0
    assert 1024 <= free_port() < 65536
