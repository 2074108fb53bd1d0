"""The number of bytes in use in a folder, shared by all processes that write to it.

Owns one small file and the lock on it. Bytes are added before they are written and subtracted after they are removed: a
crash in between leaves the count too high, never too low, so a limit kept by it holds. `recount` corrects the count while
other processes go on writing.

The kernel releases the locks of a process that dies. Knows nothing of objects.
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
"""Pause between attempts to take a lock that another process holds: the first, and the longest."""


class LockBusy(Exception):
    """Another holder kept the lock past the deadline."""


class FileLock:
    """A lock with one holder among all threads and processes. A file that was removed is created again."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._mutex = threading.Lock()
        """Taken before the file lock: threads of one process wait here without polling."""

    @contextlib.contextmanager
    def held(self, deadline: float) -> Iterator[int]:
        """Hold the lock; yields the open file. Raises LockBusy when `deadline`, on the monotonic clock, passes."""
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
    """Whether `path` still names this file. A lock on a removed file excludes no other process."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


@dataclass(frozen=True, slots=True)
class FolderUsage:
    used_bytes: int | None
    """None if unknown: the folder must be counted."""
    taken_bytes: int
    """Bytes ever taken; the difference of two readings is what was taken between them."""


class FileLedger:
    def __init__(self, path: str) -> None:
        self._lock = FileLock(path)

    def read(self, deadline: float) -> FolderUsage:
        with self._lock.held(deadline) as fd:
            return _read(fd)

    def take(self, size: int, limit: int | None, begin: Callable[[], Made], deadline: float) -> Made | None:
        """Add `size` bytes and call `begin`, both under the lock, so that a recount sees what was begun.

        Returns None where the bytes would exceed the limit, or the usage is unknown.
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
        """Set the usage to `found` bytes, counted after `before` was read, plus what was taken since; returns it.

        Bytes taken since may be among those found and then count twice.
        """
        with self._lock.held(deadline) as fd:
            now = _read(fd)
            used = found + max(0, now.taken_bytes - before.taken_bytes)
            _write(fd, FolderUsage(used, now.taken_bytes))
            return used

    @contextlib.contextmanager
    def frozen(self, deadline: float) -> Iterator[None]:
        """Hold the lock: no process takes bytes meanwhile."""
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
