from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.stats import BoundedTimeline, Sample, describe, percentile

FINITE = st.floats(-1e9, 1e9)


@given(st.lists(FINITE, min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    assert percentile(ordered, fraction) == pytest.approx(float(np.percentile(ordered, fraction * 100)), rel=1e-9, abs=1e-6)


def test_a_description_names_mean_and_percentiles() -> None:
    told = describe([float(n) for n in range(1, 102)])
    assert told is not None
    assert (told.count, told.mean, told.p50, told.p90, told.p99, told.min, told.max) == (101, 51, 51, 91, 100, 1, 101)


def test_nothing_measured_is_described_as_nothing() -> None:
    assert describe([]) is None


def test_a_percentile_outside_of_zero_to_one_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile([1.0], 90)


def test_a_sample_keeps_everything_up_to_its_capacity_and_no_more_after() -> None:
    sample = Sample(capacity=100)
    for n in range(100):
        sample.add(float(n))
    assert list(sample.values) == [float(n) for n in range(100)]
    for n in range(100, 10_000):
        sample.add(float(n))
    assert (len(sample.values), sample.seen) == (100, 10_000)
    assert 3000 < sum(sample.values) / 100 < 7000  # still drawn from all of it


@given(st.lists(st.tuples(st.floats(0, 10_000), st.integers(1, 5)), max_size=100))
def test_a_timeline_loses_nothing_and_stays_small(events: list[tuple[float, int]]) -> None:
    timeline = BoundedTimeline(bucket_s=0.25, buckets_max=64)
    for at_s, amount in events:
        timeline.add(at_s, amount)
    assert sum(timeline.counts) == sum(amount for _, amount in events)
    assert len(timeline.counts) <= 64
