"""Timing steps: what is asked of the executor, what a step's time is, and that drivers can share one executor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.bench.gpu_steps import IN_FLIGHT, PREFILL_RUNS, CannotMeasure, SharedPool, StepTimer, stream
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.errors import InvariantViolated
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor

SHAPE = ExecutorShape(slots=24, blocks=600, block_size=4, context_tokens=256)


class Watched(ScriptedExecutor):
    """Keeps the plans, and how many were in flight at most."""

    def __init__(self, shape: ExecutorShape = SHAPE) -> None:
        super().__init__(shape)
        self.plans: list[StepPlan] = []
        self.in_flight = self.most_in_flight = 0

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        super().launch(plan)

    def collect(self) -> StepResult:
        self.in_flight -= 1
        return super().collect()


def ticking(tick_s: float) -> Callable[[], float]:
    now = [0.0]

    def clock_s() -> float:
        now[0] += tick_s
        return now[0]

    return clock_s


def test_a_decode_feeds_the_batch_at_the_context_asked_for() -> None:
    executor = Watched()
    timing = StepTimer(executor, ticking(0.25)).decode(6, 100)
    assert timing.step_s == 0.25
    assert timing.tokens_a_step == 6
    steps = [plan for plan in executor.plans if len(plan.decode_slots)]
    assert {len(plan.decode_slots) for plan in steps} == {6}
    begun = len(steps[0].starts[0].tokens)
    assert begun <= 100 <= begun + len(steps)
    assert executor.most_in_flight == IN_FLIGHT
    assert len(executor.plans[-1].stops) == 6


def test_of_several_windows_the_middle_one_counts() -> None:
    ticks = iter([*[1.0] * 6, *[9.0] * 12, *[2.0] * 12, *[3.0] * 12, *[1.0] * 9])
    now = [0.0]

    def clock_s() -> float:
        now[0] += next(ticks)
        return now[0]

    assert StepTimer(Watched(), clock_s).decode(2, 50).step_s == 3.0


def test_a_prefill_feeds_new_sequences_in_slots_that_nobody_uses() -> None:
    executor = Watched()
    timing = StepTimer(executor, ticking(0.5)).prefill(3, 20, 40)
    assert timing.step_s == 0.5
    fed = [plan for plan in executor.plans if plan.chunks]
    assert len(fed) == PREFILL_RUNS + 1
    assert all([(chunk.begin, chunk.end) for chunk in plan.chunks] == [(40, 60)] * 3 for plan in fed)
    for number, plan in enumerate(fed):
        now = {chunk.slot for chunk in plan.chunks}
        near = {chunk.slot for other in fed[max(0, number - IN_FLIGHT) : number] for chunk in other.chunks}
        assert not now & near


def test_every_block_is_filled_from_a_real_one() -> None:
    executor = Watched()
    StepTimer(executor).fill()
    assert sorted({copy.target for plan in executor.plans for copy in plan.copies}) == list(range(1, SHAPE.blocks))
    assert bool((executor.kv.pool == executor.kv.pool[0]).all())


@pytest.mark.parametrize(
    ("batch", "context", "short"), [(24, 200, "blocks.*600"), (1, 300, "positions.*256"), (25, 10, "slots.*24")]
)
def test_what_does_not_fit_is_said_before_it_is_tried(batch: int, context: int, short: str) -> None:
    with pytest.raises(CannotMeasure, match=short):
        StepTimer(Watched()).decode(batch, context)


def test_drivers_that_follow_one_another_share_an_executor() -> None:
    inner = Watched()
    shared = SharedPool(inner)
    for _ in range(2):
        assert StepTimer(shared, ticking(1.0)).decode(3, 30).tokens_a_step == 3
    assert [plan.step for plan in inner.plans] == list(range(1, len(inner.plans) + 1))


def test_slots_that_were_left_are_emptied_for_the_next() -> None:
    inner = Watched()
    shared = SharedPool(inner)
    half = list(StepTimer(shared).decode_plans(3, 30, 5))[:-1]
    for _ in stream(shared, iter(half)):
        pass
    with pytest.raises(InvariantViolated):
        StepTimer(shared).decode(3, 30)
    other = SharedPool(Watched())
    for _ in stream(other, iter(half)):
        pass
    other.clear()
    assert StepTimer(other).decode(3, 30).tokens_a_step == 3
