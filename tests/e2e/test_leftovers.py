"""What a killed server leaves in the temporary folder is gone after the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server import baton_serve
from tests.support.waiting import wait_until


def test_the_next_start_removes_what_a_killed_server_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with baton_serve("--executor", "scripted") as first, baton_serve("--executor", "scripted") as living:
        in_use = set(tmp_path.glob("baton-*"))
        engine = first.engine_pid()
        first.process.kill()
        first.process.wait()
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine's end")
        left = set(tmp_path.glob("baton-*"))
        assert left
        with baton_serve("--executor", "scripted") as second:
            after = set(tmp_path.glob("baton-*"))
            assert len(after & in_use) == 2, "two folders are a living server's"
            assert second.stop() == 0
        assert living.stop() == 0
    assert not set(tmp_path.glob("baton-*"))
