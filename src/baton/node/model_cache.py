"""The models in the cache: what they take, when they were last used, and which are used now.

A server holds a shared lock on a file of its model's folder for as long as it runs, and sets the file's time when it starts:

    models/smollm2-b179c9523d0e6a0f/.used      locked: a server of this machine has the model open
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import BatonError
from baton.executor.cache_folder import MAKING, MODELS, cache_folder
from baton.executor.scratch_folder import scratch_folder

USED = ".used"
LOCK_TRIES, LOCK_AGAIN_S = 20, 0.05
_AGE = re.compile(r"([0-9]{1,6})([hdw])")
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


class ModelCacheError(BatonError):
    """A command on the cache that cannot be done; the message says why."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    path: Path
    bytes: int
    used_s: float
    """When a server last started with it, or when it was made; by the wall clock."""
    is_used: bool
    """Whether a server has it open now."""

    @property
    def name(self) -> str:
        return self.path.name


@contextlib.contextmanager
def used_model(folder: Path) -> Iterator[None]:
    """Keep a model of the cache from being pruned inside this block. Does nothing for folders elsewhere."""
    descriptor = _held(folder) if folder.parent == cache_folder() / MODELS else None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _held(folder: Path) -> int | None:
    """The descriptor that holds the lock; None in a cache that cannot be written, which is not pruned either."""
    try:
        descriptor = os.open(folder / USED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        raise _removed(folder) from None
    except OSError:
        return None
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody lists models, which takes a moment, or removes this one
            time.sleep(LOCK_AGAIN_S)
        else:
            return _of_what_is_there(folder, descriptor)
    os.close(descriptor)
    raise ModelCacheError(f"the model {folder.name} is being removed from the cache; start again")


def _of_what_is_there(folder: Path, descriptor: int) -> int:
    """The lock is of use only while its file is in the cache: who held it may have removed the folder meanwhile."""
    if os.fstat(descriptor).st_nlink == 0 or not (folder / USED).exists():
        os.close(descriptor)
        raise _removed(folder)
    os.utime(descriptor)
    return descriptor


def _removed(folder: Path) -> ModelCacheError:
    return ModelCacheError(f"the model {folder.name} was removed from the cache just now; start again")


def cached_models() -> list[CachedModel]:
    """By name."""
    folder = cache_folder() / MODELS
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
    return [_looked_at(path) for path in paths]


def _looked_at(path: Path) -> CachedModel:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    used = path / USED
    return CachedModel(path, size, (used if used.exists() else path).stat().st_mtime, _is_locked(used))


def _is_locked(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def chosen(models: Sequence[CachedModel], names: Sequence[str], older_s: float | None, now_s: float) -> list[CachedModel]:
    """Those with one of these names, whole or up to a dash, and of them those unused for so long; no names: any."""
    for name in names:
        if not any(_is_named(model, name) for model in models):
            known = ", ".join(model.name for model in models) or "none"
            raise ModelCacheError(f"no model in the cache is called {name!r}; there are: {known}")
    named = [model for model in models if not names or any(_is_named(model, name) for name in names)]
    return [model for model in named if older_s is None or now_s - model.used_s >= older_s]


def _is_named(model: CachedModel, name: str) -> bool:
    return model.name == name or model.name.startswith(f"{name}-")


def seconds_of(age: str) -> float:
    """The seconds of an age such as 12h, 30d or 4w."""
    found = _AGE.fullmatch(age)
    if found is None:
        raise ModelCacheError(f"{age!r} is not an age such as 12h, 30d or 4w")
    return float(found[1]) * _SECONDS[found[2]]


def remove_model(model: CachedModel) -> bool:
    """Remove it from the cache; False where a server uses it."""
    try:
        descriptor = os.open(model.path / USED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ModelCacheError(f"{model.path} cannot be removed: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with scratch_folder(MAKING, model.path.parent) as scratch:
            # Moved first: nobody finds it half removed, and what a killed process leaves is swept.
            model.path.rename(scratch.path / "removed")
    except BlockingIOError:
        return False
    except OSError as error:
        raise ModelCacheError(f"{model.path} cannot be removed: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return True


def shown_age(seconds: float) -> str:
    """Such as "3 days ago"."""
    for size_s, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size_s:
            count = int(seconds // size_s)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def now_s() -> float:
    return time.time()
