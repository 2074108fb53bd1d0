"""What is read off a profile: gaps, however kernels overlap, and which kernels took the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.gpu_profile import Span, attention_us, busiest, gaps_us, idle_share, turns, within

TIMES = st.integers(0, 200)
SPANS = st.lists(st.tuples(TIMES, st.integers(1, 30)), min_size=1, max_size=40).map(
    lambda pairs: [Span("k", float(begin), float(begin + length)) for begin, length in sorted(pairs)]
)


@given(SPANS)
def test_gaps_and_busy_time_make_up_the_whole(spans: list[Span]) -> None:
    busy = {at for span in spans for at in range(int(span.begin_us), int(span.end_us))}
    whole = max(span.end_us for span in spans) - spans[0].begin_us
    assert sum(gaps_us(spans)) == whole - len(busy)
    assert idle_share(spans) == pytest.approx(1 - len(busy) / whole)


@given(SPANS, st.floats(0, 20))
def test_only_gaps_that_are_long_enough_count(spans: list[Span], least_us: float) -> None:
    assert 0 <= idle_share(spans, least_us) <= idle_share(spans) < 1


def test_nothing_seen_is_all_idle() -> None:
    assert idle_share([]) == 1.0
    assert within([], 0.1, 0.9) == []


def test_the_edges_can_be_left_out() -> None:
    spans = [Span(str(at), float(at), at + 1.0) for at in range(100)]
    assert [span.name for span in within(spans, 0.2, 0.9)] == [str(at) for at in range(20, 90)]


def test_kernels_are_told_apart_by_name() -> None:
    spans = [Span("attend_decode", 0, 5), Span("gemm", 6, 16), Span("attend_decode", 20, 27), Span("Memcpy DtoD", 30, 31)]
    assert attention_us(spans) == 12
    lines = busiest(spans, steps=2, count=2).splitlines()
    assert lines[0].split() == ["6.0", "µs", "a", "step", "in", "1.0", "calls", "attend_decode"]
    assert lines[1].endswith("gemm")


def test_what_a_kernel_waits_for_the_one_before_is_not_its_own() -> None:
    copy, late = Span("Memcpy DtoH", 11, 12), Span("late", 40, 42)
    spans = [Span("qkv", 0, 10), Span("attend_early", 4, 25), copy, Span("o", 20, 31), late]
    assert turns(spans) == [Span("qkv", 0, 10), copy, Span("attend_early", 10, 25), Span("o", 25, 31), late]
    assert attention_us(spans) == 15
