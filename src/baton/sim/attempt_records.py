"""The record of one life of a router: members, requests, their choices, and the attempts at each instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.config import ROLES
from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import Submission
from baton.core.routing.events import ChoiceOutcome, Join, Session
from baton.core.routing.identity import RequestNumber


@dataclass(slots=True, eq=False)
class ChoiceAtInstance:
    """One choice placed at one instance."""

    request: RequestSeen
    choice: ChoiceSeen
    session: SessionSeen
    attempt: AttemptSeen
    serial: int | None = None
    ended: EndedRequest | None = None
    opened_us: int = 0
    """When the instance reported that it accepted it."""
    preemptions: int = 0
    """The count of preemptions that it was sent with."""
    reported: int = 0
    """The count of preemptions with which its instance reported it when it joined."""
    in_place: bool = False
    """It was sent to resume in place."""
    billed: bool = False
    """Its end was reported while it was the placement of its choice."""
    called_back: bool = False
    """Cancelled, refused, or its session ended: the choice may be placed again."""
    stopped: bool = False
    forgotten: bool = False

    def is_known(self) -> bool:
        """Whether its end was reported before, in an earlier session with the same life of its instance."""
        life = self.session.life
        others = [other for other in self.request.placements if other.billed and other.session.life == life]
        return any(other.serial == self.serial for other in others)

    @property
    def is_open(self) -> bool:
        if self.called_back or self.ended is not None or self.request.over:
            return False
        return self.choice.placement is self and self.choice.outcome is None

    def call_back(self, now_us: int) -> None:
        if self.is_open:  # else its choice is elsewhere, or waits already
            self.choice.waits_since_us = now_us
        self.called_back = True

    def is_left_running(self) -> bool:
        """Whether its choice has another placement, and nobody has told its instance."""
        told = self.called_back or self.ended is not None
        return self.serial is not None and not told and self.choice.placement is not self


@dataclass(slots=True, eq=False)
class AttemptSeen:
    placements: list[ChoiceAtInstance] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SessionSeen:
    number: Session
    instance: int
    join: Join | None = None
    welcomed: bool = False
    drains: bool = False
    drains_us: int = 0
    """When it began to drain."""
    over: bool = False
    sign_us: int = 0
    tickets: dict[int, AttemptSeen] = field(default_factory=dict)
    serials: dict[int, ChoiceAtInstance] = field(default_factory=dict)
    held: list[ChoiceAtInstance] = field(default_factory=list)
    """Choices that it reported as kept when it joined; empty once it is welcomed."""
    doomed: bool = False
    """It reported that its engine is silent."""
    hears_us: int = 0
    """When it last heard the router, by what it said."""
    is_deaf: bool = False
    """Whether its last beat said that it has not heard the router for too long."""
    unanswered: AttemptSeen | None = None
    """The oldest attempt that waited for its answer at the last beat."""
    unanswered_us: int = 0
    """Since when; the moment after a time in which its engine could not answer, or the router did not look."""
    left_us: int = 0
    """The same, without more of such times than the router leaves out."""
    leaves_unanswered: bool = False
    """Whether it had left an attempt unanswered for as long as a step may take, at its last beat."""
    is_late: bool = False
    """Whether for so long that the router must have given it up."""
    said: set[bytes] = field(default_factory=set)
    """Keys of prefixes that it has reported as cached."""
    attempts: int = 0
    gauges: SchedulerGauges | None = None
    """As last reported."""
    placed_since: int = 0
    """Choices placed there since that report."""

    def room(self) -> int | None:
        """Blocks that it had room for when it last reported, while nobody waited for blocks there; None: unknown."""
        if self.gauges is None or not self.gauges.total_blocks:
            return None
        return 0 if self.gauges.waiting else self.gauges.free_blocks + self.gauges.evictable_blocks

    def may_have_one_more(self, ahead: float) -> bool:
        return self.join is not None and len(self.open_choices()) < ahead * self.join.slots

    def holds(self, tokens: int) -> bool:
        join = self.join
        return join is not None and min(join.context_tokens, join.blocks * join.block_size) >= tokens

    def oldest_unanswered(self) -> AttemptSeen | None:
        for attempt in self.tickets.values():
            if any(placement.is_open for placement in attempt.placements):
                return attempt
        return None

    def drain(self, now_us: int) -> None:
        if not self.drains:
            self.drains, self.drains_us = True, now_us

    def open_choices(self) -> list[ChoiceAtInstance]:
        """Placements whose choice is computed here and has not ended."""
        placements = [
            *self.serials.values(),
            *(placement for attempt in self.tickets.values() for placement in attempt.placements),
        ]
        return [placement for placement in placements if placement.is_open]

    @property
    def life(self) -> tuple[str, int]:
        return (self.name, 0 if self.join is None else self.join.incarnation)

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
    """The client's submission; None when it was made to an earlier router."""
    prompt: bytes = b""
    delivered: list[int] = field(default_factory=list)
    placement: ChoiceAtInstance | None = None
    """Its present placement."""
    attempts: int = 0
    losses: int = 0
    yields: int = 0
    yielded_at: list[str] = field(default_factory=list)
    failed_handovers: int = 0
    preemptions: int = 0
    """The most preemptions, anywhere, that an instance has reported of it to this router."""
    turned_down_by: str = ""
    """The instance that refused it last, or was lost with it."""
    no_room_us: int | None = None
    version_refused_us: int | None = None
    """When an instance first refused it for the version of its constraint, since it had a place."""
    waits_since_us: int = 0
    """When an instance that had accepted it was last lost, ended it or was told to."""
    max_tokens: int | None = None
    bills: list[Bill] = field(default_factory=list)
    outcome: ChoiceOutcome | None = None
    cut: bool = False
    """Its client has stopped it: it has all the tokens it wants."""


@dataclass(slots=True, eq=False)
class RequestSeen:
    number: RequestNumber | None
    origin: bytes
    arrived_us: int
    choices: list[ChoiceSeen]
    placements: list[ChoiceAtInstance] = field(default_factory=list)
    over: bool = False
    left: bool = False
    """Its client disconnected, or did not come back to resume it."""
    accepted: bool = False
    """An instance has accepted it."""
    found: bool = False
    """It was submitted to an earlier router and reported by an instance."""
    claimed: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether a token of it was delivered, or an instance has it."""
        return self.found or any(
            choice.delivered or (choice.placement is not None and choice.placement.is_open) for choice in self.choices
        )


@dataclass(slots=True, eq=False)
class RouterLifeSeen:
    """One life of a router, as seen in its messages and acts."""

    woke_us: int
    served_us: int
    """When an instance last served."""
    served_us_before: int
    """The last time at which no instance served."""
    began_us: int = 0
    asked_us: int | None = None
    """When its first request came: it has begun by then."""
    served_names: set[str] = field(default_factory=set)
    """Names of instances that have served."""
    sessions: dict[Session, SessionSeen] = field(default_factory=dict)
    requests: dict[RequestNumber, RequestSeen] = field(default_factory=dict)
    origins: dict[bytes, RequestSeen] = field(default_factory=dict)
    touched: dict[bytes, RequestSeen] = field(default_factory=dict)
    dead: list[SessionSeen] = field(default_factory=list)
    """Sessions that ended since the last check."""
    left_behind: list[ChoiceAtInstance] = field(default_factory=list)
    """Former placements of choices that another instance has reported."""
    looks: int = 0
    looked_us: int = 0
    """When it last did something."""
    joining: SessionSeen | None = None
    """Just welcomed; cancellations of what it holds in vain follow at once."""
    serves: bool = False
    """Whether an instance served at the last check."""

    def note_serving(self, members: Sequence[SessionSeen]) -> bool:
        """Remember who serves; returns whether anybody does."""
        serving = [session.name for session in members if session.serves]
        self.served_names.update(serving)
        return bool(serving)
