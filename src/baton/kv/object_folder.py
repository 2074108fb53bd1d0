"""The folder of a file store: where objects lie, which files are objects, and calls on single files.

    DIR/<layout>/<first two of key>/<key>

Only files whose names are those of objects are listed. Keeps nothing in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.errors import InvariantViolated

ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENXIO}
"""Errors that mean: there is no such file."""

_NAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{2})([0-9a-f]{30})")
_LAYOUT = re.compile(r"[0-9a-f]{16}")
_FAN = re.compile(r"[0-9a-f]{2}")
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    name: str
    path: str
    size: int
    used_ns: int


class ObjectFolder:
    def __init__(self, root: str) -> None:
        self._root = root

    def path(self, name: str) -> str:
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvariantViolated(f"{name!r} is not the name of an object")
        layout, fan, rest = match.groups()
        return f"{self._root}/{layout}/{fan}/{fan}{rest}"

    def _folders(self) -> Iterator[tuple[str, str, str]]:
        """Layout, first two of the key, path."""
        for layout in folder_entries(self._root):
            if _LAYOUT.fullmatch(layout.name) and layout.is_dir(follow_symlinks=False):
                for fan in folder_entries(layout.path):
                    if _FAN.fullmatch(fan.name) and fan.is_dir(follow_symlinks=False):
                        yield layout.name, fan.name, fan.path

    def objects(self) -> Iterator[ObjectEntry]:
        for layout, fan, folder in self._folders():
            for entry in folder_entries(folder):
                if _KEY.fullmatch(entry.name) and entry.name.startswith(fan):
                    found = plain_stat(entry.path)
                    if found is not None:
                        yield ObjectEntry(f"{layout}/{entry.name}", entry.path, found.st_size, found.st_mtime_ns)

    def remove_empty_folders(self) -> None:
        """Those with anything in them stay; who writes meanwhile makes them again."""
        folders = [path for _, _, path in self._folders()]
        for path in folders + sorted({os.path.dirname(path) for path in folders}):
            with contextlib.suppress(OSError):
                os.rmdir(path)


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


def folder_entries(folder: str) -> list[os.DirEntry[str]]:
    """Of a folder that may be gone."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def plain_stat(path: str) -> os.stat_result | None:
    """Of a plain file; None for whatever else is there, or nothing."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    return found if stat.S_ISREG(found.st_mode) else None


def remove_file(path: str) -> int:
    """Answers the bytes that this freed."""
    found = plain_stat(path)
    if found is None:
        return 0
    try:
        os.unlink(path)
    except FileNotFoundError:
        return 0
    return found.st_size


def read_all(fd: int, into: memoryview) -> int:
    """Fewer bytes than asked for where the file has become shorter."""
    at = 0
    while at < len(into):
        count = os.readv(fd, [into[at:]])
        if not count:
            break
        at += count
    return at


def write_all(fd: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += os.write(fd, data[at:])
