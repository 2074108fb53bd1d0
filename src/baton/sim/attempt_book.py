"""Checks of a simulated router: watches its messages and acts, and raises LawBroken when a promise about requests breaks.

Owns the record of one life of the router: members, the instance of each open choice, what was delivered, and how attempts
ended. The record is derived from messages and acts alone and is independent of the router's own tables. The checks
themselves are in `attempt_laws`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.core.engine.ended import EndedRequest
from baton.core.engine.orders import Accepted, Cancel, Drain, StopAt
from baton.core.engine.prefix import KEY_BYTES
from baton.core.engine.request import FinishReason, Submission
from baton.core.errors import Refusal, RefusalCode
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    ChoiceOutcome,
    DeliverTokens,
    FleetChanged,
    Join,
    RequestDeclined,
    Session,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.identity import RequestNumber
from baton.sim.attempt_laws import (
    NO_KV,
    NO_ROOM,
    AttemptLaws,
    billed,
    counts_kept,
    found_not_younger,
    let_go,
    not_younger,
    prefills_in_place,
    same_request,
)
from baton.sim.attempt_records import AttemptSeen, ChoiceAtInstance, ChoiceSeen, RequestSeen, RouterLifeSeen, SessionSeen
from baton.sim.faults import Fault
from baton.sim.law_names import (
    DESERVED_END,
    DESERVED_LOSS,
    DESERVED_SUSPICION,
    ENDS_AT_ONCE,
    ENDS_ONCE,
    FENCED,
    LAST_MOVE,
    ONE_PLACE,
    RIGHT_PLACE,
    LawBroken,
)
from baton.sim.router_watcher import RouterView, RouterWatcher
from baton.wire.engine_messages import RefusedMessage, StepOutput
from baton.wire.router_messages import (
    AllHeldSaid,
    ForgetSerials,
    FromInstance,
    FromRouter,
    HeartbeatMessage,
    HeldGroup,
    Leaving,
    PlaceAttempt,
    Welcome,
)
from baton.wire.router_sessions import Act, CloseConnection, SayToInstance

COUNT_EVERY = 8
ABOUT_THE_INSTANCE = (
    RefusalCode.DRAINING,
    RefusalCode.QUEUE_FULL,
    RefusalCode.WRONG_ROLE,
    RefusalCode.DUPLICATE_ID,
    RefusalCode.OTHER_BACKEND_VERSION,
)


class RouterExcuses(Protocol):
    """The faults that were injected, as reasons for which a router may suspect or lose an instance."""

    def may_be_suspected(self, instance: int) -> bool:
        """Whether a fault hit this instance, or its connection, that can keep its heartbeats away."""

    def may_be_lost(self, instance: int, accepted: bool) -> bool:
        """Whether a fault happened that can end its session."""

    def fire(self, fault: Fault, where: str) -> None: ...


class AttemptBook(RouterWatcher):
    def __init__(self, config: RouterConfig, excuses: RouterExcuses) -> None:
        super().__init__()
        self._config = config
        self._excuses = excuses
        self._suspected: set[tuple[str, int]] = set()
        self._seniority: dict[bytes, list[tuple[int, int]]] = {}
        """By origin: the seniority of each choice, as its client's request came. Outlives the router."""
        self.begin(0)

    def begin(self, now_us: int) -> None:
        """Start with an empty record: the router process is new."""
        self._life = RouterLifeSeen(now_us, now_us, now_us, began_us=now_us)
        self._laws = AttemptLaws(self._config, self._life)

    def members(self) -> dict[int, set[bytes]]:
        """By instance: the prefix keys that it has reported as cached."""
        return {session.instance: session.said for session in self._life.sessions.values() if session.welcomed}

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def woke(self, now_us: int) -> None:
        """The router was paused until now; silence before this moment does not count.

        Of an attempt's wait for its answer, the router leaves out the pause, which began a beat after its last look at most.
        """
        paused_us = max(0, now_us - self._life.looked_us - self._config.beat_us)
        self._life.woke_us = now_us
        for session in self._life.sessions.values():
            session.sign_us = session.hears_us = session.unanswered_us = now_us
            session.left_us += paused_us

    def connected(self, session: Session, instance: int) -> None:
        self._life.sessions[session] = SessionSeen(session, instance)

    def asked(self, number: RequestNumber, group: Sequence[Submission], origin: bytes, now_us: int) -> None:
        choices = []
        self._life.asked_us = now_us if self._life.asked_us is None else self._life.asked_us
        for index, item in enumerate(group):
            choices.append(ChoiceSeen(index, item.request_id, item, item.prompt.tobytes(), max_tokens=item.max_tokens))
        self._seniority[origin] = [item.seniority for item in group]
        self._life.requests[number] = self._life.origins[origin] = RequestSeen(number, origin, now_us, choices)

    def left(self, number: RequestNumber) -> None:
        self._life.requests[number].left = True
        self._over(self._life.requests[number])

    def cut(self, number: RequestNumber, choice: int) -> None:
        self._life.requests[number].choices[choice].cut = True
        self._life.touched[self._life.requests[number].origin] = self._life.requests[number]

    def claimed(self, number: RequestNumber) -> None:
        self._life.requests[number].claimed = True
        self._perhaps_over(self._life.requests[number])

    def lost(self, session: Session, now_us: int) -> None:
        """The connection broke, or the router closed it."""
        known = self._life.sessions.pop(session, None)
        if known is None or known.over:
            return
        known.over = True
        placements = [
            *known.serials.values(),
            *(placement for attempt in known.tickets.values() for placement in attempt.placements),
        ]
        for placement in placements:
            if placement.ended is None and not placement.called_back and placement.choice.placement is placement:
                placement.choice.losses += 1
                placement.choice.turned_down_by = known.name
                if placement.serial is not None:
                    placement.choice.waits_since_us = now_us
            placement.called_back = True
        self._life.dead.append(known)

    # ── messages of instances ────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, number: Session, message: FromInstance, now_us: int) -> None:
        session = self._life.sessions.get(number)
        if session is None or (session.welcomed and isinstance(message, Join | HeldGroup | AllHeldSaid)):
            return
        match message:
            case StepOutput():
                session.sign_us = now_us
                for ended in message.ended:
                    self._ended(session, ended, now_us)
            case HeartbeatMessage():
                _hears_and_answers(self._config, session, message, now_us)
                session.sign_us = now_us
                session.doomed = message.engine_silent_us >= self._config.engine_suspect_us(message.engine_runs)
                session.gauges, session.placed_since = message.gauges, 0
                _names(session, message)
                for serial, count in message.preempted:
                    self._yields_counted(session.serials.get(serial), count)
            case Accepted(ticket, serials):
                session.sign_us = now_us
                attempt = session.tickets.pop(ticket, None)
                for placement, serial in zip(attempt.placements if attempt is not None else (), serials, strict=False):
                    placement.serial, placement.opened_us = serial, now_us
                    placement.request.accepted = True
                    placement.choice.version_refused_us = None
                    session.serials[serial] = placement
                    self._touch(placement)
                    if placement.choice.placement is not placement:  # another instance has reported the choice meanwhile
                        self._life.left_behind.append(placement)
            case RefusedMessage(ticket, code):
                session.sign_us = now_us
                attempt = session.tickets.pop(ticket, None)
                for placement in attempt.placements if attempt is not None else ():
                    _refused(placement, code, now_us)
                if code is RefusalCode.QUEUE_FULL:
                    self._excuses.fire(Fault.LEG_REFUSED, session.name)
            case Join():
                session.join, session.sign_us = message, now_us
                if message.draining:
                    session.drain(now_us)
            case HeldGroup():
                self._holds(session, message)
            case AllHeldSaid():
                session.sign_us = now_us
            case Leaving():
                session.drain(now_us)

    def _yields_counted(self, placement: ChoiceAtInstance | None, count: int) -> None:
        if placement is not None and not placement.called_back and placement.choice.placement is placement:
            placement.choice.preemptions = max(placement.choice.preemptions, count)
            self._touch(placement)

    def _ended(self, session: SessionSeen, ended: EndedRequest, now_us: int) -> None:
        placement = session.serials.get(ended.serial)
        if placement is None:
            return
        placement.ended = ended
        self._touch(placement)
        choice = placement.choice
        if placement.called_back or choice.placement is not placement:
            return
        choice.bills.append(ended.bill)
        placement.billed = True
        self._yields_counted(placement, placement.preemptions + ended.bill.preemptions)
        choice.waits_since_us = now_us
        choice.failed_handovers += ended.fault is not None and ended.fault.code in NO_KV
        if ended.reason is FinishReason.RESCHEDULE and ended.fault is not None and ended.fault.code in NO_ROOM:
            if placement.in_place:
                raise LawBroken(LAST_MOVE, f"{choice.name} was to resume at {session.name}, which ends it: {ended}")
            choice.yields += 1
            choice.yielded_at.append(session.name)
            choice.no_room_us = now_us
            self._excuses.fire(Fault.LEG_YIELDED, session.name)
        elif ended.reason in (FinishReason.RESCHEDULE, FinishReason.ERROR, FinishReason.ABORT):
            choice.losses += 1
            choice.turned_down_by = session.name

    def _holds(self, session: SessionSeen, message: HeldGroup) -> None:
        request = self._life.origins.get(message.origin)
        if request is None:
            blank = [ChoiceSeen(index, f"{message.origin!r}.{index}", None) for index in range(message.body_choices)]
            request = self._life.origins[message.origin] = RequestSeen(None, message.origin, 0, blank, found=True)
        attempt = AttemptSeen()
        for line in message.lines:
            choice = request.choices[message.choices[line.place]]
            placement = ChoiceAtInstance(request, choice, session, attempt, line.serial, line.ended)
            placement.preemptions = message.group[line.place].preemptions
            placement.in_place = message.group[line.place].resumes_in_place
            placement.reported = line.preemptions
            attempt.placements.append(placement)
            request.placements.append(placement)
            session.serials[line.serial] = placement
            session.held.append(placement)

    # ── acts of the router ───────────────────────────────────────────────────────────────────────────────────────────────

    def acted(self, act: Act, now_us: int) -> None:
        if self._life.joining is not None and not _is_of_join(act, self._life.joining.number):
            self._found_where_they_were(self._life.joining)
        match act:
            case SayToInstance(number, message):
                session = self._life.sessions.get(number)
                if session is not None:
                    self._said(session, message, now_us)
            case DeliverTokens(request, choice, tokens, _, _, outcome):
                self._delivered(self._life.requests[request], choice, tokens, outcome, now_us)
            case CloseConnection(number):
                self.lost(number, now_us)
            case RequestDeclined(request, refusal):
                self._turned_down(self._life.requests[request], refusal, now_us)
            case UnclaimedFound():
                self._unclaimed_found(act, now_us)
            case UnclaimedDropped(request):
                self._over(self._life.requests[request])
            case FleetChanged():
                self._changed(act)
            case _:
                pass

    def _said(self, session: SessionSeen, message: FromRouter, now_us: int) -> None:
        match message:
            case PlaceAttempt():
                self._placed(session, message, now_us)
            case Cancel(serial):
                if serial in session.serials:
                    session.serials[serial].call_back(now_us)
            case StopAt(serial):
                if serial in session.serials:
                    session.serials[serial].stopped = True
            case ForgetSerials(serials):
                for serial in serials:
                    if serial in session.serials:
                        session.serials[serial].forgotten = True
            case Welcome():
                self._welcomed(session, now_us)
            case Drain():
                session.drain(now_us)

    def _welcomed(self, session: SessionSeen, now_us: int) -> None:
        join = session.join
        if session.drains:
            session.drains_us = now_us  # what is open there is told after its Join, and can move only from here on
        for other in self._life.sessions.values():
            if other is not session and other.welcomed and join is not None and other.name == join.name:
                raise LawBroken(FENCED, f"{join.name}: life {join.incarnation} is welcomed beside {other.join}")
        session.welcomed = True
        session.hears_us = now_us
        self._life.joining = session

    def _gives(self, address: str) -> None:
        """A request is prefilled at this address, which will have its prefix cached."""
        members = [session for session in self._life.sessions.values() if session.welcomed]
        givers = [session for session in members if session.join is not None and session.join.peer_address == address]
        for session in givers:
            session.attempts += 1
        if not givers:
            raise LawBroken(RIGHT_PLACE, f"{address} shall prefill, and is not there")

    def _placed(self, session: SessionSeen, place: PlaceAttempt, now_us: int) -> None:
        request = self._life.origins[place.origin]
        if not session.serves:
            raise LawBroken(RIGHT_PLACE, f"a leg of {request.origin!r} goes to {session.name}: {session.join}")
        if session.join is not None and len(session.open_choices()) >= self._config.ahead * session.join.slots:
            raise LawBroken(RIGHT_PLACE, f"{len(session.open_choices())} choices are open at {session.name}, and more come")
        attempt = session.tickets[place.ticket] = AttemptSeen()
        for item, index in zip(place.group, place.choices, strict=True):
            choice = request.choices[index]
            same_request(choice, item)
            not_younger(choice, item, self._seniority.get(place.origin, [item.seniority] * (index + 1))[index])
            if item.prefill_at:
                self._gives(item.prefill_at)
            self._laws.may_be_placed(request, choice, session, now_us)
            self._laws.stays_if_it_must(request, choice, item, now_us)
            prefills_in_place(choice, item)
            if len(place.group) == 1:
                self._laws.goes_where_room_is(choice, item, session)
            choice.attempts += 1
            session.attempts += 1
            choice.placement = placement = ChoiceAtInstance(request, choice, session, attempt)
            placement.preemptions, placement.in_place = item.preemptions, item.resumes_in_place
            attempt.placements.append(placement)
            request.placements.append(placement)
        session.placed_since += len(place.group)

    def _delivered(
        self, request: RequestSeen, index: int, tokens: list[int], outcome: ChoiceOutcome | None, now_us: int
    ) -> None:
        choice = request.choices[index]
        if choice.outcome is None and request.left and outcome is not None and outcome.reason is FinishReason.ABORT:
            choice.outcome = outcome
            return
        if choice.outcome is not None or request.over:
            raise LawBroken(ENDS_ONCE, f"{choice.name} hears {tokens} {outcome} after its end")
        choice.delivered += tokens
        if outcome is None:
            return
        choice.outcome = outcome
        self._laws.deserved(request, choice, outcome, now_us)
        billed(request, choice, outcome)
        self._perhaps_over(request)

    def _perhaps_over(self, request: RequestSeen) -> None:
        """The request is over when all choices have ended, unless it waits for its client to resume it."""
        if all(choice.outcome is not None for choice in request.choices) and (request.claimed or not request.found):
            self._over(request)

    def _turned_down(self, request: RequestSeen, refusal: Refusal, now_us: int) -> None:
        if refusal.code is RefusalCode.NO_INSTANCE:
            if not any(self._laws.gave_out(request, choice, now_us) for choice in request.choices):
                raise LawBroken(
                    DESERVED_END, f"{request.origin!r}, {now_us - request.arrived_us} µs old, is turned down: {refusal}"
                )
        elif any(choice.delivered for choice in request.choices):
            raise LawBroken(DESERVED_END, f"{request.origin!r} has begun, and is turned down: {refusal}")
        self._over(request)

    def _unclaimed_found(self, act: UnclaimedFound, now_us: int) -> None:
        request = self._life.origins[act.origin]
        if request.over:
            raise LawBroken(ENDS_ONCE, f"{act.origin!r} is over, and is found again as {act.request}")
        request.number, request.arrived_us = act.request, now_us
        self._life.requests[act.request] = request
        for choice, tokens, outcome in zip(request.choices, act.delivered, act.outcomes, strict=True):
            choice.delivered = list(tokens or ())
            choice.outcome = outcome

    def _changed(self, act: FleetChanged) -> None:
        life = act.name, act.incarnation
        if act.what == "joined" and life in self._suspected:
            self._excuses.fire(Fault.ZOMBIE, act.name)
        if act.what not in ("suspected", "stuck", "lost"):
            return
        sessions = (*reversed(self._life.dead), *self._life.sessions.values())
        session = next((s for s in sessions if s.name == act.name and s.welcomed), None)
        if act.what != "lost":
            self._suspected.add(life)
        if session is None:
            return
        if act.what == "lost" and not self._excuses.may_be_lost(session.instance, False):
            raise LawBroken(DESERVED_LOSS, f"{act.name}, life {act.incarnation}: {act.why}")
        if act.what != "lost" and not (session.leaves_unanswered or self._excuses.may_be_suspected(session.instance)):
            raise LawBroken(DESERVED_SUSPICION, f"{act.name}, life {act.incarnation}: {act.what}, {act.why}")

    # ── after all acts ───────────────────────────────────────────────────────────────────────────────────────────────────

    def looked(self, view: RouterView, now_us: int) -> None:
        touched, self._life.touched = self._life.touched, {}
        dead, self._life.dead = self._life.dead, []
        left_behind, self._life.left_behind = self._life.left_behind, []
        for placement in left_behind:
            if placement.is_left_running():
                where = placement.session.name
                raise LawBroken(ONE_PLACE, f"{placement.choice.name} goes on elsewhere, and is still open at {where}")
        self._life.looks += 1
        self._life.looked_us = now_us
        if self._life.joining is not None:
            self._found_where_they_were(self._life.joining)
        if not self._life.looks % COUNT_EVERY:
            self._laws.counted(view)
        for session in dead:
            self._laws.forgets_names(session, view)
        welcomed = [session for session in self._life.sessions.values() if session.welcomed]
        for session in welcomed:
            self._laws.in_time(session, now_us)
        serves = self._life.note_serving(welcomed)
        if serves or self._life.serves:
            self._life.served_us = now_us
        if not serves:
            self._life.served_us_before = now_us
        self._life.serves = serves
        if not serves or not self._life.looks % COUNT_EVERY:
            self._laws.waits_in_time(now_us)
        for request in touched.values():
            if request.over:
                let_go(request)
            else:
                counts_kept(request, view.yields_of(request.origin))
            for choice in request.choices:
                at = choice.placement if choice.cut else None
                if at is not None and at.is_open and at.serial is not None and not at.stopped:
                    raise LawBroken(ENDS_AT_ONCE, f"{choice.name} was cut, and {at.session.name} still computes it")

    def _found_where_they_were(self, session: SessionSeen) -> None:
        self._life.joining = None
        held, session.held = session.held, []
        for placement in held:
            choice = placement.choice
            if placement.called_back or placement.forgotten:
                continue
            placement.request.accepted = True  # not before: a choice that is elsewhere by now is not taken over
            self._touch(placement)
            before = choice.placement
            if placement.ended is not None:
                if not placement.is_known():
                    choice.bills.append(placement.ended.bill)
                placement.billed = True
            else:
                found_not_younger(placement)
                choice.losses = max(0, choice.losses - 1)  # its instance still had it
                choice.no_room_us = choice.version_refused_us = None  # it has a place, though others had refused it
            if before is not None:
                self._life.left_behind.append(before)
            choice.placement = placement
            choice.preemptions = max(choice.preemptions, placement.reported)

    def died(self) -> None:
        """The router crashed. Remember which instances still compute which request."""
        kept: dict[bytes, set[int]] = {}
        for request in self._life.requests.values():
            at = [choice.placement for choice in request.choices if choice.outcome is None]
            if not request.over and all(
                placement is not None and placement.serial is not None and not placement.called_back for placement in at
            ):
                kept[request.origin] = {
                    placement.session.instance for placement in request.placements if not placement.session.over
                }
        self.kept = kept
        self._life.sessions.clear()

    def _over(self, request: RequestSeen) -> None:
        request.over = True
        self._life.touched[request.origin] = request

    def _touch(self, placement: ChoiceAtInstance) -> None:
        self._life.touched[placement.request.origin] = placement.request


def _names(session: SessionSeen, beat: HeartbeatMessage) -> None:
    if beat.fresh:
        session.said.clear()
    session.said.difference_update(_keys(beat.forgotten))
    session.said.update(_keys(beat.named))


def _hears_and_answers(config: RouterConfig, session: SessionSeen, beat: HeartbeatMessage, now_us: int) -> None:
    late_us = 2 * config.beat_us
    session.hears_us = max(session.hears_us, now_us - beat.router_silent_us)
    session.is_deaf = now_us - session.hears_us >= config.deaf_us + late_us
    oldest = session.oldest_unanswered()
    if oldest is not session.unanswered:
        session.unanswered, session.unanswered_us, session.left_us = oldest, now_us, now_us
    elif beat.engine_silent_us >= config.beat_us:
        session.left_us += now_us - session.sign_us
        session.unanswered_us = now_us
    session.leaves_unanswered = oldest is not None and now_us - session.left_us >= beat.step_limit_us
    session.is_late = oldest is not None and now_us - session.unanswered_us >= beat.step_limit_us + late_us


def _refused(placement: ChoiceAtInstance, code: RefusalCode, now_us: int) -> None:
    choice, was_called_back = placement.choice, placement.called_back
    placement.called_back = True
    if was_called_back or choice.placement is not placement:
        return  # it has been found elsewhere meanwhile: the refusal comes too late to mean anything
    choice.turned_down_by = placement.session.name
    if code is RefusalCode.OTHER_BACKEND_VERSION and choice.version_refused_us is None:
        choice.version_refused_us = now_us
    if code in ABOUT_THE_INSTANCE:
        choice.no_room_us = now_us
    else:
        choice.yields += 1


def _is_of_join(act: Act, session: Session) -> bool:
    return isinstance(act, SayToInstance) and act.session == session and isinstance(act.message, Cancel | ForgetSerials)


def _keys(data: bytes) -> list[bytes]:
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
