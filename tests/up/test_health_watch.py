"""Whether a process hangs, by its answers to /health and by whether it runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.up.health_watch import ANSWER_US, ASK_US, HUNG_RUNNING_US, HUNG_US, UNANSWERED_MIN, HealthWatch


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, ANSWER_US)), max_size=60))
def test_a_process_hangs_when_no_good_answer_has_come_for_its_time(outcomes: list[tuple[bool, bool, int]]) -> None:
    now_us = good_us = unanswered = 0
    watch = HealthWatch(now_us)
    for is_good, runs, took_us in outcomes:
        now_us += ASK_US + took_us
        good_us, unanswered = (now_us, 0) if is_good else (good_us, unanswered + 1)
        is_over = now_us - good_us >= (HUNG_RUNNING_US if runs else HUNG_US)
        assert watch.answered(is_good, runs, now_us) == (is_over and unanswered >= UNANSWERED_MIN)


@given(st.integers(HUNG_US, 3_600_000_000))
def test_the_askers_own_sleep_does_not_count(sleep_us: int) -> None:
    watch = HealthWatch(0)
    assert not watch.answered(False, False, sleep_us)
    assert not watch.answered(False, False, sleep_us + ASK_US)
    assert not watch.answered(True, True, sleep_us + 2 * ASK_US)


@pytest.mark.parametrize(("runs", "limit_us"), [(False, HUNG_US), (True, HUNG_RUNNING_US)])
def test_a_process_that_never_answers_is_found_within_its_time_and_one_question(runs: bool, limit_us: int) -> None:
    watch, now_us = HealthWatch(0), ASK_US
    while not watch.answered(False, runs, now_us):
        now_us += ASK_US + ANSWER_US
    assert limit_us <= now_us <= limit_us + ASK_US + ANSWER_US
