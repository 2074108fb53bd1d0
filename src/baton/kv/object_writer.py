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
    ObjectEntry,
    ObjectFolder,
    folder_entries,
    make_folder,
    open_plain,
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
        """A new draft whose bytes are counted in the ledger; None where there is no room even after evicting."""
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
        """A locked draft that already has its full size, so that a recount sees all of its bytes."""
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
        """Remove a draft after a failure. Errors here are ignored; the next recount corrects the ledger."""
        with contextlib.suppress(OSError, LockBusy):
            remove_file(draft.path)
            self._ledger.give_back(size, self.deadline())

    def _make_room(self, size: int, deadline: float) -> bool:
        """Evict objects for `size` bytes unless another process just did. False where the lock stays busy."""
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
        """Count the folder and set the ledger; returns all objects and the bytes in use.

        Drafts are counted first: one that is renamed meanwhile is then counted as an object at least once.
        """
        self._sweep()
        before = self._ledger.read(self.deadline())
        drafts = self.draft_sizes()
        entries = list(self._objects.objects())
        found = sum(drafts) + sum(entry.size for entry in entries)
        return entries, self._ledger.recount(before, found, self.deadline())

    def tidy(self) -> None:
        """Remove the drafts of writers that died, and count the bytes in use."""
        self._recount()

    def _sweep(self) -> None:
        """Remove unlocked drafts. The ledger's lock is held: no draft is created meanwhile, so their writers are dead."""
        with self._ledger.frozen(self.deadline()):
            for entry in folder_entries(self._drafts):
                if _DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and _is_unlocked(entry.path):
                    remove_file(entry.path)

    def draft_sizes(self) -> list[int]:
        found = [plain_stat(entry.path) for entry in folder_entries(self._drafts) if _DRAFT.fullmatch(entry.name)]
        return [each.st_size for each in found if each is not None]


def _is_unlocked(path: str) -> bool:
    """Whether no writer holds the draft at this path."""
    fd = open_plain(path, os.O_RDWR)
    if fd is None:
        return False
    try:
        return try_lock(fd)
    finally:
        os.close(fd)
