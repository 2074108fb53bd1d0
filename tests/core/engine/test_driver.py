"""The loop around a Worker: every effect reaches its receiver and no other, and ticks come when they are due."""

from __future__ import annotations

from typing import get_args

import pytest

from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.orders import Accepted
from baton.core.engine.plan import NO_INT32S, StepPlan, StepResult
from baton.core.engine.request import Serial
from baton.core.engine.worker import Effect, Event, FrontEndLost, GroupRefused, Launch, StepDone, Tick
from baton.core.errors import InvariantViolated, Refusal, RefusalCode
from baton.core.handover.messages import Adopted, Fence, Handover, PeerEffect, PeerId, Tell
from baton.core.tiers.transfers import FenceTransfer, StorageEffect, TransferId

HANDOVER = Handover(PeerId("p"), 1, 1)
PLAN = StepPlan(1, 0)
RESULT = StepResult(1, NO_INT32S, *[NO_INT32S] * 5)  # type: ignore[arg-type]


class Answering:
    """Stands where a Worker is: answers each event with the effects that a test gave it."""

    def __init__(self) -> None:
        self.heard: list[tuple[Event, int]] = []
        self.effects: list[Effect] = []
        self.deadline: int | None = None

    def handle(self, event: Event, now_us: int) -> list[Effect]:
        self.heard.append((event, now_us))
        effects, self.effects = self.effects, []
        return effects

    def next_deadline(self) -> int | None:
        return self.deadline


class Around:
    """A driver whose receivers keep what they are given, with the name of the receiver."""

    def __init__(self, tick_in_flight_us: int | None = None) -> None:
        self.now_us = 5
        self.worker = Answering()
        self.received: list[tuple[str, Effect]] = []
        self.driver = WorkerDriver(
            self.worker,
            lambda: self.now_us,
            launch=lambda effect: self.received.append(("launch", effect)),
            answer=lambda effect: self.received.append(("answer", effect)),
            peers=lambda effect: self.received.append(("peers", effect)),
            storage=lambda effect: self.received.append(("storage", effect)),
            tick_in_flight_us=tick_in_flight_us,
        )

    def launch(self) -> None:
        self.worker.effects = [Launch(PLAN)]
        self.driver.tick()


def test_each_effect_goes_to_its_receiver_in_the_order_of_the_worker() -> None:
    around = Around()
    effects: list[Effect] = [
        Tell(HANDOVER.peer, Adopted(1, 1)),
        Accepted(1, (Serial(1),)),
        Launch(PLAN),
        FenceTransfer(TransferId(1)),
        Fence(HANDOVER),
        GroupRefused(2, Refusal(RefusalCode.QUEUE_FULL, "full")),
    ]
    around.worker.effects = list(effects)
    assert around.driver.handle(FrontEndLost()) == effects
    assert around.worker.heard == [(FrontEndLost(), 5)]
    names = ["peers", "answer", "launch", "storage", "peers", "answer"]
    assert around.received == list(zip(names, effects, strict=True))


def test_every_kind_of_effect_has_exactly_one_receiver() -> None:
    groups = [(Launch,), *(get_args(union) for union in (Answer, PeerEffect, StorageEffect))]
    kinds = [kind for group in groups for kind in group]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == set(get_args(Effect))


@pytest.mark.parametrize("effect", [Fence(HANDOVER), FenceTransfer(TransferId(1))])
def test_an_order_that_nobody_carries_out_is_a_bug(effect: Effect) -> None:
    worker = Answering()
    driver = WorkerDriver(worker, lambda: 0, launch=lambda _: None, answer=lambda _: None)
    worker.effects = [effect]
    with pytest.raises(InvariantViolated, match="nobody here carries out"):
        driver.tick()


def test_steps_are_in_flight_from_their_launch_until_their_result_is_handed_in() -> None:
    around = Around()
    around.launch()
    around.launch()
    assert around.driver.steps_in_flight == 2
    around.driver.handle(StepDone(RESULT))
    assert around.driver.steps_in_flight == 1
    assert [type(event) for event, _ in around.worker.heard] == [Tick, Tick, StepDone]


def test_a_tick_is_due_from_the_deadline_on() -> None:
    around = Around()
    assert not around.driver.is_due
    for deadline, due in ((6, False), (5, True), (4, True)):
        around.worker.deadline = deadline
        assert around.driver.is_due is due


def test_with_a_step_in_flight_its_end_is_waited_for() -> None:
    around = Around()
    around.worker.deadline = 7
    assert around.driver.wake_us() == 7
    around.launch()
    assert around.driver.wake_us() is None


def test_where_leases_run_on_they_are_looked_at_while_a_step_computes_but_not_too_often() -> None:
    around = Around(tick_in_flight_us=100)
    around.launch()
    assert around.driver.wake_us() is None
    for deadline, wake in ((7, 105), (104, 105), (300, 300)):
        around.worker.deadline = deadline
        assert around.driver.wake_us() == wake
