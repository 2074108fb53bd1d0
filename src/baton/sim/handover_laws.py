"""Checks of hand-overs on the events and effects of one worker.

Owns the record of one life: hand-overs asked for, leases with their blocks and times, and outgoing transfers. It is derived
from events and effects alone and is independent of the worker's own tables.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import get_args

from baton.core.config import OnPreempt, WorkerConfig
from baton.core.engine.ended import EndedRequest
from baton.core.engine.orders import Cancel, Drain, StopAt
from baton.core.engine.plan import StepPlan
from baton.core.engine.request import FinishReason
from baton.core.engine.worker import Deliver, Effect, Event, FrontEndLost, Launch, StepDone, Tick, Withdrawn
from baton.core.handover.faults import PdCode, PdFault
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
    OpenShip,
    PeerEvent,
    PeerId,
    PeerLost,
    PeerMessage,
    Refuse,
    Release,
    Renew,
    Ship,
    ShipFailed,
    Tell,
    TransferBroken,
    Verified,
    Verify,
)
from baton.sim.law_names import (
    ALIEN_BYTES,
    ANSWERED_AT_ONCE,
    ENDS_AT_ONCE,
    LEASES_END,
    PREFILLS_IN_PLACE,
    TRUE_DRAIN,
    TRUE_FAULT,
    WHOLE_KV,
    LawBroken,
)

PASS_US = 1_000
"""Allowance for the time between two passes of a worker."""
_OF_PEERS = frozenset(get_args(PeerEvent))
_LETS_GO = frozenset((Cancel, StopAt, FrontEndLost, PeerLost, Heard))
_MOVES_KV = (Expect, Verify, OpenShip, Ship)
_first = itemgetter(0)


@dataclass(slots=True)
class _Lease:
    opened_us: int
    sign_us: int
    """When the giver last gave a sign of life."""
    blocks: frozenset[int]
    fencing: bool = False


class HandoverLaws:
    def __init__(self, config: WorkerConfig, where: str) -> None:
        self._config = config
        self._where = where
        self._asked: dict[Handover, int] = {}
        self._arrived: dict[Handover, int] = {}
        """When each hand-over was asked for by a peer."""
        self._leases: dict[Handover, _Lease] = {}
        self._outgoing: dict[Handover, int] = {}
        """When each outgoing data connection was ordered."""
        self._fencing: set[Handover] = set()
        """Fences ordered and not answered yet: nothing may be begun for these hand-overs."""
        self._failed: set[tuple[int, PdCode]] = set()
        self._renewals: dict[Handover, int] = {}
        """Hand-overs granted to this worker, and when each must be renewed next."""
        self._unrenewed: set[Handover] = set()
        """Hand-overs of which no more renewals are due, even if their grant comes now."""
        self._drains = False
        self._now_us = 0
        self.made = 0
        """Hand-overs adopted in this life."""

    def held_for(self, peer: str, before_us: int, queued: Collection[tuple[int, int]]) -> str | None:
        """Words for something open for this peer since before `before_us`; None: nothing is. `queued`: (request, attempt) of
        what waits at the peer, which lives, behind more important requests. A request whose turn came there counts from then
        on."""
        leased = {handover: lease.opened_us for handover, lease in self._leases.items()}
        for what, opened in (
            ("a request of it", {handover: leased.get(handover, asked_us) for handover, asked_us in self._asked.items()}),
            ("a lease", leased),
            ("a connection", self._outgoing),
        ):
            for handover, at_us in opened.items():
                waits = (handover.request, handover.attempt) in queued
                if handover.peer == peer and at_us < before_us and not waits:
                    return f"{self._where} has {what} open: {handover}"
        return None

    @property
    def leased_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self._leases.values()) if self._leases else 0

    @property
    def open(self) -> int:
        return len(self._asked) + len(self._leases) + len(self._outgoing)

    def note(self, event: Event, effects: Sequence[Effect], deadline_us: int | None, now_us: int) -> None:
        """Called after each event; `deadline_us`: the worker's next deadline."""
        self._now_us = now_us
        if type(event) in _OF_PEERS:
            self._note_event(event, now_us)
        for effect in effects:
            self._note_effect(event, effect, now_us)
        if type(event) is Heard:
            if isinstance(event.message, Offer):
                self._answered(event, event.message, effects)
            if self._drains and isinstance(event.message, Ask):
                self._begins_nothing(event, event.message, effects)
        if type(event) is Drain:
            self._drains = True
        if type(event) in _LETS_GO:
            self._lets_go(event)
        if self._leases or self._asked or self._renewals:
            self._in_time(type(event) is Tick, deadline_us, now_us)

    # ── the record ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _note_event(self, event: Event, now_us: int) -> None:
        match event:
            case Heard(peer, Renew() as message):
                self._sign(_handover(peer, message), now_us)
            case Heard(peer, Ask() as message):
                self._arrived.setdefault(_handover(peer, message), now_us)
            case Heard(peer, Grant() as message):
                if (handover := _handover(peer, message)) not in self._unrenewed:
                    self._renewals.setdefault(handover, now_us + self._config.handover.renew_us)
            case Heard(peer, Release() as message):
                self._renew_no_more(_handover(peer, message))
            case Heard(peer, Decline() as message):
                self._asked.pop(_handover(peer, message), None)
            case Heard(peer, Adopted() as message):
                self._outgoing.pop(_handover(peer, message), None)
            case Arriving(handover):
                self._sign(handover, now_us)
            case Fenced(handover):
                self._fencing.discard(handover)
                self._leases.pop(handover, None)
                self._outgoing.pop(handover, None)
            case ShipFailed(handover):
                self._outgoing.pop(handover, None)
            case PeerLost(peer):
                self._asked = {handover: at_us for handover, at_us in self._asked.items() if handover.peer != peer}
                self._renewals = {handover: due_us for handover, due_us in self._renewals.items() if handover.peer != peer}
                self._unrenewed = {handover for handover in self._unrenewed if handover.peer != peer}

    def _note_effect(self, event: Event, effect: Effect, now_us: int) -> None:
        if isinstance(effect, _MOVES_KV) and effect.handover in self._fencing:
            what = f"{type(effect).__name__} of {effect.handover}"
            raise LawBroken(ALIEN_BYTES, f"{self._where} orders {what} after its fence")
        match effect:
            case Launch(plan):  # first: steps are most of what a worker orders
                if self._leases:
                    self._touches_no_lease(plan)
            case Deliver(settled):
                for ended in settled.ended:
                    self._ended(ended)
            case Tell(peer, Ask() as message):
                if message.submission.prefills_in_place:
                    raise LawBroken(PREFILLS_IN_PLACE, f"{self._where} asks {peer} for {message.submission.request_id}")
                self._asked[_handover(peer, message)] = now_us
            case Tell(peer, Renew() as message):
                self._renewals[_handover(peer, message)] = now_us + self._config.handover.renew_us
            case Tell(peer, Commit() | Decline() as message):
                self._renew_no_more(_handover(peer, message))
            case Tell(peer, Release() as message):
                self._asked.pop(_handover(peer, message), None)
            case Expect(handover, _, _, blocks):
                self._leases[handover] = _Lease(now_us, now_us, frozenset(blocks.tolist()))
            case Verify(handover):
                self._sign(handover, now_us)
            case Fence(handover):
                self._fencing.add(handover)
                self._renew_no_more(handover)
                if handover in self._leases:
                    self._leases[handover].fencing = True
            case HandoverMade(handover):
                if event != Verified(handover):
                    raise LawBroken(WHOLE_KV, f"{self._where} takes {handover} over on {event}")
                self.made += 1
                self._asked.pop(handover, None)
                self._leases.pop(handover, None)
            case OpenShip(handover):
                self._outgoing[handover] = now_us
            case AttemptFailed(handover, fault):
                self._failed_for_a_cause(event, handover, fault, now_us)
                self._asked.pop(handover, None)
                self._failed.add((handover.request, fault.code))
            case Withdrawn(ended):
                self._ended(ended)

    def _renew_no_more(self, handover: Handover) -> None:
        self._renewals.pop(handover, None)
        self._unrenewed.add(handover)

    def _sign(self, handover: Handover, now_us: int) -> None:
        if handover in self._leases:
            self._leases[handover].sign_us = now_us

    # ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answered(self, event: Heard, message: Offer, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell(peer, answer) if peer == event.peer and _handover(peer, answer) == _handover(peer, message):
                    return
        raise LawBroken(ANSWERED_AT_ONCE, f"{self._where} heard {message} from {event.peer} and said nothing")

    def _lets_go(self, event: Event) -> None:
        """Check that what a client, a peer or a lost session gave up ends at once, or is fenced if bytes may still move."""
        match event:
            case Cancel(serial) | StopAt(serial):
                kept = [handover for handover in self._asked if handover.request == serial]
            case FrontEndLost():
                kept = list(self._asked)
            case PeerLost(peer):
                kept = [handover for handover in (*self._unfenced(), *self._asked) if handover.peer == peer]
            case Heard(peer, Release() | Refuse() as message):
                kept = [handover for handover in self._unfenced() if handover == _handover(peer, message)]
            case _:
                return
        if kept:
            raise LawBroken(ENDS_AT_ONCE, f"{self._where} goes on with {kept[0]} after {type(event).__name__}")

    def _unfenced(self) -> list[Handover]:
        leased = [handover for handover, lease in self._leases.items() if not lease.fencing]
        return leased + [handover for handover in self._outgoing if handover not in self._fencing]

    def _in_time(self, is_pass: bool, deadline_us: int | None, now_us: int) -> None:
        timed = self._config.handover
        ends = [(lease.sign_us + timed.lease_us, handover) for handover, lease in self._leases.items() if not lease.fencing]
        ends += [(due_us, handover) for handover, due_us in self._renewals.items()]
        ends += [(asked_us + timed.deadline_us, handover) for handover, asked_us in self._asked.items()]
        if not ends:
            return
        end_us, handover = min(ends, key=_first)  # what holds for the first to end holds for the others
        if is_pass and now_us > end_us:
            raise LawBroken(LEASES_END, f"{self._where}: {handover} should have ended {now_us - end_us} µs ago")
        if deadline_us is None or deadline_us > max(now_us, end_us) + PASS_US:
            raise LawBroken(LEASES_END, f"{self._where} looks at {deadline_us}, but {handover} ends at {end_us}")

    def _begins_nothing(self, event: Heard, message: Ask, effects: Sequence[Effect]) -> None:
        known = self._arrived[_handover(event.peer, message)] < self._now_us
        declined = any(isinstance(effect, Tell) and isinstance(effect.message, Decline) for effect in effects)
        if not (known or declined):
            raise LawBroken(TRUE_DRAIN, f"{self._where} drains and takes {message.request}.{message.attempt} on")

    def _touches_no_lease(self, plan: StepPlan) -> None:
        """Check that no step writes to blocks that receive KV."""
        used = [block for start in plan.starts for block in start.blocks.tolist()]
        used += plan.grow_blocks.tolist() + [copy.target for copy in plan.copies]
        for handover, lease in self._leases.items():
            if not lease.blocks.isdisjoint(used):
                raise LawBroken(ALIEN_BYTES, f"{self._where} plans with blocks of {handover}: {sorted(lease.blocks)}")

    def _failed_for_a_cause(self, event: Event, handover: Handover, fault: PdFault, now_us: int) -> None:
        if not fault.reason:
            raise LawBroken(TRUE_FAULT, f"{self._where}: {handover} fails without a reason: {fault}")
        asked_us, timed = self._asked.get(handover, self._arrived.get(handover)), self._config.handover
        lease = self._leases.get(handover)
        late = asked_us is not None and now_us >= asked_us + timed.deadline_us
        quiet = lease is not None and now_us >= lease.sign_us + timed.lease_us
        match fault.code:
            case PdCode.NOT_DELIVERED:
                broke = self._config.role.gives and isinstance(event, StepDone)  # device and scheduler disagreed
                declined = isinstance(event, Heard) and isinstance(event.message, Decline)
                holds = broke or declined or late or quiet or isinstance(event, TransferBroken | ShipFailed | PeerLost)
            case PdCode.TIMEOUT:
                holds = late or quiet or isinstance(event, Heard | PeerLost)
            case PdCode.REFUSED:
                holds = isinstance(event, Heard) and isinstance(event.message, Offer | Decline | Refuse | Ask)
            case PdCode.PREEMPTED:
                holds = True
        if not holds:
            raise LawBroken(TRUE_FAULT, f"{self._where}: {handover} fails on {event}: {fault.message}")

    def _ended(self, ended: EndedRequest) -> None:
        """Check that only a RESCHEDULE end has a fault, with a known cause, and only if so configured."""
        if (ended.reason is FinishReason.RESCHEDULE) != (ended.fault is not None):
            raise LawBroken(TRUE_FAULT, f"{self._where}: {ended}")
        if ended.fault is None:
            return
        known = ended.fault.code is PdCode.PREEMPTED or (ended.serial, ended.fault.code) in self._failed
        if not known or self._config.on_preempt is not OnPreempt.RESCHEDULE:
            raise LawBroken(TRUE_FAULT, f"{self._where} sends {ended.serial} elsewhere: {ended.fault.message}")


def _handover(peer: PeerId, message: PeerMessage) -> Handover:
    return Handover(peer, message.request, message.attempt)
