"""Prefills that an instance holds for its peers: each begins once the peer has granted room.

On the short path a held prefill has its slot and all its blocks. On the general path it only has a serial, and waits in the
queue once it begins. Nothing decodes: when its last chunk is planned a request becomes HANDING_OVER, and keeps its slot and
blocks until it is ordered to stop.
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
        """Hold what a prefill needs; None if that is not available now."""

    def begin(self, serial: Serial) -> None:
        """The peer has granted room: compute it in its turn."""

    def prefetch(self, requester: Hashable, submission: Submission, keys: list[Key]) -> bool:
        """Have the store asked for the KV that a request to be held starts with. False: not possible now, try again."""


class PrefillsWithBlocks:
    """For the short path: `hold` takes a slot and all blocks."""

    def __init__(self, running: RunningSet, lookup: PrefixLookup, billing: Billing, restoring: KvRestoring) -> None:
        self._running = running
        self._lookup = lookup
        self._billing = billing
        self._restoring = restoring
        self._begun: set[int] = set()
        """Rows to compute as soon as their KV from host memory has arrived."""

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

    def prefetch(self, requester: Hashable, submission: Submission, keys: list[Key]) -> bool:
        wanted = Request(Serial(-1), submission, 0, keys, self._running.now_us, outputs=submission.generated)
        return self._restoring.prefetch(requester, wanted)

    def restored(self, slot: int) -> None:
        """The KV of a row that was in host memory is in its blocks."""
        running = self._running
        running.move(running.occupant(slot), Move.ADMIT)
        if slot in self._begun:
            self._begun.remove(slot)
            running.prefilling.append(slot)

    def forget_row(self, slot: int) -> None:
        self._begun.discard(slot)


class PrefillsForQueue:
    """For the general path: a source of rows whose requests wait outside the queue until they begin."""

    is_due = False

    def __init__(self, running: RunningSet, queue: WaitingQueue) -> None:
        self._running = running
        self._queue = queue
        self._held: dict[Serial, Request] = {}
        """Requests whose offers were not answered yet."""

    @property
    def waiting(self) -> int:
        return len(self._held)

    @property
    def stalled(self) -> int:
        return int(np.count_nonzero(self._running.slots.phase == Phase.HANDING_OVER))

    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        """Only give it a serial: slot and blocks are taken when its turn in the queue comes."""
        self._running.now_us = now_us
        request = self._running.new_request(submission, keys, limit)
        self._held[request.serial] = request
        return request.serial

    def begin(self, serial: Serial) -> None:
        self._queue.push(self._held.pop(serial))

    def prefetch(self, requester: Hashable, submission: Submission, keys: list[Key]) -> bool:
        """Does nothing: QueuedRequests asks the store for the requests in the queue."""
        del requester, submission, keys
        return True

    def begin_rows(self, step: StepBuilder) -> None:
        """Does nothing: its rows begin from the queue."""

    def withdraw(self, request: Request) -> bool:
        return self._held.pop(request.serial, None) is not None

    def forget_row(self, slot: int) -> None:
        """Does nothing: it has no rows of its own."""
