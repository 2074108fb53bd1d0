"""Folders and files that only this user, or root, can have written: checked before what is in them is trusted.

Compiled kernels are executed, keys authenticate, and converted models and stored KV become answers. If another user owns
them or may write them, he decides what runs here. Access control lists and the folders above are not looked at.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from baton.core.errors import SetupError

ROOT = 0
FILE_BYTES_MAX = 1 << 20


class UnsafeFile(SetupError):
    """A file or folder that somebody else may have written; the message says what to do."""


def why_unsafe(owner: int, mode: int, user: int) -> str | None:
    """Why a user must not trust what has this owner and these permissions; None if it is his or root's alone to write."""
    if owner not in (user, ROOT):
        return f"belongs to user {owner}, and this process runs as user {user}"
    if mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {stat.S_IMODE(mode):o})"
    if mode & stat.S_IWGRP:
        return f"can be written by its group (mode {stat.S_IMODE(mode):o})"
    return None


def private_folder(path: Path) -> Path:
    """The folder, made with mode 0700 if it is missing. Raises UnsafeFile, or OSError where it cannot be made."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """A link is followed, unless another user has made it."""
    link = path.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), ROOT):
        raise UnsafeFile(f"the folder {path} is a link of user {link.st_uid}; name the folder itself")
    _check("folder", path, path.stat())


def check_file(path: Path) -> None:
    """A link is refused: where it leads was decided by who made it, and its target may change."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFile(f"{path} is no plain file; remove it")
    _check("file", path, status)


def read_private_file(path: Path) -> bytes:
    """Read a small file that is checked as `check_file` does. Raises UnsafeFile and OSError."""
    check_file(path)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        _check("file", path, os.fstat(file.fileno()))  # of what was opened: the name may have got another file since
        return file.read(FILE_BYTES_MAX)


def _check(what: str, path: Path, status: os.stat_result) -> None:
    why = why_unsafe(status.st_uid, status.st_mode, os.geteuid())
    if why is not None:
        raise UnsafeFile(
            f"the {what} {path} {why}: somebody else could have put things there that Baton runs or trusts. "
            f"Use a folder of your own, or make this one yours alone (chown, chmod go-w) after looking at what is in it"
        )
