"""The folder of files that can be recreated: converted models and compiled kernels. Reads its environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from baton.core.errors import SetupError
from baton.executor.private_files import private_folder
from baton.executor.scratch_folder import sweep

MAKING = ".making-"
"""Prefix of folders in which something for the cache is being made."""
KERNELS = "kernels"
MODELS = "models"


class NoCacheFolder(SetupError):
    """Nothing says where the cache is."""


def cache_folder() -> Path:
    """`BATON_CACHE`, else `baton` under XDG_CACHE_HOME, else under ~/.cache. Not created here. Raises NoCacheFolder."""
    own = os.environ.get("BATON_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else _home() / ".cache") / "baton"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise NoCacheFolder("this user has no home folder: name a folder for Baton's cache in BATON_CACHE") from None


def private_cache(part: str) -> Path:
    """A folder in the cache, made if it is missing. Raises UnsafeFile where another user may have written there."""
    return private_folder(private_folder(cache_folder()) / part)


def sweep_cache() -> None:
    """Remove what killed processes were making."""
    for part in (KERNELS, MODELS):
        sweep(cache_folder() / part, MAKING)
