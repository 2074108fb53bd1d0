"""Stores that are not to be had when a server starts: what can never work ends it, what may come later is only told."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.child_processes import free_port
from baton.core.errors import EXIT_SETUP
from baton.node.start_stages import stage_of
from benchmarks.store_servers import valkey_why_not
from tests.support.server import baton_serve
from tests.support.storing import TIGHT, bills, mixture


@pytest.mark.skipif(valkey_why_not() is not None, reason=f"valkey: {valkey_why_not()}")
def test_a_store_that_is_down_is_told_and_service_begins_without_it() -> None:
    with baton_serve(*TIGHT, "--kv-store", f"valkey://127.0.0.1:{free_port()}/0") as server:
        assert "fails; serving begins without it" in server.output()
        bills(server.url, mixture())
        assert server.stop() == 0


def test_a_folder_that_cannot_be_made_is_told() -> None:
    assert_refused("file:/proc/store", "the folder /proc/store cannot be made: No such file or directory")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "valkey.py").write_text("raise ImportError('No module named valkey')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert_refused("valkey://127.0.0.1:1/0", "[valkey]")


def assert_refused(url: str, said: str) -> None:
    with baton_serve("--executor", "scripted", "--kv-store", url, wait=False) as server:
        assert server.process.wait(60) == EXIT_SETUP
        (line,) = [line for line in server.output().splitlines() if stage_of(line) is None]
        assert line.startswith("baton serve: ")
        assert said in line
