"""The router's end of its sessions with instances: legs of `core.router` on one side, tickets and serials on the other.

    session = switch.connected(now)                      somebody has dialled and proved the key
    acts    = switch.heard(session, message, now)        what it said: messages to send, news for clients
    acts    = switch.submit(tenant, group, origin, now)  … and leave, cut, claim, drain, tick

The router decides; the switch translates. For each session it has one `RequestTable` and the legs that travelled there:

    NEW ── Join ──▶ JOINING ── HeldGroup … Settled ──▶ ADMITTED    or turned away, and closed

    leg: unanswered ── accepted ──▶ its choices run, each with a serial ── all have ended, and the router wants nothing more
           │                                                               of it ──▶ Forget is said
           └── all called back: abandoned; what the instance accepts is cancelled unheard

Promises: the router hears of a leg at most one answer, of a choice each row once, in order, up to its end, and nothing of
what it has called back. Nothing is heard of a session that was closed or lost. An instance that breaks the rules gives a
WireError before the router has heard anything of that message; whoever drives closes the session and says `lost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.core.engine.request import Submission
from baton.core.errors import InvariantViolated, Refusal, RefusalCode
from baton.core.routing.events import (
    Admit,
    Arrived,
    AttemptAccepted,
    AttemptRefused,
    Beaten,
    CallBack,
    Came,
    Claimed,
    Cut,
    CutShort,
    Declined,
    Delivered,
    Drains,
    Due,
    FleetChanged,
    Forget,
    HangUp,
    HeldChoice,
    Instance,
    Joined,
    Left,
    Leg,
    Neighbours,
    Noted,
    Opened,
    OrderDrain,
    Orphan,
    OrphanDropped,
    Parted,
    RequestNumber,
    RouterEffect,
    RouterEvent,
    Send,
    Session,
    TurnAway,
)
from baton.core.routing.router import Router
from baton.core.state_machine import StateMachine
from baton.wire import request_table as desks
from baton.wire import router_messages as membership
from baton.wire.bounds import REASON_CHARS_MAX
from baton.wire.engine_messages import AcceptedAs, Cancel, Drain, RefusedWith, StepOutput, StopAt, ToEngine, WireError
from baton.wire.membership_decoding import (
    check_lines,
    checked_cached,
    end_of,
    facts_of,
    held_of,
    sign_of,
    tokens_left,
)
from baton.wire.request_table import RequestTable, StepColumns
from baton.wire.router_messages import (
    ADDRESSES_MAX,
    GROUP_MAX,
    HELD_BYTES_MAX,
    HELD_GROUPS_MAX,
    ORIGIN_BYTES_MAX,
    PLACE_BYTES_MAX,
    Beat,
    FromInstance,
    FromRouter,
    HeldGroup,
    Join,
    Leaving,
    Place,
    Settled,
    TurnedAway,
    Welcome,
    held_bytes,
)

JOIN_US = 10_000_000
RECENT_MAX = 4096
"""Requests of a session whose notes can still be placed after they have ended."""


@dataclass(frozen=True, slots=True)
class Say:
    session: Session
    message: FromRouter


@dataclass(frozen=True, slots=True)
class Close:
    session: Session
    reason: str


Act = Say | Close | Opened | Declined | Delivered | Orphan | OrphanDropped | Noted | FleetChanged
NEWS = (Delivered, Noted, Opened, Declined, FleetChanged, Orphan, OrphanDropped)
"""Effects that are acts as they are; the commonest first."""


class RouterSessionState(Enum):
    NEW = "new"
    JOINING = "joining"
    ADMITTED = "admitted"
    OVER = "over"


class RouterSessionMove(Enum):
    """What can happen to a session."""

    JOIN = "join"
    ADMIT = "admitted"
    CLOSE = "closed or lost"


SESSION_TRANSITIONS: dict[tuple[RouterSessionState, RouterSessionMove], RouterSessionState] = {
    (RouterSessionState.NEW, RouterSessionMove.JOIN): RouterSessionState.JOINING,
    (RouterSessionState.NEW, RouterSessionMove.CLOSE): RouterSessionState.OVER,
    (RouterSessionState.JOINING, RouterSessionMove.ADMIT): RouterSessionState.ADMITTED,
    (RouterSessionState.JOINING, RouterSessionMove.CLOSE): RouterSessionState.OVER,
    (RouterSessionState.ADMITTED, RouterSessionMove.CLOSE): RouterSessionState.OVER,
}


@dataclass(slots=True, eq=False)
class _Run:
    """A choice at an instance."""

    trip: _Trip
    place: int
    left: int
    """Tokens that it may still yield."""
    logprobs: bool
    serial: int | None = None
    heard: bool = True
    """Until the router calls it back."""
    cancelled: bool = False
    """So the instance keeps nothing of it."""
    over: bool = False
    keep: int | None = None
    """It was cut before the instance had answered."""


@dataclass(slots=True, eq=False)
class _Trip:
    """A leg, from its sending until the instance need not keep anything of it."""

    leg: Leg
    ticket: int | None
    """Until it is answered."""
    runs: dict[int, _Run] = field(default_factory=dict)
    """By place."""
    forget: bool = False
    """The router wants nothing more of it."""


@dataclass(slots=True, eq=False)
class _Seat:
    """One session."""

    session: Session
    due_us: int
    """By when it must have joined."""
    standing: RouterSessionState = RouterSessionState.NEW
    desk: RequestTable = field(default_factory=RequestTable)
    join: Join | None = None
    held: dict[int, HeldChoice] = field(default_factory=dict)
    """By serial, until it is admitted."""
    groups: int = 0
    bytes: int = 0
    trips: dict[Leg, _Trip] = field(default_factory=dict)
    tickets: dict[int, _Trip] = field(default_factory=dict)
    """Those that the instance has not answered and that are not abandoned."""
    runs: dict[int, _Run] = field(default_factory=dict)
    """By serial: what the instance has not ended, and of which the desk tells."""
    recent: dict[int, tuple[Leg, int]] = field(default_factory=dict)
    """By serial."""

    def joined(self) -> Join:
        if self.join is None:
            raise InvariantViolated(f"session {self.session} is {self.standing.value} and nobody has joined in it")
        return self.join


class RouterSessions:
    def __init__(self, router: Router, name: str) -> None:
        self.router = router
        self._name = name
        self._seats: dict[Session, _Seat] = {}
        self._sessions = 0
        self._bodies = 0
        self._standings = StateMachine(SESSION_TRANSITIONS, "a session")

    def turns(self) -> dict[tuple[RouterSessionState, RouterSessionMove], int]:
        """How often each transition of a session was taken."""
        return self._standings.moves()

    def _turn(self, seat: _Seat, turn: RouterSessionMove) -> None:
        seat.standing = self._standings.after(seat.standing, turn)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, now_us: int) -> Session:
        self._sessions += 1
        session = Session(self._sessions)
        self._seats[session] = _Seat(session, now_us + JOIN_US)
        return session

    def lost(self, session: Session, reason: str, now_us: int) -> list[Act]:
        seat = self._seats.pop(session, None)
        if seat is None:
            return []
        known = seat.standing is RouterSessionState.ADMITTED
        self._turn(seat, RouterSessionMove.CLOSE)
        return self._told(Parted(session, reason), now_us) if known else []

    def heard(self, session: Session, message: FromInstance, now_us: int) -> list[Act]:
        """A WireError means that the instance broke the rules: close the session and say that it is lost."""
        seat = self._seats.get(session)
        if seat is None:
            return []
        if seat.standing is not RouterSessionState.ADMITTED:
            return self._joins(seat, message, now_us)
        match message:
            case StepOutput():
                return self._stepped(seat, message, now_us)
            case Beat():
                return self._told(Beaten(session, sign_of(message, seat.recent)), now_us)
            case AcceptedAs():
                return self._accepted(seat, message, now_us)
            case RefusedWith():
                return self._refused(seat, message, now_us)
            case Leaving():
                return self._told(Drains(Instance(seat.joined().name)), now_us)
            case _:
                raise WireError(f"{type(message).__name__} from an instance that has joined")

    def _joins(self, seat: _Seat, message: FromInstance, now_us: int) -> list[Act]:
        match seat.standing, message:
            case RouterSessionState.NEW, Join():
                self._turn(seat, RouterSessionMove.JOIN)
                seat.join = message
                return []
            case RouterSessionState.JOINING, HeldGroup():
                self._holds(seat, message)
                return []
            case RouterSessionState.JOINING, Settled():
                return self._settled(seat, now_us)
            case _:
                raise WireError(f"{type(message).__name__} from an instance that is {seat.standing.value}")

    def _holds(self, seat: _Seat, message: HeldGroup) -> None:
        seat.groups += 1
        seat.bytes += held_bytes(message)
        if seat.groups > HELD_GROUPS_MAX or seat.bytes > HELD_BYTES_MAX:
            raise WireError(f"more is held than {HELD_GROUPS_MAX} groups or {HELD_BYTES_MAX} bytes")
        for choice in held_of(message, seat.joined()):
            if choice.serial in seat.held:
                raise WireError(f"serial {choice.serial} is held twice")
            seat.held[choice.serial] = choice

    def _settled(self, seat: _Seat, now_us: int) -> list[Act]:
        join = seat.joined()
        acts = self._told(Joined(seat.session, facts_of(join), join.draining, tuple(seat.held.values())), now_us)
        if seat.standing is RouterSessionState.JOINING:
            raise InvariantViolated(f"the router neither admitted session {seat.session} nor turned it away")
        return acts

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, tenant: str, group: Sequence[Submission], origin: bytes, now_us: int
    ) -> tuple[RequestNumber, list[Act]]:
        self._bodies += 1
        body = RequestNumber(self._bodies)
        # What no instance could take must not be offered to one after the other: each would end its session over it.
        refusal = _too_large(group, origin)
        if refusal is not None:
            return body, [Declined(body, refusal)]
        return body, self._told(Arrived(body, tenant, tuple(group), origin), now_us)

    def leave(self, body: RequestNumber, now_us: int) -> list[Act]:
        return self._told(Left(body), now_us)

    def cut(self, body: RequestNumber, choice: int, keep: int, now_us: int) -> list[Act]:
        return self._told(Cut(body, choice, keep), now_us)

    def claim(self, body: RequestNumber, now_us: int, group: Sequence[Submission] = ()) -> list[Act]:
        """`group`: all choices as they were asked for, where that is known: those that nobody holds begin anew."""
        return self._told(Claimed(body, tuple(group)), now_us)

    def drain(self, name: str, now_us: int) -> list[Act]:
        return self._told(Drains(Instance(name)), now_us)

    def tick(self, now_us: int) -> list[Act]:
        return [*self._told(Due(), now_us), *self._close_strangers(now_us)]

    def next_deadline(self) -> int | None:
        times = [seat.due_us for seat in self._seats.values() if seat.standing is not RouterSessionState.ADMITTED]
        return min((time for time in (*times, self.router.next_deadline()) if time is not None), default=None)

    def _close_strangers(self, now_us: int) -> list[Act]:
        """Whoever has not joined in time."""
        strangers = [seat for seat in self._seats.values() if seat.standing is not RouterSessionState.ADMITTED]
        late = [seat for seat in strangers if seat.due_us <= now_us]
        return [self._close(seat, f"it has not joined within {JOIN_US // 1_000_000} s") for seat in late]

    # ── what an instance says of legs ────────────────────────────────────────────────────────────────────────────────────

    def _accepted(self, seat: _Seat, message: AcceptedAs, now_us: int) -> list[Act]:
        trip = seat.tickets.get(message.ticket)
        if trip is not None and len(trip.runs) != len(message.serials):
            raise WireError(f"{len(trip.runs)} choices were accepted as {len(message.serials)} requests")
        took = seat.desk.take(message)
        acts = _says(seat, took.orders)
        for news in took.news:
            if isinstance(news, desks.GroupAccepted) and trip is not None:
                acts += self._open(seat, trip, news.serials, now_us)
        return acts

    def _open(self, seat: _Seat, trip: _Trip, serials: tuple[int, ...], now_us: int) -> list[Act]:
        del seat.tickets[_answered(trip)]
        acts: list[Act] = []
        for run, serial in zip(trip.runs.values(), serials, strict=True):
            _begin(seat, run, serial)
            if not run.heard:
                acts += _cancel(seat, run)
            elif run.keep is not None:
                acts += _says(seat, [seat.desk.stop(serial, run.keep)])
        return acts + self._told(AttemptAccepted(seat.session, trip.leg), now_us)

    def _refused(self, seat: _Seat, message: RefusedWith, now_us: int) -> list[Act]:
        acts: list[Act] = []
        for news in seat.desk.take(message).news:
            if isinstance(news, desks.GroupDeclined):
                trip = seat.tickets.pop(news.ticket)
                del seat.trips[trip.leg]
                acts += self._told(AttemptRefused(seat.session, trip.leg, news.refusal), now_us)
        return acts

    def _stepped(self, seat: _Seat, output: StepOutput, now_us: int) -> list[Act]:
        step = seat.desk.take(output).step
        if step is None:
            return []
        news = _news(seat, step)
        acts: list[Act] = []
        for serial in step.ended:
            run = seat.runs.pop(serial)
            run.over = True
            acts += _let_go(seat, run.trip)
        handle = self.router.handle
        for event in news:
            if seat.standing is RouterSessionState.OVER:
                break  # by what came of the rows before
            for effect in handle(event, now_us):
                if type(effect) is Delivered:
                    acts.append(effect)
                else:
                    self._do(effect, acts)
        return acts

    # ── what the router wants ────────────────────────────────────────────────────────────────────────────────────────────

    def _told(self, event: RouterEvent, now_us: int) -> list[Act]:
        acts: list[Act] = []
        for effect in self.router.handle(event, now_us):
            self._do(effect, acts)
        return acts

    def _do(self, effect: RouterEffect, acts: list[Act]) -> None:
        if isinstance(effect, NEWS):
            acts.append(effect)
            return
        seat = self._seats.get(effect.session)
        if seat is None:
            return  # lost meanwhile; the router hears of it, or has
        match effect:
            case Send():
                acts.append(self._place(seat, effect))
            case CallBack(_, leg, places):
                acts += _call_back(seat, leg, places)
            case CutShort(_, leg, place, keep):
                acts += _cut_short(seat, leg, place, keep)
            case Forget(_, leg):
                acts += _forget(seat, leg)
            case Neighbours(session, addresses):
                acts.append(Say(session, membership.Neighbours(addresses[:ADDRESSES_MAX])))
            case OrderDrain(session):
                acts.append(Say(session, Drain()))
            case Admit():
                acts += self._admit(seat, effect)
            case TurnAway(session, reason, fenced):
                acts += [Say(session, TurnedAway(reason[:REASON_CHARS_MAX], fenced)), self._close(seat, reason)]
            case HangUp(_, reason):
                acts.append(self._close(seat, reason))

    def _close(self, seat: _Seat, reason: str) -> Close:
        del self._seats[seat.session]
        self._turn(seat, RouterSessionMove.CLOSE)
        return Close(seat.session, reason)

    def _place(self, seat: _Seat, send: Send) -> Say:
        message = seat.desk.submit(send.group)
        trip = _Trip(send.leg, message.ticket)
        context = seat.joined().context_tokens
        for place, item in enumerate(send.group):
            trip.runs[place] = _Run(trip, place, tokens_left(item, context), item.sampling.logprobs is not None)
        seat.trips[send.leg] = seat.tickets[message.ticket] = trip
        return Say(seat.session, Place(message.ticket, message.group, send.choices, send.body_choices, send.origin))

    def _admit(self, seat: _Seat, admit: Admit) -> list[Act]:
        config, context = self.router.config, seat.joined().context_tokens
        self._turn(seat, RouterSessionMove.ADMIT)
        acts: list[Act] = [Say(seat.session, Welcome(self._name, config.beat_us, config.orphan_grace_us))]
        for serial, leg, place in admit.keep:
            choice = seat.held.pop(serial)
            trip = seat.trips.setdefault(leg, _Trip(leg, None))
            left = tokens_left(choice.submission, context) - len(choice.tokens)
            run = trip.runs[place] = _Run(trip, place, left, choice.submission.sampling.logprobs is not None)
            if choice.end is None:
                seat.desk.adopt(serial)
                _begin(seat, run, serial)
            else:
                run.serial, run.over = serial, True
        acts += _says(seat, [seat.desk.adopt(serial, False) for serial, choice in seat.held.items() if choice.end is None])
        ended = tuple(serial for serial, choice in seat.held.items() if choice.end is not None)
        seat.held.clear()
        return [*acts, Say(seat.session, membership.Forget(ended))] if ended else acts


# ── one session ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _says(seat: _Seat, orders: Sequence[ToEngine | None]) -> list[Act]:
    """Orders of the desk, which an instance takes as its engine would; None is one that is not needed any more."""
    return [Say(seat.session, order) for order in orders if isinstance(order, Cancel | StopAt)]


def _answered(trip: _Trip) -> int:
    if trip.ticket is None:
        raise InvariantViolated(f"leg {trip.leg} was answered before")
    ticket, trip.ticket = trip.ticket, None
    return ticket


def _begin(seat: _Seat, run: _Run, serial: int) -> None:
    run.serial = serial
    seat.runs[serial] = run
    seat.recent[serial] = (run.trip.leg, run.place)
    if len(seat.recent) > RECENT_MAX:
        del seat.recent[next(iter(seat.recent))]


def _news(seat: _Seat, step: StepColumns) -> list[Came]:
    """What a step brought to those of whom the router hears; a WireError where it cannot be."""
    session, vocabulary, runs = seat.session, seat.joined().vocabulary, seat.runs
    serials, tokens = step.serials, step.tokens
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise WireError(f"a token that is none of a vocabulary of {vocabulary}")
    if len(frozenset(serials)) != len(serials):
        raise WireError("two rows of one request in one step")
    ends = {serial: end_of(end) for serial, end in step.ended.items()}
    extras, cached = step.logprobs, step.cached
    news: list[Came] = []
    for row, (serial, begin, end) in enumerate(zip(serials, step.begins, step.ends, strict=True)):
        run = runs[serial]
        run.left -= end - begin
        if begin > end or run.left < 0:
            raise WireError(f"{end - begin} tokens of serial {serial}, which may have {run.left + end - begin}")
        lines = extras.get(row) if run.logprobs else None
        if lines is not None:  # an executor may have none
            check_lines(lines, end - begin, vocabulary)
        if run.heard:
            hit = checked_cached(cached[serial]) if serial in cached else None
            news.append(Came(session, run.trip.leg, run.place, tokens[begin:end], lines, hit, ends.pop(serial, None)))
        else:
            ends.pop(serial, None)
    for serial, over in ends.items():
        run = runs[serial]
        if run.heard:
            news.append(Came(session, run.trip.leg, run.place, [], None, None, over))
    return news


def _call_back(seat: _Seat, leg: Leg, places: tuple[int, ...]) -> list[Act]:
    trip = seat.trips.get(leg)
    if trip is None:
        return []
    for place in places:
        trip.runs[place].heard = False
    if trip.ticket is None:
        acts = [act for place in places for act in _cancel(seat, trip.runs[place])]
        return acts + _let_go(seat, trip)
    if not any(run.heard for run in trip.runs.values()):
        seat.desk.abandon(trip.ticket)
        del seat.tickets[trip.ticket], seat.trips[leg]
    return []


def _cancel(seat: _Seat, run: _Run) -> list[Act]:
    order = None if run.serial is None else seat.desk.cancel(run.serial)
    run.cancelled = run.cancelled or order is not None
    return _says(seat, [order])


def _cut_short(seat: _Seat, leg: Leg, place: int, keep: int) -> list[Act]:
    trip = seat.trips.get(leg)
    if trip is None:
        return []
    run = trip.runs[place]
    if run.serial is None:
        run.keep = keep
        return []
    return _says(seat, [seat.desk.stop(run.serial, keep)])


def _forget(seat: _Seat, leg: Leg) -> list[Act]:
    trip = seat.trips.get(leg)
    if trip is None:
        return []
    trip.forget = True
    return _let_go(seat, trip)


def _let_go(seat: _Seat, trip: _Trip) -> list[Act]:
    """Once all of a leg is over and the router wants nothing more of it, the instance need not keep it."""
    runs = trip.runs.values()
    if not all(run.over for run in runs) or not (trip.forget or not any(run.heard for run in runs)):
        return []
    del seat.trips[trip.leg]
    serials = tuple(run.serial for run in runs if run.serial is not None and not run.cancelled)
    return [Say(seat.session, membership.Forget(serials))] if serials else []


def _too_large(group: Sequence[Submission], origin: bytes) -> Refusal | None:
    size = len(origin) + sum(item.prompt.nbytes + item.generated.nbytes for item in group)
    if len(group) > GROUP_MAX:
        text = f"the body asks for {len(group)} sequences; at most {GROUP_MAX} can be asked for"
    elif len(origin) > ORIGIN_BYTES_MAX or size > PLACE_BYTES_MAX:
        text = f"the body of {len(origin)} bytes makes a message of {size} bytes, which is more than an instance takes"
    else:
        return None
    return Refusal(RefusalCode.GROUP_TOO_LARGE, text)
