"""The count of a shared folder's bytes: never too low, whatever happens between counting and writing."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from baton.kv.file_ledger import FileLedger, FileLock, FolderUsage, LockBusy

LATER = time.monotonic() + 10_000


@pytest.fixture
def ledger(tmp_path: Path) -> FileLedger:
    made = FileLedger(str(tmp_path / "ledger"))
    made.recount(made.read(LATER), 0, LATER)
    return made


def take(ledger: FileLedger, size: int, limit: int | None = None) -> bool:
    return ledger.take(size, limit, lambda: "begun", LATER) == "begun"


def used(ledger: FileLedger) -> int | None:
    return ledger.read(LATER).used_bytes


def test_what_is_taken_counts_until_it_is_given_back(ledger: FileLedger) -> None:
    assert take(ledger, 100)
    assert take(ledger, 50)
    assert used(ledger) == 150
    ledger.give_back(100, LATER)
    assert used(ledger) == 50
    ledger.give_back(100, LATER)
    assert used(ledger) == 0


def test_the_limit_may_be_reached_and_not_passed(ledger: FileLedger) -> None:
    assert take(ledger, 100, limit=100)
    assert not take(ledger, 1, limit=100)
    assert used(ledger) == 100


def test_what_could_not_be_begun_is_not_counted(ledger: FileLedger) -> None:
    take(ledger, 10)

    def fail() -> None:
        assert used_by_others(ledger) == 110, "it counts before it is begun"
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        ledger.take(100, None, fail, LATER)
    assert used(ledger) == 10


def used_by_others(ledger: FileLedger) -> int:
    """What a process would find that came now, after a crash of ours."""
    data = Path(ledger._lock.path).read_bytes()
    return int.from_bytes(data[8:16], "little")


def test_what_is_taken_while_somebody_counts_is_counted(ledger: FileLedger) -> None:
    take(ledger, 500)
    before = ledger.read(LATER)
    take(ledger, 30)
    ledger.give_back(20, LATER)
    assert ledger.recount(before, 100, LATER) == 130
    assert used(ledger) == 130


def test_nobody_takes_anything_before_it_is_known_how_much_there_is(tmp_path: Path) -> None:
    ledger = FileLedger(str(tmp_path / "ledger"))
    assert ledger.read(LATER) == FolderUsage(None, 0)
    assert not take(ledger, 1)
    ledger.give_back(1, LATER)
    assert used(ledger) is None
    ledger.recount(ledger.read(LATER), 7, LATER)
    assert take(ledger, 1)
    assert used(ledger) == 8


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with FileLock(path).held(LATER), pytest.raises(LockBusy), FileLock(path).held(time.monotonic()):
        pass
    with FileLock(path).held(time.monotonic()):
        pass


def test_threads_that_share_a_lock_wait_no_longer_than_they_may(tmp_path: Path) -> None:
    lock = FileLock(str(tmp_path / "lock"))
    with lock.held(LATER), pytest.raises(LockBusy), lock.held(time.monotonic() - 1):
        pass


def test_a_lock_on_a_file_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: Any) -> None:
    """Between opening and locking somebody removes the folder; who comes later makes the file anew, and locks that."""
    lock, real = FileLock(str(tmp_path / "lock")), fcntl.flock
    removed: list[str] = []

    def remove_first(fd: int, how: int) -> None:
        if not removed:
            os.unlink(lock.path)
            removed.append(lock.path)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with lock.held(LATER) as fd:
        assert os.path.samestat(os.fstat(fd), os.stat(lock.path))
