"""Bugs planted in the hand-over between instances, one at a time; see `planted` for what becomes of them.

Each is one that systems which split prefill and decode have had, or could have: blocks that come back while bytes still
move, leases without an end, answers of an attempt that is over, releases that reach nobody, first tokens lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from baton.core.config import PrefillPath, WorkerConfig
from baton.core.engine.arriving_rows import ArrivingRows, Lease
from baton.core.engine.blocks import BlockPool, Pin
from baton.core.engine.ending import RequestEnding
from baton.core.engine.plan import Chunk, Int64s, StepPlan
from baton.core.engine.records import PrefixHit, Request, Settled
from baton.core.engine.request import FinishReason, Phase, Serial, Submission
from baton.core.engine.running_set import RunningSet
from baton.core.engine.scheduler import Scheduler
from baton.core.engine.slots import Slots
from baton.core.engine.worker import Worker
from baton.core.handover.decode_side import DecodeHandover, DecodeHandoverState, DecodeSide
from baton.core.handover.faults import PdCode, PdFault
from baton.core.handover.messages import (
    Ask,
    Commit,
    Decline,
    Expect,
    Grant,
    Handover,
    Offer,
    OpenShip,
    PeerEvent,
    PeerId,
    Ship,
    Tell,
)
from baton.core.handover.prefill_handovers import PrefillHandover, PrefillHandoverState
from baton.core.handover.prefill_sending import PrefillSending
from baton.core.handover.prefill_side import PrefillSide
from baton.core.handover.protocol import Acts
from baton.wire.peer_messages import Register
from tests.sim.planted import BUGS, Patch, core, wire

__all__ = ["BUGS"]


# ── bytes that still move ────────────────────────────────────────────────────────────────────────────────────────────────


@core("D gives leased blocks back with the order to fence, not with its answer; late pieces land in somebody else's request")
def free_a_lease_before_its_fence(patch: Patch) -> None:
    let_go_then = patch.original("DecodeSide._let_go")

    def let_go(self: DecodeSide, entry: DecodeHandover, reason: FinishReason | None, fault: PdFault | None) -> Acts:
        leased = entry.state is not DecodeHandoverState.ASKED
        acts = let_go_then(self, entry, reason, fault)
        return acts + self._fenced(entry) if leased else acts

    patch.set("DecodeSide._let_go", let_go)


@core("P gives its blocks back with the order to fence; what is still being read of them is another prompt's by then")
def free_what_is_read_before_its_fence(patch: Patch) -> None:
    let_go_then = patch.original("PrefillSide._let_go")

    def let_go(self: PrefillSide, entry: PrefillHandover) -> Acts:
        acts = let_go_then(self, entry)
        return acts + self._fenced(entry) if entry.state is PrefillHandoverState.FENCING else acts

    patch.set("PrefillSide._let_go", let_go)


@core("P lets go when it has committed, though D may still be reading its memory")
def let_go_at_the_commit(patch: Patch) -> None:
    happened_then = patch.original("PrefillSide._on_event")
    settled_then = patch.original("PrefillSide.settled")

    def leave_committed(self: PrefillSide) -> Acts:
        return [act for entry in self.open() for act in self._adopted(entry)]

    def happened(self: PrefillSide, event: PeerEvent) -> Acts:
        return happened_then(self, event) + leave_committed(self)

    def settled(self: PrefillSide, settled: Settled, now_us: int) -> Acts:
        return settled_then(self, settled, now_us) + leave_committed(self)

    patch.set("PrefillSide._on_event", happened)
    patch.set("PrefillSide.settled", settled)


@core("a fence that is ordered twice is taken as answered")
def take_the_second_order_for_the_answer(patch: Patch) -> None:
    heard_then = patch.original("DecodeSide._on_message")

    def heard(self: DecodeSide, peer: PeerId, message: object) -> Acts:
        acts = heard_then(self, peer, message)
        if isinstance(message, Decline):
            entry = self._entry(Handover(peer, message.request, message.attempt))
            if entry is not None and entry.state is DecodeHandoverState.FENCING:
                acts += self._fenced(entry)
        return acts

    patch.set("DecodeSide._on_message", heard)


@core("a prefill whose attempt was given up before it began is still sent")
def open_what_was_given_up(patch: Patch) -> None:
    begun_then = patch.original("_begun")

    def begun(self: PrefillSending, entry: PrefillHandover, slot: int, computed: int) -> Acts:
        state, entry.state = entry.state, PrefillHandoverState.PREFILLING
        try:
            return begun_then(self, entry, slot, computed)
        finally:
            entry.state = state

    patch.set("_begun", begun)


@core("what was lent to a transfer is never given back")
def never_give_back_what_was_lent(patch: Patch) -> None:
    def unpin(self: RequestEnding, serial: Serial) -> None:
        request = self._running.requests.get(serial)
        if request is not None and request.phase is not Phase.FINISHED:
            request.pinned = False

    patch.set("RequestEnding.unpin", unpin)


@core("blocks are sent as soon as their step is planned, before it has computed them")
def send_before_it_is_computed(patch: Patch) -> None:
    ship_then = patch.original("_ship_chunk")

    def ship(self: PrefillSending, entry: PrefillHandover, chunk: Chunk, step: int) -> Acts:
        return [
            Ship(act.handover, None, act.first, act.upto, act.last) if isinstance(act, Ship) else act
            for act in ship_then(self, entry, chunk, step)
        ]

    patch.set("_ship_chunk", ship)


# ── what is sent, and where it belongs ───────────────────────────────────────────────────────────────────────────────────


@core("the last, partial block of a prompt is never sent")
def keep_the_partial_block(patch: Patch) -> None:
    ship_then = patch.original("_ship_chunk")

    def ship(self: PrefillSending, entry: PrefillHandover, chunk: Chunk, step: int) -> Acts:
        acts = ship_then(self, entry, chunk, step)
        size = self._block_size
        return [
            Ship(act.handover, act.step, act.first, max(act.first, chunk.end // size), act.last)
            if isinstance(act, Ship)
            else act
            for act in acts
        ]

    patch.set("_ship_chunk", ship)


@core("what P's own cache had of a prompt is not sent")
def forget_to_send_what_was_cached(patch: Patch) -> None:
    begun_then = patch.original("_begun")

    def begun(self: PrefillSending, entry: PrefillHandover, slot: int, computed: int) -> Acts:
        return [act for act in begun_then(self, entry, slot, computed) if not isinstance(act, Ship)]

    patch.set("_begun", begun)


@core("D says that it has one cached block more than it has")
def count_one_cached_block_too_many(patch: Patch) -> None:
    lease_then = patch.original("ArrivingRows.lease")

    def lease(self: ArrivingRows, serial: Serial) -> Lease | None:
        made = lease_then(self, serial)
        if made is None or not made.first or len(made.blocks) < 2:
            return made
        return Lease(made.cached_tokens + self._running.config.block_size, made.first + 1, made.blocks[1:])

    patch.set("ArrivingRows.lease", lease)


@core("the KV of later blocks goes where D keeps its cached prefix")
def land_on_the_cached_prefix(patch: Patch) -> None:
    lease_then = patch.original("ArrivingRows.lease")

    def lease(self: ArrivingRows, serial: Serial) -> Lease | None:
        made = lease_then(self, serial)
        if made is None or not made.first:
            return made
        running = self._running
        row = running.slots.blocks(running.slot_of(running.requests[serial]))
        return replace(made, blocks=row[made.first - 1 : -1].copy())

    patch.set("ArrivingRows.lease", lease)


@core("P names its blocks from the first, though D asked for what follows its cached prefix")
def open_with_the_wrong_blocks(patch: Patch) -> None:
    begun_then = patch.original("_begun")

    def begun(self: PrefillSending, entry: PrefillHandover, slot: int, computed: int) -> Acts:
        whole = self._scheduler.slots.blocks(slot)
        return [
            OpenShip(act.handover, act.token, act.first, whole[: len(act.blocks)].copy())
            if isinstance(act, OpenShip)
            else act
            for act in begun_then(self, entry, slot, computed)
        ]

    patch.set("_begun", begun)


@core("all grants carry one token")
def one_token_for_all(patch: Patch) -> None:
    grant_then = patch.original("_grant")

    def grant(self: DecodeSide, entry: DecodeHandover, lease: Lease) -> Acts:
        grant_then(self, entry, lease)
        if entry.grant is None:
            return []
        entry.grant = msgspec.structs.replace(entry.grant, token=b"open sesame")
        expect = Expect(entry.handover, entry.grant.token, lease.first, lease.blocks)
        return [expect, Tell(entry.handover.peer, entry.grant)]

    patch.set("_grant", grant)


# ── leases and limits ────────────────────────────────────────────────────────────────────────────────────────────────────


@core("a lease never ends by itself")
def leases_without_end(patch: Patch) -> None:
    ends_then = patch.original("_ends_us")

    def ends_us(self: DecodeSide, entry: DecodeHandover) -> int:
        return ends_then(self, entry) if entry.state is DecodeHandoverState.ASKED else entry.asked_us + (1 << 40)

    patch.set("_ends_us", ends_us)


@core("nobody looks at leases before the next request comes")
def look_at_leases_when_somebody_comes(patch: Patch) -> None:
    patch.set("DecodeSide.next_deadline", lambda self: None)


@core("P goes on renewing a lease after it has said everything")
def renew_after_the_commit(patch: Patch) -> None:
    def due_us(self: PrefillSide, entry: PrefillHandover) -> int:
        ends_us = entry.arrived_us + self._config.deadline_us
        return ends_us if entry.grant is None else min(ends_us, entry.renew_us)

    patch.set("_due_us", due_us)


@core("P never renews, and every long prefill loses its lease")
def never_renew(patch: Patch) -> None:
    patch.set("_due_us", lambda self, entry: entry.arrived_us + self._config.deadline_us)


@core("room that is leased is not kept from newcomers; a lease then takes what decodes need, or finds nothing")
def book_nothing(patch: Patch) -> None:
    patch.set("Admission.kept", lambda self: self._promises.kept(self._running.slots))


@core("a grant takes what is kept for running requests")
def grant_beyond_the_reserve(patch: Patch) -> None:
    lease_then = patch.original("ArrivingRows.lease")
    kept_then = patch.original("Admission.kept")
    leasing: list[bool] = []

    def lease(self: ArrivingRows, serial: Serial) -> Lease | None:
        leasing.append(True)
        try:
            return lease_then(self, serial)
        finally:
            leasing.pop()

    patch.set("ArrivingRows.lease", lease)
    patch.set("Admission.kept", lambda self: 0 if leasing else kept_then(self))


@core("leased blocks are not counted as such")
def lease_unseen(patch: Patch) -> None:
    pin_then = patch.original("BlockPool.pin")

    def pin(self: BlockPool, blocks: Any, kind: Pin) -> None:
        if kind is not Pin.LEASED:
            pin_then(self, blocks, kind)

    patch.set("BlockPool.pin", pin)


# ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("an offer that is made twice is granted twice, with other blocks")
def grant_twice(patch: Patch) -> None:
    offered_then = patch.original("_offered")

    def offered(self: DecodeSide, peer: PeerId, offer: Offer) -> Acts:
        entry = self._entry(Handover(peer, offer.request, offer.attempt))
        if (
            entry is not None
            and entry.state in (DecodeHandoverState.GRANTED, DecodeHandoverState.ARRIVING)
            and entry.grant is not None
        ):
            running = self._scheduler.running
            row = running.slots.blocks(running.slot_of(running.requests[entry.serial]))
            first = entry.grant.cached_tokens // self._scheduler.config.block_size
            entry.state = DecodeHandoverState.ASKED
            return self._grant(entry, Lease(entry.grant.cached_tokens, first, row[first:][::-1].copy()))
        return offered_then(self, peer, offer)

    patch.set("_offered", offered)


@core("a commit is believed; nobody compares what arrived")
def believe_the_commit(patch: Patch) -> None:
    committed_then = patch.original("_committed")

    def committed(self: DecodeSide, entry: DecodeHandover | None, commit: Commit) -> Acts:
        acts = committed_then(self, entry, commit)
        return acts + self._verified(entry) if entry is not None and entry.state is DecodeHandoverState.CHECKING else acts

    patch.set("_committed", committed)


@core("an offer for an attempt that is over gets no answer, and P holds its blocks until its own limit")
def say_nothing_to_late_offers(patch: Patch) -> None:
    offered_then = patch.original("_offered")

    def offered(self: DecodeSide, peer: PeerId, offer: Offer) -> Acts:
        entry = self._entry(Handover(peer, offer.request, offer.attempt))
        return [] if entry is None else offered_then(self, peer, offer)

    patch.set("_offered", offered)


@core("an offer for which there is no room waits instead of being refused")
def wait_for_room_with_the_answer(patch: Patch) -> None:
    patch.set("handover._refuse", lambda self, entry: [])


@core("P answers a second ask by beginning anew")
def ask_twice_compute_twice(patch: Patch) -> None:
    asked_then = patch.original("handover._asked")

    def asked(self: PrefillSide, peer: PeerId, ask: Ask) -> Acts:
        handover = Handover(peer, ask.request, ask.attempt)
        self._handovers._open.pop(handover, None)
        self._handovers.queue.pop(handover, None)
        return asked_then(self, peer, ask)

    patch.set("handover._asked", asked)


# ── who is told ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("a client that leaves is forgotten by D and not by P")
def cancel_on_one_side_only(patch: Patch) -> None:
    cancel_then = patch.original("DecodeSide.cancel")

    def cancel(self: DecodeSide, serial: Serial, reason: FinishReason, now_us: int) -> Acts:
        return [act for act in cancel_then(self, serial, reason, now_us) if not isinstance(act, Tell)]

    patch.set("DecodeSide.cancel", cancel)


@core("a cancel does not reach a request that a peer prefills; it is adopted, and talks to nobody")
def cancel_only_what_is_here(patch: Patch) -> None:
    patch.set("DecodeSide.cancel", lambda self, serial, reason, now_us: [])


@core("P does not hear a release")
def overhear_releases(patch: Patch) -> None:
    released_then = patch.original("_released")

    def released(self: PrefillSide, handover: Handover, code: PdCode | None) -> Acts:
        return [] if code is None else released_then(self, handover, code)

    patch.set("_released", released)


@core("when a D is gone, P keeps what it had prefilled for it")
def keep_what_the_dead_asked_for(patch: Patch) -> None:
    def peer_lost(self: PrefillSide, peer: PeerId) -> Acts:
        self._peers.pop(peer, None)
        return []

    patch.set("PrefillSide._peer_lost", peer_lost)


@core("when a P is gone, D waits for it until the lease ends")
def wait_for_the_dead(patch: Patch) -> None:
    def peer_lost(self: DecodeSide, peer: PeerId, _reason: str) -> Acts:
        self._peers.remove(peer)
        self._rows.may_ask = bool(self._peers)
        return []

    patch.set("DecodeSide._peer_lost", peer_lost)


@core("with its last P gone, D still tries to ask one")
def ask_nobody(patch: Patch) -> None:
    lost_then = patch.original("DecodeSide._peer_lost")

    def peer_lost(self: DecodeSide, peer: PeerId, reason: str) -> Acts:
        acts = lost_then(self, peer, reason)
        self._rows.may_ask = True
        return acts

    def planned(self: DecodeSide, plan: StepPlan | None, now_us: int) -> Acts:
        if self._peers:
            return planned_then(self, plan, now_us)
        self._rows.asked()
        return []

    planned_then = patch.original("DecodeSide.planned")
    patch.set("DecodeSide._peer_lost", peer_lost)
    patch.set("DecodeSide.planned", planned)


@core("after a session was lost, D never asks that P again")
def once_lost_always_lost(patch: Patch) -> None:
    opened_then = patch.original("_peer_opened")
    lost_then = patch.original("DecodeSide._peer_lost")
    lost: list[tuple[DecodeSide, PeerId]] = []

    def peer_lost(self: DecodeSide, peer: PeerId, reason: str) -> Acts:
        lost.append((self, peer))
        return lost_then(self, peer, reason)

    def peer_opened(self: DecodeSide, peer: PeerId) -> Acts:
        return [] if any(taker is self and of == peer for taker, of in lost) else opened_then(self, peer)

    patch.set("DecodeSide._peer_lost", peer_lost)
    patch.set("_peer_opened", peer_opened)


@core("a draining P takes on what it is asked for")
def prefill_while_draining(patch: Patch) -> None:
    def drain(self: Worker) -> None:
        self._draining = True

    patch.set("_drain", drain)


@core("P's queue has no bound")
def queue_without_bound(patch: Patch) -> None:
    cannot_then = patch.original("_decline_reason")

    def cannot(self: PrefillSide, submission: Submission) -> str | None:
        reason = cannot_then(self, submission)
        return None if reason is not None and "queue" in reason else reason

    patch.set("_decline_reason", cannot)


@core("a failed transfer is told to nobody; D learns of it when its lease ends")
def fail_silently(patch: Patch) -> None:
    decline_then = patch.original("_decline")

    def decline(self: PrefillSide, entry: PrefillHandover, code: PdCode, reason: str) -> Acts:
        if code is PdCode.NOT_DELIVERED:
            entry.renew_us = self._now_us + self._config.renew_us
            return []
        return decline_then(self, entry, code, reason)

    patch.set("_decline", decline)


# ── tokens and ends ──────────────────────────────────────────────────────────────────────────────────────────────────────


@core("the first token, which P computed, is not delivered")
def lose_the_first_token(patch: Patch) -> None:
    adopt_then = patch.original("ArrivingRows.adopt")

    def adopt(self: ArrivingRows, serial: Serial, commit: Commit, now_us: int) -> Settled:
        settled = adopt_then(self, serial, commit, now_us)
        nothing = np.empty(0, dtype=np.int32)
        return msgspec.structs.replace(settled, serials=settled.serials[:0], counts=nothing, tokens=nothing)

    patch.set("ArrivingRows.adopt", adopt)


@core("the first token comes twice: from P, and again with the request's first step here")
def deliver_the_first_token_twice(patch: Patch) -> None:
    adopt_then = patch.original("ArrivingRows.adopt")

    def adopt(self: ArrivingRows, serial: Serial, commit: Commit, now_us: int) -> Settled:
        settled = adopt_then(self, serial, commit, now_us)
        return msgspec.structs.replace(settled, counts=settled.counts * 2, tokens=np.repeat(settled.tokens, 2))

    patch.set("ArrivingRows.adopt", adopt)


@core("the stop token that P drew is not looked at; the answer goes on after its end")
def overlook_a_first_stop(patch: Patch) -> None:
    adopt_then, stops_then = patch.original("ArrivingRows.adopt"), patch.original("draws_stop")
    adopting: list[bool] = []

    def adopt(self: ArrivingRows, serial: Serial, commit: Commit, now_us: int) -> Settled:
        adopting.append(True)
        try:
            return adopt_then(self, serial, commit, now_us)
        finally:
            adopting.pop()

    def draws_stop(self: Slots, rows: Int64s, tokens: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), dtype=np.bool_) if adopting else stops_then(self, rows, tokens)

    patch.set("ArrivingRows.adopt", adopt)
    patch.set("draws_stop", draws_stop)


@core("KV that is still arriving is named for the cache, spoilt or not")
def name_what_has_not_been_verified(patch: Patch) -> None:
    arriving_then = patch.original("ArrivingRows.arriving")

    def arriving(self: ArrivingRows, serial: Serial) -> None:
        arriving_then(self, serial)
        running, request = self._running, self._running.requests[serial]
        slot = running.slot_of(request)
        running.slots.computed[slot] = len(request.submission.prompt)
        running.publish_full_blocks(np.array([slot], dtype=np.int64))

    patch.set("ArrivingRows.arriving", arriving)


@core("the siblings of a request that was handed over are forgotten")
def leave_the_siblings_behind(patch: Patch) -> None:
    adopt_then = patch.original("ArrivingRows.adopt")

    def adopt(self: ArrivingRows, serial: Serial, commit: Commit, now_us: int) -> Settled:
        request = self._running.requests[serial]
        followers, request.followers = request.followers, []
        self._queue._held_back -= len(followers)
        return adopt_then(self, serial, commit, now_us)

    patch.set("ArrivingRows.adopt", adopt)


@core("a failed hand-over ends the request, though it was to go on here")
def give_up_instead_of_resuming(patch: Patch) -> None:
    init_then = patch.original("DecodeSide.__init__")

    def init(self: DecodeSide, config: WorkerConfig, scheduler: Scheduler, rows: ArrivingRows, secret: bytes) -> None:
        init_then(self, config, scheduler, rows, secret)
        self._resumes = False

    patch.set("DecodeSide.__init__", init)


@core("who is sent elsewhere is not told why")
def reschedule_without_a_fault(patch: Patch) -> None:
    end_then = patch.original("_end_asked")

    def end(self: DecodeSide, entry: DecodeHandover, reason: FinishReason, _fault: PdFault | None) -> Acts:
        return end_then(self, entry, reason, None)

    patch.set("_end_asked", end)


@core("the time that a failed attempt took is on nobody's bill")
def bill_no_failed_attempt(patch: Patch) -> None:
    def charge(self: ArrivingRows, request: Request) -> None:
        request.since_us = self._running.now_us

    patch.set("_charge_wait", charge)


# ── the short path ───────────────────────────────────────────────────────────────────────────────────────────────────────


@core("P computes what D has no room for yet, and has nowhere to send it when the grant comes")
def compute_before_the_grant(patch: Patch) -> None:
    advance_then = patch.original("PrefillSide.advance")

    def advance(self: PrefillSide, now_us: int) -> Acts:
        acts = advance_then(self, now_us)
        for entry in self.open():
            if entry.state is PrefillHandoverState.OFFERED and entry.serial is not None:
                self._held.begin(entry.serial)
        return acts

    def once(begin_then: Any) -> Any:
        def begin(self: Any, serial: Serial) -> None:
            begun: list[Serial] = vars(self).setdefault("begun by the bug", [])
            if serial not in begun:
                begun.append(serial)
                begin_then(self, serial)

        return begin

    patch.set("PrefillSide.advance", advance)
    patch.set("PrefillsWithBlocks.begin", once(patch.original("PrefillsWithBlocks.begin")))
    patch.set("PrefillsForQueue.begin", once(patch.original("PrefillsForQueue.begin")))


@core("on the short path cached blocks are used without being held")
def use_cached_blocks_unheld(patch: Patch) -> None:
    occupy_then = patch.original("RunningSet.occupy")

    def occupy(self: RunningSet, request: Request, hit: PrefixHit, move: Any) -> int:
        slot = occupy_then(self, request, hit, move)
        if self.config.role.gives and self.config.prefill_path is PrefillPath.SHORT and len(hit.blocks):
            self.pool.drop(hit.blocks)
        return slot

    patch.set("RunningSet.occupy", occupy)


@core("a prefill that was stopped keeps its place among those to be computed")
def prefill_what_was_stopped(patch: Patch) -> None:
    stop_then = patch.original("RunningSet.order_stop")

    def order_stop(self: RunningSet, request: Request, move: Any) -> None:
        slot = self.slot_of(request)
        kept = slot in self.prefilling and self.config.role.gives
        stop_then(self, request, move)
        if kept:
            self.prefilling.append(slot)

    patch.set("RunningSet.order_stop", order_stop)


# ── wire ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _said_otherwise(patch: Patch, kind: type[Any], alter: Callable[[Any], Any]) -> None:
    """Let the codec change every message of a kind on its way."""
    sayable_then = patch.original("_sendable")
    patch.set("_sendable", lambda message: sayable_then(alter(message) if isinstance(message, kind) else message))


def _asked_otherwise(patch: Patch, alter: Callable[[Submission], Submission]) -> None:
    _said_otherwise(patch, Ask, lambda ask: msgspec.structs.replace(ask, submission=alter(ask.submission)))


def _registered_otherwise(patch: Patch, alter: Callable[[Register], Register]) -> None:
    encode_then = patch.original("encode_registration")
    patch.set("encode_registration", lambda item: encode_then(alter(item) if isinstance(item, Register) else item))


@wire("a registration names a size of layers once, however many there are: peers of one model take each other for another's")
def register_each_size_of_a_layer_once(patch: Patch) -> None:
    _registered_otherwise(
        patch, lambda item: msgspec.structs.replace(item, layer_bytes=tuple(dict.fromkeys(item.layer_bytes)))
    )


@wire("an instance registers under the first word of its name, as if it were a host's: nobody has connected to that one")
def register_under_the_first_word_of_a_name(patch: Patch) -> None:
    _registered_otherwise(patch, lambda item: msgspec.structs.replace(item, name=item.name.split()[0]))


@wire("an ask loses the tenant's salt")
def ask_without_the_salt(patch: Patch) -> None:
    _asked_otherwise(patch, lambda item: msgspec.structs.replace(item, salt=b""))


@wire("an ask loses the seed, and P draws another first token")
def ask_without_the_seed(patch: Patch) -> None:
    def alter(item: Submission) -> Submission:
        return msgspec.structs.replace(item, sampling=msgspec.structs.replace(item.sampling, seed=0))

    _asked_otherwise(patch, alter)


@wire("a grant loses what D has already, and P sends everything")
def grant_without_the_prefix(patch: Patch) -> None:
    _said_otherwise(patch, Grant, lambda grant: msgspec.structs.replace(grant, cached_tokens=0))


@wire("of the checks of a commit only the first is sent")
def send_one_check_only(patch: Patch) -> None:
    _said_otherwise(patch, Commit, lambda commit: msgspec.structs.replace(commit, checks=commit.checks[:8]))


@wire("D is told of one cached token more than P had")
def count_one_cached_token_more(patch: Patch) -> None:
    def alter(commit: Commit) -> Commit:
        return msgspec.structs.replace(commit, cached_tokens=commit.cached_tokens + 1)

    _said_otherwise(patch, Commit, alter)
