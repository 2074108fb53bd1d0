"""Events and effects of a router: the values that `router` decides with. No decisions here.

    request   what a client asked for in one HTTP request: one or more choices, each a `Submission`
    session   the driver's number for one connection of one incarnation of an instance; never used twice
    attempt   choices of one request that travel to one session together

A choice goes from attempt to attempt until it has ended. Each attempt after the first is the original submission with
all delivered tokens in `generated`: the instance continues after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta, Struct

from baton.core.bounds import NAME_CHARS_MAX, Address, Count, Fingerprint, Incarnation, Name, Positive, WireMessage
from baton.core.engine.change_journal import NO_KEYS_CHANGED, CachedKeysChanged
from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import Constraint, FinishReason, Submission
from baton.core.errors import Refusal
from baton.core.handover.faults import PdFault
from baton.core.routing.identity import AttemptId, ChoiceAttempt, RequestNumber
from baton.core.routing.timeline_stage import TimelineStage as TimelineStage

MEMBERSHIP_VERSION = 4
"""Version of the messages between routers and instances."""

Session = NewType("Session", int)
Instance = NewType("Instance", str)
"""An instance's name. It stays the same over restarts; each restart has a higher incarnation."""


# ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Join(WireMessage, tag="join", frozen=True):
    """Facts about an instance, sent when it joins; they never change in a session. The first frame of a session."""

    name: Annotated[Instance, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    incarnation: Incarnation
    role: Name
    fingerprint: Fingerprint
    """Of the model; the same for all instances of a router."""
    url: Address
    """Its own HTTP address, for display."""
    peer_address: Address
    """Address at which decoding instances ask it to prefill; empty if it does not."""
    slots: Positive
    blocks: Positive
    block_size: Positive
    context_tokens: Positive
    """Longest sequence that it can run."""
    vocabulary: Positive
    pid: Count = 0
    """Process id on its own machine."""
    draining: bool = False
    version: int = MEMBERSHIP_VERSION


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """A request entered a phase at an instance. For the timeline; nothing is decided from it."""

    attempt: ChoiceAttempt
    """The attempt may have ended."""
    phase: str
    """The name of a `core.engine.request.Phase`."""
    ago_us: int
    """Time between the change and the beat that reports it."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat. Sent every `beat_us`, whether or not anything has changed."""

    ledger: SchedulerGauges
    engine_silent_us: int
    """Time since the engine process last sent anything to its front end."""
    computing: bool
    """Steps are in flight, so `ledger.steps` must grow."""
    names: CachedKeysChanged = NO_KEYS_CHANGED
    notes: tuple[PhaseReport, ...] = ()
    preempted: tuple[tuple[ChoiceAttempt, int], ...] = ()
    """Choices that were preempted and resume there, and how often each was so far, there and elsewhere."""
    engine_runs: bool = True
    """A second sign beside silence: the engine's process uses a CPU or waits for one, so it is late and not stopped."""
    step_limit_us: int = 60_000_000
    """Time after which a step there that has not ended is a stall."""
    router_silent_us: int = 0
    """Time since anything of this router came there."""
    unanswered: AttemptId | None = None
    """Of the attempts sent there that it has neither accepted nor refused, the one that was sent first."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldChoice:
    """A choice that an instance has kept for a router that was lost, or that lost its connection."""

    serial: int
    submission: Submission
    """As submitted to this instance: outputs generated before that are in its `generated`."""
    choice: int
    """Index of the choice in its request."""
    body_choices: int
    """Number of choices of its request."""
    origin: bytes
    """The client's request as encoded by the router that accepted it; the same for all choices, and unique."""
    tokens: tuple[int, ...]
    """Tokens generated there, after `submission.generated`."""
    extras: tuple[object, ...]
    """One for each of `tokens` if log-probabilities were asked for, else empty."""
    cached_tokens: int | None
    end: EndedRequest | None
    """Its end, if it ended there meanwhile."""
    preemptions: int = 0
    """How often it was preempted so far, there and before it came there."""
    prompt_extras: object = None
    """Log-probabilities of its prompt, as far as they were computed there."""


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
class MessageCame:
    """A message of an instance that concerns no open choice: it is a sign of life all the same."""

    session: Session


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The connection has ended."""

    session: Session
    reason: str


@dataclass(frozen=True, slots=True)
class InstanceDrains:
    """The instance accepts nothing new: it was told to stop, or an operator asked the router to drain it."""

    name: Instance


@dataclass(frozen=True, slots=True, eq=False)
class RequestArrived:
    """A request of a client. Its choices share one prompt or each has its own; `leader` says which."""

    request: RequestNumber
    tenant: str
    group: tuple[Submission, ...]
    origin: bytes
    """Opaque; sent with every attempt, so that it survives this router."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client disconnected or cancelled the request."""

    request: RequestNumber


@dataclass(frozen=True, slots=True)
class StopStringFound:
    """A stop string was found: the choice ends after `keep` tokens."""

    request: RequestNumber
    choice: int
    keep: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestClaimed:
    """A client asks for an orphaned request."""

    request: RequestNumber
    group: tuple[Submission, ...] = ()
    """All choices as submitted, if known: those that no instance holds start from the beginning."""


@dataclass(frozen=True, slots=True)
class AttemptAccepted:
    session: Session
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    session: Session
    attempt: AttemptId
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class MaskCame:
    """The answer to WantMask."""

    request: RequestNumber
    choice: int
    outputs: int
    digest: bytes
    """Empty: this router has another version of the backend, or cannot compute it."""


class TokensCame(NamedTuple):
    """Tokens of a choice, or its end, or both. A tuple, because one is made for each row of each step."""

    session: Session
    attempt: ChoiceAttempt
    tokens: list[int]
    extras: object = None
    """Passed on to the client with the tokens (their log-probabilities); not read here."""
    cached_tokens: int | None = None
    end: EndedRequest | None = None
    prompt_extras: object = None
    """Passed on as `extras` are: log-probabilities of its prompt, which come before the first token or with it."""


@dataclass(frozen=True, slots=True)
class DeadlineCame:
    """`next_deadline` has passed."""


RouterEvent = (
    InstanceJoined
    | HeartbeatCame
    | MessageCame
    | InstanceLost
    | InstanceDrains
    | RequestArrived
    | ClientLeft
    | StopStringFound
    | RequestClaimed
    | AttemptAccepted
    | AttemptRefused
    | MaskCame
    | TokensCame
    | DeadlineCame
)


# ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AdmitInstance:
    """The instance belongs to the fleet. It continues the serials of `keep`, each as that attempt, and drops the rest."""

    session: Session
    keep: tuple[tuple[int, ChoiceAttempt], ...] = ()


@dataclass(frozen=True, slots=True)
class RejectInstance:
    session: Session
    reason: str
    fenced: bool
    """A later incarnation of the same name is known: this one must stop serving."""
    known_incarnation: int = 0
    """That incarnation; 0 where it is not fenced."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The session is closed; its messages are ignored from now on."""

    session: Session
    reason: str


@dataclass(frozen=True, slots=True)
class TellPrefillPeers:
    """Tell a decoding instance which peers prefill for it now."""

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
    """Indices of these choices in their request."""
    body_choices: int
    origin: bytes


@dataclass(frozen=True, slots=True)
class CancelChoices:
    """Cancel these choices of an attempt, in whatever state they are at the instance."""

    session: Session
    attempt: AttemptId
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopChoice:
    session: Session
    attempt: ChoiceAttempt
    keep: int
    """Counts all outputs, those of earlier attempts included."""


@dataclass(frozen=True, slots=True)
class ForgetChoices:
    """A request has ended: the instance may drop everything it keeps of these choices."""

    session: Session
    attempt: AttemptId


@dataclass(frozen=True, slots=True, eq=False)
class WantMask:
    """To the front end: compute the digest of the mask that the constraint's version has after these outputs. Answer
    MaskCame."""

    request: RequestNumber
    choice: int
    constraint: Constraint
    outputs: tuple[int, ...]


class RequestOpened(Struct, frozen=True, gc=False):
    """To the client: an instance accepted the request, for the first time."""

    request: RequestNumber


@dataclass(frozen=True, slots=True)
class RequestDeclined:
    """To the client: the request was not accepted. No token of it was delivered."""

    request: RequestNumber
    refusal: Refusal


class ChoiceOutcome(Struct, frozen=True, gc=False):
    """The end of a choice, over all of its attempts."""

    reason: FinishReason
    """RESCHEDULE if it could not be continued; `fault` then says why."""
    generated_tokens: int
    bill: Bill
    """Summed over its attempts."""
    fault: PdFault | None = None


class DeliverTokens(NamedTuple):
    """To the client: tokens in order, none twice, none missing; and the end, once. A tuple, like TokensCame."""

    request: RequestNumber
    choice: int
    tokens: list[int]
    extras: object
    cached_tokens: int | None
    outcome: ChoiceOutcome | None
    prompt_extras: object = None
    """May come again after a move: the first counts."""


@dataclass(frozen=True, slots=True, eq=False)
class UnclaimedFound:
    """A request of a lost router was found, with everything known of it. A client may claim it."""

    request: RequestNumber
    origin: bytes
    delivered: tuple[tuple[int, ...] | None, ...]
    """By choice: all of its tokens so far. None: nothing is known of it."""
    extras: tuple[tuple[object, ...], ...]
    """By choice, for its last tokens: those from before a move are lost."""
    cached_tokens: tuple[int | None, ...]
    outcomes: tuple[ChoiceOutcome | None, ...]
    prompt_extras: tuple[object, ...] = ()
    """By choice, as far as an instance still has them; empty: none."""


@dataclass(frozen=True, slots=True)
class UnclaimedDropped:
    request: RequestNumber


class TimelineNoted(Struct, frozen=True, gc=False):
    """For the log, the metrics and the timeline: an event of a choice."""

    request: RequestNumber
    choice: int
    stage: TimelineStage
    where: Instance | None
    at_us: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """For the log and the dashboard: an instance joined, left, drains or is suspected."""

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
    | WantMask
    | RequestOpened
    | RequestDeclined
    | DeliverTokens | UnclaimedFound | UnclaimedDropped | TimelineNoted | FleetChanged
)  # fmt: skip
