"""Counts of spans on the page of metrics: zero where no traces are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class SpanTotals(NamedTuple):
    exported: int = 0
    dropped: int = 0


class SpanCounts(Collector):
    def __init__(self, totals: Callable[[], SpanTotals] = SpanTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        totals = self._totals()
        yield CounterMetricFamily("baton_spans_exported", "Spans that the collector of traces took", value=totals.exported)
        text = "Spans that were dropped because the collector of traces did not take them, or not in time"
        yield CounterMetricFamily("baton_spans_dropped", text, value=totals.dropped)
