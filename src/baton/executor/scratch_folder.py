"""Temporary folders that the next start removes if their process was killed.

The process holds a lock on a file inside for as long as it lives; the kernel releases it, however the process ends:

    baton-x1y2z3/.lock     locked: in use     not locked: left behind     absent: not one of ours, or about to be renamed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

LOCK = ".lock"
ENTRIES_MAX = 10_000
"""Entries with the prefix that are looked at; those without it may be any number, since a temporary folder is shared."""


class ScratchFolder:
    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mode 0700
        self._lock = os.open(self.path / f"{LOCK}.new", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under its name only when it is locked: at no moment does the folder look left behind.
        (self.path / f"{LOCK}.new").rename(self.path / LOCK)

    def rename(self, target: Path) -> None:
        """Give the folder its final name. Raises OSError where that exists."""
        (self.path / LOCK).unlink()
        self.path.rename(target)

    def remove(self) -> None:
        remove_lock_last(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[ScratchFolder]:
    """A new folder, removed afterwards unless it was renamed."""
    folder = ScratchFolder(prefix, parent)
    try:
        yield folder
    finally:
        folder.remove()


def sweep(parent: Path, prefix: str) -> int:
    """Remove folders of this user with that prefix whose process is gone; returns how many."""
    try:
        with os.scandir(parent) as entries:
            found = list(islice((entry for entry in entries if entry.name.startswith(prefix)), ENTRIES_MAX))
    except OSError:
        return 0
    return sum(_remove_if_left_behind(Path(entry.path)) for entry in found if _is_ours(entry))


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False


def _remove_if_left_behind(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_lock_last(folder)
    except OSError:
        return False  # its process lives, or another one sweeps
    finally:
        os.close(lock)
    return True


def remove_lock_last(folder: Path) -> None:
    """Remove a folder, if it is there. If this process is killed meanwhile, the next start can go on."""
    with contextlib.suppress(OSError):
        for child in folder.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != LOCK:
                child.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
