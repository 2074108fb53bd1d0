"""The schedulers of an instance that only prefills and hands over: the short path, and the general one beside it.

Both let a giver hold what a prefill will need (`hold`), begin it once the other side has granted room (`begin`), and then
are asked for plans and settled like any scheduler. Nothing decodes: the planning of its last chunk makes a request
HANDING_OVER, and there it stays, slot and blocks with it, until it is ordered to stop.

The short path has no queue, no reserve and no growth: a request has all its blocks before it begins, so a pass is nothing
but chunks, in the order of arrival, until the token budget is used up. The general path is the general scheduler under the
same two methods; it is there to be compared with.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.records import Crew, Request
from baton.core.engine.request import Move, Phase, Serial, Submission
from baton.core.engine.reserve import blocks_for
from baton.core.engine.running_set import Board, StepBuilder
from baton.core.engine.scheduler import Scheduler
from baton.core.errors import InvariantViolated


class BlocksNotHeld(InvariantViolated):
    """A prefill was to be planned whose blocks are not all there: the short path has no way to get more."""


class PrefillScheduler(Board):
    """The short path."""

    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        super().__init__(config, prefix)
        self._begun: set[int] = set()
        """Rows that may be computed as soon as what host memory has of them is here."""
        self._nobody = self._crew_of_decodes(self.slots.decoding())

    @property
    def waiting(self) -> int:
        return 0

    @property
    def asleep(self) -> bool:
        return not (self._flights or self._prefilling or self._stopping)

    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        """A slot and all blocks of what it starts with; None where they are not to be had now."""
        self._now_us = now_us
        if not self.slots.has_room:
            return None
        request = self._new_request(submission, keys, limit, now_us)
        hit = self._look_up(request)
        if self._blocks_to_take(request.tokens_at_start, hit) > self.pool.available:
            del self._requests[request.serial]
            return None
        rows = self._host_rows(request, hit)
        if len(rows):
            self._restore(request, hit, rows, protected=False)
            return request.serial
        slot = self._occupy(request, hit, Move.ADMIT)
        whole = blocks_for(request.tokens_at_start, self.config.block_size)
        self.slots.append_blocks(slot, self.pool.take(whole - len(hit.blocks)))
        self._charge_start(request, hit.computed)
        return request.serial

    def begin(self, serial: Serial) -> None:
        """The other side has granted room: compute it when its turn comes, and what host memory has of it is here."""
        slot = self._slot_of(self._requests[serial])
        if self.slots.restoring[slot]:
            self._begun.add(slot)
        else:
            self._prefilling.append(slot)

    def seek(self, seeker: Hashable, submission: Submission, keys: list[Key]) -> bool:
        """Have the store asked for what a request that is to be held will start with. False: not now."""
        return self._seek(seeker, Request(Serial(-1), submission, 0, keys, self._now_us, outputs=submission.generated))

    def _is_restored(self, slot: int) -> None:
        self._move(self._occupant(slot), Move.ADMIT)
        if slot in self._begun:
            self._begun.remove(slot)
            self._prefilling.append(slot)

    def _unrestore(self, slot: int) -> None:
        self._begun.discard(slot)

    def _schedule(self, step: StepBuilder) -> None:
        self._order_stops(step)
        self.prefill_schedule(step)

    def prefill_schedule(self, step: StepBuilder) -> None:
        """Chunks in the order of arrival, the whole budget theirs."""
        while self._prefilling and step.budget > 0:
            slot = self._prefilling[0]
            if not self.slots.told[slot]:
                self._tell_known(step, slot)
            self._plan_chunk(step, slot)

    def _tell_known(self, step: StepBuilder, slot: int) -> None:
        slots, request = self.slots, self._occupant(slot)
        if slots.held[slot] * self.config.block_size < slots.known[slot]:
            raise BlocksNotHeld(
                f"request {request.serial} has {slots.held[slot]} blocks of {self.config.block_size} "
                f"for a prompt of {slots.known[slot]} tokens"
            )
        request.bill.queue_us += self._now_us - request.since_us
        request.since_us = self._now_us
        self._tell_start(step, slot, request.submission.known.copy(), int(slots.computed[slot]))

    def _decoding(self) -> Crew:
        return self._nobody

    def _queue_up(self, request: Request) -> None:
        raise InvariantViolated(f"request {request.serial} would have to wait where nothing waits")

    def _unqueue(self, request: Request) -> None:
        raise InvariantViolated(f"request {request.serial} waits where nothing waits")


class GeneralPrefillScheduler(Scheduler):
    """The general path: a queue, a reserve, and a look at both in every pass."""

    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        super().__init__(config, prefix)
        self._aside: dict[Serial, Request] = {}
        """Held for offers that were not answered yet."""

    @property
    def waiting(self) -> int:
        return super().waiting + len(self._aside)

    def _waiting_for_kv(self) -> int:
        return super()._waiting_for_kv() + int(np.count_nonzero(self.slots.phase == Phase.HANDING_OVER))

    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        """Only its number: what it needs is found when the queue comes to it."""
        request = self._new_request(submission, keys, limit, now_us)
        self._aside[request.serial] = request
        return request.serial

    def begin(self, serial: Serial) -> None:
        self._queue_up(self._aside.pop(serial))

    def seek(self, seeker: Hashable, submission: Submission, keys: list[Key]) -> bool:  # noqa: ARG002
        """The queue has the store asked by itself."""
        return True

    def _unqueue(self, request: Request) -> None:
        if self._aside.pop(request.serial, None) is None:
            super()._unqueue(request)

    def _protects(self, request: Request) -> bool:
        """Nothing decodes here: nobody yields, and nobody needs more than its prompt."""
        del request
        return False

    def _grow_to(self, step: StepBuilder, slot: int, tokens: int) -> None:
        """All at once: what is sent is named by its blocks from the first chunk on. Admission found room for all of it."""
        super()._grow_to(step, slot, max(tokens, int(self.slots.known[slot])))
