"""The decode side of a hand-over (D): asks peers to prefill, grants them room, adopts what arrives. See `protocol`."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from baton.core.config import HandoverConfig, OnPreempt, WorkerConfig
from baton.core.engine.arriving_rows import ArrivingRows, Lease
from baton.core.engine.gauges import HandoverGauges
from baton.core.engine.plan import StepPlan
from baton.core.engine.records import Request
from baton.core.engine.request import FinishReason, Serial, Submission
from baton.core.engine.scheduler import Scheduler
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.handover.messages import (
    Adopted,
    Arriving,
    Ask,
    AttemptFailed,
    Commit,
    Decline,
    Expect,
    Fence,
    Fenced,
    Grant,
    Handover,
    HandoverMade,
    Heard,
    Offer,
    PeerEvent,
    PeerId,
    PeerLost,
    PeerOpened,
    Refuse,
    Release,
    Renew,
    Tell,
    TransferBroken,
    Verified,
    Verify,
)
from baton.core.handover.prefill_peers import PrefillPeers
from baton.core.handover.protocol import DIGEST_BYTES, Acts, HandoverSide, gauges_of, prompt_digest
from baton.core.state_machine import FastEnum, StateMachine

ATTEMPTS_MAX = 3
"""After this many asks that were declined, or offers without room, the decode side prefills a request itself."""


class DecodeHandoverState(FastEnum):
    ASKED = "asked"
    GRANTED = "granted"
    ARRIVING = "arriving"
    CHECKING = "checking"
    """Committed; the driver compares the received bytes with the checks."""
    FENCING = "fencing"
    OVER = "over"


class DecodeHandoverMove(FastEnum):
    GRANT = "offer granted"
    REFUSE = "offer refused"
    ARRIVE = "first bytes"
    COMMIT = "committed"
    ADOPT = "verified and adopted"
    DROP = "given up before the grant"
    GIVE_UP = "given up"
    FENCED = "fenced"


DECODE_TRANSITIONS: dict[tuple[DecodeHandoverState, DecodeHandoverMove], DecodeHandoverState] = {
    (DecodeHandoverState.ASKED, DecodeHandoverMove.GRANT): DecodeHandoverState.GRANTED,
    (DecodeHandoverState.ASKED, DecodeHandoverMove.REFUSE): DecodeHandoverState.OVER,
    (DecodeHandoverState.ASKED, DecodeHandoverMove.DROP): DecodeHandoverState.OVER,
    (DecodeHandoverState.GRANTED, DecodeHandoverMove.ARRIVE): DecodeHandoverState.ARRIVING,
    (DecodeHandoverState.GRANTED, DecodeHandoverMove.COMMIT): DecodeHandoverState.CHECKING,
    (DecodeHandoverState.GRANTED, DecodeHandoverMove.GIVE_UP): DecodeHandoverState.FENCING,
    (DecodeHandoverState.ARRIVING, DecodeHandoverMove.COMMIT): DecodeHandoverState.CHECKING,
    (DecodeHandoverState.ARRIVING, DecodeHandoverMove.GIVE_UP): DecodeHandoverState.FENCING,
    (DecodeHandoverState.CHECKING, DecodeHandoverMove.ADOPT): DecodeHandoverState.OVER,
    (DecodeHandoverState.CHECKING, DecodeHandoverMove.GIVE_UP): DecodeHandoverState.FENCING,
    (DecodeHandoverState.FENCING, DecodeHandoverMove.FENCED): DecodeHandoverState.OVER,
}


TIMEOUT_FAULTS = {
    DecodeHandoverState.ASKED: (PdCode.TIMEOUT, PdStage.OFFER),
    DecodeHandoverState.GRANTED: (PdCode.TIMEOUT, PdStage.PREFILL),
    DecodeHandoverState.ARRIVING: (PdCode.TIMEOUT, PdStage.PREFILL),
    DecodeHandoverState.CHECKING: (PdCode.NOT_DELIVERED, PdStage.TRANSFER),
}
"""The fault of an attempt whose time ran out, by its state: the prefill never came, or its bytes are missing."""


@dataclass(slots=True)
class DecodeHandover:
    """One attempt, as the decode side knows it."""

    handover: Handover
    submission: Submission
    asked_us: int
    state: DecodeHandoverState = DecodeHandoverState.ASKED
    lease_until_us: int = 0
    grant: Grant | None = None
    commit: Commit | None = None

    @property
    def serial(self) -> Serial:
        return Serial(self.handover.request)


class DecodeSide(HandoverSide):
    def __init__(self, config: WorkerConfig, scheduler: Scheduler, rows: ArrivingRows, secret: bytes) -> None:
        self._config = config.handover
        self._resumes = config.on_preempt is OnPreempt.RESUME
        self._scheduler = scheduler
        self._rows = rows
        self._prefix = scheduler.pool.prefix
        self._secret = hashlib.blake2b(secret, digest_size=32).digest()
        self._peers = PrefillPeers()
        self._open: dict[Serial, DecodeHandover] = {}
        self._states = StateMachine(DECODE_TRANSITIONS, "a hand-over")
        self._failed: Counter[PdCode] = Counter()
        self._made = 0
        self._now_us = 0

    # ── views ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> tuple[DecodeHandover, ...]:
        """For the laws."""
        return tuple(self._open.values())

    def moves(self) -> dict[tuple[DecodeHandoverState, DecodeHandoverMove], int]:
        return self._states.moves()

    def gauges(self) -> HandoverGauges:
        return gauges_of(len(self._peers), len(self._open), self._made, self._failed)

    def knows(self, serial: Serial) -> bool:
        return serial in self._open

    def next_deadline(self) -> int | None:
        if not self._open:
            return None  # the usual case, and this is called after each event
        return min(
            (self._ends_us(entry) for entry in self._open.values() if entry.state is not DecodeHandoverState.FENCING),
            default=None,
        )

    def _ends_us(self, entry: DecodeHandover) -> int:
        whole_us = entry.asked_us + self._config.deadline_us
        return whole_us if entry.state is DecodeHandoverState.ASKED else min(whole_us, entry.lease_until_us)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: PeerEvent, now_us: int) -> Acts:
        self._now_us = now_us
        match event:
            case PeerOpened(peer):
                return self._peer_opened(peer)
            case PeerLost(peer, reason):
                return self._peer_lost(peer, reason)
            case Heard(peer, message):
                return self._on_message(peer, message)
            case Arriving(handover):
                return self._arriving(self._entry(handover))
            case Verified(handover):
                return self._verified(self._entry(handover))
            case TransferBroken(handover, reason):
                entry = self._entry(handover)
                return self._fail(entry, PdCode.NOT_DELIVERED, PdStage.TRANSFER, reason) if entry else []
            case Fenced(handover):
                return self._fenced(self._entry(handover))
            case _:
                return []  # events of a prefill side's driver

    def planned(self, plan: StepPlan | None, now_us: int) -> Acts:
        """Ask peers to prefill the requests that the pass admitted for them."""
        del plan
        self._now_us = now_us
        return [self._ask(request) for request in self._rows.asked()]

    def expire(self, now_us: int) -> Acts:
        self._now_us = now_us
        late = [
            entry
            for entry in self._open.values()
            if entry.state is not DecodeHandoverState.FENCING and self._ends_us(entry) <= now_us
        ]
        acts: Acts = []
        for entry in late:
            acts += self._fail(entry, *TIMEOUT_FAULTS[entry.state], _timeout_reason(entry, self._config, now_us))
        return acts

    def cancel(self, serial: Serial, reason: FinishReason, now_us: int) -> Acts:
        """The client is gone, or the instance gives the request up: end it on both sides."""
        self._now_us = now_us
        entry = self._open[serial]
        if entry.state is DecodeHandoverState.FENCING:
            self._scheduler.order_stop(serial, reason, now_us)
            return []
        return [_release(entry, "it was cancelled"), *self._let_go(entry, reason, None)]

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _peer_opened(self, peer: PeerId) -> Acts:
        self._peers.add(peer, self._now_us)
        self._rows.may_ask = True
        return []

    def _peer_lost(self, peer: PeerId, reason: str) -> Acts:
        self._peers.remove(peer)
        self._rows.may_ask = bool(self._peers)
        acts: Acts = []
        for entry in [entry for entry in self._open.values() if entry.handover.peer == peer]:
            if entry.state is DecodeHandoverState.ASKED:
                acts += self._not_taken(entry, PdCode.TIMEOUT, f"the peer is gone: {reason}")
            elif entry.state is not DecodeHandoverState.FENCING:
                acts += self._fail(entry, PdCode.NOT_DELIVERED, PdStage.TRANSFER, f"the peer is gone: {reason}", tell=False)
        return acts

    def _on_message(self, peer: PeerId, message: object) -> Acts:
        match message:
            case Offer():
                return self._offered(peer, message)
            case Renew(request, attempt):
                self._renew(self._entry(Handover(peer, request, attempt)))
            case Commit(request, attempt):
                self._peers.learn(peer, message.queued_tokens, self._now_us)
                return self._committed(self._entry(Handover(peer, request, attempt)), message)
            case Decline(request, attempt, code, reason):
                entry = self._entry(Handover(peer, request, attempt))
                if entry is not None and entry.state is DecodeHandoverState.ASKED:
                    return self._not_taken(entry, code, reason)
                return self._fail(entry, code, PdStage.PREFILL, reason, tell=False) if entry else []
        return []

    def _ask(self, request: Request) -> Tell:
        peer = self._peers.choose(request.submission, self._now_us)
        request.bill.attempts += 1
        handover = Handover(peer, request.serial, request.bill.attempts)
        self._open[request.serial] = DecodeHandover(handover, request.submission, self._now_us)
        return Tell(peer, Ask(request.serial, handover.attempt, request.submission))

    # ── one attempt ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _entry(self, handover: Handover) -> DecodeHandover | None:
        """None for an attempt that has ended or never existed."""
        entry = self._open.get(Serial(handover.request))
        return entry if entry is not None and entry.handover == handover else None

    def _offered(self, peer: PeerId, offer: Offer) -> Acts:
        self._peers.learn(peer, offer.queued_tokens, self._now_us)
        entry = self._entry(Handover(peer, offer.request, offer.attempt))
        if entry is None or entry.state is DecodeHandoverState.FENCING:
            return [Tell(peer, Release(offer.request, offer.attempt, "this attempt is over"))]
        if entry.grant is not None:
            return [Tell(peer, entry.grant)]
        if offer.prompt_tokens != entry.submission.known_tokens:
            text = f"{offer.prompt_tokens} tokens were offered for a prompt of {entry.submission.known_tokens}"
            return self._fail(entry, PdCode.NOT_DELIVERED, PdStage.OFFER, text)
        lease = self._rows.lease(entry.serial)
        return self._refuse(entry) if lease is None else self._grant(entry, lease)

    def _grant(self, entry: DecodeHandover, lease: Lease) -> Acts:
        handover = entry.handover
        self._move(entry, DecodeHandoverMove.GRANT)
        named = f"{handover.request}/{handover.attempt}".encode()
        token = self._prefix.hashes.noted(hashlib.blake2b(named, key=self._secret, digest_size=DIGEST_BYTES).digest())
        entry.grant = Grant(handover.request, handover.attempt, lease.cached_tokens, self._config.lease_us, token)
        self._renew(entry)
        return [Expect(handover, token, lease.first, lease.blocks), Tell(handover.peer, entry.grant)]

    def _refuse(self, entry: DecodeHandover) -> Acts:
        """No room now: refuse at once. The request is asked for again when there is room, or ends its attempt."""
        handover, reason = entry.handover, "no slot or too few free blocks beside the reserve"
        self._move(entry, DecodeHandoverMove.REFUSE)
        fault = self._note_fault(PdCode.REFUSED, PdStage.OFFER, reason)
        refuse = Refuse(handover.request, handover.attempt, reason)
        acts: Acts = [Tell(handover.peer, refuse), AttemptFailed(handover, fault)]
        if self._resumes or entry.submission.resumes_in_place:
            gives_up = handover.attempt >= ATTEMPTS_MAX
            self._rows.take_back(entry.serial, prefills_here=gives_up, now_us=self._now_us)
            return acts
        return acts + self._end_asked(entry, FinishReason.RESCHEDULE, fault)

    def _not_taken(self, entry: DecodeHandover, code: PdCode, reason: str) -> Acts:
        """The peer did not begin (it drains, its queue is full, it is gone): ask another one, or prefill here."""
        handover = entry.handover
        self._peers.declined(handover.peer, self._now_us)
        self._move(entry, DecodeHandoverMove.DROP)
        none_accepts = self._peers.all_decline(self._now_us)
        prefills_here = none_accepts or handover.attempt >= ATTEMPTS_MAX
        self._rows.take_back(entry.serial, prefills_here=prefills_here, now_us=self._now_us)
        return [AttemptFailed(handover, self._note_fault(code, PdStage.OFFER, reason))]

    def _renew(self, entry: DecodeHandover | None) -> None:
        if entry is not None and entry.grant is not None:
            entry.lease_until_us = self._now_us + self._config.lease_us

    def _arriving(self, entry: DecodeHandover | None) -> Acts:
        if entry is None or entry.state not in (
            DecodeHandoverState.GRANTED,
            DecodeHandoverState.ARRIVING,
            DecodeHandoverState.CHECKING,
        ):
            return []
        if entry.state is DecodeHandoverState.GRANTED:
            self._move(entry, DecodeHandoverMove.ARRIVE)
            self._rows.arriving(entry.serial)
        self._renew(entry)
        return []

    def _committed(self, entry: DecodeHandover | None, commit: Commit) -> Acts:
        if entry is None or entry.state not in (DecodeHandoverState.GRANTED, DecodeHandoverState.ARRIVING):
            return []  # ended, or committed already
        digest = self._prefix.hashes.noted(prompt_digest(entry.submission, self._prefix.fingerprint))
        wrong = _commit_error(entry.submission, commit, digest, self._config.vocabulary)
        if wrong is not None:
            return self._fail(entry, PdCode.NOT_DELIVERED, PdStage.TRANSFER, wrong)
        self._move(entry, DecodeHandoverMove.COMMIT)
        self._renew(entry)
        entry.commit = commit
        return [Verify(entry.handover, commit.checks)]

    def _verified(self, entry: DecodeHandover | None) -> Acts:
        if entry is None or entry.state is not DecodeHandoverState.CHECKING or entry.commit is None:
            return []
        handover = entry.handover
        self._move(entry, DecodeHandoverMove.ADOPT)
        self._made += 1
        took_us = self._now_us - entry.asked_us
        return [
            Tell(handover.peer, Adopted(handover.request, handover.attempt)),
            HandoverMade(handover, entry.serial, took_us),
            self._rows.adopt(entry.serial, entry.commit, self._now_us),
        ]

    def _fail(self, entry: DecodeHandover, code: PdCode, stage: PdStage, reason: str, *, tell: bool = True) -> Acts:
        """The attempt failed. A request that resumes in place continues here, as all do with on_preempt=resume."""
        if entry.state is DecodeHandoverState.FENCING:
            return []
        fault = self._note_fault(code, stage, reason)
        acts: Acts = [AttemptFailed(entry.handover, fault)]
        if tell:
            acts.append(_release(entry, reason))
        resumes = self._resumes or entry.submission.resumes_in_place
        return acts + self._let_go(entry, None if resumes else FinishReason.RESCHEDULE, fault)

    def _let_go(self, entry: DecodeHandover, reason: FinishReason | None, fault: PdFault | None) -> Acts:
        """Without a reason the request goes back into this instance's own queue."""
        if entry.state is not DecodeHandoverState.ASKED:
            self._move(entry, DecodeHandoverMove.GIVE_UP)
            self._rows.order_fence(entry.serial, reason, fault)
            return [Fence(entry.handover)]
        self._move(entry, DecodeHandoverMove.DROP)
        if reason is not None:
            return self._end_asked(entry, reason, fault)
        self._rows.take_back(entry.serial, prefills_here=True, now_us=self._now_us)
        return []

    def _end_asked(self, entry: DecodeHandover, reason: FinishReason, fault: PdFault | None) -> Acts:
        ended = self._scheduler.order_stop(entry.serial, reason, self._now_us, fault=fault)
        return [] if ended is None else [ended]

    def _fenced(self, entry: DecodeHandover | None) -> Acts:
        if entry is None or entry.state is not DecodeHandoverState.FENCING:
            return []
        self._move(entry, DecodeHandoverMove.FENCED)
        ended = self._rows.fenced(entry.serial, self._now_us)
        return [] if ended is None else [ended]

    def _note_fault(self, code: PdCode, stage: PdStage, reason: str) -> PdFault:
        self._failed[code] += 1
        return PdFault(code, stage, reason)

    def _move(self, entry: DecodeHandover, move: DecodeHandoverMove) -> None:
        entry.state = self._states.after(entry.state, move)
        if entry.state is DecodeHandoverState.OVER:
            del self._open[entry.serial]


def _release(entry: DecodeHandover, reason: str) -> Tell:
    return Tell(entry.handover.peer, Release(entry.handover.request, entry.handover.attempt, reason))


def _commit_error(submission: Submission, commit: Commit, digest: bytes, vocabulary: int) -> str | None:
    """Why a commit cannot be adopted."""
    if commit.prompt_digest != digest:
        return "the KV is of another prompt, tenant or model"
    if not 0 <= commit.token < vocabulary:
        return "its first token is not in the vocabulary"
    if submission.sampling.logprobs is not None and commit.logprobs is None:
        return "the log-probabilities of its first token are missing"
    return None


def _timeout_reason(entry: DecodeHandover, config: HandoverConfig, now_us: int) -> str:
    if now_us >= entry.asked_us + config.deadline_us:
        return f"it was not done {config.deadline_us // 1000} ms after it was asked for"
    return f"nothing was heard of it for {config.lease_us // 1000} ms"
