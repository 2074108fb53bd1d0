"""Admission: whether a request fits beside the blocks kept for others, and how it starts.

A newcomer may not take blocks promised to running requests, the reserve, or blocks booked for requests that a peer prefills.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.core.engine.billing import Billing
from baton.core.engine.plan import Copy
from baton.core.engine.prefills import PrefillChunks
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.request import Move, Serial
from baton.core.engine.reserve import BlockPromises
from baton.core.engine.running_set import RunningSet
from baton.core.engine.step_builder import StepBuilder


@dataclass(frozen=True, slots=True)
class Admit:
    hit: PrefixHit
    protected: bool


@dataclass(frozen=True, slots=True)
class MustWait:
    """The request does not fit yet."""


class Bookings:
    """Requests without a slot that will get one, and the blocks each will need."""

    def __init__(self) -> None:
        self._booked: dict[Serial, int] = {}

    def __contains__(self, serial: Serial) -> bool:
        return serial in self._booked

    def __len__(self) -> int:
        return len(self._booked)

    @property
    def blocks(self) -> int:
        return sum(self._booked.values())

    def of(self, serial: Serial) -> int:
        return self._booked[serial]

    def book(self, serial: Serial, blocks: int) -> None:
        self._booked[serial] = blocks

    def cancel(self, serial: Serial) -> None:
        del self._booked[serial]


class Admission:
    def __init__(
        self, running: RunningSet, lookup: PrefixLookup, promises: BlockPromises, chunks: PrefillChunks, billing: Billing
    ) -> None:
        self._running = running
        self._lookup = lookup
        self._promises = promises
        self._chunks = chunks
        self._billing = billing
        self.bookings = Bookings()

    @property
    def has_row(self) -> bool:
        """Whether one more request may have a slot."""
        slots = self._running.slots
        return slots.slots - slots.occupied > len(self.bookings)

    def kept(self) -> int:
        """Blocks that a new request may not take."""
        return self._promises.kept(self._running.slots) + self.bookings.blocks

    def consider(self, request: Request) -> Admit | MustWait:
        """Whether a request's tokens fit beside the blocks kept for others. Changes nothing."""
        hit = self._lookup.find(request)
        protected = self.protects(request)
        fits = self.blocks_needed(request, protected, hit) <= self._running.pool.available - self.kept()
        return Admit(hit, protected) if fits else MustWait()

    def protects(self, request: Request) -> bool:
        """Whether it was preempted max_preemptions times, here or elsewhere, and is never a victim again.

        False where nothing decodes: there nothing is preempted either.
        """
        config = self._running.config
        return not config.role.gives and request.preemptions >= config.max_preemptions

    def blocks_needed(self, request: Request, protected: bool, hit: PrefixHit) -> int:
        """Blocks that must be available to admit it: those of its tokens; if it is protected, those of its limit."""
        return self._lookup.blocks_to_take(request.limit if protected else request.tokens_at_start, hit)

    def start(self, step: StepBuilder, request: Request, hit: PrefixHit, protected: bool) -> None:
        """Give it a row and put its Start and its first chunk into the step."""
        running, slots = self._running, self._running.slots
        slot = running.occupy(request, hit, Move.ADMIT)
        slots.protected[slot] = protected
        self._billing.start(request, hit.computed, running.now_us)
        if hit.copy_from is not None:
            target = running.pool.take(1)
            slots.append_blocks(slot, target)
            step.copies.append(Copy(hit.copy_from, int(target[0])))
        tokens = np.concatenate((request.submission.prompt, request.outputs))
        running.start_row(step, slot, tokens, hit.computed)
        running.prefilling.append(slot)
        self._chunks.plan(step, slot)
