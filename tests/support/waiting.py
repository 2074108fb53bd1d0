"""Waiting for what another thread or process does and tells nobody of."""

from __future__ import annotations

import time
from collections.abc import Callable

SETTLED_S_MAX = 30.0


def wait_until(holds: Callable[[], bool], what: str = "what was waited for", seconds: float = SETTLED_S_MAX) -> None:
    deadline_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)
