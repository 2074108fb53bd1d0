"""The loop around a Worker: an event in, effects out to their receivers, a tick when one is due.

Owns the routing of effects, the count of steps in flight, and when a tick is due. It has no clock, thread or socket: real
or virtual time comes in as `now_us`, and the parts that run steps, answer clients, talk to peers or move KV are plugged in
as receivers.

    driver.handle(event)        hand in an event: a message, the result of a step, an answer of a peer or a store
    driver.is_due               then plan: `driver.tick()` while this holds
    driver.wake_us()            then wait for the next event, or until then
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, get_args

from baton.core.engine.orders import Accepted
from baton.core.engine.worker import Deliver, Effect, Event, GroupRefused, Launch, StepDone, Tick, Withdrawn
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import PeerEffect
from baton.core.tiers.transfers import StorageEffect

Answer = Accepted | GroupRefused | Deliver | Withdrawn
"""Effects that concern the front end."""


class Driven(Protocol):
    """A Worker, or a wrapper that measures one."""

    def handle(self, event: Event, now_us: int) -> list[Effect]: ...

    def next_deadline(self) -> int | None: ...


class WorkerDriver:
    def __init__(
        self,
        worker: Driven,
        now_us: Callable[[], int],
        *,
        launch: Callable[[Launch], None],
        answer: Callable[[Answer], None],
        peers: Callable[[PeerEffect], None] | None = None,
        storage: Callable[[StorageEffect], None] | None = None,
        tick_in_flight_us: int | None = None,
    ) -> None:
        """`peers`, `storage`: None if the worker has none. `tick_in_flight_us`: interval at which deadlines of leases and
        transfers are checked while a step computes; None: they are checked when it ends."""
        self.steps_in_flight = 0
        """Steps that were launched and whose results were not handed in yet."""
        self._worker = worker
        self._now_us = now_us
        self._launch = launch
        self._tick_in_flight_us = tick_in_flight_us
        self._receivers: dict[type[Effect], Callable[..., None]] = {Launch: self._launched}
        for kinds, receiver in ((Answer, answer), (PeerEffect, peers or _refuse), (StorageEffect, storage or _refuse)):
            self._receivers.update(dict.fromkeys(get_args(kinds), receiver))

    def handle(self, event: Event) -> list[Effect]:
        """Hand in one event and carry out its effects, in order."""
        if type(event) is StepDone:
            self.steps_in_flight -= 1
        effects, receivers = self._worker.handle(event, self._now_us()), self._receivers
        for effect in effects:
            receivers[type(effect)](effect)
        return effects

    def tick(self) -> list[Effect]:
        return self.handle(Tick())

    @property
    def is_due(self) -> bool:
        """Whether a tick is due now."""
        deadline = self._worker.next_deadline()
        return deadline is not None and deadline <= self._now_us()

    def wake_us(self) -> int | None:
        """Time of the next tick if no event comes first; None: an event comes, or there is nothing to do.

        Once no further step may be planned, the end of the oldest step in flight is the next event.
        """
        deadline = self._worker.next_deadline()
        if deadline is None or not self.steps_in_flight:
            return deadline
        return None if self._tick_in_flight_us is None else max(deadline, self._now_us() + self._tick_in_flight_us)

    def _launched(self, effect: Launch) -> None:
        self.steps_in_flight += 1
        self._launch(effect)


def _refuse(effect: PeerEffect | StorageEffect) -> None:
    raise InvariantViolated(f"nobody here carries out {effect}")
