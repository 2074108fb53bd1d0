"""Requests leave their rows: they end, or they are preempted and wait again.

A request with a row on the executor is ordered to stop, and ends when the executor acknowledges. Its blocks are saved to
other tiers before they are freed, and are not freed while a transfer to a peer reads them (`pin`).
"""

from __future__ import annotations

import numpy as np

from baton.core.engine.billing import Billing
from baton.core.engine.ended import EndedRequest
from baton.core.engine.prefix import Key
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.records import Request
from baton.core.engine.request import FinishReason, Move, Phase, Serial
from baton.core.engine.running_set import RunningSet
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.tiers.offload import AnyTiers


class RequestEnding:
    def __init__(
        self, running: RunningSet, queue: WaitingQueue, lookup: PrefixLookup, billing: Billing, tiers: AnyTiers
    ) -> None:
        self._running = running
        self._queue = queue
        self._lookup = lookup
        self._billing = billing
        self._tiers = tiers

    def order_end(self, request: Request, reason: FinishReason) -> None:
        """Order it to stop: it ends with the next acknowledgement, and further tokens are discarded."""
        if request.ends_as is not None:
            return
        running = self._running
        request.ends_as = reason
        running.slots.discarded[running.slot_of(request)] = True
        self._queue.release_followers(request)
        if request.phase is not Phase.PREEMPTING:
            running.order_stop(request, Move.ORDER_STOP)

    def end(self, request: Request, reason: FinishReason, move: Move) -> EndedRequest:
        """End a request that has a row; `vacate` frees the row."""
        running, slots = self._running, self._running.slots
        self._charge(request)
        running.move(request, move)
        self._queue.release_followers(request)
        slot = running.slot_of(request)
        generated = int(slots.known[slot] - slots.prompt[slot])
        return EndedRequest(request.serial, reason, _kept(request, generated), request.bill, request.fault)

    def end_unstarted(self, request: Request, reason: FinishReason) -> EndedRequest:
        """End a request whose row was never started on the executor."""
        prefilling, slot = self._running.prefilling, self._running.slot_of(request)
        if slot in prefilling:
            prefilling.remove(slot)
        ended = self.end(request, reason, Move.FINISH)
        self.vacate(request)
        return ended

    def withdraw(self, request: Request, reason: FinishReason) -> EndedRequest:
        """End a request that has no row and was taken out of its queue."""
        self._queue.release_followers(request)
        self._billing.queued(request, self._running.now_us)
        self._running.move(request, Move.FINISH)
        del self._running.requests[request.serial]
        return EndedRequest(request.serial, reason, _kept(request, len(request.outputs)), request.bill, request.fault)

    def requeue(self, request: Request) -> None:
        """Put it back at the head of the queue, to continue after the delivered tokens."""
        running = self._running
        self._charge(request)
        request.outputs = running.slots.outputs(running.slot_of(request))
        request.is_prefetched, request.prefetched_again = False, 0
        known = np.concatenate((request.submission.prompt, request.outputs))
        request.keys = self._lookup.keys_of(request.submission, known)
        running.move(request, Move.ACK_PREEMPTION)
        self._queue.push(request)

    def _charge(self, request: Request) -> None:
        slots, slot = self._running.slots, self._running.slot_of(request)
        self._billing.run(request, int(slots.known[slot]), int(slots.computed[slot]), self._running.now_us)

    def pin(self, serial: Serial) -> None:
        """A transfer to a peer reads the request's blocks from now on."""
        self._running.requests[serial].pinned = True

    def unpin(self, serial: Serial) -> None:
        """The transfer has ended; a row that ended meanwhile is freed now. A request that was never pinned may be gone."""
        request = self._running.requests.get(serial)
        if request is None:
            return
        request.pinned = False
        if request.phase is Phase.FINISHED:
            self.vacate(request)

    def vacate(self, request: Request) -> list[Key]:
        """Save its blocks and free its row, unless a transfer reads it. Returns keys that the store will get and lacks."""
        if request.pinned:
            return []
        unstored = self._save(request)
        self._running.vacate(request)
        return unstored

    def _save(self, request: Request) -> list[Key]:
        running, config = self._running, self._running.config
        preempted = request.phase is Phase.WAITING or request.ends_as is FinishReason.RESCHEDULE
        wanted = config.tiers.save_preempted if preempted else config.tiers.save_finished
        if not wanted or request.ends_as in (FinishReason.ERROR, FinishReason.CONSTRAINT_FAILED):
            return []
        blocks = running.slots.blocks(running.slot_of(request))
        if not config.tiers.cache_outputs:
            blocks = blocks[: len(request.submission.prompt) // config.block_size]
        return self._tiers.save(blocks, preempted, running.now_us)


def _kept(request: Request, generated: int) -> int:
    return generated if request.keep is None else min(generated, request.keep)
