"""Stop strings in a growing text.

Promises: the text that comes out never contains a stop string, nor any part of one that is completed later; text is held
back only while a stop string may still be completed by what follows; and the outcome does not depend on how the text
was cut into pieces. Where several stop strings match, the one that is completed first counts (the longest of those),
as if the text had come one character at a time.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not stops or not all(stops):
            raise ValueError("a scanner needs stop strings, and none of them empty")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def hit(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that can be sent now; "" after a hit."""
        if self.hit or not text:
            return ""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, end = match
            self.matched, self._held = buffer[start:end], ""
            return buffer[: end if self._include else start]
        safe = len(buffer) - self._partial(buffer)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """The text still held back at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _partial(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that is a prefix of a stop string."""
        return max(_overlap(buffer, stop) for stop in self._stops)


def _overlap(buffer: str, stop: str) -> int:
    start = max(0, len(buffer) - len(stop) + 1)
    while (start := buffer.find(stop[0], start)) >= 0:
        if stop.startswith(buffer[start:]):
            return len(buffer) - start
        start += 1
    return 0
