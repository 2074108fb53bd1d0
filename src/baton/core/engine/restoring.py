"""Rows whose KV is copied back from host memory: blocks are taken, the copy is ordered, and the row runs when it has ended.

A copy that fails or is fenced leaves the row with fewer computed tokens; the rest is computed.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from baton.core.engine.billing import Billing
from baton.core.engine.blocks import Pin
from baton.core.engine.ended import EndedRequest
from baton.core.engine.ending import RequestEnding
from baton.core.engine.plan import NO_INT32S, Int32s
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.request import FinishReason, Move, Serial
from baton.core.engine.reserve import blocks_for
from baton.core.engine.running_set import RunningSet
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.tiers.offload import AnyTiers


class KvRestoring:
    def __init__(
        self,
        running: RunningSet,
        queue: WaitingQueue,
        lookup: PrefixLookup,
        billing: Billing,
        ending: RequestEnding,
        tiers: AnyTiers,
    ) -> None:
        self._running = running
        self._queue = queue
        self._lookup = lookup
        self._billing = billing
        self._ending = ending
        self._tiers = tiers

    def host_rows(self, request: Request, hit: PrefixHit) -> Int32s:
        """The rows of host memory that continue the cached prefix; none if computing them again is quicker."""
        rows = self._tiers.host.run(self._lookup.keys_after(request, hit))
        return rows if len(rows) and self._tiers.brings_back(len(rows)) else NO_INT32S

    def prefetch(self, requester: Hashable, request: Request) -> bool:
        """Prefetch from the store the blocks that neither the cache nor host memory has. False: try again later."""
        if not self._running.config.tiers.store:
            return True
        after = self._lookup.keys_after(request, self._lookup.find(request))
        here = len(self._tiers.host.run(after))
        self._tiers.host.touch(after[:here])
        return self._tiers.prefetch(requester, after[here:], self._running.now_us)

    def restore(self, request: Request, hit: PrefixHit, rows: Int32s, protected: bool) -> None:
        """Take a row and all blocks of the tokens it starts with, and order the copy of those in host memory."""
        running, slots = self._running, self._running.slots
        slot = running.occupy(request, hit, Move.RESTORE)
        slots.protected[slot] = protected
        fresh = running.pool.take(blocks_for(request.tokens_at_start, running.config.block_size) - len(hit.blocks))
        slots.append_blocks(slot, fresh)
        arriving = fresh[: len(rows)]
        running.pool.pin(arriving, Pin.RECEIVING)
        slots.restoring[slot] = True
        request.found_tokens = hit.computed
        request.computed_ever = max(request.computed_ever, hit.computed)
        self._billing.queued(request, running.now_us)
        first = len(hit.blocks) + 1
        self._tiers.load(request.serial, request.keys[first : first + len(rows)], rows, arriving, running.now_us)

    def loaded(self, serial: Serial, blocks: int) -> EndedRequest | int:
        """The copy has ended and brought `blocks` leading blocks. Returns its end, or the slot that may run."""
        running, slots = self._running, self._running.slots
        request = running.requests[serial]
        slot = running.slot_of(request)
        slots.restoring[slot] = False
        running.pin(request, Pin.NONE)
        self._billing.transferred(request, running.now_us)
        if request.ends_as is not None:
            ended = self._ending.end(request, request.ends_as, Move.ACK_END)
            self._ending.vacate(request)
            return ended
        tokens = blocks * running.config.block_size
        computed = request.found_tokens + tokens
        slots.planned[slot] = slots.computed[slot] = computed
        request.bill.restored_tokens += tokens
        running.publish_full_blocks(np.array([slot], dtype=np.int64))
        self._billing.start(request, computed, running.now_us)
        return slot

    def order_end(self, request: Request, reason: FinishReason) -> None:
        """End it once nothing writes to its blocks."""
        request.ends_as = reason
        self._queue.release_followers(request)
        self._running.move(request, Move.ORDER_STOP)
        self._tiers.give_up_load(request.serial)


class RestoredRows:
    """A source of rows: those whose copy has ended begin with the next step."""

    waiting = 0

    def __init__(self, running: RunningSet) -> None:
        self._running = running
        self._restored: list[int] = []

    @property
    def is_due(self) -> bool:
        return bool(self._restored)

    @property
    def stalled(self) -> int:
        return self._running.slots.loading

    def add(self, slot: int) -> None:
        self._restored.append(slot)

    def begin_rows(self, step: StepBuilder) -> None:
        running = self._running
        for slot in self._restored:
            request = running.occupant(slot)
            running.move(request, Move.ADMIT)
            tokens = np.concatenate((request.submission.prompt, request.outputs))
            running.start_row(step, slot, tokens, int(running.slots.computed[slot]))
            running.prefilling.append(slot)
        self._restored.clear()

    def withdraw(self, request: Request) -> bool:
        del request
        return False

    def forget_row(self, slot: int) -> None:
        if slot in self._restored:
            self._restored.remove(slot)
