"""A decode whose mask is late yields nothing in a step, and draws the same token in a later one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.config import WorkerConfig
from baton.core.engine.plan import RowOutcome, StepResult
from baton.core.engine.request import Constraint, FinishReason, Sampling
from baton.core.engine.worker import StepDone
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource
from baton.executor.scripted import ScriptedExecutor, undisturbed
from tests.support.driver import VOCABULARY, Driver, shape_of, submission

FREE = Sampling(seed=1, temperature=1.0)
BACKENDS = ((ScriptedBackend.name, ScriptedBackend.version),)


def constrained(seed: int) -> Sampling:
    source = ScriptedSource(seed, VOCABULARY).text()
    return replace(FREE, seed=seed, constraint=Constraint(ScriptedBackend.name, ScriptedBackend.version, source))


def driver_of(is_late: Callable[[], bool] | None, **sizes: int) -> Driver:
    shape = {"slots": 4, "blocks": 64, "block_size": 4, "context_tokens": 128, "step_tokens": 32, "depth": 2, **sizes}
    config = WorkerConfig(**shape, constraint_backends=BACKENDS)
    return Driver(config, ScriptedExecutor(shape_of(config), VOCABULARY, is_late=is_late))


@settings(deadline=None)
@given(
    late=st.lists(st.booleans(), min_size=1, max_size=12).filter(lambda pattern: not all(pattern)),
    depth=st.integers(1, 3),
    burst=st.integers(1, 4),
    blocks=st.integers(14, 40),
)
def test_whenever_masks_are_late_the_tokens_are_the_same(late: list[bool], depth: int, burst: int, blocks: int) -> None:
    pattern, drawn = cycle(late), list[bool]()

    def is_late() -> bool:
        drawn.append(next(pattern))
        return drawn[-1]

    driver = driver_of(is_late, depth=depth, burst=burst, blocks=blocks)
    wishes = [constrained(3), FREE, constrained(4), constrained(5), FREE]
    prompts = [[nth + 1, 2, 3] for nth in range(len(wishes))]
    serials = [
        driver.submit(submission(prompt, 20, sampling=wish, name=str(prompt)))[0]
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    driver.run()
    for serial, prompt, wish in zip(serials, prompts, wishes, strict=True):
        assert driver.outputs[serial] == undisturbed(prompt, wish, 20, VOCABULARY)
    assert driver.worker.scheduler.broken_rows == 0
    assert driver.worker.gauges().sat_out_rows <= sum(drawn)


def test_a_row_without_a_constraint_draws_in_the_step_that_another_sits_out() -> None:
    late = [True] * 5 + [False] * 100
    driver = driver_of(lambda: late.pop(0), depth=1)
    (waits,) = driver.submit(submission([1, 2], 9, sampling=constrained(3), name="a"))
    (free,) = driver.submit(submission([1, 2], 9, sampling=FREE, name="b"))
    for _ in range(6):
        driver.tick(), driver.settle_one()
    assert (len(driver.outputs[waits]), len(driver.outputs[free])) == (1, 6)
    assert driver.worker.gauges().sat_out_rows == 5
    driver.run()
    assert driver.outputs[waits] == undisturbed([1, 2], constrained(3), 9, VOCABULARY)


def test_rows_that_sat_out_have_the_first_turn_in_the_next_step() -> None:
    """With time for one mask a step, three rows take turns."""
    asked = 0

    def is_late() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    driver = driver_of(is_late, depth=1)
    serials = [driver.submit(submission([nth + 1, 2], 30, sampling=constrained(nth), name=str(nth)))[0] for nth in range(3)]
    for _ in range(10):
        asked = 0
        driver.tick(), driver.settle_one()
    counts = [len(driver.outputs[serial]) for serial in serials]
    assert sum(counts) == 3 + 9
    assert max(counts) - min(counts) <= 1


def _after_one_decode(change: Callable[[StepResult], StepResult], wish: Sampling) -> tuple[Driver, FinishReason | None]:
    driver = driver_of(None, depth=1)
    (serial,) = driver.submit(submission([1, 2], 9, sampling=wish))
    driver.tick(), driver.settle_one(), driver.tick()
    driver.in_flight.popleft()
    driver.send(StepDone(change(driver.executor.collect())))
    driver.run()
    return driver, driver.ended[serial].reason


def _sat_out(result: StepResult, known: int) -> StepResult:
    return replace(
        result,
        outcomes=np.array([RowOutcome.SAT_OUT], dtype=np.int8),
        counts=np.zeros(1, dtype=np.int32),
        tokens=result.tokens[:0],
        known=np.array([known], dtype=np.int64),
    )


@pytest.mark.parametrize(
    ("wish", "known"), [(FREE, 3), (constrained(3), 4), (constrained(3), 2)], ids=["no constraint", "one more", "one less"]
)
def test_a_row_that_may_not_sit_out_or_is_not_as_it_was_is_broken(wish: Sampling, known: int) -> None:
    driver, reason = _after_one_decode(lambda result: _sat_out(result, known), wish)
    assert reason is FinishReason.ERROR
    assert driver.worker.scheduler.broken_rows
    assert driver.worker.gauges().sat_out_rows == 0


def test_the_end_of_a_prefill_cannot_sit_out() -> None:
    driver = driver_of(None, depth=1)
    (serial,) = driver.submit(submission([1, 2], 9, sampling=constrained(3)))
    driver.tick()
    driver.in_flight.popleft()
    driver.send(StepDone(_sat_out(driver.executor.collect(), 2)))
    driver.run()
    assert driver.ended[serial].reason is FinishReason.ERROR
