"""When a process that ended is started again."""

from __future__ import annotations

from baton.core.errors import EXIT_SETUP
from baton.up.restarts import FAILED_STARTS_MAX, FIRST_DELAY_US, HEALTHY_US, GiveUp, RestartAfter, RestartPolicy

KILLED = -9


def one_life(lives: RestartPolicy, now_us: int, served_us: int, code: int = KILLED) -> int:
    """The time of the restart."""
    lives.started()
    lives.ready(now_us)
    verdict = lives.ended(code, now_us + served_us)
    assert isinstance(verdict, RestartAfter)
    return verdict.at_us - (now_us + served_us)


def test_the_first_restart_is_at_once_and_the_next_ones_later_and_later() -> None:
    lives = RestartPolicy()
    delays = [one_life(lives, 0, served_us=1000) for _ in range(5)]
    assert delays == [0, FIRST_DELAY_US, 2 * FIRST_DELAY_US, 4 * FIRST_DELAY_US, 8 * FIRST_DELAY_US]


def test_the_delay_has_a_bound() -> None:
    lives = RestartPolicy(delay_us_max=1_000_000)
    assert max(one_life(lives, 0, served_us=1) for _ in range(100)) == 1_000_000


def test_a_minute_of_health_clears_the_slate() -> None:
    lives = RestartPolicy()
    for _ in range(6):
        one_life(lives, 0, served_us=1)
    assert one_life(lives, 0, HEALTHY_US - 1) > 0
    assert one_life(lives, 0, HEALTHY_US) == 0


def test_one_that_was_drained_and_left_is_replaced_like_one_that_was_killed() -> None:
    killed, drained = RestartPolicy(), RestartPolicy()
    for _ in range(4):
        assert one_life(killed, 0, 5) == one_life(drained, 0, 5, code=0)


def test_one_that_never_gets_ready_is_given_up_after_five_starts() -> None:
    lives = RestartPolicy()
    for _ in range(FAILED_STARTS_MAX - 1):
        lives.started()
        assert isinstance(lives.ended(1, 0), RestartAfter)
    lives.started()
    assert lives.ended(1, 0) == GiveUp(FAILED_STARTS_MAX)


def test_getting_ready_once_forgives_the_failed_starts() -> None:
    lives = RestartPolicy()
    for _ in range(FAILED_STARTS_MAX - 1):
        lives.started()
        lives.ended(1, 0)
    one_life(lives, 0, 1)
    lives.started()
    assert isinstance(lives.ended(1, 0), RestartAfter)


def test_what_cannot_be_had_is_not_tried_twice() -> None:
    lives = RestartPolicy()
    lives.started()
    assert lives.ended(EXIT_SETUP, 0) == GiveUp(1)


def test_a_code_of_two_after_it_served_is_an_end_like_any_other() -> None:
    assert one_life(RestartPolicy(), 0, 1, code=2) == 0
