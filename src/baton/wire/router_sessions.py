"""The router's sessions with instances: translates attempts of `core.routing` to tickets and serials, and back.

    session = sessions.connected(now)                      an instance has connected and proved the key
    acts    = sessions.receive(session, message, now)        a message of it: messages to send, news for clients
    acts    = sessions.submit(tenant, group, origin, now)  … and leave, stop_choice, claim, drain, tick

The router decides; this translates. Each session has one `RequestTable` and the attempts that were sent there:

    NEW ── Join ──▶ JOINING ── HeldGroup … AllHeldSaid ──▶ ADMITTED    or rejected, and closed

    attempt: unanswered ── accepted ──▶ its choices run, each with a serial ── all have ended, and the router has released
               │                                                               the attempt ──▶ ForgetSerials is sent
               └── all cancelled: abandoned; requests that the instance still accepts are cancelled and not reported

Promises: the router gets at most one answer to an attempt, of a choice each row once, in order, up to its end, and nothing
of what it has cancelled. Nothing is reported of a session that was closed or lost. An instance that breaks the protocol
causes a WireError before any part of that message reaches the router; the driver closes the session and calls `lost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from baton.core.bounds import REASON_CHARS_MAX
from baton.core.engine.orders import Accepted, Cancel, Drain, StopAt
from baton.core.engine.request import Submission
from baton.core.errors import InvariantViolated, Refusal, RefusalCode
from baton.core.routing.events import (
    AdmitInstance,
    AttemptAccepted,
    AttemptRefused,
    CancelChoices,
    ClientLeft,
    CloseSession,
    DeadlineCame,
    DeliverTokens,
    FleetChanged,
    ForgetChoices,
    HeartbeatCame,
    HeldChoice,
    Instance,
    InstanceDrains,
    InstanceJoined,
    InstanceLost,
    Join,
    MaskCame,
    MessageCame,
    OrderDrain,
    RejectInstance,
    RequestArrived,
    RequestClaimed,
    RequestDeclined,
    RequestOpened,
    RouterEffect,
    RouterEvent,
    SendAttempt,
    Session,
    StopChoice,
    StopStringFound,
    TellPrefillPeers,
    TimelineNoted,
    TokensCame,
    UnclaimedDropped,
    UnclaimedFound,
    WantMask,
)
from baton.core.routing.identity import AttemptId, ChoiceAttempt, RequestNumber
from baton.core.routing.routed_requests import sooner
from baton.core.routing.router import Router
from baton.core.state_machine import FastEnum, StateMachine
from baton.wire import request_table
from baton.wire import router_messages as membership
from baton.wire.engine_messages import RefusedMessage, StepOutput, ToEngine, WireError, asked_bytes
from baton.wire.membership_decoding import (
    check_lines,
    check_prompt_lines,
    heartbeat_of,
    held_of,
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
    AllHeldSaid,
    FromInstance,
    FromRouter,
    HeartbeatMessage,
    HeldGroup,
    Leaving,
    PlaceAttempt,
    TurnedAway,
    Welcome,
    held_bytes,
)

JOIN_US = 10_000_000
RECENT_MAX = 4096
"""Requests of a session whose phase notes are still matched after they have ended."""


class SayToInstance(Struct, frozen=True, gc=False):
    session: Session
    message: FromRouter


@dataclass(frozen=True, slots=True)
class CloseConnection:
    session: Session
    reason: str


Act = (
    SayToInstance
    | CloseConnection
    | RequestOpened
    | RequestDeclined
    | DeliverTokens
    | UnclaimedFound
    | UnclaimedDropped
    | TimelineNoted
    | FleetChanged
    | WantMask
)
NEWS = (
    DeliverTokens,
    TimelineNoted,
    RequestOpened,
    RequestDeclined,
    FleetChanged,
    UnclaimedFound,
    UnclaimedDropped,
    WantMask,
)
"""Effects that are passed on as acts; the most common first."""


class RouterSessionState(FastEnum):
    NEW = "new"
    JOINING = "joining"
    ADMITTED = "admitted"
    OVER = "over"


class RouterSessionMove(FastEnum):
    """The events of a session."""

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
class _SentChoice:
    """One choice of an attempt at an instance."""

    id: ChoiceAttempt
    sent: _SentAttempt
    left: int
    """Tokens that it may still yield."""
    submission: Submission
    serial: int | None = None
    is_reported: bool = True
    """Whether its output is passed to the router: until the router cancels it."""
    cancelled: bool = False
    """Whether a cancel was sent: the instance keeps nothing of it then."""
    over: bool = False
    keep: int | None = None
    """The StopAt to send once the instance has answered: tokens to keep."""


@dataclass(slots=True, eq=False)
class _SentAttempt:
    """An attempt, from sending until the instance may forget it."""

    id: AttemptId
    ticket: int | None
    """None once it is answered."""
    choices: dict[int, _SentChoice] = field(default_factory=dict)
    """By index, in the order sent."""
    forget: bool = False
    """Whether the router has released the attempt."""


@dataclass(slots=True, eq=False)
class _InstanceSession:
    """One session."""

    number: Session
    due_us: int
    """The deadline for joining."""
    state: RouterSessionState = RouterSessionState.NEW
    table: RequestTable = field(default_factory=RequestTable)
    join: Join | None = None
    held: dict[int, HeldChoice] = field(default_factory=dict)
    """By serial, until the instance is admitted."""
    groups: int = 0
    bytes: int = 0
    attempts: dict[AttemptId, _SentAttempt] = field(default_factory=dict)
    tickets: dict[int, _SentAttempt] = field(default_factory=dict)
    """Attempts that the instance has not answered and that are not abandoned; in the order sent."""
    running: dict[int, _SentChoice] = field(default_factory=dict)
    """By serial: choices that have not ended and that the request table reports."""
    recent: dict[int, ChoiceAttempt] = field(default_factory=dict)
    """By serial, for matching phase notes."""

    def joined(self) -> Join:
        if self.join is None:
            raise InvariantViolated(f"session {self.number} is {self.state.value} and no instance has joined in it")
        return self.join


class RouterSessions:
    def __init__(self, router: Router, name: str, *, keyed: bool = False) -> None:
        """`keyed`: whether clients of this router need an API key."""
        self.router = router
        self._name = name
        self._keyed = keyed
        self._sessions: dict[Session, _InstanceSession] = {}
        self._sessions_made = 0
        self._requests_made = 0
        self._states = StateMachine(SESSION_TRANSITIONS, "a session")

    def session_moves(self) -> dict[tuple[RouterSessionState, RouterSessionMove], int]:
        """Count of each transition of sessions."""
        return self._states.moves()

    def _move(self, session: _InstanceSession, move: RouterSessionMove) -> None:
        session.state = self._states.after(session.state, move)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, now_us: int) -> Session:
        self._sessions_made += 1
        number = Session(self._sessions_made)
        self._sessions[number] = _InstanceSession(number, now_us + JOIN_US)
        return number

    def lost(self, number: Session, reason: str, now_us: int) -> list[Act]:
        session = self._sessions.pop(number, None)
        if session is None:
            return []
        known = session.state is RouterSessionState.ADMITTED
        self._move(session, RouterSessionMove.CLOSE)
        return self._handle(InstanceLost(number, reason), now_us) if known else []

    def receive(self, number: Session, message: FromInstance, now_us: int) -> list[Act]:
        """Raises WireError where the instance broke the protocol: close the session and call `lost`."""
        session = self._sessions.get(number)
        if session is None:
            return []
        if session.state is not RouterSessionState.ADMITTED:
            return self._receive_joining(session, message, now_us)
        match message:
            case StepOutput():
                return self._on_step(session, message, now_us)
            case HeartbeatMessage():
                oldest = next(iter(session.tickets.values()), None)
                sign = heartbeat_of(message, session.recent, None if oldest is None else oldest.id)
                return self._handle(HeartbeatCame(number, sign), now_us)
            case Accepted():
                return self._accepted(session, message, now_us)
            case RefusedMessage():
                return self._refused(session, message, now_us)
            case Leaving():
                return self._handle(InstanceDrains(Instance(session.joined().name)), now_us)
            case _:
                raise WireError(f"{type(message).__name__} from an instance that has joined")

    def _receive_joining(self, session: _InstanceSession, message: FromInstance, now_us: int) -> list[Act]:
        match session.state, message:
            case RouterSessionState.NEW, Join():
                self._move(session, RouterSessionMove.JOIN)
                session.join = message
                return []
            case RouterSessionState.JOINING, HeldGroup():
                self._add_held(session, message)
                return []
            case RouterSessionState.JOINING, AllHeldSaid():
                return self._finish_join(session, now_us)
            case _:
                raise WireError(f"{type(message).__name__} from an instance that is {session.state.value}")

    def _add_held(self, session: _InstanceSession, message: HeldGroup) -> None:
        session.groups += 1
        session.bytes += held_bytes(message)
        if session.groups > HELD_GROUPS_MAX or session.bytes > HELD_BYTES_MAX:
            raise WireError(f"more is held than {HELD_GROUPS_MAX} groups or {HELD_BYTES_MAX} bytes")
        for choice in held_of(message, session.joined()):
            if choice.serial in session.held:
                raise WireError(f"serial {choice.serial} is held twice")
            session.held[choice.serial] = choice

    def _finish_join(self, session: _InstanceSession, now_us: int) -> list[Act]:
        join = session.joined()
        acts = self._handle(InstanceJoined(session.number, join, join.draining, tuple(session.held.values())), now_us)
        if session.state is RouterSessionState.JOINING:
            raise InvariantViolated(f"the router neither admitted session {session.number} nor turned it away")
        return acts

    # ── requests of clients ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, tenant: str, group: Sequence[Submission], origin: bytes, now_us: int
    ) -> tuple[RequestNumber, list[Act]]:
        self._requests_made += 1
        number = RequestNumber(self._requests_made)
        # A group that exceeds the limits would end the session of every instance it is offered to.
        refusal = _too_large(group, origin)
        if refusal is not None:
            return number, [RequestDeclined(number, refusal)]
        return number, self._handle(RequestArrived(number, tenant, tuple(group), origin), now_us)

    def leave(self, number: RequestNumber, now_us: int) -> list[Act]:
        return self._handle(ClientLeft(number), now_us)

    def stop_choice(self, number: RequestNumber, choice: int, keep: int, now_us: int) -> list[Act]:
        return self._handle(StopStringFound(number, choice, keep), now_us)

    def claim(self, number: RequestNumber, now_us: int, group: Sequence[Submission] = ()) -> list[Act]:
        """`group`: all choices as asked for, where known; choices that no instance holds start anew."""
        return self._handle(RequestClaimed(number, tuple(group)), now_us)

    def mask_came(self, number: RequestNumber, choice: int, outputs: int, digest: bytes, now_us: int) -> list[Act]:
        """The answer to WantMask."""
        return self._handle(MaskCame(number, choice, outputs, digest), now_us)

    def drain(self, name: str, now_us: int) -> list[Act]:
        return self._handle(InstanceDrains(Instance(name)), now_us)

    def tick(self, now_us: int) -> list[Act]:
        return [*self._handle(DeadlineCame(), now_us), *self._close_late_joins(now_us)]

    def next_deadline(self) -> int | None:
        due_us = self.router.next_deadline()
        for session in self._sessions.values():
            if session.state is not RouterSessionState.ADMITTED:
                due_us = sooner(due_us, session.due_us)
        return due_us

    def _close_late_joins(self, now_us: int) -> list[Act]:
        """Close sessions in which no instance has joined in time."""
        joining = [session for session in self._sessions.values() if session.state is not RouterSessionState.ADMITTED]
        late = [session for session in joining if session.due_us <= now_us]
        return [self._close(session, f"it has not joined within {JOIN_US // 1_000_000} s") for session in late]

    # ── messages of an instance about attempts ───────────────────────────────────────────────────────────────────────────

    def _accepted(self, session: _InstanceSession, message: Accepted, now_us: int) -> list[Act]:
        sent = session.tickets.get(message.ticket)
        if sent is not None and len(sent.choices) != len(message.serials):
            raise WireError(f"{len(sent.choices)} choices were accepted as {len(message.serials)} requests")
        took = session.table.take(message)
        acts = _messages(session, took.orders)
        opened = [news for news in took.news if isinstance(news, request_table.GroupAccepted)] if sent is not None else []
        if sent is None or not opened:
            return acts + self._handle(MessageCame(session.number), now_us)
        for news in opened:
            acts += self._open(session, sent, news.serials, now_us)
        return acts

    def _open(self, session: _InstanceSession, sent: _SentAttempt, serials: tuple[int, ...], now_us: int) -> list[Act]:
        del session.tickets[_answered(sent)]
        acts: list[Act] = []
        for run, serial in zip(sent.choices.values(), serials, strict=True):
            _start_choice(session, run, serial)
            if not run.is_reported:
                acts += _cancel(session, run)
            elif run.keep is not None:
                acts += _messages(session, [session.table.stop(serial, run.keep)])
        return acts + self._handle(AttemptAccepted(session.number, sent.id), now_us)

    def _refused(self, session: _InstanceSession, message: RefusedMessage, now_us: int) -> list[Act]:
        took = session.table.take(message).news
        declined = [news for news in took if isinstance(news, request_table.GroupDeclined)]
        acts = [] if declined else self._handle(MessageCame(session.number), now_us)
        for news in declined:
            sent = session.tickets.pop(news.ticket)
            del session.attempts[sent.id]
            acts += self._handle(AttemptRefused(session.number, sent.id, news.refusal), now_us)
        return acts

    def _on_step(self, session: _InstanceSession, output: StepOutput, now_us: int) -> list[Act]:
        step = session.table.take(output).step
        news = [] if step is None else _token_events(session, step)
        acts = [] if news else self._handle(MessageCame(session.number), now_us)  # of choices that were called back
        if step is None:
            return acts
        for serial in step.ended:
            run = session.running.pop(serial)
            run.over = True
            acts += _release_if_over(session, run.sent)
        handle = self.router.handle
        for event in news:
            if session.state is RouterSessionState.OVER:
                break  # closed by the effects of earlier rows
            for effect in handle(event, now_us):
                if type(effect) is DeliverTokens:
                    acts.append(effect)
                else:
                    self._do(effect, acts)
        return acts

    # ── effects of the router ────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, event: RouterEvent, now_us: int) -> list[Act]:
        acts: list[Act] = []
        for effect in self.router.handle(event, now_us):
            self._do(effect, acts)
        return acts

    def _do(self, effect: RouterEffect, acts: list[Act]) -> None:
        if isinstance(effect, NEWS):
            acts.append(effect)
            return
        session = self._sessions.get(effect.session)
        if session is None:
            return  # lost meanwhile; the router gets or has got InstanceLost
        match effect:
            case SendAttempt():
                acts.append(self._place(session, effect))
            case CancelChoices(_, attempt, choices):
                acts += _cancel_choices(session, attempt, choices)
            case StopChoice(_, which, keep):
                acts += _stop_choice(session, which, keep)
            case ForgetChoices(_, attempt):
                acts += _forget(session, attempt)
            case TellPrefillPeers(number, addresses):
                acts.append(SayToInstance(number, membership.PrefillPeersChanged(addresses[:ADDRESSES_MAX])))
            case OrderDrain(number):
                acts.append(SayToInstance(number, Drain()))
            case AdmitInstance():
                acts += self._admit(session, effect)
            case RejectInstance(number, reason, fenced, known):
                answer = TurnedAway(reason[:REASON_CHARS_MAX], fenced, known)
                acts += [SayToInstance(number, answer), self._close(session, reason)]
            case CloseSession(_, reason):
                acts.append(self._close(session, reason))

    def _close(self, session: _InstanceSession, reason: str) -> CloseConnection:
        del self._sessions[session.number]
        self._move(session, RouterSessionMove.CLOSE)
        return CloseConnection(session.number, reason)

    def _place(self, session: _InstanceSession, send: SendAttempt) -> SayToInstance:
        message = session.table.submit(send.group)
        sent = _SentAttempt(send.attempt, message.ticket)
        context = session.joined().context_tokens
        for choice, item in zip(send.choices, send.group, strict=True):
            which = ChoiceAttempt(send.attempt.request, choice, send.attempt.attempt)
            sent.choices[choice] = _SentChoice(which, sent, tokens_left(item, context), item)
        session.attempts[send.attempt] = session.tickets[message.ticket] = sent
        return SayToInstance(
            session.number, PlaceAttempt(message.ticket, message.group, send.choices, send.body_choices, send.origin)
        )

    def _admit(self, session: _InstanceSession, admit: AdmitInstance) -> list[Act]:
        config, context = self.router.config, session.joined().context_tokens
        self._move(session, RouterSessionMove.ADMIT)
        welcome = Welcome(self._name, config.beat_us, config.orphan_grace_us, self._keyed)
        acts: list[Act] = [SayToInstance(session.number, welcome)]
        for serial, which in admit.keep:
            choice = session.held.pop(serial)
            sent = session.attempts.setdefault(which.group, _SentAttempt(which.group, None))
            left = tokens_left(choice.submission, context) - len(choice.tokens)
            run = sent.choices[which.choice] = _SentChoice(which, sent, left, choice.submission)
            if choice.end is None:
                session.table.adopt(serial)
                _start_choice(session, run, serial)
            else:
                run.serial, run.over = serial, True
        acts += _messages(
            session, [session.table.adopt(serial, False) for serial, choice in session.held.items() if choice.end is None]
        )
        ended = tuple(serial for serial, choice in session.held.items() if choice.end is not None)
        session.held.clear()
        return [*acts, SayToInstance(session.number, membership.ForgetSerials(ended))] if ended else acts


# ── one session ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _messages(session: _InstanceSession, orders: Sequence[ToEngine | None]) -> list[Act]:
    """Messages for orders of the request table; None entries are skipped."""
    return [SayToInstance(session.number, order) for order in orders if isinstance(order, Cancel | StopAt)]


def _answered(sent: _SentAttempt) -> int:
    if sent.ticket is None:
        raise InvariantViolated(f"{sent.id} was answered before")
    ticket, sent.ticket = sent.ticket, None
    return ticket


def _start_choice(session: _InstanceSession, run: _SentChoice, serial: int) -> None:
    run.serial = serial
    session.running[serial] = run
    session.recent[serial] = run.id
    if len(session.recent) > RECENT_MAX:
        del session.recent[next(iter(session.recent))]


def _token_events(session: _InstanceSession, step: StepColumns) -> list[TokensCame]:
    """The step's output for choices that are passed to the router. Raises WireError where it is impossible."""
    number, vocabulary, runs = session.number, session.joined().vocabulary, session.running
    serials, tokens = step.serials, step.tokens
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise WireError("a token that is not in the vocabulary")
    if len(frozenset(serials)) != len(serials):
        raise WireError("two rows of one request in one step")
    ends = dict(step.ended)
    extras, prompts, cached = step.logprobs, step.prompt_logprobs, step.cached
    news: list[TokensCame] = []
    for row, (serial, begin, end) in enumerate(zip(serials, step.begins, step.ends, strict=True)):
        run = runs[serial]
        run.left -= end - begin
        if begin > end or run.left < 0:
            raise WireError(f"{end - begin} tokens of serial {serial}, which may have {run.left + end - begin}")
        sampling = run.submission.sampling
        lines = extras.get(row) if sampling.logprobs is not None else None
        if lines is not None:  # an executor may compute none
            check_lines(lines, end - begin, vocabulary)
        prompt = prompts.get(row) if sampling.prompt_logprobs is not None else None
        if prompt is not None:
            check_prompt_lines(prompt, run.submission, vocabulary)
        if run.is_reported:
            hit, parts = cached.get(serial), None if prompt is None else (prompt,)
            news.append(TokensCame(number, run.id, tokens[begin:end], lines, hit, ends.pop(serial, None), parts))
        else:
            ends.pop(serial, None)
    for serial, over in ends.items():
        run = runs[serial]
        if run.is_reported:
            news.append(TokensCame(number, run.id, [], None, None, over))
    return news


def _cancel_choices(session: _InstanceSession, attempt: AttemptId, choices: tuple[int, ...]) -> list[Act]:
    sent = session.attempts.get(attempt)
    if sent is None:
        return []
    for choice in choices:
        sent.choices[choice].is_reported = False
    if sent.ticket is None:
        acts = [act for choice in choices for act in _cancel(session, sent.choices[choice])]
        return acts + _release_if_over(session, sent)
    if not any(run.is_reported for run in sent.choices.values()):
        session.table.abandon(sent.ticket)
        del session.tickets[sent.ticket], session.attempts[attempt]
    return []


def _cancel(session: _InstanceSession, run: _SentChoice) -> list[Act]:
    order = None if run.serial is None else session.table.cancel(run.serial)
    run.cancelled = run.cancelled or order is not None
    return _messages(session, [order])


def _stop_choice(session: _InstanceSession, which: ChoiceAttempt, keep: int) -> list[Act]:
    sent = session.attempts.get(which.group)
    if sent is None:
        return []
    run = sent.choices[which.choice]
    if run.serial is None:
        run.keep = keep
        return []
    return _messages(session, [session.table.stop(run.serial, keep)])


def _forget(session: _InstanceSession, attempt: AttemptId) -> list[Act]:
    sent = session.attempts.get(attempt)
    if sent is None:
        return []
    sent.forget = True
    return _release_if_over(session, sent)


def _release_if_over(session: _InstanceSession, sent: _SentAttempt) -> list[Act]:
    """Send ForgetSerials once all choices of the attempt are over and the router has released it."""
    runs = sent.choices.values()
    if not all(run.over for run in runs) or not (sent.forget or not any(run.is_reported for run in runs)):
        return []
    del session.attempts[sent.id]
    serials = tuple(run.serial for run in runs if run.serial is not None and not run.cancelled)
    return [SayToInstance(session.number, membership.ForgetSerials(serials))] if serials else []


def _too_large(group: Sequence[Submission], origin: bytes) -> Refusal | None:
    size = len(origin) + sum(map(asked_bytes, group))
    if len(group) > GROUP_MAX:
        text = f"the body asks for {len(group)} sequences; at most {GROUP_MAX} can be asked for"
    elif len(origin) > ORIGIN_BYTES_MAX or size > PLACE_BYTES_MAX:
        text = f"the body of {len(origin)} bytes makes a message of {size} bytes, which is more than an instance takes"
    else:
        return None
    return Refusal(RefusalCode.GROUP_TOO_LARGE, text)
