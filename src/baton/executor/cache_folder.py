"""The folder of files that can be recreated: converted models and compiled kernels. Reads its environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`BATON_CACHE`, else `baton` under XDG_CACHE_HOME, else under ~/.cache. Not created here."""
    own = os.environ.get("BATON_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "baton"
