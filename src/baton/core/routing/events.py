"""What a router is told and what it orders: the values that `core.router` decides with. No decisions here.

    request   what a client asked for in one HTTP request: one or more choices, each a `Submission`
    session   the driver's number for one connection of one life of an instance; never used twice
    attempt   choices of one request that travel to one session together

A choice goes from attempt to attempt until it has ended. Each attempt after the first is the original submission with
everything that was delivered so far in `generated`: the instance goes on after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta

from baton.core.bounds import NAME_CHARS_MAX, Address, Count, Fingerprint, Incarnation, Name, Positive, WireMessage
from baton.core.engine.change_journal import NO_KEYS_CHANGED, CachedKeysChanged
from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import FinishReason, Submission
from baton.core.errors import Refusal
from baton.core.handover.faults import PdFault
from baton.core.routing.identity import AttemptId, ChoiceAttempt, RequestNumber

MEMBERSHIP_VERSION = 1
"""Of the messages between routers and instances."""

Session = NewType("Session", int)
Instance = NewType("Instance", str)
"""An instance's name. It outlives its lives: each life has a higher incarnation."""


# ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Join(WireMessage, tag="join", frozen=True):
    """What an instance says of itself as it joins; true for its whole life. The first frame of a session."""

    name: Annotated[Instance, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    incarnation: Incarnation
    role: Name
    fingerprint: Fingerprint
    """Of the model: instances of one router have the same."""
    url: Address
    """Its own HTTP address, for people."""
    peer_address: Address
    """Where instances that decode ask it to prefill; empty where none can."""
    slots: Positive
    blocks: Positive
    block_size: Positive
    context_tokens: Positive
    """Longest sequence that could ever run there."""
    vocabulary: Positive
    pid: Count = 0
    """On its own machine."""
    draining: bool = False
    version: int = MEMBERSHIP_VERSION


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """A request entered a phase at an instance. For the timeline; nothing is decided from it."""

    attempt: ChoiceAttempt
    """May be over."""
    phase: str
    """As `core.request.Phase` names it."""
    ago_us: int
    """How long before the beat that brings it."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life. Sent every `beat_us`, whether or not anything has changed."""

    ledger: SchedulerGauges
    engine_silent_us: int
    """How long ago the engine process last gave a sign of life to its front end."""
    computing: bool
    """Steps are in flight, so `ledger.steps` must grow."""
    names: CachedKeysChanged = NO_KEYS_CHANGED
    notes: tuple[PhaseReport, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class HeldChoice:
    """A choice that an instance has kept for a router that was lost, or that lost its connection."""

    serial: int
    submission: Submission
    """As it was asked for there: what was generated before is in its `generated`."""
    choice: int
    """Which choice of its body."""
    body_choices: int
    """How many choices its body has."""
    origin: bytes
    """The client's request, as the router that took it wrote it down; the same for all legs of a body, and no other's."""
    tokens: tuple[int, ...]
    """Everything generated there, after `submission.generated`."""
    extras: tuple[object, ...]
    """One for each of `tokens` where log-probabilities were asked for, else empty."""
    cached_tokens: int | None
    end: EndedRequest | None
    """How it ended there meanwhile."""


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    session: Session
    facts: Join
    draining: bool = False
    held: tuple[HeldChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class HeartbeatCame:
    session: Session
    sign: Heartbeat


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The connection is over."""

    session: Session
    reason: str


@dataclass(frozen=True, slots=True)
class InstanceDrains:
    """The instance takes nothing new: it was told to stop, or somebody asked the router to drain it."""

    name: Instance


@dataclass(frozen=True, slots=True, eq=False)
class RequestArrived:
    """A request of a client. All of its choices share one prompt or each has its own; `leader` says which."""

    request: RequestNumber
    tenant: str
    group: tuple[Submission, ...]
    origin: bytes
    """Opaque; travels with every attempt, so that it survives this router."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client is gone, or took the request back."""

    request: RequestNumber


@dataclass(frozen=True, slots=True)
class StopStringFound:
    """A stop string was found: the choice ends after `keep` tokens."""

    request: RequestNumber
    choice: int
    keep: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestClaimed:
    """A client has come for an orphaned request."""

    request: RequestNumber
    group: tuple[Submission, ...] = ()
    """All of its choices as they were asked for, where that is known: those that no instance holds begin anew."""


@dataclass(frozen=True, slots=True)
class AttemptAccepted:
    session: Session
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    session: Session
    attempt: AttemptId
    refusal: Refusal


class TokensCame(NamedTuple):
    """Tokens of a choice, or its end, or both. A tuple: one is made for each row of each step."""

    session: Session
    attempt: ChoiceAttempt
    tokens: list[int]
    extras: object = None
    """Travels to the client with the tokens (their log-probabilities); not looked at."""
    cached_tokens: int | None = None
    end: EndedRequest | None = None


@dataclass(frozen=True, slots=True)
class DeadlineCame:
    """`next_deadline` has come."""


RouterEvent = (
    InstanceJoined
    | HeartbeatCame
    | InstanceLost
    | InstanceDrains
    | RequestArrived
    | ClientLeft
    | StopStringFound
    | RequestClaimed
    | AttemptAccepted
    | AttemptRefused
    | TokensCame
    | DeadlineCame
)


# ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AdmitInstance:
    """The instance belongs to the fleet. It goes on with the serials of `keep`, each as that attempt, and drops the rest."""

    session: Session
    keep: tuple[tuple[int, ChoiceAttempt], ...] = ()


@dataclass(frozen=True, slots=True)
class RejectInstance:
    session: Session
    reason: str
    fenced: bool
    """A later life of the same name is known: this one must not serve any more."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The session is given up; nothing of it is heard any more."""

    session: Session
    reason: str


@dataclass(frozen=True, slots=True)
class TellPrefillPeers:
    """Tell an instance that decodes who prefills for it now."""

    session: Session
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrderDrain:
    session: Session


@dataclass(frozen=True, slots=True, eq=False)
class SendAttempt:
    """Submit these choices there; answer AttemptAccepted or AttemptRefused."""

    session: Session
    attempt: AttemptId
    group: tuple[Submission, ...]
    choices: tuple[int, ...]
    """Which choices of their request these are."""
    body_choices: int
    origin: bytes


@dataclass(frozen=True, slots=True)
class CancelChoices:
    """These choices of an attempt are not wanted any more, whatever the instance made of them."""

    session: Session
    attempt: AttemptId
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopChoice:
    session: Session
    attempt: ChoiceAttempt
    keep: int
    """Of the outputs, those of earlier attempts included."""


@dataclass(frozen=True, slots=True)
class ForgetChoices:
    """A request is over: the instance need not keep what it knows of these choices."""

    session: Session
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class RequestOpened:
    """To the client: the request was accepted by an instance, for the first time."""

    request: RequestNumber


@dataclass(frozen=True, slots=True)
class RequestDeclined:
    """To the client: the request was not accepted. Nothing of it was delivered."""

    request: RequestNumber
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class ChoiceOutcome:
    """How a choice ended, over all of its attempts."""

    reason: FinishReason
    """RESCHEDULE where it could not be carried on; `fault` says why then."""
    generated_tokens: int
    bill: Bill
    """Summed over its attempts."""
    fault: PdFault | None = None


class DeliverTokens(NamedTuple):
    """To the client: tokens in order, none twice, none missing; and the end, once. A tuple, as Came is."""

    request: RequestNumber
    choice: int
    tokens: list[int]
    extras: object
    cached_tokens: int | None
    outcome: ChoiceOutcome | None


@dataclass(frozen=True, slots=True, eq=False)
class UnclaimedFound:
    """A request of a router that was lost has been found: everything that is known of it. A client may claim it."""

    request: RequestNumber
    origin: bytes
    delivered: tuple[tuple[int, ...] | None, ...]
    """By choice: all of its tokens so far. None: nothing is known of it."""
    extras: tuple[tuple[object, ...], ...]
    """By choice, for its last tokens: what came before a move is not known any more."""
    cached_tokens: tuple[int | None, ...]
    outcomes: tuple[ChoiceOutcome | None, ...]


@dataclass(frozen=True, slots=True)
class UnclaimedDropped:
    request: RequestNumber


class TimelineStage(Enum):
    """What the timeline shows of a choice."""

    QUEUED = "queued"
    PLACED = "placed"
    PREFILL = "prefill"
    HANDOVER = "handover"
    DECODE = "decode"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    MOVED = "moved"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class TimelineNoted:
    """For the log, the metrics and the timeline: something happened to a choice."""

    request: RequestNumber
    choice: int
    stage: TimelineStage
    where: Instance | None
    at_us: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """For the log and the dashboard: an instance came, left, drains or was suspected."""

    name: Instance
    incarnation: int
    what: str
    """joined, draining, left (after draining, with nothing open), lost, suspected, stuck, fenced, refused"""
    why: str


RouterEffect = (
    AdmitInstance
    | RejectInstance
    | CloseSession
    | TellPrefillPeers
    | OrderDrain
    | SendAttempt
    | CancelChoices
    | StopChoice
    | ForgetChoices
    | RequestOpened
    | RequestDeclined
    | DeliverTokens | UnclaimedFound | UnclaimedDropped | TimelineNoted | FleetChanged
)  # fmt: skip
