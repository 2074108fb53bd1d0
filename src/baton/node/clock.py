"""The clock of every process: microseconds that only grow, and mean nothing to another machine."""

from __future__ import annotations

import time


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000
