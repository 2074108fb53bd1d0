"""Rows whose prefill is done by a peer: a source of rows for an instance that decodes.

    admitted ─▶ asked for ──lease──▶ slot and blocks are taken, RECEIVING ──adopt──▶ begins in the next plan, RUNNING_DECODE
                   │                                │
                   └── taken back, or ended         └── fence ordered, PREEMPTING ──fenced──▶ WAITING again, or ended

A request is admitted by the same rule as any other. While it is asked for, its blocks are booked, so that its offer
is hardly ever refused. Peers, messages and time limits belong to `handover.decode_side`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.core.engine.admission import Admission
from baton.core.engine.billing import Billing
from baton.core.engine.blocks import Pin
from baton.core.engine.ended import EndedRequest, StartedRequest
from baton.core.engine.ending import RequestEnding
from baton.core.engine.plan import NO_INT32S, NO_INT64S, Int32s, Logprobs
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.records import PrefixHit, Request, Settled
from baton.core.engine.request import FinishReason, Move, Phase, Serial
from baton.core.engine.reserve import blocks_for
from baton.core.engine.running_set import RunningSet
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.errors import InvariantViolated
from baton.core.handover.faults import PdFault
from baton.core.handover.messages import Commit
from baton.core.tiers.offload import AnyTiers


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Blocks for the tokens a request starts with, without the leading ones that the cache has."""

    cached_tokens: int
    first: int
    """Leading blocks that the cache has."""
    blocks: Int32s
    """Blocks of our pool for the KV of all later ones."""


class ArrivingRows:
    def __init__(
        self,
        running: RunningSet,
        queue: WaitingQueue,
        admission: Admission,
        lookup: PrefixLookup,
        billing: Billing,
        ending: RequestEnding,
        tiers: AnyTiers,
    ) -> None:
        self.may_ask = False
        """Whether at least one peer can prefill for this instance."""
        self._running = running
        self._queue = queue
        self._admission = admission
        self._bookings = admission.bookings
        self._lookup = lookup
        self._billing = billing
        self._ending = ending
        self._tiers = tiers
        self._to_ask: list[Request] = []
        self._receiving = 0
        """Rows that wait for KV, or for the fence that ends the wait."""
        self._arrived: list[int] = []
        """Adopted rows whose Start goes into the next plan."""

    # ── as a source of rows ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        return len(self._bookings)

    @property
    def is_due(self) -> bool:
        return bool(self._arrived)

    @property
    def stalled(self) -> int:
        return self._receiving

    def begin_rows(self, step: StepBuilder) -> None:
        """Start adopted rows in this step. They decode from the next step on, so none of them is a victim in this one."""
        running = self._running
        for slot in self._arrived:
            request = running.occupant(slot)
            tokens = np.concatenate((request.submission.prompt, running.slots.outputs(slot)))
            running.start_row(step, slot, tokens, int(running.slots.computed[slot]))
            running.move(request, Move.ADOPT)
        self._arrived.clear()

    def withdraw(self, request: Request) -> bool:
        if request.serial not in self._bookings:
            return False
        self._bookings.cancel(request.serial)
        self._charge_wait(request)
        return True

    def forget_row(self, slot: int) -> None:
        if slot in self._arrived:
            self._arrived.remove(slot)

    # ── asked for ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def prefills_here(self, request: Request) -> bool:
        """Whether no peer is asked: if its router says so, without peers, after outputs were generated here, for siblings
        (prompt cached), and where log-probabilities of the prompt are asked for, which no hand-over carries."""
        is_set = request.prefills_here or request.submission.prefills_in_place
        is_set = is_set or request.submission.sampling.prompt_logprobs is not None
        return is_set or not self.may_ask or not request.is_fresh or request.leader is not None

    def takes(self, request: Request, hit: PrefixHit, protected: bool) -> bool:
        """Book blocks for an admitted request that a peer will prefill. False: it is prefilled here."""
        if not self._goes_elsewhere(request, hit):
            return False
        self._tiers.forget_prefetch(request.serial)
        self._bookings.book(request.serial, self._admission.blocks_needed(request, protected, hit))
        self._to_ask.append(request)
        self._billing.queued(request, self._running.now_us)
        return True

    def _goes_elsewhere(self, request: Request, hit: PrefixHit) -> bool:
        """Whether more than `local_tokens` of its tokens are neither in the cache nor in host memory."""
        if self.prefills_here(request):
            return False
        config = self._running.config
        missing = request.tokens_at_start - hit.computed
        if missing > config.handover.local_tokens:
            missing -= len(self._tiers.host.run(self._lookup.keys_after(request, hit))) * config.block_size
        return missing > config.handover.local_tokens

    def asked(self) -> list[Request]:
        """Requests that the last pass admitted for a peer to prefill; each is returned once."""
        requests, self._to_ask = self._to_ask, []
        return requests

    def take_back(self, serial: Serial, *, prefills_here: bool, now_us: int) -> None:
        """No peer prefills it: it goes back into this instance's own queue."""
        self._running.now_us = now_us
        self._bookings.cancel(serial)
        request = self._running.requests[serial]
        request.prefills_here = prefills_here
        self._charge_wait(request)
        self._queue.push(request)

    def _charge_wait(self, request: Request) -> None:
        """Bill the time of a failed attempt as transfer time."""
        self._billing.transferred(request, self._running.now_us)

    # ── leased ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def lease(self, serial: Serial) -> Lease | None:
        """Take a slot and blocks for a request that was asked for; None if they do not fit beside what is kept."""
        running, slots = self._running, self._running.slots
        request = running.requests[serial]
        hit, protected = self._lookup.find(request), self._admission.protects(request)
        kept = self._admission.kept() - self._bookings.of(serial)
        need = self._admission.blocks_needed(request, protected, hit)
        if not slots.has_room or need > running.pool.available - kept:
            return None
        self._bookings.cancel(serial)
        slot = running.occupy(request, hit, Move.LEASE)
        slots.protected[slot] = protected
        self._billing.count_look_up(request, hit.computed)
        request.found_tokens = request.computed_ever = hit.computed
        fresh = running.pool.take(blocks_for(request.tokens_at_start, running.config.block_size) - len(hit.blocks))
        slots.append_blocks(slot, fresh)
        running.pool.pin(fresh, Pin.LEASED)
        self._receiving += 1
        return Lease(hit.computed, len(hit.blocks), fresh)

    def arriving(self, serial: Serial) -> None:
        self._running.pin(self._leased(serial), Pin.RECEIVING)

    def adopt(self, serial: Serial, commit: Commit, now_us: int) -> Settled:
        """All KV of its start is in its blocks, and the commit has the next token: it decodes from the next plan on."""
        running, slots = self._running, self._running.slots
        running.now_us = now_us
        request = self._leased(serial)
        slot = running.slot_of(request)
        running.pin(request, Pin.NONE)
        self._receiving -= 1
        rows = np.array([slot], dtype=np.int64)
        tokens = np.array([commit.token], dtype=np.int32)
        slots.append(rows, tokens)
        slots.computed[slot] = request.tokens_at_start
        running.publish_full_blocks(rows)
        self._billing.prefilled_by_peer(request, commit, now_us)
        self._queue.release_followers(request)
        ended: list[EndedRequest] = []
        stopped = bool(slots.draws_stop(rows, tokens)[0])
        if stopped or slots.known[slot] >= slots.limit[slot]:
            ended.append(self._ending.end_unstarted(request, FinishReason.STOP if stopped else FinishReason.LENGTH))
        else:
            self._arrived.append(slot)
        return _one_token(request, tokens, commit.logprobs, ended)

    def order_fence(self, serial: Serial, reason: FinishReason | None, fault: PdFault | None) -> None:
        """Give up a lease. Its row is freed once nothing writes to it; then the request ends or waits again."""
        request = self._leased(serial)
        request.ends_as = reason
        request.fault = fault
        self._running.move(request, Move.ORDER_STOP)

    def fenced(self, serial: Serial, now_us: int) -> EndedRequest | None:
        """`order_fence` was acknowledged."""
        running = self._running
        running.now_us = now_us
        request = running.requests[serial]
        running.pin(request, Pin.NONE)
        self._receiving -= 1
        self._charge_wait(request)
        ended = None
        if request.ends_as is None:
            request.prefills_here, request.fault = True, None
            running.move(request, Move.ACK_PREEMPTION)
            self._queue.push(request)
        else:
            ended = self._ending.end(request, request.ends_as, Move.ACK_END)
        self._ending.vacate(request)
        return ended

    def _leased(self, serial: Serial) -> Request:
        request = self._running.requests[serial]
        if request.phase is not Phase.RECEIVING or request.slot in self._arrived:
            raise InvariantViolated(f"request {serial} in {request.phase.name} waits for no KV")
        return request


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
