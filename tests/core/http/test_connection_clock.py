"""When a client has had time enough, and when it has not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.http.connection_clock import ConnectionClock, ConnectionPhase, Overdue, TimeLimits

LIMITS = TimeLimits(
    idle_s=70, header_s=20, body_s=30, body_bytes_a_s=1000, rest_s=5, closing_s=2, unread_s=600
)  # fmt: skip


def at(clock: ConnectionClock) -> Callable[[float], Overdue | None]:
    return lambda now_s: clock.overdue(now_s, 0, is_blocked=False)


@pytest.mark.parametrize(
    ("phase", "limit_s", "told"),
    [
        (ConnectionPhase.IDLE, 70, Overdue.IDLE),
        (ConnectionPhase.HEADER, 20, Overdue.HEADER),
        (ConnectionPhase.BODY, 30, Overdue.BODY),
        (ConnectionPhase.REST, 5, Overdue.REST),
        (ConnectionPhase.CLOSING, 2, Overdue.CLOSING),
    ],
)
def test_every_phase_but_an_answer_has_its_limit(phase: ConnectionPhase, limit_s: float, told: Overdue) -> None:
    clock = ConnectionClock(LIMITS, 0)
    clock.enter(phase, 0)
    assert at(clock)(limit_s - 0.1) is None
    assert at(clock)(limit_s) is told


def test_bytes_that_trickle_do_not_prolong_a_header() -> None:
    clock = ConnectionClock(LIMITS, 0)
    for now_s in range(20):
        clock.enter(ConnectionPhase.HEADER, now_s)
    assert at(clock)(20) is Overdue.HEADER


def test_a_body_at_the_least_rate_may_take_its_time_and_a_slower_one_may_not() -> None:
    clock = ConnectionClock(LIMITS, 0)
    clock.enter(ConnectionPhase.BODY, 0)
    for now_s in range(1, 1000):
        clock.count_body(1000)
        assert at(clock)(now_s) is None
    assert at(clock)(999 + 29.9) is None
    assert at(clock)(999 + 30) is Overdue.BODY


@given(st.lists(st.tuples(st.floats(0.1, 590), st.integers(1, 10**6)), max_size=50))
def test_a_reader_that_takes_anything_now_and_then_is_never_cut(reads: list[tuple[float, int]]) -> None:
    clock = ConnectionClock(LIMITS, 0)
    clock.enter(ConnectionPhase.ANSWER, 0)
    now_s, unsent = 0.0, 10**8
    assert clock.overdue(now_s, unsent, is_blocked=True) is None
    for pause_s, taken in reads:
        now_s, unsent = now_s + pause_s, unsent - taken
        assert clock.overdue(now_s, unsent, is_blocked=True) is None


def test_a_reader_that_takes_nothing_is_given_up_also_of_an_answer_that_is_complete() -> None:
    for phase in (ConnectionPhase.ANSWER, ConnectionPhase.IDLE):
        clock = ConnectionClock(LIMITS, 0)
        clock.enter(phase, 0)
        assert [clock.overdue(now_s, 100, is_blocked=True) for now_s in (1, 300, 599)] == [None] * 3
        assert clock.overdue(601, 100, is_blocked=True) is Overdue.UNREAD


def test_a_stream_that_grows_faster_than_it_is_read_is_not_cut_while_it_may_grow() -> None:
    clock = ConnectionClock(LIMITS, 0)
    clock.enter(ConnectionPhase.ANSWER, 0)
    assert [clock.overdue(now_s, now_s, is_blocked=False) for now_s in range(0, 6000, 100)] == [None] * 60
