"""Statistics: percentiles, a bounded sample, a bounded timeline.

Owns the arithmetic of the benchmark. Everything here keeps a fixed amount of memory however long a run is: a
`Sample` beyond its capacity keeps a uniform random subset, a `BoundedTimeline` beyond its capacity doubles its bucket width.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence

import msgspec

SAMPLE_CAPACITY = 1_000_000
TIMELINE_BUCKETS = 4096
TIMELINE_BUCKET_S = 0.25


class Distribution(msgspec.Struct, frozen=True):
    """Summary of many values of one unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    min: float
    max: float


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of `ordered` (ascending, not empty) lies, linearly interpolated."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"a percentile is between 0 and 1, not {fraction}")
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def describe(values: Sequence[float]) -> Distribution | None:
    """None when there is nothing to describe."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        min=ordered[0],
        max=ordered[-1],
    )


def median(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.5)


class Sample:
    """Values as they come: all of them up to `capacity`, then a uniform random subset (reservoir sampling)."""

    def __init__(self, capacity: int = SAMPLE_CAPACITY, seed: int = 0) -> None:
        self._capacity = capacity
        self._draw = random.Random(seed)
        self._values = array("d")
        self.seen = 0

    def add(self, value: float) -> None:
        self.seen += 1
        if len(self._values) < self._capacity:
            self._values.append(value)
            return
        place = self._draw.randrange(self.seen)
        if place < self._capacity:
            self._values[place] = value

    @property
    def values(self) -> Sequence[float]:
        return self._values


class BoundedTimeline:
    """Sums by time bucket since the start of a run."""

    def __init__(self, bucket_s: float = TIMELINE_BUCKET_S, buckets_max: int = TIMELINE_BUCKETS) -> None:
        self.bucket_s = bucket_s
        self._buckets_max = buckets_max
        self._counts: list[int] = []

    def add(self, at_s: float, amount: int = 1) -> None:
        while (bucket := max(0, int(at_s / self.bucket_s))) >= self._buckets_max:
            self._halve()
        if bucket >= len(self._counts):
            self._counts.extend([0] * (bucket + 1 - len(self._counts)))
        self._counts[bucket] += amount

    @property
    def counts(self) -> Sequence[int]:
        return self._counts

    def _halve(self) -> None:
        """Merge pairs of buckets."""
        if len(self._counts) % 2:
            self._counts.append(0)
        self._counts = [self._counts[i] + self._counts[i + 1] for i in range(0, len(self._counts), 2)]
        self.bucket_s *= 2
