"""The general scheduler with a second way in: requests whose prefill is done by a peer.

    let in ──▶ asked for ──lease──▶ slot and blocks are taken, RECEIVING ──adopt──▶ begins in the next plan, RUNNING_DECODE
                   │                                │
                   └── taken back, or ended         └── fence ordered, PREEMPTING ──fenced──▶ WAITING again, or ended

Owns the rows of such requests and what they keep newcomers from taking. A request is let in by the same rule as any other;
while it is asked for, the room it will need is booked, so that its offer is hardly ever refused. It knows nothing of peers,
messages or time limits: `handover` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.blocks import Pin
from baton.core.engine.ended import EndedRequest, StartedRequest
from baton.core.engine.plan import NO_INT32S, NO_INT64S, Int32s, Logprobs
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.records import Hit, Request, Settled
from baton.core.engine.request import FinishReason, Move, Phase, Serial
from baton.core.engine.reserve import blocks_for
from baton.core.engine.running_set import StepBuilder
from baton.core.engine.scheduler import Scheduler
from baton.core.errors import InvariantViolated
from baton.core.handover.faults import PdFault
from baton.core.handover.messages import Commit


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Room for what a request starts with, less the leading blocks that are here already."""

    cached_tokens: int
    first: int
    """How many blocks those are."""
    blocks: Int32s
    """Where the KV of all later ones belongs."""


class DecodeScheduler(Scheduler):
    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        super().__init__(config, prefix)
        self.may_ask = False
        """Whether there is a peer to prefill for us."""
        self._booked: dict[Serial, int] = {}
        """Requests that a peer is or will be asked for, and the blocks that each will need."""
        self._to_ask: list[Request] = []
        self._receiving = 0
        """Rows that wait for KV, or for the fence that ends the waiting."""
        self._arrived: list[int] = []
        """Adopted rows whose Start goes into the next plan."""

    @property
    def waiting(self) -> int:
        return super().waiting + len(self._booked)

    @property
    def asleep(self) -> bool:
        return not self._arrived and super().asleep

    def _waiting_for_kv(self) -> int:
        return super()._waiting_for_kv() + self._receiving

    def asked(self) -> list[Request]:
        """What the last pass let in for a peer to prefill; each is said once."""
        requests, self._to_ask = self._to_ask, []
        return requests

    # ── asked for ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _has_row(self) -> bool:
        return self.slots.slots - self.slots.occupied > len(self._booked)

    def _kept(self) -> int:
        return super()._kept() + sum(self._booked.values())

    def _let_in(self, step: StepBuilder, request: Request, hit: Hit, protected: bool) -> None:
        if not self._goes_elsewhere(request, hit):
            super()._let_in(step, request, hit, protected)
            return
        if self.tiers is not None:
            self.tiers.forget_seeker(request.serial)
        self._booked[request.serial] = self._blocks_to_take(self._wanted(request, protected), hit)
        self._to_ask.append(request)
        request.bill.queue_us += self._now_us - request.since_us
        request.since_us = self._now_us

    def _goes_elsewhere(self, request: Request, hit: Hit) -> bool:
        """Not what is nearly all here, in the cache or in host memory."""
        if self._prefills_here(request):
            return False
        missing = request.tokens_at_start - hit.computed
        if missing > self.config.handover.local_tokens and self.tiers is not None:
            missing -= len(self.tiers.host.run(self._keys_after(request, hit))) * self.config.block_size
        return missing > self.config.handover.local_tokens

    def _prefills_here(self, request: Request) -> bool:
        """What was generated here is computed here again, and siblings find their prompt in the cache."""
        return not self.may_ask or request.prefills_here or not request.is_fresh or request.leader is not None

    def take_back(self, serial: Serial, *, prefills_here: bool, now_us: int) -> None:
        """Nobody prefills it elsewhere: it waits in our own queue."""
        request = self._unbook(serial)
        request.prefills_here = prefills_here
        self._charge_wait(request, now_us)
        self._queue_up(request)

    def _unqueue(self, request: Request) -> None:
        if request.serial in self._booked:
            self._charge_wait(self._unbook(request.serial), self._now_us)
        else:
            super()._unqueue(request)

    def _unbook(self, serial: Serial) -> Request:
        del self._booked[serial]
        return self._requests[serial]

    def _charge_wait(self, request: Request, now_us: int) -> None:
        """The time that an attempt took which came to nothing."""
        request.bill.transfer_us += now_us - request.since_us
        request.since_us = now_us

    # ── leased ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def lease(self, serial: Serial) -> Lease | None:
        """A slot and blocks for a request that was asked for; None where they do not fit beside what is kept for others."""
        request = self._requests[serial]
        hit, booked = self._look_up(request), self._booked[serial]
        kept = self._kept() - booked
        protected = self._protects(request)
        need = self._blocks_to_take(self._wanted(request, protected), hit)
        if not self.slots.has_room or need > self.pool.available - kept:
            return None
        self._unbook(serial)
        slot = self._occupy(request, hit, Move.LEASE)
        self.slots.protected[slot] = protected
        self._count_look_up(request, hit.computed)
        request.found_tokens = request.computed_ever = hit.computed
        fresh = self.pool.take(blocks_for(request.tokens_at_start, self.config.block_size) - len(hit.blocks))
        self.slots.append_blocks(slot, fresh)
        self.pool.pin(fresh, Pin.LEASED)
        self._receiving += 1
        return Lease(hit.computed, len(hit.blocks), fresh)

    def arriving(self, serial: Serial) -> None:
        self._pin(self._leased(serial), Pin.RECEIVING)

    def adopt(self, serial: Serial, commit: Commit, now_us: int) -> Settled:
        """All KV of what it starts with is in its blocks, and this is the next token: from the next plan on it decodes."""
        self._now_us = now_us
        request = self._leased(serial)
        slot = self._slot_of(request)
        self._pin(request, Pin.NONE)
        self._receiving -= 1
        rows = np.array([slot], dtype=np.int64)
        tokens = np.array([commit.token], dtype=np.int32)
        self.slots.append(rows, tokens)
        self.slots.computed[slot] = request.tokens_at_start
        self._name_full_blocks(rows)
        self._charge_prefill(request, commit)
        self._release_followers(request)
        ended: list[EndedRequest] = []
        stopped = bool(self.slots.draws_stop(rows, tokens)[0])
        if stopped or self.slots.known[slot] >= self.slots.limit[slot]:
            ended.append(self._end_untold(request, FinishReason.STOP if stopped else FinishReason.LENGTH))
        else:
            self._arrived.append(slot)
        return _one_token(request, tokens, commit.logprobs, ended)

    def _charge_prefill(self, request: Request, commit: Commit) -> None:
        """What the peer did, as it says, within the time that passed here."""
        bill, tokens = request.bill, request.tokens_at_start
        passed = self._now_us - request.since_us
        queued = min(commit.queue_us, passed)
        computed = min(commit.prefill_us, passed - queued)
        bill.queue_us += queued
        bill.prefill_us += computed
        bill.transfer_us += passed - queued - computed
        bill.cached_tokens = min(commit.cached_tokens, tokens)
        bill.restored_tokens += min(commit.restored_tokens, bill.cached_tokens)
        bill.computed_tokens += tokens - bill.cached_tokens
        request.found_tokens = request.computed_ever = tokens
        request.since_us = self._now_us

    def order_fence(self, serial: Serial, reason: FinishReason | None, fault: PdFault | None) -> None:
        """Give up a lease. Its row is free when nothing writes there any more; then the request ends or waits again."""
        request = self._leased(serial)
        request.ends_as = reason
        request.fault = fault
        self._move(request, Move.ORDER_STOP)

    def fenced(self, serial: Serial, now_us: int) -> EndedRequest | None:
        """The acknowledgement of `order_fence`."""
        self._now_us = now_us
        request = self._requests[serial]
        self._pin(request, Pin.NONE)
        self._receiving -= 1
        self._charge_wait(request, now_us)
        ended: list[EndedRequest] = []
        if request.ends_as is None:
            request.prefills_here, request.fault = True, None
            self._move(request, Move.ACK_PREEMPTION)
            self._queue_up(request)
        else:
            self._end(request, request.ends_as, Move.ACK_END, ended)
        self._vacate(request)
        return ended[0] if ended else None

    def _leased(self, serial: Serial) -> Request:
        request = self._requests[serial]
        if request.phase is not Phase.RECEIVING or request.slot in self._arrived:
            raise InvariantViolated(f"request {serial} in {request.phase.name} waits for no KV")
        return request

    def _pin(self, request: Request, pin: Pin) -> None:
        self.pool.pin(self.pool.pinned(self.slots.blocks(self._slot_of(request))), pin)

    # ── adopted ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _continue_prefills(self, step: StepBuilder) -> None:
        """Adopted rows begin with the step and decode from the next on, so that none of them is a victim in this one."""
        for slot in self._arrived:
            request = self._occupant(slot)
            tokens = np.concatenate((request.submission.prompt, self.slots.outputs(slot)))
            self._tell_start(step, slot, tokens, int(self.slots.computed[slot]))
            self._move(request, Move.ADOPT)
        self._arrived.clear()
        super()._continue_prefills(step)

    def _end_untold(self, request: Request, reason: FinishReason) -> EndedRequest:
        if request.slot in self._arrived:
            self._arrived.remove(request.slot)
        return super()._end_untold(request, reason)


def _one_token(request: Request, tokens: Int32s, logprobs: Logprobs | None, ended: list[EndedRequest]) -> Settled:
    lines = () if logprobs is None else (Logprobs(0, logprobs.chosen, logprobs.top_ids, logprobs.top),)
    if request.submission.sampling.logprobs is None:
        lines = ()
    return Settled(
        serials=np.array([request.serial], dtype=NO_INT64S.dtype),
        counts=np.ones(1, dtype=NO_INT32S.dtype),
        tokens=tokens,
        logprobs=lines,
        started=(StartedRequest(request.serial, request.cached_of_prompt),),
        ended=tuple(ended),
    )
