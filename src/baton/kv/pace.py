"""A limit on bytes a second, for measuring what a slow network would do."""

from __future__ import annotations


class Pace:
    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def delay_s(self, now_s: float) -> float:
        """How long to wait before the next bytes; 0 is now."""
        return max(0.0, self._free_at_s - now_s)

    def spent(self, size: int, now_s: float) -> None:
        if self._bytes_per_s is not None:
            self._free_at_s = max(self._free_at_s, now_s) + size / self._bytes_per_s
