"""What killed processes of this user have left in the temporary folder and in the cache is removed at the next start."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.executor.cache_folder import sweep_cache
from baton.executor.scratch_folder import scratch_folder, sweep

SCRATCH_PREFIX = "baton-"


@contextlib.contextmanager
def process_scratch() -> Iterator[Path]:
    """A temporary folder of this process, removed afterwards. First removes what killed processes have left behind."""
    sweep_leftovers()
    with scratch_folder(SCRATCH_PREFIX) as scratch:
        yield scratch.path


def sweep_leftovers() -> None:
    """Costs one look at each of these folders. What a living process uses stays."""
    sweep(Path(tempfile.gettempdir()), SCRATCH_PREFIX)
    sweep_cache()
