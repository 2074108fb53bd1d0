"""Objects as files of a folder that any number of processes may share.

    DIR/<layout>/<first two of key>/<key>     an object: written as a draft, then renamed, so it is complete or absent
    DIR/.writing/<key>.<random>               a draft: locked by its writer while that lives, removed by any process after
    DIR/.ledger, DIR/.evicting                bytes in use; the lock of the process that evicts

Nothing is kept in memory. A folder that is emptied or removed while it is in use is an empty store. Only files whose names
are those of objects and drafts are counted or removed.

**Limit.** Bytes are counted before they are written (`file_ledger`) by all processes that share the folder, so the limit
holds for them together. Over it, the least recently used objects are removed until a tenth is free. The time of use is the
file's modification time, set when it is written and, at most once a minute, when it is looked for or read. Of the objects of
one call the first counts as used last: the later ones of its chain are useless without it.

Where no limit is given it is DEFAULT_LIMIT_BYTES: a store that clients fill must not fill the disk.

**No fsync.** A killed process loses nothing that was renamed: the kernel has it. After a power cut a file may be empty or
torn; the envelope's checksum detects that, and the block is computed again. Waiting for the disk for each block would make
the store many times slower to protect a cache.

**Time.** The time-out bounds waiting for other processes. It does not bound moving bytes or, with very many objects,
evicting: a file system that hangs cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence

from baton.kv.file_ledger import LockBusy
from baton.kv.object_folder import ObjectFolder, make_folder, open_plain, plain_stat, read_all, remove_file
from baton.kv.object_writer import ObjectWriter, drafts_folder
from baton.kv.store import MISSING, OVERSIZED, BadStore, Store, StoreFailed, StoreStat, StoreUrl

DEFAULT_LIMIT_BYTES = 10 << 30
TOUCH_S = 60.0
_STEP_NS = 1000
"""Difference between the times of two objects of one call: the resolution of coarse file systems."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class FileStore:
    kind = "file"

    def __init__(self, folder: str, timeout_s: float, limit_bytes: int | None, touch_s: float = TOUCH_S) -> None:
        """Does not touch the folder; `open_file` checks and prepares it."""
        self._folder = folder
        self._objects = ObjectFolder(folder)
        self._writer = ObjectWriter(folder, self._objects, timeout_s, limit_bytes)
        self._limit = limit_bytes
        self._touch_ns = int(touch_s * 1e9)

    # ── what a store does ────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, names: Sequence[str]) -> list[bool]:
        now = time.time_ns()
        with self._failures_as_store_failed("look"):
            return [self._look(self._objects.path(name), now - at * _STEP_NS) for at, name in enumerate(names)]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        now = time.time_ns()
        with self._failures_as_store_failed("read"):
            pairs = enumerate(zip(names, into, strict=True))
            return [self._get(self._objects.path(name), buffer, now - at * _STEP_NS) for at, (name, buffer) in pairs]

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        now, deadline = time.time_ns(), self._writer.deadline()
        with self._failures_as_store_failed("write"):
            pairs = enumerate(zip(names, objects, strict=True))
            return [self._put(self._objects.path(name), data, now - at * _STEP_NS, deadline) for at, (name, data) in pairs]

    def drop(self, names: Sequence[str]) -> None:
        with self._failures_as_store_failed("remove"):
            freed = sum(remove_file(self._objects.path(name)) for name in names)
            if freed:
                self._writer.removed(freed)

    def attach(self, arena: memoryview) -> None:
        """Nothing to do: files are read into any memory."""

    def names(self) -> Iterator[tuple[str, int]]:
        with self._failures_as_store_failed("list"):
            for entry in self._objects.objects():
                yield entry.name, entry.size

    def stat(self) -> StoreStat:
        with self._failures_as_store_failed("list"):
            sizes = [entry.size for entry in self._objects.objects()]
            drafts = len(self._writer.draft_sizes())
        details = {"folder": self._folder, "being written": str(drafts)}
        with contextlib.suppress(FileNotFoundError):
            disk = os.statvfs(self._folder)
            details["free on the disk"] = f"{disk.f_bavail * disk.f_frsize / 2**30:.1f} GiB"
        return StoreStat(self.kind, len(sizes), sum(sizes), self._limit, details)

    def clear(self) -> int:
        with self._failures_as_store_failed("clear"):
            count = 0
            for entry in self._objects.objects():
                count += remove_file(entry.path) > 0
            self._objects.remove_empty_folders()
            if os.path.exists(drafts_folder(self._folder)):
                self.tidy()
            return count

    def close(self) -> None:
        """Nothing to do: no file stays open between calls."""

    def tidy(self) -> None:
        """Remove the drafts of writers that died, and count the bytes in use."""
        self._writer.tidy()

    # ── looking and reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, path: str, now_ns: int) -> bool:
        found = plain_stat(path)
        if found is None:
            return False
        self._touch(path, found, now_ns)
        return True

    def _get(self, path: str, into: memoryview, now_ns: int) -> int:
        fd = open_plain(path, os.O_RDONLY)
        if fd is None:
            return MISSING
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return MISSING
            if found.st_size > len(into):
                return OVERSIZED
            count = read_all(fd, into[: found.st_size])
            self._touch(fd, found, now_ns)
            return count
        finally:
            os.close(fd)

    def _touch(self, at: str | int, found: os.stat_result, now_ns: int) -> None:
        """Set the time of use, at most once every `touch_s`: it is a write. A read-only file keeps its time."""
        if abs(now_ns - found.st_mtime_ns) >= self._touch_ns:
            with contextlib.suppress(OSError):
                os.utime(at, ns=(now_ns, now_ns))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, path: str, data: memoryview, now_ns: int, deadline: float) -> bool:
        found = plain_stat(path)
        if found is not None and found.st_size == len(data):
            self._touch(path, found, now_ns)
            return True
        try:
            return self._writer.write(path, data, now_ns, deadline)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            raise

    @contextlib.contextmanager
    def _failures_as_store_failed(self, what: str) -> Iterator[None]:
        try:
            yield
        except LockBusy:
            raise StoreFailed(f"cannot {what} in {self._folder}: another process holds its lock") from None
        except OSError as error:
            raise StoreFailed(f"cannot {what} in {self._folder}: {error.strerror or error}") from error


# ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_file(url: StoreUrl, timeout_s: float, limit_bytes: int | None, create: bool) -> Store:
    folder = _folder_at(url.path)
    if create:
        prepare_folder(folder)
        limit_bytes = DEFAULT_LIMIT_BYTES if limit_bytes is None else limit_bytes
    else:
        _demand_folder(folder, create=False)
    store = FileStore(folder, timeout_s, limit_bytes)
    if create:
        with _usable(folder), contextlib.suppress(LockBusy):
            store.tidy()
    return store


def prepare_folder(path: str) -> None:
    """Create the folder and the subfolder for drafts. Raises BadStore with the reason where that is impossible."""
    folder = _folder_at(path)
    drafts = drafts_folder(folder)
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
    """Turns errors of preparing a folder into BadStore, except a full disk: stored objects can still be read then."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise BadStore(f"{folder} cannot be a store: its file system has no locks ({_reason(error)})") from error
        if error.errno == errno.EROFS or error.errno not in _NO_ROOM:
            raise BadStore(f"{folder} cannot be a store: {error.filename or folder}: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
