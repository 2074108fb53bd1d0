"""Prefills that an instance holds for its peers: what one needs is held, and it begins once the peer has granted room.

On the short path a held prefill has its slot and all its blocks. On the general path it is only numbered, and waits in the
queue once it begins. Nothing decodes: the planning of its last chunk makes a request HANDING_OVER, and there it stays, slot
and blocks with it, until it is ordered to stop.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np

from baton.core.engine.billing import Billing
from baton.core.engine.prefix import Key
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.records import Request
from baton.core.engine.request import Move, Phase, Serial, Submission
from baton.core.engine.reserve import blocks_for
from baton.core.engine.restoring import KvRestoring
from baton.core.engine.running_set import RunningSet
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.waiting_queue import WaitingQueue


class HeldPrefills(Protocol):
    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        """Hold what a prefill will need; None where that is not to be had now."""

    def begin(self, serial: Serial) -> None:
        """The peer has granted room: compute it when its turn comes."""

    def seek(self, seeker: Hashable, submission: Submission, keys: list[Key]) -> bool:
        """Have the store asked for what a request that is to be held will start with. False: not now."""


class PrefillsWithBlocks:
    """For the short path: a slot and all blocks are taken with `hold`."""

    def __init__(self, running: RunningSet, lookup: PrefixLookup, billing: Billing, restoring: KvRestoring) -> None:
        self._running = running
        self._lookup = lookup
        self._billing = billing
        self._restoring = restoring
        self._begun: set[int] = set()
        """Rows that may be computed as soon as what host memory has of them is here."""

    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        running, slots = self._running, self._running.slots
        running.now_us = now_us
        if not slots.has_room:
            return None
        request = running.new_request(submission, keys, limit)
        hit = self._lookup.find(request)
        if self._lookup.blocks_to_take(request.tokens_at_start, hit) > running.pool.available:
            del running.requests[request.serial]
            return None
        rows = self._restoring.host_rows(request, hit)
        if len(rows):
            self._restoring.restore(request, hit, rows, protected=False)
            return request.serial
        slot = running.occupy(request, hit, Move.ADMIT)
        whole = blocks_for(request.tokens_at_start, running.config.block_size)
        slots.append_blocks(slot, running.pool.take(whole - len(hit.blocks)))
        self._billing.start(request, hit.computed, now_us)
        return request.serial

    def begin(self, serial: Serial) -> None:
        running = self._running
        slot = running.slot_of(running.requests[serial])
        if running.slots.restoring[slot]:
            self._begun.add(slot)
        else:
            running.prefilling.append(slot)

    def seek(self, seeker: Hashable, submission: Submission, keys: list[Key]) -> bool:
        wanted = Request(Serial(-1), submission, 0, keys, self._running.now_us, outputs=submission.generated)
        return self._restoring.seek(seeker, wanted)

    def restored(self, slot: int) -> None:
        """What host memory had of a row is in its blocks."""
        running = self._running
        running.move(running.occupant(slot), Move.ADMIT)
        if slot in self._begun:
            self._begun.remove(slot)
            running.prefilling.append(slot)

    def forget_row(self, slot: int) -> None:
        self._begun.discard(slot)


class PrefillsForQueue:
    """For the general path: a source of rows, whose requests wait outside the queue until they begin."""

    is_due = False

    def __init__(self, running: RunningSet, queue: WaitingQueue) -> None:
        self._running = running
        self._queue = queue
        self._held: dict[Serial, Request] = {}
        """For offers that were not answered yet."""

    @property
    def waiting(self) -> int:
        return len(self._held)

    @property
    def stalled(self) -> int:
        return int(np.count_nonzero(self._running.slots.phase == Phase.HANDING_OVER))

    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        """Only number it: what it needs is found when the queue comes to it."""
        self._running.now_us = now_us
        request = self._running.new_request(submission, keys, limit)
        self._held[request.serial] = request
        return request.serial

    def begin(self, serial: Serial) -> None:
        self._queue.push(self._held.pop(serial))

    def seek(self, seeker: Hashable, submission: Submission, keys: list[Key]) -> bool:
        """The store is asked from the queue."""
        del seeker, submission, keys
        return True

    def begin_rows(self, step: StepBuilder) -> None:
        """Its rows begin from the queue."""

    def withdraw(self, request: Request) -> bool:
        return self._held.pop(request.serial, None) is not None

    def forget_row(self, slot: int) -> None:
        """It has no rows of its own."""
