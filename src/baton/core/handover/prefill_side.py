"""The prefill side of a hand-over (P): queues what peers ask for, offers, prefills, sends and commits. See `protocol`."""

from __future__ import annotations

from collections import Counter

from baton.core.config import WorkerConfig
from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import HandoverGauges
from baton.core.engine.held_prefills import HeldPrefills
from baton.core.engine.plan import StepPlan
from baton.core.engine.records import NOTHING_SETTLED, Settled
from baton.core.engine.request import FinishReason, Submission
from baton.core.engine.scheduler import Scheduler
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.handover.messages import (
    Adopted,
    Ask,
    AttemptFailed,
    Decline,
    Fence,
    Fenced,
    Grant,
    Handover,
    Heard,
    PeerEvent,
    PeerId,
    PeerLost,
    PeerOpened,
    Refuse,
    Release,
    Renew,
    ShipFailed,
    Shipped,
    Tell,
)
from baton.core.handover.prefill_handovers import (
    AT_WORK,
    ENDING,
    PrefillHandover,
    PrefillHandoverMove,
    PrefillHandovers,
    PrefillHandoverState,
)
from baton.core.handover.prefill_offers import PrefillOffers
from baton.core.handover.prefill_sending import PrefillSending
from baton.core.handover.protocol import Acts, HandoverSide, gauges_of

RENEW_US_MIN = 10_000
"""Shortest time between two renewals, whatever lease a peer grants."""


class PrefillSide(HandoverSide):
    def __init__(self, config: WorkerConfig, scheduler: Scheduler, held: HeldPrefills) -> None:
        self._worker_config = config
        self._config = config.handover
        self._scheduler = scheduler
        self._held = held
        self._handovers = PrefillHandovers(scheduler.tiers)
        self._offers = PrefillOffers(scheduler, held, self._handovers)
        self._sending = PrefillSending(scheduler, self._handovers)
        self._peers: dict[PeerId, None] = {}
        self._failed: Counter[PdCode] = Counter()
        self._made = 0
        self._now_us = 0

    # ── views ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> tuple[PrefillHandover, ...]:
        """For the laws."""
        return self._handovers.all()

    def moves(self) -> dict[tuple[PrefillHandoverState, PrefillHandoverMove], int]:
        return self._handovers.moves()

    def gauges(self) -> HandoverGauges:
        return gauges_of(len(self._peers), len(self._handovers), self._made, self._failed)

    @property
    def queued(self) -> int:
        return len(self._handovers.queue)

    def next_deadline(self) -> int | None:
        return min((self._due_us(entry) for entry in self._handovers.with_time_limit()), default=None)

    def _due_us(self, entry: PrefillHandover) -> int:
        """The time limit, or the next renewal. Nothing is renewed after the commit: then the decode side waits for bytes."""
        ends_us = entry.arrived_us + self._config.deadline_us
        return min(ends_us, entry.renew_us) if entry.state in AT_WORK else ends_us

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: PeerEvent, now_us: int) -> Acts:
        """Handle an event, and then offer: an end may have made room."""
        self._now_us = now_us
        return self._on_event(event) + self.advance(now_us)

    def _on_event(self, event: PeerEvent) -> Acts:
        match event:
            case PeerOpened(peer):
                self._peers[peer] = None
                return []
            case PeerLost(peer):
                return self._peer_lost(peer)
            case Heard(peer, message):
                return self._on_message(peer, message)
            case Shipped(handover, checks):
                return self._sending.shipped(self._handovers.get(handover), checks)
            case ShipFailed(handover, reason):
                entry = self._handovers.get(handover)
                return self._decline(entry, PdCode.NOT_DELIVERED, reason) if entry else []
            case Fenced(handover):
                return self._fenced(self._handovers.get(handover))
            case _:
                return []  # events of a decode side's driver

    def planned(self, plan: StepPlan | None, now_us: int) -> Acts:
        self._now_us = now_us
        return [] if plan is None else self._sending.planned(plan)

    def settled(self, settled: Settled, now_us: int) -> Acts:
        """First tokens are sent to the peer; no front end waits for them. Ends free room for the next offers."""
        self._now_us = now_us
        acts: Acts = []
        logprobs = {item.row: item for item in settled.logprobs}
        for row, (serial, token) in enumerate(zip(settled.serials.tolist(), settled.tokens.tolist(), strict=True)):
            acts += self._sending.prefilled(self._handovers.of_row(serial), token, logprobs.get(row))
        for ended in settled.ended:
            acts += self.left(ended)
        return [*acts, *self.advance(now_us), NOTHING_SETTLED]

    def expire(self, now_us: int) -> Acts:
        self._now_us = now_us
        acts: Acts = []
        while late := [entry for entry in self._handovers.with_time_limit() if self._due_us(entry) <= now_us]:
            acts += [act for entry in late for act in self._late(entry)]
        return acts + self.advance(now_us)

    def _late(self, entry: PrefillHandover) -> Acts:
        if entry.grant is None or self._now_us >= entry.arrived_us + self._config.deadline_us:
            return self._decline(entry, PdCode.TIMEOUT, "it took too long")
        entry.renew_us = self._now_us + self._renews_every_us(entry.grant)
        return [Tell(entry.handover.peer, Renew(entry.handover.request, entry.handover.attempt))]

    def advance(self, now_us: int) -> Acts:
        self._now_us = now_us
        return self._offers.advance(now_us)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _peer_lost(self, peer: PeerId) -> Acts:
        self._peers.pop(peer, None)
        acts: Acts = []
        for entry in self._handovers.of_peer(peer):
            acts += self._let_go(entry)
        return acts

    def _on_message(self, peer: PeerId, message: object) -> Acts:
        match message:
            case Ask():
                return self._asked(peer, message)
            case Grant(request, attempt):
                return self._granted(Handover(peer, request, attempt), message)
            case Refuse(request, attempt):
                return self._released(Handover(peer, request, attempt), PdCode.REFUSED)
            case Adopted(request, attempt):
                return self._adopted(self._handovers.get(Handover(peer, request, attempt)))
            case Release(request, attempt):
                return self._released(Handover(peer, request, attempt), None)
        return []

    def _asked(self, peer: PeerId, ask: Ask) -> Acts:
        handover = Handover(peer, ask.request, ask.attempt)
        entry = self._handovers.get(handover)
        if entry is not None and entry.state in ENDING:  # the peer restarted, and its serials began anew
            text = "an attempt of the same number is still being given up"
            return [Tell(peer, Decline(ask.request, ask.attempt, PdCode.TIMEOUT, text))]
        if entry is not None:
            return [self._offers.tell(entry)] if entry.state is PrefillHandoverState.OFFERED else []
        acts: Acts = []
        before = self._handovers.get(handover._replace(attempt=ask.attempt - 1))
        if before is not None:
            acts += self._let_go(before)
        reason = self._decline_reason(ask.submission)
        if reason is not None:
            self._failed[PdCode.TIMEOUT] += 1
            return [*acts, Tell(peer, Decline(ask.request, ask.attempt, PdCode.TIMEOUT, reason))]
        self._handovers.add(PrefillHandover(handover, ask.submission, self._now_us))
        return acts

    def _decline_reason(self, submission: Submission) -> str | None:
        config, known = self._worker_config, submission.known
        if self.draining:
            return "the instance is draining"
        if submission.sampling.prompt_logprobs is not None:
            return "log-probabilities of a prompt are computed where it decodes"
        if not len(submission.prompt) or len(known) >= config.context_tokens or len(known) > config.pool_tokens:
            return (
                f"a prompt of {len(known)} tokens does not fit a context of {config.context_tokens}, "
                f"{config.pool_tokens} in all"
            )
        if not 0 <= int(known.min()) <= int(known.max()) < self._config.vocabulary:
            return "the prompt has token ids that this model does not know"
        constraint = submission.sampling.constraint
        if constraint is not None and (constraint.backend, constraint.began_under) not in config.constraint_backends:
            # Its first token is drawn here.
            return f"it has no {constraint.backend} {constraint.began_under} for the constraint"
        if self.queued >= config.waiting_max:
            return f"its queue is full: {self.queued} prefills wait"
        return None

    def _granted(self, handover: Handover, grant: Grant) -> Acts:
        entry = self._handovers.get(handover)
        if entry is None or entry.state in ENDING:
            return [Tell(handover.peer, Decline(handover.request, handover.attempt, PdCode.NOT_DELIVERED, "it was let go"))]
        if entry.state is not PrefillHandoverState.OFFERED or entry.serial is None:
            return []  # the same grant again
        tokens, block_size = entry.submission.known_tokens, self._worker_config.block_size
        if not 0 <= grant.cached_tokens < tokens or grant.cached_tokens % block_size:
            text = f"{grant.cached_tokens} tokens of a prompt of {tokens} cannot be there already"
            return self._decline(entry, PdCode.NOT_DELIVERED, text)
        entry.grant = grant
        entry.renew_us = self._now_us + self._renews_every_us(grant)
        entry.shipped_upto = grant.cached_tokens // block_size
        self._handovers.move(entry, PrefillHandoverMove.GRANTED)
        self._held.begin(entry.serial)
        return []

    def _adopted(self, entry: PrefillHandover | None) -> Acts:
        if entry is None or entry.state is not PrefillHandoverState.COMMITTED:
            return []
        self._made += 1
        self._handovers.move(entry, PrefillHandoverMove.ADOPTED)
        return self._order_leave(entry)

    def _released(self, handover: Handover, code: PdCode | None) -> Acts:
        entry = self._handovers.get(handover)
        if entry is None:
            return []
        if code is not None:
            self._failed[code] += 1
        return self._let_go(entry)

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
            self._handovers.move(entry, PrefillHandoverMove.DROP)
            return []
        if entry.state is PrefillHandoverState.OFFERED and entry.serial is not None:
            self._handovers.move(entry, PrefillHandoverMove.DROP)
            # Nothing has begun: it ends at once, or when no copy from host memory writes to its blocks any more.
            self._scheduler.order_stop(entry.serial, FinishReason.ABORT, self._now_us)
            return []
        self._handovers.move(entry, PrefillHandoverMove.GIVE_UP)
        return [Fence(entry.handover)]

    def _fenced(self, entry: PrefillHandover | None) -> Acts:
        if entry is None or entry.state is not PrefillHandoverState.FENCING:
            return []
        self._handovers.move(entry, PrefillHandoverMove.FENCED)
        return self._order_leave(entry)

    def _order_leave(self, entry: PrefillHandover) -> Acts:
        """Stop its row. Its slot is free once the executor acknowledges; at once if the row has ended or has not started."""
        serial = entry.row
        self._scheduler.unpin(serial)
        if entry.row_has_ended:
            self._handovers.move(entry, PrefillHandoverMove.LEFT)
            return []
        ended = self._scheduler.order_stop(serial, FinishReason.ABORT, self._now_us)
        return [] if ended is None else self.left(ended)

    def left(self, ended: EndedRequest) -> Acts:
        """The scheduler has ended a row."""
        entry = self._handovers.of_serial(ended.serial)
        if entry is None:
            return []
        if entry.state is PrefillHandoverState.LEAVING:
            self._handovers.move(entry, PrefillHandoverMove.LEFT)
            return []
        entry.row_has_ended = True
        return self._decline(entry, PdCode.NOT_DELIVERED, f"its prefill ended with {ended.reason}")

    def _renews_every_us(self, grant: Grant) -> int:
        """Every `renew_us`, or twice in a lease that is shorter."""
        return min(self._config.renew_us, max(RENEW_US_MIN, grant.lease_us // 2))
