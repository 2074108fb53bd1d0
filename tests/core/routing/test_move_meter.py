"""What a router measures of moves after a preemption, and tells instances with each submission."""

from __future__ import annotations

import pytest

from baton.core.engine.request import FinishReason
from baton.core.routing.config import RouterConfig
from tests.support.routing import PREEMPTED, Bench, ended, facts, submission


def two_instances() -> Bench:
    bench = Bench(RouterConfig())
    for name in ("a", "b"):
        bench.join(facts(name))
    return bench


def moved(bench: Bench, took_us: int) -> None:
    """A request of 40 tokens yields with ten delivered, and has its next token `took_us` later."""
    _, send = bench.open(submission(f"moves {bench.now_us}"))
    bench.came(send, *range(10))
    bench.came(send, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
    bench.pass_us(took_us)
    again = bench.sent()
    bench.take(again)
    bench.came(again, 10)
    bench.came(again, 11, end=ended(FinishReason.STOP))


def told(bench: Bench) -> float | None:
    """What the next request's instance is told."""
    bench.arrive(submission(f"told {bench.now_us}"))
    return bench.sent().group[0].move_us_per_token


def test_nothing_is_told_before_a_move_was_measured() -> None:
    assert told(two_instances()) is None


def test_a_move_counts_from_the_preemption_to_the_next_token_per_token_of_the_sequence() -> None:
    bench = two_instances()
    moved(bench, 500_000)
    assert told(bench) == 500_000 / 50


def test_the_newest_moves_weigh_most() -> None:
    bench = two_instances()
    moved(bench, 500_000)
    moved(bench, 1_000_000)
    assert told(bench) == pytest.approx(10_000 * 0.8 + 20_000 * 0.2)


def test_a_request_that_was_never_preempted_is_not_measured() -> None:
    bench = two_instances()
    _, send = bench.open(submission("lost"))
    bench.came(send, 1)
    bench.came(send, end=ended(FinishReason.ERROR))
    again = bench.sent()
    bench.take(again)
    bench.now_us += 1_000_000
    bench.came(again, 2)
    assert told(bench) is None
