"""Writes objects of a file store within its limit, together with all other processes that share the folder.

    DIR/.writing/<key>.<random>               a draft, locked by its writer; renamed when it is complete
    DIR/.ledger, DIR/.evicting                bytes in use; the lock of the process that evicts

Bytes are counted in the ledger before they are written. Over the limit, the least recently used objects are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from dataclasses import dataclass

from baton.core.errors import InvariantViolated
from baton.kv.file_ledger import FileLedger, FileLock, FolderUsage, LockBusy, try_lock
from baton.kv.object_folder import (
    ABSENT,
    ObjectEntry,
    ObjectFolder,
    folder_entries,
    make_folder,
    plain_stat,
    remove_file,
    write_all,
)
from baton.kv.store import StoreFailed

KEEP_SHARE = 0.9
"""Share of the limit that stays in use after evicting, so that not every put evicts."""

_DRAFT = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{16}")
_TRIES = 4
"""Attempts before a folder that others keep removing is an error."""


def drafts_folder(folder: str) -> str:
    return os.path.join(folder, ".writing")


@dataclass(frozen=True, slots=True)
class _Draft:
    fd: int
    path: str


class ObjectWriter:
    def __init__(self, folder: str, objects: ObjectFolder, timeout_s: float, limit_bytes: int | None) -> None:
        self._folder = folder
        self._drafts = drafts_folder(folder)
        self._objects = objects
        self._ledger = FileLedger(os.path.join(folder, ".ledger"))
        self._evicting = FileLock(os.path.join(folder, ".evicting"))
        self._timeout_s = timeout_s
        self._limit = limit_bytes

    def deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def removed(self, size: int) -> None:
        """Count `size` bytes as free again."""
        self._ledger.give_back(size, self.deadline())

    def write(self, path: str, data: memoryview, now_ns: int, deadline: float) -> bool:
        for _ in range(_TRIES):
            try:
                return self._write_once(path, data, now_ns, deadline)
            except FileNotFoundError:
                make_folder(self._folder)
                make_folder(self._drafts)
        raise StoreFailed(f"{self._folder} is removed again and again while objects are written")

    def _write_once(self, path: str, data: memoryview, now_ns: int, deadline: float) -> bool:
        draft = self._begin(path, len(data), deadline)
        if draft is None:
            return False
        done = False
        try:
            write_all(draft.fd, data)
            os.utime(draft.fd, ns=(now_ns, now_ns))
            self._publish(draft, path)
            done = True
        finally:
            os.close(draft.fd)
            if not done:
                self._abandon(draft, len(data))
        return True

    def _publish(self, draft: _Draft, path: str) -> None:
        try:
            os.rename(draft.path, path)
        except FileNotFoundError:
            make_folder(os.path.dirname(path))
            os.rename(draft.path, path)

    def _begin(self, path: str, size: int, deadline: float) -> _Draft | None:
        """A draft whose bytes are counted; None where there is no room, and none can be made."""
        if self._limit is not None and size > self._limit:
            return None
        for _ in range(_TRIES):
            draft = self._ledger.take(size, self._limit, lambda: self._new_draft(path, size), deadline)
            if draft is not None:
                return draft
            if not self._make_room(size, deadline):
                return None
        return None

    def _new_draft(self, path: str, size: int) -> _Draft:
        """It has its full size from the beginning: whoever counts bytes meanwhile counts all that it will have."""
        where = os.path.join(self._drafts, f"{os.path.basename(path)}.{secrets.token_hex(8)}")
        fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        ready = False
        try:
            if not try_lock(fd):
                raise InvariantViolated(f"the new draft {where} is locked by somebody else")
            os.ftruncate(fd, size)
            ready = True
        finally:
            if not ready:
                os.close(fd)
                remove_file(where)
        return _Draft(fd, where)

    def _abandon(self, draft: _Draft, size: int) -> None:
        """After a failure, which is what is told; that this fails too is found at the next count."""
        with contextlib.suppress(OSError, LockBusy):
            remove_file(draft.path)
            self._ledger.give_back(size, self.deadline())

    def _make_room(self, size: int, deadline: float) -> bool:
        """One at a time; the others wait for it, and then there may be room."""
        try:
            with self._evicting.held(deadline):
                if not self._is_room(self._ledger.read(self.deadline()), size):
                    self._evict(*self._recount(), size)
        except LockBusy:
            return False
        return True

    def _is_room(self, account: FolderUsage, size: int) -> bool:
        used = account.used_bytes
        return used is not None and (self._limit is None or used + size <= self._limit)

    def _evict(self, entries: list[ObjectEntry], used: int, size: int) -> None:
        if self._limit is None:
            return
        goal = min(self._limit - size, int(self._limit * KEEP_SHARE))
        freed = 0
        for entry in sorted(entries, key=lambda entry: (entry.used_ns, entry.name)):
            if used - freed <= goal:
                break
            freed += remove_file(entry.path)
        self._ledger.give_back(freed, self.deadline())

    def _recount(self) -> tuple[list[ObjectEntry], int]:
        """All objects, and the bytes in use, which are what the ledger says from here on. Drafts first: one that is renamed
        meanwhile is then found as an object at least once."""
        self._sweep()
        before = self._ledger.read(self.deadline())
        drafts = self.draft_sizes()
        entries = list(self._objects.objects())
        found = sum(drafts) + sum(entry.size for entry in entries)
        return entries, self._ledger.recount(before, found, self.deadline())

    def tidy(self) -> None:
        """Remove what writers that died have left, and count."""
        self._recount()

    def _sweep(self) -> None:
        """Nobody begins a draft meanwhile, so one that is not locked is nobody's."""
        with self._ledger.frozen(self.deadline()):
            for entry in folder_entries(self._drafts):
                if _DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and _is_unlocked(entry.path):
                    remove_file(entry.path)

    def draft_sizes(self) -> list[int]:
        found = [plain_stat(entry.path) for entry in folder_entries(self._drafts) if _DRAFT.fullmatch(entry.name)]
        return [each.st_size for each in found if each is not None]


def _is_unlocked(path: str) -> bool:
    """Whether no writer holds the draft at this path."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise
    try:
        return try_lock(fd)
    finally:
        os.close(fd)
