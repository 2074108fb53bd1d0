"""An instance's successive sessions with its router: which messages are sent when, and which requests are the router's.

    messages = sessions.opened(now)         a session opens: Join, every held group, AllHeldSaid
    effects  = sessions.receive(message, now) a message of the router: orders for the engine, answers for the router
    effects  = sessions.take(message, now)  a message of the engine about the router's requests
    effects  = sessions.tick(now)           at `next_deadline`: the grace period is over, or the router did not answer a join
    sessions.lost(reason, now)              the session is over; open requests continue and are kept for a grace period

The session is in one state (AWAY, JOINING, SERVING, TURNED_AWAY). `held_choices` records the choices that a router has
placed here.

A place that the engine has not answered when its session is lost is kept. If the answer comes before the next session
opens, the group is reported as held, and a restarted router can match it to its client's request. A place still unanswered
when the next session opens is dropped: it has no serial by which to report it.

Promises: within a session the router gets one answer to each place and, of each choice that it placed or that was reported
to it, every row up to the end, in order, none twice; the report of `opened` and the rows after it are the choice's whole
output. A prefix key is reported once in a session.

The engine is trusted, the router is not: its messages are checked, so that it cannot harm the engine or the clients of this
instance's own HTTP address. Pure: no clock, socket or task.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.core.bounds import INCARNATION_MAX
from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, StopAt
from baton.core.errors import Refusal, RefusalCode
from baton.core.routing.events import Join
from baton.core.state_machine import FastEnum, StateMachine
from baton.wire.engine_messages import Pulse, RefusedMessage, StepOutput, ToEngine, WireError, refused
from baton.wire.heartbeats import EngineVitals, Heartbeats
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


class InstanceSessionState(FastEnum):
    AWAY = "no session"
    JOINING = "joining"
    SERVING = "serving"
    TURNED_AWAY = "turned away"


class InstanceSessionMove(FastEnum):
    OPEN = "opened"
    WELCOME = "welcomed"
    TURN_AWAY = "turned away"
    LOSE = "lost"


SESSION_TRANSITIONS: dict[tuple[InstanceSessionState, InstanceSessionMove], InstanceSessionState] = {
    (InstanceSessionState.AWAY, InstanceSessionMove.OPEN): InstanceSessionState.JOINING,
    (InstanceSessionState.JOINING, InstanceSessionMove.WELCOME): InstanceSessionState.SERVING,
    (InstanceSessionState.JOINING, InstanceSessionMove.TURN_AWAY): InstanceSessionState.TURNED_AWAY,
    (InstanceSessionState.JOINING, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.SERVING, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.TURNED_AWAY, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
}

WELCOME_US = 10_000_000
"""Time that the router has to answer a join; it gives an instance as long to join."""
SENDING_STATES = (InstanceSessionState.SERVING, InstanceSessionState.JOINING)
"""States in which output is sent to the router: it follows the held groups also before the router has answered."""


@dataclass(slots=True)
class SessionEffects:
    """What the driver must do, in the order of the fields."""

    orders: list[ToEngine] = field(default_factory=list)
    messages: list[FromInstance] = field(default_factory=list)
    prefill_peers: tuple[str, ...] | None = None
    """The prefill peers of this instance; None: unchanged."""
    drain: bool = False
    """The router asks this instance to drain."""
    welcomed: Welcome | None = None
    turned_away: str | None = None
    """Why the router rejected this instance; the session must be closed."""
    fenced: str | None = None
    """Set with `turned_away` where the rejection is final: a later incarnation of this name has joined."""
    rejoins_as: int | None = None
    """Set with `turned_away` where this instance has taken a higher incarnation, with which it joins again."""
    hang_up: str | None = None
    """Why the session must be closed: nothing would come in it any more."""


class InstanceSessions:
    def __init__(self, join: Join, grace_us: int = 10_000_000, welcome_us: int = WELCOME_US) -> None:
        """`welcome_us`: time that a router has to answer a join."""
        self._join = join
        self._grace_us = grace_us
        self._welcome_us = welcome_us
        self._welcome_by_us: int | None = None
        """While joining: when the router must have answered."""
        self._state = InstanceSessionState.AWAY
        self._states = StateMachine(SESSION_TRANSITIONS, "a session")
        self._lost_us: int | None = None
        """Since when no router knows of the held choices; None while one does."""
        self._draining = join.draining
        self._was_welcomed = False
        """Whether any router has welcomed this instance since its process began."""
        self._choices = HeldChoices()
        self._beats = Heartbeats(self._choices.has)
        self._unsent: list[ToEngine] = []
        """Orders from opening a session; sent with the router's first message."""

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> InstanceSessionState:
        return self._state

    def moves(self) -> dict[tuple[HeldState, HeldMove], int]:
        """Count of each transition of choices."""
        return self._choices.moves()

    def session_moves(self) -> dict[tuple[InstanceSessionState, InstanceSessionMove], int]:
        """Count of each transition of the session."""
        return self._states.moves()

    @property
    def open_requests(self) -> int:
        """Choices that the engine has not ended, or not answered."""
        return self._choices.open_requests

    @property
    def kept_choices(self) -> int:
        """Choices that will be reported to the next router session."""
        return self._choices.kept

    @property
    def held_choices(self) -> int:
        """Choices of which the output is kept."""
        return self._choices.held

    def opened(self, now_us: int) -> list[FromInstance]:
        """The first messages of a session. Everything that `take` returns from here on is sent after them."""
        self._move(InstanceSessionMove.OPEN)
        self._welcome_by_us = now_us + self._welcome_us
        held, orders = self._choices.next_session()
        self._unsent += orders
        return [msgspec.structs.replace(self._join, draining=self._draining), *held, AllHeldSaid()]

    def lost(self, reason: str, now_us: int) -> None:  # noqa: ARG002
        """The session is over. A loss before the welcome does not extend the grace period."""
        self._move(InstanceSessionMove.LOSE)
        self._beats.void()
        if self._lost_us is None:
            self._lost_us = now_us

    def next_deadline(self) -> int | None:
        if self._state is InstanceSessionState.JOINING:
            return self._welcome_by_us
        if self._state is not InstanceSessionState.AWAY or self._lost_us is None or self._choices.is_empty:
            return None
        return self._lost_us + self._grace_us

    def tick(self, now_us: int) -> SessionEffects:
        deadline = self.next_deadline()
        if deadline is None or now_us < deadline:
            return SessionEffects()
        if self._state is InstanceSessionState.JOINING:
            # A router that died without a word, or an answer that was lost: we send nothing that could show it.
            self._welcome_by_us = None
            return SessionEffects(hang_up=f"it has not answered the join within {self._welcome_us / 1e6:g} s")
        self._lost_us = None
        return SessionEffects(orders=[*self._take_unsent(), *self._choices.drop_everything()])

    def leave(self) -> list[FromInstance]:
        """Tell the router that this instance takes no new requests."""
        was_draining, self._draining = self._draining, True
        return [Leaving()] if not was_draining and self._state in SENDING_STATES else []

    def _move(self, move: InstanceSessionMove) -> None:
        self._state = self._states.after(self._state, move)

    def _take_unsent(self) -> list[ToEngine]:
        orders, self._unsent = self._unsent, []
        return orders

    # ── messages of the router ───────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: FromRouter, now_us: int) -> SessionEffects:  # noqa: ARG002
        """Raises WireError where the router broke the protocol; nothing has changed then."""
        match message:
            case Welcome():
                return self._on_welcome(message)
            case TurnedAway():
                return self._on_turned_away(message)
            case _ if self._state is not InstanceSessionState.SERVING:
                raise WireError(f"{type(message).__name__} to an instance that is {self._state.value}")
            case PlaceAttempt():
                return self._place(message)
            case Cancel(serial):
                return SessionEffects(orders=self._choices.drop([serial]))
            case ForgetSerials(serials):
                return SessionEffects(orders=self._choices.drop(serials))
            case StopAt(serial):
                return SessionEffects(orders=[message] if self._choices.is_wanted(serial) else [])
            case PrefillPeersChanged(addresses):
                return SessionEffects(prefill_peers=addresses)
            case Drain():
                self._draining = True
                return SessionEffects(drain=True)

    def _on_welcome(self, message: Welcome) -> SessionEffects:
        if self._state is not InstanceSessionState.JOINING:
            raise WireError(f"a welcome to an instance that is {self._state.value}")
        self._move(InstanceSessionMove.WELCOME)
        self._was_welcomed = True
        self._grace_us = message.orphan_grace_us
        self._lost_us = None
        return SessionEffects(orders=[*self._take_unsent(), ReportChanges()], welcomed=message)

    def _on_turned_away(self, message: TurnedAway) -> SessionEffects:
        if self._state is not InstanceSessionState.JOINING:
            raise WireError(f"an instance that is {self._state.value} was turned away")
        self._move(InstanceSessionMove.TURN_AWAY)
        effects = SessionEffects(orders=self._take_unsent(), turned_away=message.reason)
        if message.fenced and self._was_welcomed:
            effects.fenced = message.reason
        elif message.fenced:
            effects.rejoins_as = self._exceed(message.known_incarnation)
        return effects

    def _exceed(self, known: int) -> int | None:
        """Take the incarnation after one that the router knows; None where that is none.

        Incarnations are read from a clock that may have been set back since the last life of this name. A process that was
        never welcomed cannot have been outlived: what the router knows is an earlier life, however high its number. Where
        the number cannot be exceeded this instance keeps trying, and the router forgets an absent incarnation in time.
        """
        if not self._join.incarnation <= known < INCARNATION_MAX:
            return None
        self._join = msgspec.structs.replace(self._join, incarnation=known + 1)
        return known + 1

    def _place(self, place: PlaceAttempt) -> SessionEffects:
        if self._choices.is_unanswered(place.ticket):
            raise WireError(f"ticket {place.ticket} waits for its answer already")
        try:
            check_group(place.group, self._join.vocabulary)
        except UnknownToken as error:
            return SessionEffects(messages=[refused(place.ticket, Refusal(RefusalCode.NOT_IN_VOCABULARY, str(error)))])
        if self._choices.open_requests + len(place.group) > CHOICES_MAX:
            refusal = Refusal(RefusalCode.QUEUE_FULL, f"{CHOICES_MAX} choices of this router are open here", 1)
            return SessionEffects(messages=[refused(place.ticket, refusal)])
        return SessionEffects(orders=self._choices.place(place))

    # ── messages of the engine ───────────────────────────────────────────────────────────────────────────────────────────

    def owns_ticket(self, ticket: int) -> bool:
        return ticket >= FIRST_ROUTED_TICKET

    def split(self, output: StepOutput) -> tuple[StepOutput | None, StepOutput | None]:
        """Split a step into the router's part and the front end's own part."""
        return split(output, self._choices.open) if self._choices.open else (None, output)

    def take(self, message: Accepted | RefusedMessage | StepOutput, now_us: int) -> SessionEffects:  # noqa: ARG002
        match message:
            case StepOutput():
                return self._on_step(message)
            case Accepted(ticket, serials):
                group = self._choices.answered(ticket)
                orders = self._choices.accept(group, serials)
                return SessionEffects(orders, [Accepted(group.place.ticket, serials)] if self._awaits_answer(group) else [])
            case RefusedMessage(ticket):
                group = self._choices.answered(ticket)
                self._choices.refuse(group)
                answer = msgspec.structs.replace(message, ticket=group.place.ticket)
                return SessionEffects(messages=[answer] if self._awaits_answer(group) else [])

    def _awaits_answer(self, group: PlacedGroup) -> bool:
        """Whether the router of this session waits for the answer."""
        return self._state in SENDING_STATES and group.session == self._choices.session

    def _on_step(self, output: StepOutput) -> SessionEffects:
        serials = serials_of(output)
        known = self._choices.known_of(output, serials) if self._state in SENDING_STATES else None
        self._choices.record_output(output, serials)
        return SessionEffects(messages=[] if known is None else [known])

    # ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def record_pulse(self, pulse: Pulse, now_us: int) -> None:
        """Record a pulse of the engine for the next heartbeat. Call once per pulse."""
        self._choices.record_preemptions(pulse.preempted)
        self._beats.record_pulse(pulse, self._state is InstanceSessionState.SERVING, now_us)

    def beat(
        self, pulse: Pulse | None, engine: EngineVitals, now_us: int, router_silent_us: int = 0
    ) -> HeartbeatMessage | None:
        """The next heartbeat; None while not serving. `pulse` must not have been recorded before. `router_silent_us`: time
        since bytes of the router last came in this session."""
        if pulse is not None:
            self.record_pulse(pulse, now_us)
        return self._beats.beat(engine, router_silent_us, now_us) if self._state is InstanceSessionState.SERVING else None
