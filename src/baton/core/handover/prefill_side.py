"""The giver's side of a hand-over (P): queues what peers ask for, offers, prefills, sends and commits. See `handover`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from baton.core.config import WorkerConfig
from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import HandoverGauges
from baton.core.engine.held_prefills import HeldPrefills
from baton.core.engine.plan import Chunk, Logprobs, StepPlan
from baton.core.engine.prefix import Key
from baton.core.engine.queued_requests import SOUGHT_AHEAD
from baton.core.engine.records import Settled
from baton.core.engine.request import FinishReason, Serial, Submission
from baton.core.engine.scheduler import Scheduler
from baton.core.errors import InvariantViolated
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.handover.messages import (
    Adopted,
    Ask,
    AttemptFailed,
    Commit,
    Decline,
    Fence,
    Fenced,
    Grant,
    Handover,
    Heard,
    Offer,
    OpenShip,
    PeerEvent,
    PeerId,
    PeerLost,
    PeerOpened,
    Refuse,
    Release,
    Renew,
    Ship,
    ShipFailed,
    Shipped,
    Tell,
)
from baton.core.handover.protocol import Acts, gauges_of, prompt_digest
from baton.core.state_machine import StateMachine

STEPS_AHEAD = 2
"""A giver offers so many steps' worth of prefill in advance: enough to stay busy, and no more, since it costs room at D."""
RENEW_US_MIN = 10_000
"""A taker whose leases are short is told that often at most."""


class PrefillHandoverState(Enum):
    QUEUED = "queued"
    OFFERED = "offered"
    """Slot and blocks are held for it here (on the general path: its place)."""
    PREFILLING = "prefilling"
    SHIPPING = "shipping"
    """The first token is there; bytes are still leaving."""
    COMMITTED = "committed"
    FENCING = "fencing"
    LEAVING = "leaving"
    """Nothing reads its blocks any more; the executor is to let go of its slot."""
    OVER = "over"


class PrefillHandoverMove(Enum):
    OFFER = "offered"
    GRANTED = "granted"
    PREFILLED = "first token"
    COMMIT = "all sent"
    ADOPTED = "adopted"
    DROP = "given up before the grant"
    GIVE_UP = "given up"
    FENCED = "fenced"
    LEFT = "slot free"


PREFILL_TRANSITIONS: dict[tuple[PrefillHandoverState, PrefillHandoverMove], PrefillHandoverState] = {
    (PrefillHandoverState.QUEUED, PrefillHandoverMove.OFFER): PrefillHandoverState.OFFERED,
    (PrefillHandoverState.QUEUED, PrefillHandoverMove.DROP): PrefillHandoverState.OVER,
    (PrefillHandoverState.OFFERED, PrefillHandoverMove.GRANTED): PrefillHandoverState.PREFILLING,
    (PrefillHandoverState.OFFERED, PrefillHandoverMove.DROP): PrefillHandoverState.OVER,
    (PrefillHandoverState.PREFILLING, PrefillHandoverMove.PREFILLED): PrefillHandoverState.SHIPPING,
    (PrefillHandoverState.PREFILLING, PrefillHandoverMove.GIVE_UP): PrefillHandoverState.FENCING,
    (PrefillHandoverState.SHIPPING, PrefillHandoverMove.COMMIT): PrefillHandoverState.COMMITTED,
    (PrefillHandoverState.SHIPPING, PrefillHandoverMove.GIVE_UP): PrefillHandoverState.FENCING,
    (PrefillHandoverState.COMMITTED, PrefillHandoverMove.ADOPTED): PrefillHandoverState.LEAVING,
    (PrefillHandoverState.COMMITTED, PrefillHandoverMove.GIVE_UP): PrefillHandoverState.FENCING,
    (PrefillHandoverState.FENCING, PrefillHandoverMove.FENCED): PrefillHandoverState.LEAVING,
    (PrefillHandoverState.LEAVING, PrefillHandoverMove.LEFT): PrefillHandoverState.OVER,
}

SOON = (PrefillHandoverState.OFFERED, PrefillHandoverState.PREFILLING)
AHEAD = (PrefillHandoverState.QUEUED, *SOON)
AT_WORK = (PrefillHandoverState.PREFILLING, PrefillHandoverState.SHIPPING)
ENDING = (PrefillHandoverState.FENCING, PrefillHandoverState.LEAVING)


@dataclass(slots=True)
class PrefillHandover:
    """One attempt, as the giver knows it."""

    handover: Handover
    submission: Submission
    arrived_us: int
    state: PrefillHandoverState = PrefillHandoverState.QUEUED
    keys: list[Key] | None = None
    """Names of the blocks of what it starts with; made when its turn comes, and kept while it waits for room."""
    is_sought: bool = False
    """The store was asked for what it starts with."""
    serial: Serial | None = None
    """From the offer on."""
    row_has_ended: bool = False
    """The scheduler ended the request by itself."""
    grant: Grant | None = None
    renew_us: int = 0
    """When the taker is told next that this goes on."""
    shipped_upto: int = 0
    """Blocks of the sequence that were ordered to be sent."""
    token: int | None = None
    logprobs: Logprobs | None = None
    checks: bytes | None = None


class PrefillSide:
    def __init__(self, config: WorkerConfig, scheduler: Scheduler, held: HeldPrefills) -> None:
        self._worker_config = config
        self._config = config.handover
        self._scheduler = scheduler
        self._held = held
        self._fingerprint = scheduler.pool.prefix.fingerprint
        self._open: dict[Handover, PrefillHandover] = {}
        self._queue: dict[Handover, PrefillHandover] = {}
        """Those that were not offered yet, in the order of arrival."""
        self._active: dict[Handover, PrefillHandover] = {}
        """The others: as many as have slots, and on the general path those that are soon to have one."""
        self._by_serial: dict[Serial, PrefillHandover] = {}
        self._queued_tokens = 0
        """Of all that are still AHEAD."""
        self._peers: dict[PeerId, None] = {}
        self._states = StateMachine(PREFILL_TRANSITIONS, "a hand-over")
        self._failed: Counter[PdCode] = Counter()
        self._made = 0
        self._now_us = 0
        self.draining = False

    # ── what others may know ─────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> tuple[PrefillHandover, ...]:
        """For the laws."""
        return tuple(self._open.values())

    def moves(self) -> dict[tuple[PrefillHandoverState, PrefillHandoverMove], int]:
        return self._states.moves()

    def gauges(self) -> HandoverGauges:
        return gauges_of(len(self._peers), len(self._open), self._made, self._failed)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def next_deadline(self) -> int | None:
        return min((self._due_us(entry) for entry in self._waiting_for_time()), default=None)

    def _waiting_for_time(self) -> list[PrefillHandover]:
        """Of the queue the first is due first."""
        return [*islice(self._queue.values(), 1), *(entry for entry in self._active.values() if entry.state not in ENDING)]

    def _due_us(self, entry: PrefillHandover) -> int:
        """A time limit, or the next renewal. After its commit a giver has no say in how long the taker waits for bytes."""
        ends_us = entry.arrived_us + self._config.deadline_us
        return min(ends_us, entry.renew_us) if entry.state in AT_WORK else ends_us

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: PeerEvent, now_us: int) -> Acts:
        """Whatever an event ends may be what the next offer waited for."""
        self._now_us = now_us
        return self._happened(event) + self.advance(now_us)

    def _happened(self, event: PeerEvent) -> Acts:
        match event:
            case PeerOpened(peer):
                self._peers[peer] = None
                return []
            case PeerLost(peer):
                return self._peer_lost(peer)
            case Heard(peer, message):
                return self._heard(peer, message)
            case Shipped(handover, checks):
                return self._shipped(self._open.get(handover), checks)
            case ShipFailed(handover, reason):
                entry = self._open.get(handover)
                return self._decline(entry, PdCode.NOT_DELIVERED, reason) if entry else []
            case Fenced(handover):
                return self._fenced(self._open.get(handover))
            case _:
                return []  # what a taker's driver would say

    def planned(self, plan: StepPlan) -> Acts:
        """Before its launch: what of this step is to be sent, layer by layer."""
        acts: Acts = []
        for start in plan.starts:
            acts += self._begun(self._entry_of_slot(start.slot), start.slot, start.computed)
        for chunk in plan.chunks:
            acts += self._ship_chunk(self._entry_of_slot(chunk.slot), chunk, plan.step)
        return acts

    def settled(self, settled: Settled, now_us: int) -> Acts:
        """First tokens are for the taker, not for the front end; ends free what the next offer needs."""
        self._now_us = now_us
        acts: Acts = []
        logprobs = {item.row: item for item in settled.logprobs}
        for row, (serial, token) in enumerate(zip(settled.serials.tolist(), settled.tokens.tolist(), strict=True)):
            acts += self._prefilled(self._by_serial[Serial(serial)], token, logprobs.get(row))
        for ended in settled.ended:
            acts += self.left(ended)
        return acts + self.advance(now_us)

    def expire(self, now_us: int) -> Acts:
        self._now_us = now_us
        acts: Acts = []
        while late := [entry for entry in self._waiting_for_time() if self._due_us(entry) <= now_us]:
            acts += [act for entry in late for act in self._late(entry)]
        return acts + self.advance(now_us)

    def _late(self, entry: PrefillHandover) -> Acts:
        if entry.grant is None or self._now_us >= entry.arrived_us + self._config.deadline_us:
            return self._decline(entry, PdCode.TIMEOUT, "it took too long")
        entry.renew_us = self._now_us + self._renews_every_us(entry.grant)
        return [Tell(entry.handover.peer, Renew(entry.handover.request, entry.handover.attempt))]

    def advance(self, now_us: int) -> Acts:
        """Offer what can be computed soon, in the order of arrival."""
        self._now_us = now_us
        acts: Acts = []
        if not self._queue:
            return acts
        ahead = sum(self._unplanned(entry) for entry in self._active.values() if entry.state in SOON)
        most = STEPS_AHEAD * self._worker_config.step_tokens
        while ahead < most and (entry := self._next_to_offer()) is not None:
            serial = self._held.hold(entry.submission, self._keys_of(entry), entry.submission.known_tokens + 1, now_us)
            if serial is None:
                break
            entry.serial = serial
            ahead += self._unplanned(entry)
            self._by_serial[serial] = entry
            self._move(entry, PrefillHandoverMove.OFFER)
            acts.append(Tell(entry.handover.peer, self._offer(entry)))
        return acts

    def _next_to_offer(self) -> PrefillHandover | None:
        """In the order of arrival; one whose KV is being brought from the store lets others pass."""
        tiers = self._scheduler.tiers
        for entry in islice(self._queue.values(), SOUGHT_AHEAD):
            if not entry.is_sought:
                entry.is_sought = self._held.seek(entry.handover, entry.submission, self._keys_of(entry))
            if not tiers.is_seeking(entry.handover):
                return entry
        return None

    def _keys_of(self, entry: PrefillHandover) -> list[Key]:
        entry.keys = entry.keys or self._scheduler.keys_of(entry.submission, entry.submission.known)
        return entry.keys

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _peer_lost(self, peer: PeerId) -> Acts:
        self._peers.pop(peer, None)
        acts: Acts = []
        for entry in [entry for entry in self._open.values() if entry.handover.peer == peer]:
            acts += self._let_go(entry)
        return acts

    def _heard(self, peer: PeerId, message: object) -> Acts:
        match message:
            case Ask():
                return self._asked(peer, message)
            case Grant(request, attempt):
                return self._granted(Handover(peer, request, attempt), message)
            case Refuse(request, attempt):
                return self._released(Handover(peer, request, attempt), PdCode.REFUSED)
            case Adopted(request, attempt):
                return self._adopted(self._open.get(Handover(peer, request, attempt)))
            case Release(request, attempt):
                return self._released(Handover(peer, request, attempt), None)
        return []

    def _asked(self, peer: PeerId, ask: Ask) -> Acts:
        handover = Handover(peer, ask.request, ask.attempt)
        entry = self._open.get(handover)
        if entry is not None and entry.state in ENDING:  # of a former life of this peer, whose numbers began anew
            text = "an attempt of the same number is still being given up"
            return [Tell(peer, Decline(ask.request, ask.attempt, PdCode.TIMEOUT, text))]
        if entry is not None:
            return [Tell(peer, self._offer(entry))] if entry.state is PrefillHandoverState.OFFERED else []
        acts: Acts = []
        before = self._open.get(handover._replace(attempt=ask.attempt - 1))
        if before is not None:
            acts += self._let_go(before)
        reason = self._cannot(ask.submission)
        if reason is not None:
            self._failed[PdCode.TIMEOUT] += 1
            return [*acts, Tell(peer, Decline(ask.request, ask.attempt, PdCode.TIMEOUT, reason))]
        self._open[handover] = self._queue[handover] = PrefillHandover(handover, ask.submission, self._now_us)
        self._queued_tokens += ask.submission.known_tokens
        return acts

    def _cannot(self, submission: Submission) -> str | None:
        config, known = self._worker_config, submission.known
        if self.draining:
            return "the instance is draining"
        if not len(submission.prompt) or len(known) >= config.context_tokens or len(known) > config.pool_tokens:
            return (
                f"a prompt of {len(known)} tokens does not fit a context of {config.context_tokens}, "
                f"{config.pool_tokens} in all"
            )
        if not 0 <= int(known.min()) <= int(known.max()) < self._config.vocabulary:
            return "the prompt has token ids that this model does not know"
        if len(self._queue) >= config.waiting_max:
            return f"its queue is full: {len(self._queue)} prefills wait"
        return None

    def _granted(self, handover: Handover, grant: Grant) -> Acts:
        entry = self._open.get(handover)
        if entry is None or entry.state in ENDING:
            return [Tell(handover.peer, Decline(handover.request, handover.attempt, PdCode.NOT_DELIVERED, "it was let go"))]
        if entry.state is not PrefillHandoverState.OFFERED or entry.serial is None:
            return []  # the same grant once more
        tokens = entry.submission.known_tokens
        if not 0 <= grant.cached_tokens < tokens or grant.cached_tokens % self._block_size:
            text = f"{grant.cached_tokens} tokens of a prompt of {tokens} cannot be there already"
            return self._decline(entry, PdCode.NOT_DELIVERED, text)
        entry.grant = grant
        entry.renew_us = self._now_us + self._renews_every_us(grant)
        entry.shipped_upto = grant.cached_tokens // self._block_size
        self._move(entry, PrefillHandoverMove.GRANTED)
        self._held.begin(entry.serial)
        return []

    def _adopted(self, entry: PrefillHandover | None) -> Acts:
        if entry is None or entry.state is not PrefillHandoverState.COMMITTED:
            return []
        self._made += 1
        self._move(entry, PrefillHandoverMove.ADOPTED)
        return self._order_leave(entry)

    def _released(self, handover: Handover, code: PdCode | None) -> Acts:
        entry = self._open.get(handover)
        if entry is None:
            return []
        if code is not None:
            self._failed[code] += 1
        return self._let_go(entry)

    # ── computing and sending ────────────────────────────────────────────────────────────────────────────────────────────

    def _begun(self, entry: PrefillHandover, slot: int, computed: int) -> Acts:
        """Its row is in a plan: what the cache had of it can leave at once. Not if it is being given up meanwhile."""
        if entry.grant is None or entry.state is not PrefillHandoverState.PREFILLING:
            return []
        first, found = entry.shipped_upto, computed // self._block_size
        blocks = self._scheduler.slots.blocks(slot)[first:]
        blocks.setflags(write=False)
        self._scheduler.pin(self._serial_of(entry))
        acts: Acts = [OpenShip(entry.handover, entry.grant.token, first, blocks)]
        if found > first:
            acts.append(Ship(entry.handover, None, first, found, last=False))
            entry.shipped_upto = found
        return acts

    def _ship_chunk(self, entry: PrefillHandover, chunk: Chunk, step: int) -> Acts:
        """Whole blocks only, the last one aside: no block is sent twice."""
        if entry.state is not PrefillHandoverState.PREFILLING:
            return []
        upto = -(-chunk.end // self._block_size) if chunk.samples else chunk.end // self._block_size
        first = entry.shipped_upto
        if upto <= first:
            return []
        entry.shipped_upto = upto
        return [Ship(entry.handover, step, first, upto, last=chunk.samples)]

    def _prefilled(self, entry: PrefillHandover, token: int, logprobs: Logprobs | None) -> Acts:
        if entry.state is not PrefillHandoverState.PREFILLING:
            return []
        entry.token, entry.logprobs = token, logprobs
        self._move(entry, PrefillHandoverMove.PREFILLED)
        return self._commit_if_ready(entry)

    def _shipped(self, entry: PrefillHandover | None, checks: bytes) -> Acts:
        if entry is None or entry.state not in (PrefillHandoverState.PREFILLING, PrefillHandoverState.SHIPPING):
            return []
        entry.checks = checks
        return self._commit_if_ready(entry)

    def _commit_if_ready(self, entry: PrefillHandover) -> Acts:
        """The last piece may leave before the first token is known, or after."""
        if (
            entry.state is not PrefillHandoverState.SHIPPING
            or entry.checks is None
            or entry.token is None
            or entry.serial is None
        ):
            return []
        request = self._scheduler.request(entry.serial)
        if request is None:
            return []
        self._move(entry, PrefillHandoverMove.COMMIT)
        commit = Commit(
            request=entry.handover.request,
            attempt=entry.handover.attempt,
            token=entry.token,
            logprobs=entry.logprobs,
            cached_tokens=request.bill.cached_tokens,
            restored_tokens=request.bill.restored_tokens,
            queue_us=max(0, request.since_us - entry.arrived_us - request.bill.prefill_us),
            prefill_us=request.bill.prefill_us,
            prompt_digest=prompt_digest(entry.submission, self._fingerprint),
            checks=entry.checks,
            queued_tokens=self._queued_tokens,
        )
        return [Tell(entry.handover.peer, commit)]

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _decline(self, entry: PrefillHandover, code: PdCode, reason: str) -> Acts:
        if entry.state in ENDING:
            return []
        self._failed[code] += 1
        handover = entry.handover
        fault = PdFault(code, PdStage.PREFILL, reason)
        decline = Tell(handover.peer, Decline(handover.request, handover.attempt, code, reason))
        return [decline, AttemptFailed(handover, fault), *self._let_go(entry)]

    def _let_go(self, entry: PrefillHandover) -> Acts:
        if entry.state in ENDING:
            return []
        if entry.state is PrefillHandoverState.QUEUED:
            self._move(entry, PrefillHandoverMove.DROP)
            return []
        if entry.state is PrefillHandoverState.OFFERED and entry.serial is not None:
            self._move(entry, PrefillHandoverMove.DROP)
            # Nothing has begun: it ends at once, or when no copy from host memory writes to its blocks any more.
            self._scheduler.order_stop(entry.serial, FinishReason.ABORT, self._now_us)
            return []
        self._move(entry, PrefillHandoverMove.GIVE_UP)
        return [Fence(entry.handover)]

    def _fenced(self, entry: PrefillHandover | None) -> Acts:
        if entry is None or entry.state is not PrefillHandoverState.FENCING:
            return []
        self._move(entry, PrefillHandoverMove.FENCED)
        return self._order_leave(entry)

    def _order_leave(self, entry: PrefillHandover) -> Acts:
        """Its slot comes back with the executor's acknowledgement, or at once where it has that already or needs none."""
        serial = self._serial_of(entry)
        self._scheduler.unpin(serial)
        if entry.row_has_ended:
            self._move(entry, PrefillHandoverMove.LEFT)
            return []
        ended = self._scheduler.order_stop(serial, FinishReason.ABORT, self._now_us)
        return [] if ended is None else self.left(ended)

    def left(self, ended: EndedRequest) -> Acts:
        """The scheduler has ended a row."""
        entry = self._by_serial.get(ended.serial)
        if entry is None:
            return []
        if entry.state is PrefillHandoverState.LEAVING:
            self._move(entry, PrefillHandoverMove.LEFT)
            return []
        entry.row_has_ended = True
        return self._decline(entry, PdCode.NOT_DELIVERED, f"its prefill ended with {ended.reason}")

    # ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _block_size(self) -> int:
        return self._worker_config.block_size

    def _renews_every_us(self, grant: Grant) -> int:
        """As we do, or as often as a lease that ends sooner needs it."""
        return min(self._config.renew_us, max(RENEW_US_MIN, grant.lease_us // 2))

    def _unplanned(self, entry: PrefillHandover) -> int:
        return 0 if entry.serial is None else self._scheduler.unplanned(entry.serial)

    def _offer(self, entry: PrefillHandover) -> Offer:
        tokens = entry.submission.known_tokens
        return Offer(entry.handover.request, entry.handover.attempt, tokens, self._queued_tokens)

    def _serial_of(self, entry: PrefillHandover) -> Serial:
        if entry.serial is None:
            raise InvariantViolated(f"{entry.handover} in {entry.state.name} has no row")
        return entry.serial

    def _entry_of_slot(self, slot: int) -> PrefillHandover:
        return self._by_serial[Serial(int(self._scheduler.slots.serial[slot]))]

    def _move(self, entry: PrefillHandover, move: PrefillHandoverMove) -> None:
        before, entry.state = entry.state, self._states.after(entry.state, move)
        if before is PrefillHandoverState.QUEUED:
            del self._queue[entry.handover]
            self._scheduler.tiers.forget_seeker(entry.handover)
        if before in AHEAD and entry.state not in AHEAD:
            self._queued_tokens -= entry.submission.known_tokens
        if entry.state is PrefillHandoverState.OFFERED:
            self._active[entry.handover] = entry
        if entry.state is PrefillHandoverState.OVER:
            del self._open[entry.handover]
            self._active.pop(entry.handover, None)
            if entry.serial is not None:
                del self._by_serial[entry.serial]
