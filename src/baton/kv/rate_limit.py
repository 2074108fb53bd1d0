"""A limit on bytes a second, for measuring what a slow network would do."""

from __future__ import annotations

EVENLY_S = 0.005
LATE_S = 0.02
"""A thread that wakes late on a busy machine makes up for so much; a network would not have slept."""


class ByteRateLimit:
    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def delay_s(self, now_s: float) -> float:
        """How long to wait before the next bytes; 0 is now."""
        return max(0.0, self._free_at_s - now_s)

    def at_once(self, size: int) -> int:
        """How much of `size` may go in one go, so that it still flows evenly."""
        return size if self._bytes_per_s is None else min(size, max(1, int(self._bytes_per_s * EVENLY_S)))

    def spent(self, size: int, now_s: float) -> None:
        if self._bytes_per_s is not None:
            is_late = now_s - self._free_at_s <= LATE_S
            self._free_at_s = (self._free_at_s if is_late else now_s) + size / self._bytes_per_s
