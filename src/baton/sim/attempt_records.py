"""What is known of one life of a router: who is a member, which choice is open where, how its legs ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.config import ROLES
from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.request import Submission
from baton.core.routing.events import ChoiceOutcome, Join, Session
from baton.core.routing.identity import RequestNumber


@dataclass(slots=True, eq=False)
class ChoiceAtInstance:
    """A choice at an instance."""

    body: RequestSeen
    choice: ChoiceSeen
    session: SessionSeen
    leg: AttemptSeen
    serial: int | None = None
    ended: EndedRequest | None = None
    opened_us: int = 0
    """When the instance said that it had taken it."""
    called_back: bool = False
    """Cancelled, or refused, or its session is over: the choice may be elsewhere."""
    stopped: bool = False
    forgotten: bool = False

    @property
    def is_open(self) -> bool:
        if self.called_back or self.ended is not None or self.body.over:
            return False
        return self.choice.hop is self and self.choice.outcome is None


@dataclass(slots=True, eq=False)
class AttemptSeen:
    hops: list[ChoiceAtInstance] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SessionSeen:
    number: Session
    instance: int
    join: Join | None = None
    welcomed: bool = False
    drains: bool = False
    drains_us: int = 0
    """Since when."""
    over: bool = False
    sign_us: int = 0
    tickets: dict[int, AttemptSeen] = field(default_factory=dict)
    serials: dict[int, ChoiceAtInstance] = field(default_factory=dict)
    held: list[ChoiceAtInstance] = field(default_factory=list)
    """What it said it has kept, until it is welcomed."""
    doomed: bool = False
    """It said itself that its engine is silent."""
    said: set[bytes] = field(default_factory=set)
    """Names of prefixes that it has cached."""
    legs: int = 0

    def drain(self, now_us: int) -> None:
        if not self.drains:
            self.drains, self.drains_us = True, now_us

    def open_hops(self) -> list[ChoiceAtInstance]:
        """Those whose choice is here, and that somebody waits for."""
        hops = [*self.serials.values(), *(hop for leg in self.tickets.values() for hop in leg.hops)]
        return [hop for hop in hops if hop.is_open]

    @property
    def name(self) -> str:
        return "somebody" if self.join is None else self.join.name

    @property
    def serves(self) -> bool:
        role = None if self.join is None else ROLES.get(self.join.role)
        return self.welcomed and not self.over and not self.drains and role is not None and role.serves


@dataclass(slots=True, eq=False)
class ChoiceSeen:
    index: int
    name: str
    asked: Submission | None
    """As its client did; None: a router before this one was asked."""
    prompt: bytes = b""
    delivered: list[int] = field(default_factory=list)
    hop: ChoiceAtInstance | None = None
    """Where it is."""
    legs: int = 0
    losses: int = 0
    yields: int = 0
    yielded_at: list[str] = field(default_factory=list)
    turned_down_by: str = ""
    """Who refused it last, or was lost with it."""
    no_room_us: int | None = None
    max_tokens: int | None = None
    bills: list[Bill] = field(default_factory=list)
    outcome: ChoiceOutcome | None = None
    cut: bool = False
    """Its client has everything it wants of it."""


@dataclass(slots=True, eq=False)
class RequestSeen:
    body: RequestNumber | None
    origin: bytes
    arrived_us: int
    choices: list[ChoiceSeen]
    hops: list[ChoiceAtInstance] = field(default_factory=list)
    over: bool = False
    left: bool = False
    """Its client is gone, or none came for it."""
    found: bool = False
    """A router before this one was asked for it."""
    claimed: bool = False


@dataclass(slots=True, eq=False)
class RouterLifeSeen:
    """One life of a router, as far as messages and acts tell of it."""

    woke_us: int
    served_us: int
    """When somebody last served."""
    served_us_before: int
    """Since when somebody has."""
    sessions: dict[Session, SessionSeen] = field(default_factory=dict)
    bodies: dict[RequestNumber, RequestSeen] = field(default_factory=dict)
    origins: dict[bytes, RequestSeen] = field(default_factory=dict)
    touched: dict[bytes, RequestSeen] = field(default_factory=dict)
    dead: list[SessionSeen] = field(default_factory=list)
    """Since everything was last looked at."""
    left_behind: list[ChoiceAtInstance] = field(default_factory=list)
    """Where choices were that have been found elsewhere."""
    looks: int = 0
    joining: SessionSeen | None = None
    """Just welcomed: what it holds and nobody wants is about to be said."""
    serves: bool = False
    """Whether somebody served when everything was last looked at."""
