"""Drives a Router by hand: instances, bodies and time, with what it answered kept by kind."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from baton.core.engine.change_journal import CachedKeysChanged
from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import FinishReason, RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    AttemptAccepted,
    AttemptRefused,
    DeadlineCame,
    DeliverTokens,
    Heartbeat,
    HeartbeatCame,
    HeldChoice,
    Instance,
    InstanceJoined,
    Join,
    RequestArrived,
    RouterEffect,
    RouterEvent,
    SendAttempt,
    Session,
    TokensCame,
)
from baton.core.routing.identity import ChoiceAttempt, RequestNumber
from baton.core.routing.router import Router

Kind = TypeVar("Kind", bound=RouterEffect)
PREEMPTED = PdFault(PdCode.PREEMPTED, PdStage.DECODE, "no blocks")
EMPTY = SchedulerGauges(free_blocks=256)
SECRET = b"prefixes"
BLOCK_SIZE = 16


def facts(
    name: str, role: str = "mixed", incarnation: int = 1, *, slots: int = 4, context: int = 1024, blocks: int = 256
) -> Join:
    peer = f"{name}:7000" if role == "prefill" else ""
    return Join(Instance(name), incarnation, role, b"model", "", peer, slots, blocks, BLOCK_SIZE, context, 1000)


def submission(
    name: str, tokens: int = 40, *, first: int = 0, max_tokens: int | None = 100, choice: int = 0, priority: int = 0,
    leader: str | None = None, stops: tuple[int, ...] = (), min_tokens: int = 0,
) -> Submission:  # fmt: skip
    sampling = Sampling(seed=1, choice=choice, stop_token_ids=stops, min_tokens=min_tokens)
    prompt = frozen_tokens(range(first, first + tokens))
    leads = None if leader is None else RequestId(leader)
    return Submission(RequestId(name), prompt, sampling, max_tokens, b"", priority, leads)


def choices(name: str, count: int, **more: int) -> tuple[Submission, ...]:
    return tuple(
        submission(f"{name}/{number}", choice=number, leader=f"{name}/0" if number else None, **more)
        for number in range(count)
    )


AS_MANY_AS_CAME = 1 << 20


def ended(reason: FinishReason, fault: PdFault | None = None, bill: Bill | None = None) -> EndedRequest:
    return EndedRequest(Serial(0), reason, AS_MANY_AS_CAME, bill or Bill(), fault)


def held(
    serial: int, *tokens: int, origin: bytes = b"origin 1", choice: int = 0, of: int = 1, before: tuple[int, ...] = (),
    end: EndedRequest | None = None,
) -> HeldChoice:  # fmt: skip
    asked = replace(choices("x", of)[choice], generated=frozen_tokens(before))
    return HeldChoice(serial, asked, choice, of, origin, tokens, tuple(f"lp{t}" for t in tokens), 16, end)


def which(send: SendAttempt, nth: int = 0) -> ChoiceAttempt:
    """The nth choice that was sent."""
    return ChoiceAttempt(send.attempt.request, send.choices[nth], send.attempt.attempt)


class Bench:
    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.router = Router(self.config, SECRET, seed=7)
        self.now_us = 1_000_000
        self.last: list[RouterEffect] = []
        self.all: list[RouterEffect] = []
        self.sessions: dict[str, Session] = {}
        self.ledgers: dict[str, SchedulerGauges] = {}
        """What an instance reports while time passes, if not an empty pool."""
        self._numbers = 0
        self._bodies = 0

    def tell(self, event: RouterEvent) -> list[RouterEffect]:
        self.last = self.router.handle(event, self.now_us)
        self.all += self.last
        return self.last

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Those of the last event."""
        return [effect for effect in self.last if isinstance(effect, kind)]

    def ever(self, kind: type[Kind]) -> list[Kind]:
        return [effect for effect in self.all if isinstance(effect, kind)]

    def join(self, facts: Join, *held: HeldChoice, draining: bool = False) -> Session:
        self._numbers += 1
        session = self.sessions[facts.name] = Session(self._numbers)
        self.tell(InstanceJoined(session, facts, draining, held))
        return session

    def arrive(self, *group: Submission, tenant: str = "t", origin: bytes | None = None) -> RequestNumber:
        self._bodies += 1
        body = RequestNumber(self._bodies)
        self.tell(RequestArrived(body, tenant, group, f"origin {body}".encode() if origin is None else origin))
        return body

    def sent(self) -> SendAttempt:
        """The last attempt that was sent, which must be of the last event."""
        (send,) = self.of(SendAttempt)
        return send

    def open(self, *group: Submission) -> tuple[RequestNumber, SendAttempt]:
        body = self.arrive(*group)
        send = self.sent()
        self.take(send)
        return body, send

    def take(self, send: SendAttempt) -> None:
        self.tell(AttemptAccepted(send.session, send.attempt))

    def refuse(self, send: SendAttempt, code: RefusalCode) -> None:
        self.tell(AttemptRefused(send.session, send.attempt, Refusal(code, code.value)))

    def came(
        self, send: SendAttempt, *tokens: int, nth: int = 0, end: EndedRequest | None = None, cached: int | None = None
    ) -> None:
        """Of the nth choice that was sent."""
        self.tell(TokensCame(send.session, which(send, nth), list(tokens), None, cached, end))

    def delivered(self, body: RequestNumber, choice: int = 0) -> list[int]:
        rows = [item for item in self.ever(DeliverTokens) if (item.request, item.choice) == (body, choice)]
        return [token for row in rows for token in row.tokens]

    def beat(self, *left_out: str, computing: bool = False, steps: int = 0, silent_us: int = 0) -> None:
        for name, session in self.sessions.items():
            if name not in left_out and session in self.router.fleet.members:
                self.tell(
                    HeartbeatCame(session, Heartbeat(SchedulerGauges(free_blocks=256, steps=steps), silent_us, computing))
                )

    def named(self, name: str, *keys: bytes) -> None:
        self.tell(
            HeartbeatCame(
                self.sessions[name], Heartbeat(SchedulerGauges(free_blocks=256), 0, False, CachedKeysChanged(False, keys))
            )
        )

    def run_to(self, until_us: int, *silent: str) -> list[RouterEffect]:
        """Time passes; all but the silent ones give signs of life. Everything that was answered."""
        said: list[RouterEffect] = []
        while True:
            due_us = self.router.next_deadline()
            if due_us is None or due_us > until_us:
                break
            self.now_us = max(self.now_us, due_us)
            for name in self.sessions:
                if name not in silent and self.sessions[name] in self.router.fleet.members:
                    said += self.tell(HeartbeatCame(self.sessions[name], Heartbeat(self.ledgers.get(name, EMPTY), 0, False)))
            said += self.tell(DeadlineCame())
        self.now_us = max(self.now_us, until_us)
        self.last = said
        return said

    def pass_us(self, time_us: int, *silent: str) -> list[RouterEffect]:
        return self.run_to(self.now_us + time_us, *silent)
