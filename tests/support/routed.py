"""A router and instances in one thread, in virtual time: RouterSessions ↔ bytes ↔ InstanceSessions ↔ a scripted Worker.

Lines between them are queues of frames in either direction. A test can break any of them at any message, kill the router
and start another, stop an instance for good; clients compare what they got with the undisturbed run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.orders import Accepted, ReportChanges
from baton.core.engine.plan import Logprobs, StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import FinishReason, RequestId, Sampling, Submission, frozen_tokens
from baton.core.engine.worker import Launch, StepDone, Worker
from baton.core.errors import Refusal
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    ChoiceOutcome,
    DeliverTokens,
    FleetChanged,
    Join,
    RequestDeclined,
    RequestOpened,
    Session,
    TimelineNoted,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.identity import RequestNumber
from baton.core.routing.router import Router
from baton.executor.scripted import ScriptedExecutor, undisturbed
from baton.wire.engine_messages import (
    FromEngine,
    PrefillPeerAddresses,
    RefusedMessage,
    StepOutput,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
    pulse,
)
from baton.wire.heartbeats import EngineVitals
from baton.wire.instance_sessions import InstanceSessions, InstanceSessionState, SessionEffects
from baton.wire.router_messages import FromInstance, decode_from_instance, decode_from_router, encode_membership
from baton.wire.router_sessions import Act, CloseConnection, RouterSessions, SayToInstance
from baton.wire.worker_messages import message_of
from tests.support.driver import VOCABULARY, shape_of

SECRET = b"secret"
CONFIG = WorkerConfig(slots=4, blocks=48, block_size=4, context_tokens=64, step_tokens=32, waiting_max=16)
TURN_US = 1_000
PULSE_US = 100_000


class LogprobExecutor(ScriptedExecutor):
    """Reports a log-probability for each token that asked for it: minus the token, so that a wrong line is seen."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(shape_of(config), VOCABULARY)
        self._plans: deque[StepPlan] = deque()
        self._wants: dict[int, bool] = {}

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        super().launch(plan)

    def collect(self) -> StepResult:
        for start in self._plans.popleft().starts:
            self._wants[start.slot] = start.sampling.logprobs is not None
        result = super().collect()
        rows, at = list[Logprobs](), 0
        for row, (slot, count) in enumerate(zip(result.slots.tolist(), result.counts.tolist(), strict=True)):
            tokens = result.tokens[at : at + count]
            at += count
            if count and self._wants.get(slot):
                values = -tokens.astype(np.float32)
                rows.append(Logprobs(row, values, tokens.reshape(-1, 1), values.reshape(-1, 1)))
        return StepResult(
            result.step,
            result.slots,
            result.epochs,
            result.outcomes,
            result.counts,
            result.tokens,
            result.known,
            tuple(rows),
        )


@dataclass
class Line:
    """A connection: what is on its way in either direction."""

    session: Session
    up: deque[bytes] = field(default_factory=deque)
    """To the router."""
    down: deque[bytes] = field(default_factory=deque)
    closed_by: str = ""
    """The router has hung up; the instance finds out after what was sent before."""


class Member:
    """An instance: engine and front end."""

    def __init__(self, world: World, name: str, config: WorkerConfig = CONFIG) -> None:
        self.world, self.name = world, name
        self.executor = LogprobExecutor(config)
        self.worker = Worker(config, PrefixIndex(SECRET, self.executor.fingerprint, config.blocks))
        self.driver = WorkerDriver(self.worker, lambda: world.now_us, launch=self._launch, answer=self._answer)
        join = Join(
            name, 1, config.role.name, self.executor.fingerprint[:64], f"http://{name}", "", config.slots, config.blocks,
            config.block_size, config.context_tokens, VOCABULARY, 0, False,
        )  # fmt: skip
        self.sessions = InstanceSessions(join)
        self.line: Line | None = None
        self.dial_at_us = 0
        self.pulse_at_us: int | None = None
        self.fenced: str | None = None
        self.dead = False
        self.local: list[StepOutput] = []
        """What was for the clients of its own address."""
        self.answers: list[Accepted | RefusedMessage] = []

    # The engine.

    def order(self, order: ToEngine) -> None:
        order = decode_to_engine(encode_to_engine(order))
        if isinstance(order, PrefillPeerAddresses):
            return
        if isinstance(order, ReportChanges):
            self.pulse_at_us = self.world.now_us
        self.driver.handle(order)

    def compute(self) -> bool:
        """A step, if there is one to be had."""
        if self.driver.is_due:
            self.driver.tick()
        if not self.driver.steps_in_flight:
            return False
        self.driver.handle(StepDone(self.executor.collect()))
        return True

    def _launch(self, launch: Launch) -> None:
        self.executor.launch(launch.plan)

    def _answer(self, answer: Answer) -> None:
        self._front(decode_from_engine(encode_from_engine(message_of(answer, self.worker))))

    # The front end.

    def _front(self, message: FromEngine) -> None:
        match message:
            case Accepted(ticket) | RefusedMessage(ticket):
                if self.sessions.owns_ticket(ticket):
                    self.act(self.sessions.take(message, self.world.now_us))
                else:
                    self.answers.append(message)
            case StepOutput():
                ours, local = self.sessions.split(message)
                if local is not None:
                    self.local.append(local)
                if ours is not None:
                    self.act(self.sessions.take(ours, self.world.now_us))

    def act(self, out: SessionEffects) -> None:
        self.fenced = self.fenced or out.fenced
        for order in out.orders:
            self.order(order)
        self.say(out.messages)

    def say(self, messages: Sequence[FromInstance]) -> None:
        if self.line is not None:
            self.line.up.extend(encode_membership(message) for message in messages)
        else:
            assert not messages, "it speaks to nobody"

    def dial(self) -> None:
        self.line = Line(self.world.sessions.connected(self.world.now_us))
        self.world.lines.append(self.line)
        self.say(self.sessions.opened(self.world.now_us))

    def beat(self) -> None:
        if self.pulse_at_us is None or self.pulse_at_us > self.world.now_us:
            return
        self.pulse_at_us = self.world.now_us + PULSE_US
        made = pulse(self.worker.gauges(), self.driver.steps_in_flight > 0, self.worker.changes(self.world.now_us))
        beat = self.sessions.beat(made, EngineVitals(0), self.world.now_us)
        self.say([] if beat is None else [beat])

    def hang_up(self, reason: str, again_us: int = 0) -> None:
        """The connection is over for this side."""
        if self.line is not None:
            self.line = None
            self.sessions.lost(reason, self.world.now_us)
            self.dial_at_us = self.world.now_us + again_us


@dataclass
class Asked:
    """A client and what it got."""

    group: list[Submission]
    origin: bytes
    request: RequestNumber
    tokens: list[list[int]]
    extras: list[list[object]]
    outcomes: list[ChoiceOutcome | None]
    cached: list[int | None]
    opened: int = 0
    declined: Refusal | None = None
    keep: dict[int, int] = field(default_factory=dict)
    """By choice: after how many tokens it was cut."""

    @property
    def over(self) -> bool:
        return self.declined is not None or all(outcome is not None for outcome in self.outcomes)

    def expected(self, choice: int) -> list[int]:
        item = self.group[choice]
        return undisturbed(item.prompt, item.sampling, item.max_tokens or 0, VOCABULARY)


class World:
    def __init__(self, members: int = 1, config: RouterConfig | None = None, worker: WorkerConfig = CONFIG) -> None:
        self.now_us = 1
        self.config = config or RouterConfig()
        self.lines: list[Line] = []
        self.sessions = self._router()
        self.members = [Member(self, f"d{number}", worker) for number in range(members)]
        self.asked: dict[RequestNumber, Asked] = {}
        self.orphans: dict[bytes, Asked] = {}
        self.noted: list[TimelineNoted] = []
        self.changed: list[FleetChanged] = []
        self.delivered = 0
        """Messages that have crossed any line."""
        self.break_at: dict[int, str] = {}
        """What happens instead of the n-th message: see `_break`."""
        self.broken: list[str] = []
        self.resubmitted = 0
        self._waiting: list[Asked] = []
        """Clients of a router that is gone."""

    def _router(self) -> RouterSessions:
        return RouterSessions(Router(self.config, SECRET, seed=1), "router")

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, group: Sequence[Submission], origin: bytes = b"") -> Asked:
        origin = origin or group[0].request_id.encode()
        size = range(len(group))
        asked = Asked(
            list(group),
            origin,
            RequestNumber(0),
            [[] for _ in size],
            [[] for _ in size],
            [None for _ in size],
            [None for _ in size],
        )
        self._submit(asked)
        return asked

    def _submit(self, asked: Asked) -> None:
        asked.request, acts = self.sessions.submit("tenant", asked.group, asked.origin, self.now_us)
        self.asked[asked.request] = asked
        self.do(acts)

    def do(self, acts: Sequence[Act]) -> None:
        for act in acts:
            match act:
                case SayToInstance(session, message):
                    line = self._line(session)
                    assert line is not None, f"{message} to a session that is over"
                    line.down.append(encode_membership(message))
                case CloseConnection(session, reason):
                    line = self._line(session)
                    assert line is not None
                    line.closed_by = reason
                case RequestOpened(body):
                    self.asked[body].opened += 1
                case RequestDeclined(body, refusal):
                    self.asked[body].declined = refusal
                case DeliverTokens():
                    self._deliver(act)
                case UnclaimedFound():
                    self._find(act)
                case UnclaimedDropped(body):
                    self.orphans = {key: orphan for key, orphan in self.orphans.items() if orphan.request != body}
                    del self.asked[body]
                case TimelineNoted():
                    self.noted.append(act)
                case FleetChanged():
                    self.changed.append(act)

    def _find(self, orphan: UnclaimedFound) -> None:
        """News of it may come before its client does."""
        tokens = [list(known or ()) for known in orphan.delivered]
        extras = [list(known) for known in orphan.extras]
        found = Asked([], orphan.origin, orphan.request, tokens, extras, list(orphan.outcomes), list(orphan.cached_tokens))
        self.orphans[orphan.origin] = self.asked[orphan.request] = found

    def _deliver(self, news: DeliverTokens) -> None:
        asked = self.asked[news.request]
        assert asked.outcomes[news.choice] is None, "news after the end"
        asked.tokens[news.choice] += news.tokens
        if isinstance(news.extras, list):
            asked.extras[news.choice] += news.extras
        if news.cached_tokens is not None and asked.cached[news.choice] is None:
            asked.cached[news.choice] = news.cached_tokens
        asked.outcomes[news.choice] = news.outcome

    def _line(self, session: Session) -> Line | None:
        return next((line for line in self.lines if line.session == session and not line.closed_by), None)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def break_line(self, member: Member, again_us: int = 0) -> None:
        """Both sides find out; what was on its way is gone."""
        line = member.line
        if line is None:
            return
        self.lines.remove(line)
        member.hang_up("reset", again_us)
        if not line.closed_by:
            self.do(self.sessions.lost(line.session, "reset", self.now_us))

    def half_break(self, member: Member) -> None:
        """Only the instance finds out, and calls again at once."""
        if member.line is not None:
            member.line.down.clear()
            member.line.up.clear()
            member.hang_up("timed out")

    def kill(self, member: Member) -> None:
        member.dead = True
        self.break_line(member)

    def restart_router(self) -> None:
        """Everything that it knew is gone. Clients whose request nobody took ask again; the others wait for theirs."""
        for line in self.lines:
            line.closed_by = line.closed_by or "the router is gone"
            line.down.clear()
        for member in self.members:
            member.hang_up("reset")
        self.lines.clear()
        self.sessions = self._router()
        self._waiting += [asked for asked in self.asked.values() if asked.group and not asked.over]
        self.asked = {}
        self.orphans = {}

    def _claim_all(self) -> None:
        """Clients come for what was theirs; what nobody holds is asked for anew."""
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            found = self.orphans.pop(asked.origin, None)
            if found is None:
                self.resubmitted += 1
                asked.tokens, asked.extras = [[] for _ in asked.group], [[] for _ in asked.group]
                asked.outcomes, asked.opened = [None] * len(asked.group), 0
                self._submit(asked)
                continue
            for had, known in zip(asked.tokens, found.tokens, strict=True):
                shorter = min(len(had), len(known))
                assert had[:shorter] == known[:shorter], "what was found is another answer"
            found.group, found.keep = asked.group, asked.keep
            self.do(self.sessions.claim(found.request, self.now_us, found.group))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self) -> bool:
        """Everything that can happen now, once; False when only time can help."""
        moved = False
        for member in self.members:
            if member.dead or member.fenced:
                continue
            if member.line is None and member.dial_at_us <= self.now_us:
                member.dial()
                moved = True
            moved |= self._deliver_frames(member)
            moved |= member.compute()
            member.beat()
            moved |= self._deliver_frames(member)
            member.act(member.sessions.tick(self.now_us))
        deadline = self.sessions.next_deadline()
        if deadline is not None and deadline <= self.now_us:
            self.do(self.sessions.tick(self.now_us))
        return moved

    def _deliver_frames(self, member: Member) -> bool:
        moved = False
        while (line := member.line) is not None and (line.up or line.down or line.closed_by):
            moved = True
            if line.closed_by and not line.down:
                if line in self.lines:
                    self.lines.remove(line)
                member.hang_up(line.closed_by, 50_000)
                break
            if line.closed_by:
                line.up.clear()
            if self._break(member):
                continue
            if line.up:
                self.do(self.sessions.receive(line.session, decode_from_instance(line.up.popleft()), self.now_us))
            elif line.down:
                member.act(member.sessions.receive(decode_from_router(line.down.popleft()), self.now_us))
        return moved

    def _break(self, member: Member) -> bool:
        """One message crosses, unless this is where a test wants something else to happen."""
        self.delivered += 1
        what = self.break_at.get(self.delivered)
        match what:
            case None:
                return False
            case "reset":
                self.break_line(member)
            case "away":
                self.break_line(member, 300_000)
            case "half":
                self.half_break(member)
            case "kill":
                self.kill(member)
            case "router":
                self.restart_router()
        self.broken.append(what)
        return True

    def run(self, until_us: int = 30_000_000) -> None:
        """Until every client has its end and nothing is open."""
        while not self.quiet():
            if self.now_us > until_us:
                raise RuntimeError(
                    f"did not finish: {[asked for asked in self.asked.values() if not asked.over]}, {self.broken}"
                )
            self.go_on()

    def go_on(self) -> None:
        if not self.turn():
            self._sleep()
        elif self._waiting and all(m.sessions.state is InstanceSessionState.SERVING for m in self.members if not m.dead):
            self._claim_all()
        self.now_us += TURN_US

    def leave(self, asked: Asked) -> None:
        """Its client is gone."""
        self.do(self.sessions.leave(asked.request, self.now_us))
        self.asked.pop(asked.request, None)

    def cut(self, asked: Asked, choice: int, keep: int) -> None:
        """Its client needs no more than so many tokens."""
        asked.keep[choice] = keep
        self.do(self.sessions.stop_choice(asked.request, choice, keep, self.now_us))

    def quiet(self) -> bool:
        clients = all(asked.over for asked in self.asked.values()) and not self._waiting and not self.orphans
        return clients and all(
            member.dead
            or (
                member.worker.is_idle
                and not member.sessions.held_choices
                and not (member.line and (member.line.up or member.line.down))
            )
            for member in self.members
        )

    def _sleep(self) -> None:
        times = [self.sessions.next_deadline()]
        for member in self.members:
            if not member.dead:
                times += [member.worker.next_deadline(), member.pulse_at_us, member.sessions.next_deadline()]
                if member.line is None and not member.fenced:
                    times.append(member.dial_at_us)
        self.now_us = max(self.now_us, min(time for time in times if time is not None))

    def judge(self) -> None:
        """Everybody got what the undisturbed run gives, once, and nothing is kept."""
        for asked in self.asked.values():
            assert asked.declined is None, asked.declined
            for choice, item in enumerate(asked.group):
                self._judge_choice(asked, choice)
                if item.sampling.logprobs is not None:
                    values = [-float(token) for token in asked.tokens[choice]]
                    got = [line[0] for line in asked.extras[choice]]  # type: ignore[index]
                    assert got == values[len(values) - len(got) :]
        for member in self.members:
            if not member.dead:
                assert member.sessions.open_requests == member.sessions.held_choices == 0
                assert member.worker.is_idle
        assert self.sessions.router.open_requests == 0

    def _judge_choice(self, asked: Asked, choice: int) -> None:
        outcome, tokens, expected = asked.outcomes[choice], asked.tokens[choice], asked.expected(choice)
        assert outcome is not None
        if outcome.reason is FinishReason.STOP:  # it was cut; what came before its instance knew is of the same answer
            assert tokens == expected[: len(tokens)], (asked.origin, choice, self.broken)
            assert outcome.generated_tokens == asked.keep[choice], (asked.origin, choice, self.broken)
        else:
            assert tokens == expected, (asked.origin, choice, self.broken)
            assert outcome.generated_tokens == len(tokens)


def prompt_of(name: str, size: int = 6) -> list[int]:
    return [(ord(char) * (at + 3) + size) % VOCABULARY for at, char in enumerate((name * size)[:size])]


def body(
    name: str, choices: int = 1, max_tokens: int = 4, logprobs: int | None = None, temperature: float = 0.7
) -> list[Submission]:
    ids = [RequestId(f"{name}:{at}") for at in range(choices)]
    prompt = frozen_tokens(prompt_of(name))
    return [
        Submission(
            ids[at], prompt, Sampling(seed=5, choice=at, temperature=temperature, logprobs=logprobs), max_tokens,
            leader=ids[0] if at else None,
        )
        for at in range(choices)
    ]  # fmt: skip
