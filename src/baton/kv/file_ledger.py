"""How many bytes a folder of objects holds, known to all processes that share it.

Owns one small file and the lock on it. What is going to be written is counted before it is written, and what is removed is
taken off after it is removed: so the count may be too high, after a crash in between, and not too low, and a limit that is
kept by it is kept. Counting again (`recount`) brings it back to the truth while others go on writing.

The kernel gives up the locks of a process that dies, however it dies. Knows nothing of objects.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Made = TypeVar("Made")

_RECORD = struct.Struct("<8sQQ")
_MAGIC = b"batonled"
_POLL_S = (0.0005, 0.02)
"""How long to wait before asking again for a lock that another process has: at first, and at most."""


class LockBusy(Exception):
    """Somebody else has the lock for longer than we may wait."""


class FileLock:
    """One holder at a time among all threads and processes. The file may be removed meanwhile; it is made again."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._mutex = threading.Lock()
        """Threads of one process wait here, where waiting needs no polling."""

    @contextlib.contextmanager
    def held(self, deadline: float) -> Iterator[int]:
        """With the open file. `deadline` is on the monotonic clock; Busy when it passes."""
        if not self._mutex.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LockBusy(self.path)
        try:
            fd = self._take(deadline)
            try:
                yield fd
            finally:
                os.close(fd)
        finally:
            self._mutex.release()

    def _take(self, deadline: float) -> int:
        wait_s, most_s = _POLL_S
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if try_lock(fd) and _is_at(fd, self.path):
                    kept, fd = fd, -1
                    return kept
            finally:
                if fd >= 0:
                    os.close(fd)
            if time.monotonic() >= deadline:
                raise LockBusy(self.path)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    """A lock on a file that was removed keeps nobody out."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


@dataclass(frozen=True, slots=True)
class FolderUsage:
    used_bytes: int | None
    """None: not known, count again."""
    taken_bytes: int
    """Of all time; what was taken between two looks is the difference."""


class FileLedger:
    def __init__(self, path: str) -> None:
        self._lock = FileLock(path)

    def read(self, deadline: float) -> FolderUsage:
        with self._lock.held(deadline) as fd:
            return _read(fd)

    def take(self, size: int, limit: int | None, begin: Callable[[], Made], deadline: float) -> Made | None:
        """Count `size` bytes more and `begin` what will hold them; None where they would be over the limit, or nobody knows.

        Both under the lock: whoever counts again sees what was begun.
        """
        with self._lock.held(deadline) as fd:
            was = _read(fd)
            if was.used_bytes is None or (limit is not None and was.used_bytes + size > limit):
                return None
            _write(fd, FolderUsage(was.used_bytes + size, was.taken_bytes + size))
            begun = False
            try:
                made = begin()
                begun = True
                return made
            finally:
                if not begun:
                    _write(fd, was)

    def give_back(self, size: int, deadline: float) -> None:
        with self._lock.held(deadline) as fd:
            was = _read(fd)
            if was.used_bytes is not None:
                _write(fd, FolderUsage(max(0, was.used_bytes - size), was.taken_bytes))

    def recount(self, before: FolderUsage, found: int, deadline: float) -> int:
        """`found` bytes were there after `before` was read; what was taken since may be among them and counts twice.
        Answers the bytes that are now in use."""
        with self._lock.held(deadline) as fd:
            now = _read(fd)
            used = found + max(0, now.taken_bytes - before.taken_bytes)
            _write(fd, FolderUsage(used, now.taken_bytes))
            return used

    @contextlib.contextmanager
    def frozen(self, deadline: float) -> Iterator[None]:
        """Nobody begins anything meanwhile."""
        with self._lock.held(deadline):
            yield


def _read(fd: int) -> FolderUsage:
    data = os.pread(fd, _RECORD.size + 1, 0)
    if len(data) != _RECORD.size or not data.startswith(_MAGIC):
        return FolderUsage(None, 0)
    _, used, taken = _RECORD.unpack(data)
    return FolderUsage(used, taken)


def _write(fd: int, account: FolderUsage) -> None:
    os.pwrite(fd, _RECORD.pack(_MAGIC, account.used_bytes or 0, account.taken_bytes), 0)
