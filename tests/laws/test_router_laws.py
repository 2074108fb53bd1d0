"""Random fleets that lose, refuse, preempt and come back, routers that crash, clients that leave: the laws of routing hold.

Hypothesis draws the shape and a seed; the seed draws the events. Instances here are scripts: the next token is a hash of all
tokens before it, so that one that is lost, repeated or carried wrongly changes everything after it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.engine.change_journal import CachedKeysChanged
from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import FinishReason, RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.errors import IllegalTransition, Refusal, RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.config import RouterConfig, RoutingPolicy
from baton.core.routing.events import (
    AdmitInstance,
    AttemptAccepted,
    AttemptRefused,
    CancelChoices,
    ChoiceOutcome,
    ClientLeft,
    CloseSession,
    DeadlineCame,
    DeliverTokens,
    ForgetChoices,
    Heartbeat,
    HeartbeatCame,
    HeldChoice,
    Instance,
    InstanceDrains,
    InstanceJoined,
    InstanceLost,
    Join,
    RejectInstance,
    RequestArrived,
    RequestClaimed,
    RequestDeclined,
    RequestOpened,
    RouterEvent,
    SendAttempt,
    Session,
    StopChoice,
    StopStringFound,
    TellPrefillPeers,
    TokensCame,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.fleet_members import TRANSITIONS as FLEET_TRANSITIONS
from baton.core.routing.identity import AttemptId, ChoiceAttempt, RequestNumber
from baton.core.routing.routed_request import TRANSITIONS, ChoiceMove, ChoiceState
from baton.core.routing.router import Router
from baton.core.state_machine import StateMachine

VOCABULARY = 40
BEAT_US = 200_000
EXAMPLES = 60
HEALING_BEATS_MAX = 2_000
BILL = Bill(computed_tokens=1)
PREEMPTIONS = (PdFault(PdCode.PREEMPTED, PdStage.DECODE, "no blocks"), PdFault(PdCode.REFUSED, PdStage.OFFER, "no slot"))
LOSSES = (PdFault(PdCode.NOT_DELIVERED, PdStage.TRANSFER, "torn"), PdFault(PdCode.TIMEOUT, PdStage.PREFILL, "late"), None)
TURNED_DOWN = (RefusalCode.QUEUE_FULL, RefusalCode.DRAINING, RefusalCode.DUPLICATE_ID)


def next_token(submission: Submission, outputs: list[int]) -> int:
    known = submission.prompt.tobytes() + frozen_tokens(outputs).tobytes() + f"/{submission.sampling.choice}".encode()
    return int.from_bytes(hashlib.blake2b(known, digest_size=4).digest(), "little") % VOCABULARY


def ending(submission: Submission, outputs: list[int]) -> FinishReason | None:
    if outputs and outputs[-1] in submission.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if submission.max_tokens is not None and len(outputs) >= submission.max_tokens else None


def undisturbed(submission: Submission, limit: int) -> list[int]:
    submission, outputs = replace(submission, max_tokens=limit), list[int]()
    while ending(submission, outputs) is None:
        outputs.append(next_token(submission, outputs))
    return outputs


# ── a scripted instance ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Seat:
    """One choice at an instance."""

    serial: int
    attempt: AttemptId
    submission: Submission
    choice: int
    body_choices: int
    origin: bytes
    made: list[int] = field(default_factory=list)
    end: EndedRequest | None = None

    @property
    def id(self) -> ChoiceAttempt:
        return ChoiceAttempt(self.attempt.request, self.choice, self.attempt.attempt)

    @property
    def outputs(self) -> list[int]:
        return [*self.submission.generated.tolist(), *self.made]


@dataclass(eq=False)
class Life:
    """One life of an instance."""

    facts: Join
    session: Session | None = None
    asked: list[SendAttempt] = field(default_factory=list)
    """Attempts without an answer."""
    seats: dict[ChoiceAttempt, Seat] = field(default_factory=dict)
    attempts: list[AttemptId] = field(default_factory=list)
    """Of this session, neither refused nor forgotten."""
    beats: bool = True
    drains: bool = False
    serials: int = 0
    steps: int = 0

    def take(self, send: SendAttempt) -> None:
        for submission, choice in zip(send.group, send.choices, strict=True):
            self.serials += 1
            seat = Seat(self.serials, send.attempt, submission, choice, send.body_choices, send.origin)
            self.seats[seat.id] = seat

    def held(self) -> tuple[HeldChoice, ...]:
        return tuple(
            HeldChoice(s.serial, s.submission, s.choice, s.body_choices, s.origin, tuple(s.made), tuple(s.made), 0, s.end)
            for s in self.seats.values()
        )


@dataclass(eq=False)
class Client:
    """What one body was told."""

    group: tuple[Submission, ...]
    origin: bytes
    tokens: list[list[int]]
    outcomes: list[ChoiceOutcome | None]
    body: RequestNumber
    opened: int = 0
    declined: Refusal | None = None
    left: bool = False
    orphaned: bool = False
    """Its router was lost, and no other has told of it yet."""
    cut: dict[int, int] = field(default_factory=dict)
    cut_before: dict[int, int] = field(default_factory=dict)
    """Under a router that was lost."""
    limits: list[int | None] = field(default_factory=list)


# ── the world ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class World:
    def __init__(self, config: RouterConfig, seed: int, seen: Counter[str]) -> None:
        self.config, self.seen = config, seen
        self.draws = random.Random(seed)
        self.router = Router(config, b"secret", seed)
        self.now_us = 1_000_000
        self.lives: dict[Instance, Life] = {}
        self.ghosts: list[Life] = []
        """Earlier lives that may come back."""
        self.clients: list[Client] = []
        self.by_body: dict[RequestNumber, Client] = {}
        self.old_events: list[RouterEvent] = []
        self.sessions = 0
        self.bodies = 0
        self.incarnations = 0
        self.healing = False

    def run(self) -> None:
        for _ in range(self.draws.randrange(1, 4)):
            self.join_new()
        for _ in range(self.draws.randrange(60, 240)):
            self.something()
        self.heal()
        self.check_the_end()

    def something(self) -> None:
        weights: dict[Callable[[], None], int] = {
            self.arrive: 14, self.answer: 30, self.step: 60, self.beat: 14, self.pass_time: 12, self.part: 4,
            self.join_new: 2, self.rejoin: 6, self.new_life: 2, self.zombie: 2, self.fall_silent: 2, self.drain: 1,
            self.leave: 3, self.cut: 3, self.replay: 6, self.engine_dies: 1, self.crash: 2, self.claim: 2,
        }  # fmt: skip
        self.draws.choices(list(weights), list(weights.values()))[0]()

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, event: RouterEvent) -> None:
        if isinstance(event, TokensCame | AttemptAccepted | AttemptRefused | HeartbeatCame) and self.draws.random() < 0.1:
            self.old_events.append(event)
        self.now_us += self.draws.randrange(0, 2000)
        before = self.unaccepted()
        for effect in self.router.handle(event, self.now_us):
            self.obey(effect)
        if isinstance(event, RequestArrived) and self.by_body[event.request].declined is None:
            assert self.unaccepted() <= max(self.config.waiting_max, before)
        self.check_the_books()

    def unaccepted(self) -> int:
        """Waiting choices of requests that no instance has accepted: the others keep no newcomers out."""
        waiting = [request for request in self.router.requests() if not request.opened]
        return sum(choice.state is ChoiceState.WAITING for request in waiting for choice in request.choices)

    def arrive(self) -> None:
        draws, number = self.draws, self.bodies
        self.bodies += 1
        prompt, choices = frozen_tokens(range(draws.randrange(3), draws.choice([8, 40, 90]))), draws.choice([1, 1, 2, 3])
        limit = draws.choice([None, 1, draws.randrange(2, 30)])
        group = tuple(
            Submission(
                RequestId(f"{number}/{choice}"), prompt,
                Sampling(seed=1, choice=choice, stop_token_ids=draws.choice([(), (3,)])), limit,
                priority=draws.choice([0, 0, 1]), leader=RequestId(f"{number}/0") if choice else None,
            )
            for choice in range(choices)
        )  # fmt: skip
        body = RequestNumber(number)
        client = Client(group, f"origin {number}".encode(), [[] for _ in group], [None] * choices, body)
        client.limits = [submission.max_tokens for submission in group]
        self.clients.append(client)
        self.by_body[body] = client
        self.tell(RequestArrived(body, draws.choice(["a", "b"]), group, client.origin))

    def connected(self) -> list[Life]:
        return [life for life in self.lives.values() if life.session is not None]

    def answer(self) -> None:
        asked = [(life, send) for life in self.connected() for send in life.asked]
        if not asked:
            return
        life, send = self.draws.choice(asked)
        life.asked.remove(send)
        session = life.session
        assert session is not None
        longest = max(len(item.prompt) + (item.max_tokens or 0) for item in send.group)
        if longest > life.facts.context_tokens or self.draws.random() < (0 if self.healing else 0.15):
            code = RefusalCode.CONTEXT_EXCEEDED if longest > life.facts.context_tokens else self.draws.choice(TURNED_DOWN)
            self.seen["refusals"] += 1
            life.attempts.remove(send.attempt)
            self.tell(AttemptRefused(session, send.attempt, Refusal(code, "not here, or not now")))
        else:
            life.take(send)
            self.tell(AttemptAccepted(session, send.attempt))

    def step(self) -> None:
        running = [(life, s) for life in self.lives.values() for s in life.seats.values() if s.end is None]
        if not running:
            return
        life, seat = self.draws.choice(running)
        life.steps += 1
        fresh = []
        for _ in range(self.draws.randrange(1, 4)):
            if ending(seat.submission, seat.outputs) is None:
                fresh.append(next_token(seat.submission, seat.outputs))
                seat.made.append(fresh[-1])
        reason = ending(seat.submission, seat.outputs)
        chance = 1.0 if self.healing else self.draws.random()
        if reason is not None and chance < 0.3:
            reason = None  # its last token came, and its end will
        if reason is not None:
            seat.end = EndedRequest(Serial(0), reason, len(seat.outputs), BILL)
        elif chance < 0.06:
            seat.end = EndedRequest(
                Serial(0), FinishReason.RESCHEDULE, len(seat.outputs), BILL, self.draws.choice(PREEMPTIONS)
            )
        elif chance < 0.09:
            fault = self.draws.choice(LOSSES)
            kind = FinishReason.ERROR if fault is None else FinishReason.RESCHEDULE
            seat.end = EndedRequest(Serial(0), kind, len(seat.outputs), BILL, fault)
        if life.session is not None:  # else it computes for nobody, and keeps it
            self.tell(TokensCame(life.session, seat.id, fresh, list(fresh), 0, seat.end))

    def beat(self) -> None:
        for life in self.connected():
            if life.beats and life.session is not None:
                keys = tuple(self.draws.randbytes(16) for _ in range(2))
                names = CachedKeysChanged(self.draws.random() < 0.1, keys, keys[:0])
                ledger = SchedulerGauges(free_blocks=self.draws.randrange(40), steps=life.steps)
                self.tell(HeartbeatCame(life.session, Heartbeat(ledger, 0, False, names)))

    def pass_time(self) -> None:
        until_us = self.now_us + self.draws.choice([1_000, 30_000, 250_000, 250_000, 700_000])
        self.beat()
        while True:
            due_us = self.router.next_deadline()
            if due_us is None or due_us > until_us:
                break
            self.now_us = max(self.now_us, due_us)
            self.beat()
            self.tell(DeadlineCame())
        self.now_us = max(self.now_us, until_us)

    def join_new(self) -> None:
        name = Instance(f"i{self.draws.randrange(4)}")
        if name not in self.lives:
            self.begin(name)

    def begin(self, name: Instance) -> None:
        self.incarnations += 1
        role = self.draws.choice(["mixed", "decode", "decode", "prefill"])
        facts = Join(
            name, self.incarnations, role, b"model", "", f"{name}:1" if role == "prefill" else "",
            self.draws.randrange(1, 4), 60, 4, self.draws.choice([80, 96]), VOCABULARY,
        )  # fmt: skip
        self.lives[name] = Life(facts)
        self.join(self.lives[name])

    def join(self, life: Life) -> None:
        self.sessions += 1
        life.session, life.asked, life.attempts, life.beats = Session(self.sessions), [], [], True
        self.tell(InstanceJoined(life.session, life.facts, life.drains, life.held()))

    def part(self) -> None:
        """The connection is lost; the instance lives on."""
        if self.connected():
            life = self.draws.choice(self.connected())
            session, life.session, life.asked = life.session, None, []
            assert session is not None
            self.tell(InstanceLost(session, "reset"))

    def rejoin(self) -> None:
        """Also while the router still believes in the connection before."""
        away = [life for life in self.lives.values() if life.session is None or self.draws.random() < 0.1]
        if away:
            self.join(self.draws.choice(away))

    def new_life(self) -> None:
        if self.lives:
            name = self.draws.choice(list(self.lives))
            self.ghosts.append(self.lives.pop(name))
            self.begin(name)

    def zombie(self) -> None:
        """An earlier life comes back while a later one is there."""
        for life in self.ghosts[-1:]:
            if self.lives[life.facts.name].session is not None:
                self.join(life)
                assert life.session is None, "it was let in"
                self.ghosts.remove(life)
                self.seen["fenced"] += 1

    def fall_silent(self) -> None:
        if self.connected():
            self.draws.choice(self.connected()).beats = False

    def engine_dies(self) -> None:
        if self.connected():
            session = self.draws.choice(self.connected()).session
            assert session is not None
            self.tell(HeartbeatCame(session, Heartbeat(SchedulerGauges(), self.config.suspect_us, True)))

    def drain(self) -> None:
        if self.connected():
            life = self.draws.choice(self.connected())
            life.drains = True
            self.tell(InstanceDrains(life.facts.name))

    def someone(self) -> Client | None:
        there = [c for c in self.clients if not c.left and c.declined is None and not c.orphaned and None in c.outcomes]
        return self.draws.choice(there) if there else None

    def leave(self) -> None:
        client = self.someone()
        if client is not None:
            client.left = True
            self.tell(ClientLeft(client.body))

    def cut(self) -> None:
        client = self.someone()
        if client is None or not client.opened:
            return
        choice = self.draws.randrange(len(client.group))
        if client.outcomes[choice] is None and choice not in client.cut and client.tokens[choice]:
            client.cut[choice] = self.draws.randrange(1, len(client.tokens[choice]) + 1)
            self.tell(StopStringFound(client.body, choice, client.cut[choice]))

    def replay(self) -> None:
        """Of sessions and attempts that are over, and some that are not: those are left out, for their lines keep order."""
        live = [life.session for life in self.connected()]
        for event in self.old_events[-3:]:
            if (
                isinstance(event, TokensCame | AttemptAccepted | AttemptRefused | HeartbeatCame)
                and event.session not in live
            ):
                late = self.router.counts.late
                assert self.router.handle(event, self.now_us) == []
                assert self.router.counts.late == late + 1
                self.seen["late events"] += 1

    def crash(self) -> None:
        """The router is gone and another comes up: of what was open it knows nothing until instances tell."""
        self.count_moves()
        self.seen["crashes"] += 1
        self.router = Router(self.config, b"secret", self.draws.randrange(100))
        for life in self.lives.values():
            life.session, life.asked = None, []
        self.old_events.clear()
        for client in self.clients:
            client.orphaned = client.orphaned or (client.declined is None and None in client.outcomes)
            client.cut_before, client.cut = {**client.cut_before, **client.cut}, {}
        self.by_body = {}
        for life in list(self.lives.values()):
            if self.draws.random() < 0.7:
                self.join(life)

    def claim(self) -> None:
        orphans = [b for b, c in self.by_body.items() if b < 0 and not c.orphaned and not c.left]
        if orphans:
            body = self.draws.choice(orphans)
            client = self.by_body[body]
            self.tell(RequestClaimed(body, client.group if self.draws.random() < 0.7 else ()))

    # ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def of(self, session: Session) -> Life | None:
        return next((life for life in [*self.lives.values(), *self.ghosts] if life.session == session), None)

    def obey(self, effect: object) -> None:
        match effect:
            case SendAttempt():
                life = self.of(effect.session)
                assert life is not None
                assert life.facts.role != "prefill"
                self.check_group(effect)
                life.asked.append(effect)
                life.attempts.append(effect.attempt)
            case CancelChoices(session, attempt, choices):
                life = self.of(session)
                assert life is not None
                assert attempt in life.attempts
                for choice in choices:
                    life.seats.pop(ChoiceAttempt(attempt.request, choice, attempt.attempt), None)
            case StopChoice(session, which, keep):
                life = self.of(session)
                assert life is not None
                self.cut_short(life, life.seats[which], keep)
            case ForgetChoices(session, attempt):
                life = self.of(session)
                assert life is not None
                life.attempts.remove(attempt)
                life.seats = {key: seat for key, seat in life.seats.items() if key.group != attempt}
                life.asked = [send for send in life.asked if send.attempt != attempt]
            case RejectInstance(session) | CloseSession(session):
                life = self.of(session)
                if life is not None:
                    life.session, life.asked = None, []
            case AdmitInstance(session, keep):
                self.admitted(session, keep)
            case TellPrefillPeers(_, addresses):
                assert all(address.endswith(":1") for address in addresses)
            case RequestOpened() | RequestDeclined() | DeliverTokens() | UnclaimedFound() | UnclaimedDropped():
                self.hear(effect)

    def check_group(self, send: SendAttempt) -> None:
        """Each attempt goes on exactly where its client stands, and whoever leads is in it, before those it leads."""
        client = next(c for c in self.clients if c.origin == send.origin)
        before: list[RequestId] = []
        for submission, choice in zip(send.group, send.choices, strict=True):
            assert submission.generated.tolist() == client.tokens[choice]
            assert ending(submission, client.tokens[choice]) is None
            assert submission.leader is None or submission.leader in before
            assert submission.max_tokens is not None
            assert client.limits[choice] in (None, submission.max_tokens)
            client.limits[choice] = submission.max_tokens
            before.append(submission.request_id)
        if len(client.group) > 1 and len(send.group) > 1:
            assert any(submission.leader is not None for submission in send.group)

    def cut_short(self, life: Life, seat: Seat, keep: int) -> None:
        if seat.end is None and self.draws.random() < 0.7 and life.session is not None:
            seat.end = EndedRequest(Serial(0), FinishReason.STOP, keep, BILL)
            self.tell(TokensCame(life.session, seat.id, [], None, None, seat.end))

    def admitted(self, session: Session, keep: tuple[tuple[int, ChoiceAttempt], ...]) -> None:
        life = self.of(session)
        assert life is not None
        seats = {seat.serial: seat for seat in life.seats.values()}
        assert len({serial for serial, _ in keep} & set(seats)) == len(keep)
        life.seats = {}
        for serial, which in keep:
            assert seats[serial].choice == which.choice
            seats[serial].attempt = which.group
            life.seats[which] = seats[serial]
            life.attempts.append(which.group)
            self.seen["kept at a join"] += 1

    def hear(self, effect: RequestOpened | RequestDeclined | DeliverTokens | UnclaimedFound | UnclaimedDropped) -> None:
        if isinstance(effect, UnclaimedFound):
            self.found(effect)
            return
        client = self.by_body[effect.request]
        match effect:
            case RequestOpened():
                assert client.declined is None
                assert not client.left
                client.opened += 1
            case RequestDeclined(_, refusal):
                assert client.declined is None
                assert not client.opened
                client.declined = refusal
                self.seen[refusal.code.value] += 1
            case UnclaimedDropped():
                self.seen["dropped"] += 1
                client.left = True
            case DeliverTokens(_, choice, tokens, extras, _, outcome):
                assert client.opened or effect.request < 0
                assert client.outcomes[choice] is None, "something came after the end"
                assert not (client.left and tokens) or effect.request < 0
                self.check_extras(tokens, extras)
                client.tokens[choice] += tokens
                if outcome is not None:
                    self.over(client, choice, outcome)

    def check_extras(self, tokens: list[int], extras: object) -> None:
        """They are of the last tokens; here each is the token itself."""
        if isinstance(extras, list) and extras:
            assert tokens[-len(extras) :] == extras

    def found(self, orphan: UnclaimedFound) -> None:
        self.seen["orphans"] += 1
        client = next(c for c in self.clients if c.origin == orphan.origin)
        assert client.orphaned or client.left or None not in client.outcomes or client.declined
        client.orphaned, client.body = False, orphan.request
        self.by_body[orphan.request] = client
        if client.left or client.declined is not None:
            client.left = True
        for choice, tokens in enumerate(orphan.delivered):
            client.tokens[choice], client.outcomes[choice] = list(tokens or ()), None
            outcome = orphan.outcomes[choice]
            if outcome is not None:
                self.over(client, choice, outcome)

    def over(self, client: Client, choice: int, outcome: ChoiceOutcome) -> None:
        client.outcomes[choice] = outcome
        tokens, limit = client.tokens[choice], client.limits[choice]
        self.seen[outcome.reason.value] += 1
        if client.left:
            return
        if choice in client.cut:
            assert (outcome.reason, outcome.generated_tokens) == (FinishReason.STOP, client.cut[choice])
        elif outcome.generated_tokens == client.cut_before.get(choice):
            assert outcome.reason in (FinishReason.STOP, FinishReason.LENGTH)
        elif outcome.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert outcome.generated_tokens == len(tokens)
            assert limit is not None
            assert tokens == undisturbed(client.group[choice], limit)
        else:
            assert outcome.reason is FinishReason.RESCHEDULE
            assert outcome.fault is not None

    # ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def check_the_books(self) -> None:
        router = self.router
        aboard: Counter[Session] = Counter()
        prefill: Counter[Session] = Counter()
        waiting = 0
        for body in router.requests():
            assert body.open_choices == sum(choice.state is not ChoiceState.ENDED for choice in body.choices)
            assert body.open_choices or body.orphan
            for choice in body.choices:
                waiting += choice.state is ChoiceState.WAITING
                assert (choice.attempt is not None) == (
                    choice.state in (ChoiceState.SENT, ChoiceState.OPEN, ChoiceState.CUT)
                )
                if choice.attempt is not None:
                    aboard[choice.attempt.member.session] += 1
                if choice.prefill is not None:
                    prefill[choice.prefill[0].session] += choice.prefill[1]
        assert waiting == router.waiting
        for session, member in router.fleet.members.items():
            assert len(member.choices) == aboard.pop(session, 0)
            assert member.prefill_tokens == prefill[session]
        assert not aboard, "somebody is aboard of an instance that is gone"

    def heal(self) -> None:
        """No more faults, and two instances that serve: everything ends."""
        self.healing = True
        for life in self.lives.values():
            life.beats = True
        for name in ("h1", "h2"):
            self.incarnations += 1
            facts = Join(Instance(name), self.incarnations, "mixed", b"model", "", "", 8, 60, 4, 96, VOCABULARY)
            self.lives[Instance(name)] = Life(facts)
            self.join(self.lives[Instance(name)])
        for _ in range(HEALING_BEATS_MAX):
            if not self.router.requests():
                return
            for life in self.lives.values():
                if life.session is None:
                    self.join(life)
            for _ in range(20):
                self.answer()
                self.step()
            self.pass_time()
        raise AssertionError(f"{self.router.open_requests} bodies still wait")

    def check_the_end(self) -> None:
        for client in self.clients:
            if client.left or client.orphaned:
                continue
            if client.declined is None:
                assert None not in client.outcomes
            assert client.opened + (client.declined is not None) == 1 or client.body < 0
        for member in self.router.fleet.members.values():
            assert not member.choices
            assert member.prefill_tokens == 0
        assert self.router.waiting == 0
        for life in self.connected():
            assert not life.seats, "an instance keeps what nobody wants"
            assert not life.attempts, "an attempt was not forgotten"
        self.count_moves()

    def count_moves(self) -> None:
        for (state, move), times in self.router.moves().items():
            self.seen[f"{state.name} {move.name}"] += times
        for (member, change), times in self.router.fleet.moves().items():
            self.seen[f"{member.name} {change.name}"] += times


@st.composite
def configs(draw: st.DrawFn) -> RouterConfig:
    return RouterConfig(
        policy=draw(st.sampled_from(RoutingPolicy)),
        preempt_retry_count=draw(st.sampled_from([0, 3])),
        preempt_retry_exclude_decode=draw(st.booleans()),
        loss_retry_count=draw(st.sampled_from([1, 8])),
        waiting_max=draw(st.sampled_from([2, 64])),
        ahead=draw(st.sampled_from([1.0, 2.0])),
        retry_burst=draw(st.sampled_from([1, 512])),
        drain_us=1_000_000,
        absent_us=draw(st.sampled_from([0, 500_000])),
        orphan_grace_us=3_000_000,
        key_concurrency=draw(st.sampled_from([None, None, 6])),
    )


def test_whatever_happens_to_a_fleet_each_client_gets_its_tokens_once_and_one_end() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(configs(), st.integers(0, 2**32))
    def law(config: RouterConfig, seed: int) -> None:
        World(config, seed, seen).run()

    law()
    moves = [f"{state.name} {move.name}" for state, move in TRANSITIONS]
    moves += [f"{member.name} {change.name}" for member, change in FLEET_TRANSITIONS]
    wanted = [*moves, "refusals", "late events", "crashes", "fenced", "kept at a join", "orphans", "dropped",
              "stop", "length", "abort", "pd_reschedule", "queue_full", "no_instance", "rate_limited"]  # fmt: skip
    assert not [name for name in wanted if not seen[name]], dict(seen)


def test_what_is_not_in_the_table_is_a_bug() -> None:
    machine = StateMachine(TRANSITIONS, "a choice")
    for state in ChoiceState:
        for move in ChoiceMove:
            if (state, move) in TRANSITIONS:
                assert machine.after(state, move) is TRANSITIONS[state, move]
            else:
                with pytest.raises(IllegalTransition, match=f"a choice in {state.name} cannot take the move {move.name}"):
                    machine.after(state, move)
    assert set(machine.moves().values()) == {1}, "each legal move was counted, and no other"
