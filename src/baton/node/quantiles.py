"""Quantiles over a sliding time window, in bounded memory. Has no clock: every call passes the time.

Measurements are counted by second and by size bucket. Buckets are exact below 32 and within 1/32 above, so that a second
needs at most a few hundred counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

SECOND_US = 1_000_000
_EXACT_BITS = 5
_HALF = 1 << (_EXACT_BITS - 1)
_VALUE_MAX = (1 << 42) - 1
"""About 50 days."""


def size_of(value: int) -> int:
    """The bucket of a value; larger values never have a smaller bucket."""
    value = min(max(value, 0), _VALUE_MAX)
    shift = max(value.bit_length() - _EXACT_BITS, 0)
    return shift * _HALF + (value >> shift)


def middle_of(size: int) -> int:
    """The value in the middle of a bucket."""
    if size < 2 * _HALF:
        return size
    shift = size // _HALF - 1
    return ((size - shift * _HALF) << shift) + (1 << shift) // 2


class QuantileWindow:
    def __init__(self, seconds: int = 60) -> None:
        self._seconds = seconds
        self._counts: deque[tuple[int, dict[int, int]]] = deque()
        """(second, count by bucket), oldest first."""

    def add(self, value_us: int, now_us: int, weight: int = 1) -> None:
        second = now_us // SECOND_US
        if not self._counts or self._counts[-1][0] < second:
            self._counts.append((second, {}))
            self._forget(second)
        counts = self._counts[-1][1]
        size = size_of(value_us)
        counts[size] = counts.get(size, 0) + weight

    def quantiles(self, fractions: Sequence[float], now_us: int) -> list[int | None]:
        """By nearest rank, for fractions in rising order; None while nothing was measured."""
        self._forget(now_us // SECOND_US)
        counts: dict[int, int] = {}
        for _, of_second in self._counts:
            for size, count in of_second.items():
                counts[size] = counts.get(size, 0) + count
        total = sum(counts.values())
        if total == 0:
            return [None] * len(fractions)
        return _at_ranks(sorted(counts.items()), (max(1, math.ceil(fraction * total)) for fraction in fractions))

    def _forget(self, second: int) -> None:
        while self._counts and self._counts[0][0] <= second - self._seconds:
            self._counts.popleft()


def _at_ranks(counts: list[tuple[int, int]], ranks: Iterable[int]) -> list[int | None]:
    found: list[int | None] = []
    seen, position = 0, -1
    for rank in ranks:
        while seen < rank:
            position += 1
            seen += counts[position][1]
        found.append(middle_of(counts[position][0]))
    return found
