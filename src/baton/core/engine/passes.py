"""Filling a step: the general pass, and the short pass of an instance that only prefills.

The general pass plans decodes first, then unfinished prefills, then new requests, within the token budget.

The short pass has no queue, no reserve and no growth: a request has all its blocks before it begins, so a pass plans only
chunks, in the order of arrival, until the token budget is used up. The general pass can serve such an instance too, for
comparison.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton.core.engine.billing import Billing
from baton.core.engine.departing import DepartingRequests
from baton.core.engine.held_prefills import PrefillsWithBlocks
from baton.core.engine.prefills import PrefillChunks, StartedPrefills
from baton.core.engine.pressure import BlockPressure
from baton.core.engine.queued_requests import QueuedRequests
from baton.core.engine.records import Request
from baton.core.engine.reserve import BlockPromises
from baton.core.engine.restoring import RestoredRows
from baton.core.engine.row_source import RowSource
from baton.core.engine.running_set import RunningSet
from baton.core.engine.step_builder import StepBuilder
from baton.core.errors import InvariantViolated


class PressureGauges(NamedTuple):
    preemptions_for_others: int = 0
    preemptions_of_self: int = 0
    chunk_prefill_unsatisfied: int = 0
    reserve_ratio: float = 0.0


NO_PRESSURE = PressureGauges()


class PlanningPass(Protocol):
    def fill(self, step: StepBuilder) -> None:
        """Fill a step."""

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""

    @property
    def asleep(self) -> bool:
        """Whether all open requests wait for a peer or a copy, so that a pass would do nothing."""

    def promised(self) -> int:
        """For the laws: blocks promised to protected rows."""

    def pressure(self) -> PressureGauges:
        """Counts of preemptions and of passes that were short of blocks."""

    def restored(self, slot: int) -> None:
        """The KV of a row that was in host memory is in its blocks: the row may run."""

    def withdraw(self, request: Request) -> None:
        """A waiting request will not run any more."""

    def forget_row(self, slot: int) -> None:
        """A row ends, perhaps before it was in any plan."""


class GeneralPass:
    def __init__(
        self,
        running: RunningSet,
        pressure: BlockPressure,
        promises: BlockPromises,
        prefills: StartedPrefills,
        queued: QueuedRequests,
        restored: RestoredRows,
        departing: DepartingRequests,
        others: tuple[RowSource, ...] = (),
    ) -> None:
        self._running = running
        self._pressure = pressure
        self._promises = promises
        self._prefills = prefills
        self._queued = queued
        self._restored = restored
        self._departing = departing
        self._sources: tuple[RowSource, ...] = (*others, restored)
        self._unsatisfied_passes = 0

    def fill(self, step: StepBuilder) -> None:
        self._pressure.continue_decodes(step)
        self._running.order_stops(step)
        for source in self._sources:
            source.begin_rows(step)
        self._prefills.continue_all(step)
        self._queued.prefetch()
        if step.may_admit:
            self._queued.admit(step)
        self._note(step)

    def _note(self, step: StepBuilder) -> None:
        """Every pass with open requests lowers the reserve, even one that planned nothing: waiting requests get admitted."""
        self._unsatisfied_passes += step.chunk_prefill_unsatisfied
        if self._running.requests or self._departing:
            self._promises.policy.after_pass()

    @property
    def waiting(self) -> int:
        waiting = self._queued.waiting
        for source in self._sources:  # a loop: this is read several times an event
            waiting += source.waiting
        return waiting

    @property
    def asleep(self) -> bool:
        running = self._running
        if running.in_flight or running.stopping or self._queued.is_due:
            return False
        stalled = 0
        for source in self._sources:
            if source.is_due:
                return False
            stalled += source.stalled
        return running.slots.occupied == stalled

    def promised(self) -> int:
        return self._promises.promised(self._running.slots)

    def pressure(self) -> PressureGauges:
        pressure = self._pressure
        ratio = self._promises.policy.ratio
        return PressureGauges(pressure.preemptions_for_others, pressure.preemptions_of_self, self._unsatisfied_passes, ratio)

    def restored(self, slot: int) -> None:
        self._restored.add(slot)

    def withdraw(self, request: Request) -> None:
        if not any(source.withdraw(request) for source in self._sources):
            self._queued.withdraw(request)

    def forget_row(self, slot: int) -> None:
        for source in self._sources:
            source.forget_row(slot)


class BlocksNotHeld(InvariantViolated):
    """A prefill without all of its blocks was to be planned: the short pass cannot get more."""


class ShortPrefillPass:
    waiting = 0

    def __init__(self, running: RunningSet, chunks: PrefillChunks, billing: Billing, held: PrefillsWithBlocks) -> None:
        self._running = running
        self._chunks = chunks
        self._billing = billing
        self._held = held

    def fill(self, step: StepBuilder) -> None:
        self._running.order_stops(step)
        self.prefill_schedule(step)

    def prefill_schedule(self, step: StepBuilder) -> None:
        """Plan chunks in the order of arrival until the budget is used up."""
        running = self._running
        while running.prefilling and step.budget > 0:
            slot = running.prefilling[0]
            if not running.slots.started[slot]:
                self._start(step, slot)
            self._chunks.plan(step, slot)

    def _start(self, step: StepBuilder, slot: int) -> None:
        running, slots = self._running, self._running.slots
        request, size = running.occupant(slot), running.config.block_size
        if slots.held[slot] * size < slots.known[slot]:
            raise BlocksNotHeld(
                f"request {request.serial} has {slots.held[slot]} blocks of {size} "
                f"for a prompt of {slots.known[slot]} tokens"
            )
        self._billing.queued(request, running.now_us)
        running.start_row(step, slot, request.submission.known.copy(), int(slots.computed[slot]))

    @property
    def asleep(self) -> bool:
        running = self._running
        return not (running.in_flight or running.prefilling or running.stopping)

    def promised(self) -> int:
        return 0

    def pressure(self) -> PressureGauges:
        return NO_PRESSURE

    def restored(self, slot: int) -> None:
        self._held.restored(slot)

    def withdraw(self, request: Request) -> None:
        raise InvariantViolated(f"request {request.serial} waits where nothing waits")

    def forget_row(self, slot: int) -> None:
        self._held.forget_row(slot)
