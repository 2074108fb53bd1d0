"""A histogram for the event loop's thread, and the buckets of each quantity.

`prometheus_client.Histogram` takes two locks and walks its buckets for each observation. Tokens are observed here at every
delivery of every stream, so an observation is one bisection and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
STAGE_S = (0.001, 0.005, 0.01, 0.025, *WHOLE_S)
"""Of queue, prefill and decode, which are shorter than the whole."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
MOVE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class UnlockedHistogram(Collector):
    """Observed and collected on one thread."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float], labels: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._help = help_text
        self._bounds = tuple(float(bound) for bound in buckets)
        self._labels = dict(labels or {})
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), cumulative(self._bounds, self._counts), self._sum)
        yield family


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), as the exposition format has them. `counts` has one more: those beyond."""
    made: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*(repr(float(bound)) for bound in bounds), "+Inf"), counts, strict=True):
        total += count
        made.append((bound, total))
    return made
