"""Objects as files of a folder, which any number of processes may share.

    DIR/<layout>/<first two of key>/<key>     an object: written elsewhere, then renamed, so it is there whole or not at all
    DIR/.writing/<key>.<random>               a draft: locked by its writer as long as that lives, swept by anybody after
    DIR/.ledger, DIR/.evicting                bytes in use; the lock of the one that makes room

Nothing is kept in memory: what is in the folder is the truth, and a folder that is emptied or removed under us is an empty
store. Only files whose names look like ours are ever counted or removed.

**Limit.** Bytes are counted before they are written (`file_ledger`), by all who share the folder: the limit holds for them
together. Over it, the least recently used objects go until a tenth is free. "Used" is the file's time of change, set when it
is written and, at most once a minute, when it is looked for or read. Of one call's objects the first counts as the latest
used: without it, the later ones of its chain would be of no use.

**No fsync.** Killing us loses nothing that was renamed: the kernel has it. After a power cut a file may be empty or torn;
the envelope's checksum finds that, and the block is computed again. To wait for the disk for each block would make the store
many times slower to protect what is a cache.

**Time.** The time-out bounds waiting for other processes. It does not bound the moving of bytes or, with very many objects,
making room: a file system that hangs cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.core.errors import InvariantViolated
from baton.kv.file_ledger import FileLedger, FileLock, FolderUsage, LockBusy, try_lock
from baton.kv.store import MISSING, OVERSIZED, BadStore, Store, StoreFailed, StoreStat, StoreUrl

TOUCH_S = 60.0
KEEP_SHARE = 0.9
"""Of the limit: what is left after making room, so that it need not be made for each object."""

_NAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{2})([0-9a-f]{30})")
_LAYOUT = re.compile(r"[0-9a-f]{16}")
_FAN = re.compile(r"[0-9a-f]{2}")
_KEY = re.compile(r"[0-9a-f]{32}")
_DRAFT = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{16}")
_STEP_NS = 1000
"""Between the times of two objects of one call; finer than this not every file system tells apart."""
_TRIES = 4
"""A folder may be removed between making it and using it; not again and again."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENXIO}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    path: str
    size: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class _Draft:
    fd: int
    path: str


class FileStore:
    kind = "file"

    def __init__(self, folder: str, timeout_s: float, limit_bytes: int | None, touch_s: float = TOUCH_S) -> None:
        """Touches nothing yet; `open_file` checks the folder and makes it ready."""
        self._folder = folder
        self._drafts = os.path.join(folder, ".writing")
        self._ledger = FileLedger(os.path.join(folder, ".ledger"))
        self._evicting = FileLock(os.path.join(folder, ".evicting"))
        self._timeout_s = timeout_s
        self._limit = limit_bytes
        self._touch_ns = int(touch_s * 1e9)

    # ── what a store does ────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, names: Sequence[str]) -> list[bool]:
        now = time.time_ns()
        with self._failures_as_store_failed("look"):
            return [self._look(self._path(name), now - at * _STEP_NS) for at, name in enumerate(names)]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        now = time.time_ns()
        with self._failures_as_store_failed("read"):
            pairs = enumerate(zip(names, into, strict=True))
            return [self._get(self._path(name), buffer, now - at * _STEP_NS) for at, (name, buffer) in pairs]

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        now, deadline = time.time_ns(), self._deadline()
        with self._failures_as_store_failed("write"):
            pairs = enumerate(zip(names, objects, strict=True))
            return [self._put(self._path(name), data, now - at * _STEP_NS, deadline) for at, (name, data) in pairs]

    def drop(self, names: Sequence[str]) -> None:
        with self._failures_as_store_failed("remove"):
            freed = sum(_remove(self._path(name)) for name in names)
            if freed:
                self._ledger.give_back(freed, self._deadline())

    def attach(self, arena: memoryview) -> None:
        """Any memory will do."""

    def names(self) -> Iterator[tuple[str, int]]:
        with self._failures_as_store_failed("list"):
            for entry in self._objects():
                yield entry.name, entry.size

    def stat(self) -> StoreStat:
        with self._failures_as_store_failed("list"):
            sizes = [entry.size for entry in self._objects()]
            drafts = len(self._draft_sizes())
        details = {"folder": self._folder, "being written": str(drafts)}
        with contextlib.suppress(FileNotFoundError):
            disk = os.statvfs(self._folder)
            details["free on the disk"] = f"{disk.f_bavail * disk.f_frsize / 2**30:.1f} GiB"
        return StoreStat(self.kind, len(sizes), sum(sizes), self._limit, details)

    def clear(self) -> int:
        with self._failures_as_store_failed("clear"):
            count = 0
            for entry in self._objects():
                count += _remove(entry.path) > 0
            self._remove_empty_folders()
            if os.path.exists(self._drafts):
                self.tidy()
            return count

    def close(self) -> None:
        """Nothing is kept open between calls."""

    # ── looking and reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, path: str, now_ns: int) -> bool:
        found = _stat(path)
        if found is None:
            return False
        self._touch(path, found, now_ns)
        return True

    def _get(self, path: str, into: memoryview, now_ns: int) -> int:
        try:
            # Of what is no file of ours, neither a link is followed nor a pipe waited for.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _ABSENT:
                return MISSING
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return MISSING
            if found.st_size > len(into):
                return OVERSIZED
            count = _read_all(fd, into[: found.st_size])
            self._touch(fd, found, now_ns)
            return count
        finally:
            os.close(fd)

    def _touch(self, at: str | int, found: os.stat_result, now_ns: int) -> None:
        """To touch is to write; once in a while is enough to know what nobody uses. Where it cannot be, it need not be."""
        if abs(now_ns - found.st_mtime_ns) >= self._touch_ns:
            with contextlib.suppress(OSError):
                os.utime(at, ns=(now_ns, now_ns))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, path: str, data: memoryview, now_ns: int, deadline: float) -> bool:
        found = _stat(path)
        if found is not None and found.st_size == len(data):
            self._touch(path, found, now_ns)
            return True
        try:
            return self._write(path, data, now_ns, deadline)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            raise

    def _write(self, path: str, data: memoryview, now_ns: int, deadline: float) -> bool:
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
            _write_all(draft.fd, data)
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
                _remove(where)
        return _Draft(fd, where)

    def _abandon(self, draft: _Draft, size: int) -> None:
        """After a failure, which is what is told; that this fails too is found at the next count."""
        with contextlib.suppress(OSError, LockBusy):
            _remove(draft.path)
            self._ledger.give_back(size, self._deadline())

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_room(self, size: int, deadline: float) -> bool:
        """One at a time; the others wait for it, and then there may be room."""
        try:
            with self._evicting.held(deadline):
                if not self._is_room(self._ledger.read(self._deadline()), size):
                    self._evict(*self._recount(), size)
        except LockBusy:
            return False
        return True

    def _is_room(self, account: FolderUsage, size: int) -> bool:
        used = account.used_bytes
        return used is not None and (self._limit is None or used + size <= self._limit)

    def _evict(self, entries: list[_Entry], used: int, size: int) -> None:
        if self._limit is None:
            return
        goal = min(self._limit - size, int(self._limit * KEEP_SHARE))
        freed = 0
        for entry in sorted(entries, key=lambda entry: (entry.used_ns, entry.name)):
            if used - freed <= goal:
                break
            freed += _remove(entry.path)
        self._ledger.give_back(freed, self._deadline())

    def _recount(self) -> tuple[list[_Entry], int]:
        """All objects, and the bytes in use, which are what the ledger says from here on. Drafts first: one that is renamed
        meanwhile is then found as an object at least once."""
        self._sweep()
        before = self._ledger.read(self._deadline())
        drafts = self._draft_sizes()
        entries = list(self._objects())
        found = sum(drafts) + sum(entry.size for entry in entries)
        return entries, self._ledger.recount(before, found, self._deadline())

    def tidy(self) -> None:
        """Remove what writers that died have left, and count."""
        self._recount()

    def _sweep(self) -> None:
        """Nobody begins a draft meanwhile, so one that is not locked is nobody's."""
        with self._ledger.frozen(self._deadline()):
            for entry in _entries(self._drafts):
                if _DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and _is_abandoned(entry.path):
                    _remove(entry.path)

    def _draft_sizes(self) -> list[int]:
        found = [_stat(entry.path) for entry in _entries(self._drafts) if _DRAFT.fullmatch(entry.name)]
        return [each.st_size for each in found if each is not None]

    # ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, name: str) -> str:
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvariantViolated(f"{name!r} is not the name of an object")
        layout, fan, rest = match.groups()
        return f"{self._folder}/{layout}/{fan}/{fan}{rest}"

    def _folders(self) -> Iterator[tuple[str, str, str]]:
        """Layout, first two of the key, path."""
        for layout in _entries(self._folder):
            if _LAYOUT.fullmatch(layout.name) and layout.is_dir(follow_symlinks=False):
                for fan in _entries(layout.path):
                    if _FAN.fullmatch(fan.name) and fan.is_dir(follow_symlinks=False):
                        yield layout.name, fan.name, fan.path

    def _objects(self) -> Iterator[_Entry]:
        for layout, fan, folder in self._folders():
            for entry in _entries(folder):
                if _KEY.fullmatch(entry.name) and entry.name.startswith(fan):
                    found = _stat(entry.path)
                    if found is not None:
                        yield _Entry(f"{layout}/{entry.name}", entry.path, found.st_size, found.st_mtime_ns)

    def _remove_empty_folders(self) -> None:
        """Those with anything in them stay; who writes meanwhile makes them again."""
        folders = [path for _, _, path in self._folders()]
        for path in folders + sorted({os.path.dirname(path) for path in folders}):
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    @contextlib.contextmanager
    def _failures_as_store_failed(self, what: str) -> Iterator[None]:
        try:
            yield
        except LockBusy:
            raise StoreFailed(f"cannot {what} in {self._folder}: another process holds its lock") from None
        except OSError as error:
            raise StoreFailed(f"cannot {what} in {self._folder}: {error.strerror or error}") from error


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_folder(path: str) -> None:
    """For us alone. Folders above it that are missing are made as well."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Of a folder that may be gone."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _stat(path: str) -> os.stat_result | None:
    """Of a plain file; None for whatever else is there, or nothing."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    return found if stat.S_ISREG(found.st_mode) else None


def _remove(path: str) -> int:
    """Answers the bytes that this freed."""
    found = _stat(path)
    if found is None:
        return 0
    try:
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return found.st_size


def _is_abandoned(draft: str) -> bool:
    try:
        fd = os.open(draft, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    try:
        return try_lock(fd)
    finally:
        os.close(fd)


def _read_all(fd: int, into: memoryview) -> int:
    """Fewer bytes than asked for where the file has become shorter."""
    at = 0
    while at < len(into):
        count = os.readv(fd, [into[at:]])
        if not count:
            break
        at += count
    return at


def _write_all(fd: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += os.write(fd, data[at:])


# ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_file(url: StoreUrl, timeout_s: float, limit_bytes: int | None, create: bool) -> Store:
    folder = _folder_at(url.path)
    if create:
        prepare_folder(folder)
    else:
        _demand_folder(folder, create=False)
    store = FileStore(folder, timeout_s, limit_bytes)
    if create:
        with _usable(folder), contextlib.suppress(LockBusy):
            store.tidy()
    return store


def prepare_folder(path: str) -> None:
    """Makes it, and in it what a store needs. Raises BadStore with the reason where that cannot be."""
    folder = _folder_at(path)
    drafts = os.path.join(folder, ".writing")
    _demand_folder(folder, create=True)
    if os.path.islink(drafts):
        raise BadStore(f"{drafts} is a link; a store keeps its drafts in the folder itself")
    with _usable(folder):
        make_folder(drafts)


def _folder_at(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _demand_folder(folder: str, create: bool) -> None:
    try:
        if create and not os.path.lexists(folder):
            make_folder(folder)
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise BadStore(f"{folder} is a file, not a folder for a store")
        os.scandir(folder).close()
    except FileNotFoundError as error:
        if os.path.islink(folder):
            raise BadStore(f"{folder} is a link to nothing") from None
        if not create:
            raise BadStore(f"there is no store at {folder}") from None
        raise BadStore(f"the folder {folder} cannot be made: {_reason(error)}") from error
    except (OSError, ValueError) as error:
        raise BadStore(f"{folder} cannot be a store: {_reason(error)}") from error


@contextlib.contextmanager
def _usable(folder: str) -> Iterator[None]:
    """A full disk is no reason not to start, and neither is a process that stands still with the lock: what is stored can
    still be read, and the next one tidies up."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise BadStore(f"{folder} cannot be a store: its file system has no locks ({_reason(error)})") from error
        if error.errno == errno.EROFS or error.errno not in _NO_ROOM:
            raise BadStore(f"{folder} cannot be a store: {error.filename or folder}: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
