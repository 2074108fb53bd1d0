"""Pauses between attempts to connect grow, end, and begin anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.wire.retry_pauses import RetryConfig, RetryPauses

CONFIG = RetryConfig(first_us=50, longest_us=400, held_us=1_000, early_rejections=2, early_rejected_us=70, rejected_us=9_000)


def test_they_double_up_to_a_limit_and_begin_anew_after_a_connection_that_held() -> None:
    pauses = RetryPauses(CONFIG)
    assert [pauses.after(10, 1.0) for _ in range(5)] == [100, 200, 400, 400, 400]
    assert [pauses.after(lasted_us, 1.0) for lasted_us in (1_001, 1_000)] == [50, 100]


def test_after_a_rejection_they_are_short_for_a_while_and_then_long() -> None:
    pauses = RetryPauses(CONFIG)
    assert [pauses.after(10, 1.0, rejected=True) for _ in range(4)] == [70, 70, 9_000, 9_000]
    assert pauses.after(10, 1.0) == 400
    assert pauses.after(10, 1.0, rejected=True) == 70


@given(attempts=st.lists(st.tuples(st.integers(0, 3_000), st.booleans()), max_size=40), share=st.floats(0.5, 1.0))
def test_no_pause_is_longer_than_the_longest(attempts: list[tuple[int, bool]], share: float) -> None:
    pauses = RetryPauses(CONFIG)
    for lasted_us, rejected in attempts:
        assert 0 < pauses.after(lasted_us, share, rejected=rejected) <= (9_000 if rejected else 400)
