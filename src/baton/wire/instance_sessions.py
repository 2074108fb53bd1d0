"""An instance's sessions with its router, one after the other: what is said when, and which requests are the router's.

    messages = sessions.opened(now)         a session is there: who we are, everything that is held, and that this was all
    effects  = sessions.heard(message, now) what the router says: orders for the engine, answers for the router
    effects  = sessions.take(message, now)  what the engine says of requests that are a router's
    sessions.lost(reason, now)              the session is over; what is open goes on, and is kept for a while

The session is in one state (AWAY, JOINING, SERVING, TURNED_AWAY). `held_choices` has the choices that a router has placed
here, and what becomes of them.

A place that the engine has not answered when its session is lost is kept: answered before the next session opens, it is
among what is held, and a router that was started anew may find its client's request in it. Still unanswered when the next
session opens, it has no serial by which the router could be told of it: it is dropped.

Promises: within a session the router hears of each place one answer and of each choice that it placed or was told of every
row, in order, none twice, up to its end; what `opened` says of a choice and the rows after it are its whole history. A name
of a prefix is said once in a session.

It trusts its engine and not the router: what a router says is checked, so that it cannot harm the engine or the clients of
this instance's own HTTP address. It has no clock, socket or task in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, StopAt
from baton.core.errors import Refusal, RefusalCode
from baton.core.routing.events import Join
from baton.core.state_machine import StateMachine
from baton.wire.engine_messages import Pulse, RefusedMessage, StepOutput, ToEngine, WireError, refused
from baton.wire.heartbeats import Heartbeats
from baton.wire.held_choices import CHOICES_MAX, FIRST_ROUTED_TICKET, HeldChoices, HeldMove, HeldState, PlacedGroup
from baton.wire.router_messages import (
    AllHeldSaid,
    ForgetSerials,
    FromInstance,
    FromRouter,
    HeartbeatMessage,
    Leaving,
    PlaceAttempt,
    PrefillPeersChanged,
    TurnedAway,
    UnknownToken,
    Welcome,
    check_group,
)
from baton.wire.step_parts import serials_of, split


class InstanceSessionState(Enum):
    AWAY = "no session"
    JOINING = "joining"
    SERVING = "serving"
    TURNED_AWAY = "turned away"


class InstanceSessionMove(Enum):
    OPEN = "opened"
    WELCOME = "welcomed"
    TURN_AWAY = "turned away"
    LOSE = "lost"


SESSION_TRANSITIONS: dict[tuple[InstanceSessionState, InstanceSessionMove], InstanceSessionState] = {
    (InstanceSessionState.AWAY, InstanceSessionMove.OPEN): InstanceSessionState.JOINING,
    (InstanceSessionState.AWAY, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.JOINING, InstanceSessionMove.WELCOME): InstanceSessionState.SERVING,
    (InstanceSessionState.JOINING, InstanceSessionMove.TURN_AWAY): InstanceSessionState.TURNED_AWAY,
    (InstanceSessionState.JOINING, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.SERVING, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.TURNED_AWAY, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
}

TELLING = (InstanceSessionState.SERVING, InstanceSessionState.JOINING)
"""What comes after the held groups were said follows them, whether or not the answer is there yet."""


@dataclass(slots=True)
class SessionEffects:
    """What is to be done, in this order of fields."""

    orders: list[ToEngine] = field(default_factory=list)
    says: list[FromInstance] = field(default_factory=list)
    neighbours: tuple[str, ...] | None = None
    """The instances that prefill for this one now; None: as before."""
    drain: bool = False
    """The router wants this instance to take nothing new."""
    welcomed: Welcome | None = None
    turned_away: str | None = None
    """The router does not want us, and why; the session is to be closed."""
    fenced: str | None = None
    """It never will: a later life of this name is there."""


class InstanceSessions:
    def __init__(self, join: Join, grace_us: int = 10_000_000) -> None:
        self._join = join
        self._grace_us = grace_us
        self._standing = InstanceSessionState.AWAY
        self._standings = StateMachine(SESSION_TRANSITIONS, "a session")
        self._lost_us: int | None = None
        """Since when no router has known of what is held; None while one does."""
        self._draining = join.draining
        self._choices = HeldChoices()
        self._beats = Heartbeats(self._choices.has)
        self._unsent: list[ToEngine] = []
        """Orders that came of opening a session: they go out with the router's first word."""

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def standing(self) -> InstanceSessionState:
        return self._standing

    def moves(self) -> dict[tuple[HeldState, HeldMove], int]:
        """How often each transition of a choice was taken."""
        return self._choices.moves()

    def turns(self) -> dict[tuple[InstanceSessionState, InstanceSessionMove], int]:
        """How often each transition of the session was taken."""
        return self._standings.moves()

    @property
    def open_requests(self) -> int:
        """Choices that the engine has not ended, or not answered."""
        return self._choices.open_requests

    @property
    def kept_choices(self) -> int:
        """Choices of which a router will be told when it is there again."""
        return self._choices.kept

    @property
    def held_choices(self) -> int:
        """Choices of which something is kept."""
        return self._choices.held

    def opened(self, now_us: int) -> list[FromInstance]:  # noqa: ARG002
        """The first messages of a session. Everything that `take` says from here on comes after them."""
        self._turn(InstanceSessionMove.OPEN)
        held, orders = self._choices.next_session()
        self._unsent += orders
        return [msgspec.structs.replace(self._join, draining=self._draining), *held, AllHeldSaid()]

    def lost(self, reason: str, now_us: int) -> None:  # noqa: ARG002
        """The session is over. A second loss, or one before the welcome, does not make the grace longer."""
        self._turn(InstanceSessionMove.LOSE)
        self._beats.void()
        if self._lost_us is None:
            self._lost_us = now_us

    def next_deadline(self) -> int | None:
        if self._standing is not InstanceSessionState.AWAY or self._lost_us is None or self._choices.is_empty:
            return None
        return self._lost_us + self._grace_us

    def tick(self, now_us: int) -> SessionEffects:
        deadline = self.next_deadline()
        if deadline is None or now_us < deadline:
            return SessionEffects()
        self._lost_us = None
        return SessionEffects(orders=[*self._flushed(), *self._choices.drop_everything()])

    def leave(self) -> list[FromInstance]:
        """This instance was told to stop: nothing new, please."""
        said, self._draining = self._draining, True
        return [Leaving()] if not said and self._standing in TELLING else []

    def _turn(self, turn: InstanceSessionMove) -> None:
        self._standing = self._standings.after(self._standing, turn)

    def _flushed(self) -> list[ToEngine]:
        orders, self._unsent = self._unsent, []
        return orders

    # ── what the router says ─────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, message: FromRouter, now_us: int) -> SessionEffects:  # noqa: ARG002
        """A WireError means that the router broke the rules; nothing has changed then."""
        match message:
            case Welcome():
                return self._welcomed(message)
            case TurnedAway(reason, fenced):
                return self._turned_away(reason, fenced)
            case _ if self._standing is not InstanceSessionState.SERVING:
                raise WireError(f"{type(message).__name__} to an instance that is {self._standing.value}")
            case PlaceAttempt():
                return self._place(message)
            case Cancel(serial):
                return SessionEffects(orders=self._choices.drop([serial]))
            case ForgetSerials(serials):
                return SessionEffects(orders=self._choices.drop(serials))
            case StopAt(serial):
                return SessionEffects(orders=[message] if self._choices.is_wanted(serial) else [])
            case PrefillPeersChanged(addresses):
                return SessionEffects(neighbours=addresses)
            case Drain():
                self._draining = True
                return SessionEffects(drain=True)

    def _welcomed(self, message: Welcome) -> SessionEffects:
        if self._standing is not InstanceSessionState.JOINING:
            raise WireError(f"a welcome to an instance that is {self._standing.value}")
        self._turn(InstanceSessionMove.WELCOME)
        self._grace_us = message.orphan_grace_us
        self._lost_us = None
        return SessionEffects(orders=[*self._flushed(), ReportChanges()], welcomed=message)

    def _turned_away(self, reason: str, fenced: bool) -> SessionEffects:
        if self._standing is not InstanceSessionState.JOINING:
            raise WireError(f"an instance that is {self._standing.value} was turned away")
        self._turn(InstanceSessionMove.TURN_AWAY)
        return SessionEffects(orders=self._flushed(), turned_away=reason, fenced=reason if fenced else None)

    def _place(self, place: PlaceAttempt) -> SessionEffects:
        if self._choices.waits(place.ticket):
            raise WireError(f"ticket {place.ticket} waits for its answer already")
        try:
            check_group(place.group, self._join.vocabulary)
        except UnknownToken as error:
            return SessionEffects(says=[refused(place.ticket, Refusal(RefusalCode.NOT_IN_VOCABULARY, str(error)))])
        if self._choices.open_requests + len(place.group) > CHOICES_MAX:
            refusal = Refusal(RefusalCode.QUEUE_FULL, f"{CHOICES_MAX} choices of this router are open here", 1)
            return SessionEffects(says=[refused(place.ticket, refusal)])
        return SessionEffects(orders=self._choices.place(place))

    # ── what the engine says ─────────────────────────────────────────────────────────────────────────────────────────────

    def owns_ticket(self, ticket: int) -> bool:
        return ticket >= FIRST_ROUTED_TICKET

    def split(self, output: StepOutput) -> tuple[StepOutput | None, StepOutput | None]:
        """The router's part, and that of the front end's own requests."""
        return split(output, self._choices.open) if self._choices.open else (None, output)

    def take(self, message: Accepted | RefusedMessage | StepOutput, now_us: int) -> SessionEffects:  # noqa: ARG002
        match message:
            case StepOutput():
                return self._stepped(message)
            case Accepted(ticket, serials):
                group = self._choices.answered(ticket)
                orders = self._choices.accept(group, serials)
                return SessionEffects(orders, [Accepted(group.place.ticket, serials)] if self._knows(group) else [])
            case RefusedMessage(ticket):
                group = self._choices.answered(ticket)
                self._choices.refuse(group)
                answer = msgspec.structs.replace(message, ticket=group.place.ticket)
                return SessionEffects(says=[answer] if self._knows(group) else [])

    def _knows(self, group: PlacedGroup) -> bool:
        """Whether the router of this session waits for the answer."""
        return self._standing in TELLING and group.session == self._choices.session

    def _stepped(self, output: StepOutput) -> SessionEffects:
        serials = serials_of(output)
        known = self._choices.known_of(output, serials) if self._standing in TELLING else None
        self._choices.write_down(output, serials)
        return SessionEffects(says=[] if known is None else [known])

    # ── beats ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def feel(self, pulse: Pulse, now_us: int) -> None:
        """The engine's pulse, once for each: the next beat says it."""
        self._beats.feel(pulse, self._standing is InstanceSessionState.SERVING, now_us)

    def beat(self, pulse: Pulse | None, silent_us: int, now_us: int) -> HeartbeatMessage | None:
        """A sign of life for the router; None where there is none. `pulse` is one that was not given before."""
        if pulse is not None:
            self.feel(pulse, now_us)
        return self._beats.beat(silent_us, now_us) if self._standing is InstanceSessionState.SERVING else None
