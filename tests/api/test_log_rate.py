"""However many lines come: few are written, and every one is counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.api.log_rate import KINDS_MAX, LogRate


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 3))), st.integers(1, 3))
def test_every_line_is_written_or_counted(steps: list[tuple[str, float]], lines: int) -> None:
    rate = LogRate(lines, every_s=10)
    now_s, told, writes = 0.0, 0, list[tuple[str, float]]()
    for kind, pause_s in steps:
        now_s += pause_s
        left_out = rate.take(kind, now_s)
        if left_out is not None:
            told += 1 + left_out
            writes.append((kind, now_s))
    told += sum(1 + others for _, others in rate.due(now_s + 10))
    assert told == len(steps)
    for kind, at_s in writes:
        within = [when for other, when in writes if other == kind and at_s <= when < at_s + 5]
        assert len(within) <= 2 * lines  # the end of one window and the beginning of the next


def test_the_first_is_written_at_once_and_the_last_is_told_when_the_window_is_over() -> None:
    rate = LogRate(every_s=10)
    assert [rate.take("bad", 0.1 * n, f"line {n}") for n in range(5)] == [0, None, None, None, None]
    assert rate.due(9) == []
    assert rate.due(10) == [("line 4", 3)]
    assert rate.due(30) == []
    assert rate.take("bad", 31, "line 5") == 0


def test_there_are_not_more_kinds_than_can_be_held() -> None:
    rate = LogRate()
    written = [rate.take(str(n), 0.0) for n in range(1000)]
    assert written.count(0) == KINDS_MAX + 1
