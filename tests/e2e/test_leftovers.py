"""What a killed process leaves in the temporary folder and in the cache is gone after the next start."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.executor.cache_folder import KERNELS, MAKING, MODELS, private_cache
from baton.executor.scratch_folder import LOCK, scratch_folder
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


def test_the_next_start_removes_what_a_killed_process_was_making_for_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    with ExitStack() as making:
        folders = [making.enter_context(scratch_folder(MAKING, private_cache(part))).path for part in (KERNELS, MODELS)]
        left = [folder.with_name(f"{MAKING}left") for folder in folders]
        for folder in left:
            folder.mkdir()
            (folder / LOCK).touch()  # nobody holds it
        with baton_serve("--executor", "scripted") as server:
            assert [folder.exists() for folder in left] == [False, False]
            assert [folder.exists() for folder in folders] == [True, True], "these are being made"
            assert server.stop() == 0
