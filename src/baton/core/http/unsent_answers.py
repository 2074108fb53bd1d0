"""Decides which connections are closed because too much of the answers to all of them waits to be read.

Memory that a client holds by not reading is bounded in all. Beyond the bound connections are closed whose client has read
nothing for a while, and then others; of both the one with most unsent first. So a reader is spared while others only hold.

Has no socket and no clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

ConnectionT = TypeVar("ConnectionT", bound=Hashable)

UNSENT_BYTES_MAX = 64 << 20
STOPPED_S = 10.0
"""Who has read nothing for this long is closed before who reads."""


class _Unsent(NamedTuple):
    bytes: int
    read_s: float


class UnsentAnswers(Generic[ConnectionT]):
    def __init__(self, bytes_max: int = UNSENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._unsent: dict[ConnectionT, _Unsent] = {}
        """Connections with something unsent."""
        self.bytes = 0

    @property
    def is_over(self) -> bool:
        return self.bytes > self._bytes_max

    def note(self, one: ConnectionT, unsent_bytes: int, read_s: float) -> None:
        """So much waits for this client now, who was last seen to read at `read_s`."""
        self.forget(one)
        if unsent_bytes:
            self._unsent[one] = _Unsent(unsent_bytes, read_s)
            self.bytes += unsent_bytes

    def forget(self, one: ConnectionT) -> None:
        known = self._unsent.pop(one, None)
        if known is not None:
            self.bytes -= known.bytes

    def drop(self, now_s: float) -> list[ConnectionT]:
        """Forget as many as are too many; the caller closes them."""
        if self.bytes <= self._bytes_max:
            return []
        dropped = []
        for one in sorted(self._unsent, key=lambda one: self._rank(one, now_s), reverse=True):
            if not self.is_over:
                break
            self.forget(one)
            dropped.append(one)
        return dropped

    def _rank(self, one: ConnectionT, now_s: float) -> tuple[bool, int]:
        unsent = self._unsent[one]
        return now_s - unsent.read_s >= STOPPED_S, unsent.bytes
