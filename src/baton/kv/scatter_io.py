"""Scattered memory that a socket takes from, or fills, bit by bit.

Owns the arithmetic of how far it has come. Pieces of one size are kept together, so that moving on costs the same however
many there are.
"""

from __future__ import annotations

from collections import deque


class _Run:
    """Pieces of one size."""

    __slots__ = ("done", "left", "pieces", "size")

    def __init__(self, pieces: list[memoryview]) -> None:
        self.pieces = pieces
        self.size = len(pieces[0])
        self.done = 0
        self.left = self.size * len(pieces)

    def rest(self, limit: int) -> list[memoryview]:
        at, inside = divmod(self.done, self.size)
        found = self.pieces[at : at + limit]
        if inside:
            found[0] = found[0][inside:]
        return found


class ScatterBuffers:
    def __init__(self) -> None:
        self._runs: deque[_Run] = deque()
        self.left = 0
        """Bytes."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, pieces: list[memoryview]) -> None:
        """These, all of one size, come after what is there."""
        if pieces and len(pieces[0]):
            self._runs.append(_Run(pieces))
            self.left += self._runs[-1].left

    def next(self, limit: int) -> list[memoryview]:
        """The first buffers that are not done, no more than `limit`."""
        found: list[memoryview] = []
        for run in self._runs:
            found += run.rest(limit - len(found))
            if len(found) >= limit:
                break
        return found

    def advance(self, size: int) -> None:
        """So many more bytes are done."""
        self.left -= size
        while size:
            run = self._runs[0]
            step = min(size, run.left)
            run.done += step
            run.left -= step
            size -= step
            if not run.left:
                self._runs.popleft()
