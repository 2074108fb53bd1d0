"""Whether a process hangs, by its answers to /health."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.up.health_watch import ANSWER_US, ASK_US, HUNG_US, HealthWatch


@given(st.lists(st.tuples(st.booleans(), st.integers(0, ANSWER_US)), max_size=40))
def test_a_process_hangs_when_no_good_answer_has_come_for_its_time(outcomes: list[tuple[bool, int]]) -> None:
    now_us = good_us = 0
    watch = HealthWatch(now_us)
    for is_good, took_us in outcomes:
        now_us += ASK_US + took_us
        good_us = now_us if is_good else good_us
        assert watch.answered(is_good, now_us) == (now_us - good_us >= HUNG_US)


@given(st.integers(HUNG_US, 3_600_000_000))
def test_the_askers_own_sleep_does_not_count(sleep_us: int) -> None:
    watch = HealthWatch(0)
    assert not watch.answered(False, sleep_us)
    assert not watch.answered(False, sleep_us + ASK_US)
    assert not watch.answered(True, sleep_us + 2 * ASK_US)


def test_a_process_that_never_answers_is_found_within_its_time_and_one_question() -> None:
    watch, now_us = HealthWatch(0), ASK_US
    while not watch.answered(False, now_us):
        now_us += ASK_US + ANSWER_US
    assert now_us <= HUNG_US + ASK_US + ANSWER_US
