"""A router as an instance sees it: lets instances in over real sockets, keeps what they say, and says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

import numpy as np

from baton.core.engine.ended import EndedRequest
from baton.core.engine.orders import Accepted
from baton.core.engine.request import RequestId, Sampling, Submission, Tokens, frozen_tokens
from baton.core.routing.events import Join
from baton.node.sealed_connection import Listener, SealedConnection
from baton.router.instance_connections import INSTANCE_STREAM
from baton.wire.engine_messages import DecodedRows, StepOutput
from baton.wire.router_messages import (
    FromInstance,
    FromRouter,
    HeartbeatMessage,
    PlaceAttempt,
    Welcome,
    decode_from_instance,
    encode_membership,
)
from baton.wire.sealed_stream import ConnectionEnd

KEY_TEXT = "a key for the tests"
DEADLINE_S = 90.0
NO_TOKENS = frozen_tokens([])

_Said = TypeVar("_Said", bound=FromInstance)


class RouterSide:
    """One router. `messages` is everything of all sessions in order; each session begins with a Join."""

    def __init__(self, key: bytes, port: int = 0, welcome: Welcome | None = None) -> None:
        self.welcome = welcome or Welcome("r", beat_us=50_000, orphan_grace_us=30_000_000)
        self.answers: list[FromRouter | None] = []
        """What the next joins are answered with, None: with nothing; the welcome after that."""
        self.lines: list[SealedConnection] = []
        self.ends: list[ConnectionEnd] = []
        self.door = Listener(key, "router r", self, INSTANCE_STREAM)
        self.messages: list[FromInstance] = []
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self.listener.getsockname()[1]
        self._news = asyncio.Event()

    def opened(self, line: SealedConnection) -> None:
        self.lines.append(line)

    def received(self, line: SealedConnection, frame: bytes) -> None:
        message = decode_from_instance(frame)
        self.messages.append(message)
        if isinstance(message, Join):
            self._answer(line, self.answers.pop(0) if self.answers else self.welcome)
        self._news.set()

    def _answer(self, line: SealedConnection, answer: FromRouter | None) -> None:
        if answer is not None:
            line.send([encode_membership(answer)])
            if not isinstance(answer, Welcome):
                line.close("turned away")

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None:
        self.ends.append(end)
        self._news.set()

    def say(self, *messages: FromRouter) -> None:
        self.lines[-1].send(map(encode_membership, messages))

    def place(self, ticket: int, *group: Submission, origin: bytes = b"origin") -> None:
        choices = tuple(range(len(group)))
        self.say(PlaceAttempt(ticket, tuple(group), choices, len(group), origin))

    def hang_up(self) -> None:
        self.lines[-1].abort(None, "the router hangs up")

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    def of(self, kind: type[_Said], since: int = 0) -> list[_Said]:
        return [message for message in self.messages[since:] if isinstance(message, kind)]

    async def next(self, kind: type[_Said], since: int = 0) -> _Said:
        await self.until(lambda: bool(self.of(kind, since)))
        return self.of(kind, since)[0]

    async def beat_where(self, holds: Callable[[HeartbeatMessage], bool]) -> HeartbeatMessage:
        since = len(self.messages)
        await self.until(lambda: any(map(holds, self.of(HeartbeatMessage, since))))
        return next(filter(holds, self.of(HeartbeatMessage, since)))

    async def serial_of(self, ticket: int) -> int:
        await self.until(lambda: any(answer.ticket == ticket for answer in self.of(Accepted)))
        (serial,) = next(answer.serials for answer in self.of(Accepted) if answer.ticket == ticket)
        return serial

    def tokens_of(self, serial: int, since: int = 0) -> list[int]:
        return [token for output in self.of(StepOutput, since) for token in row_tokens(output, serial)]

    def end_of(self, serial: int) -> EndedRequest | None:
        ends = [end for output in self.of(StepOutput) for end in output.ended if end.serial == serial]
        return ends[0] if ends else None


@contextlib.asynccontextmanager
async def router_side(key: bytes, port: int = 0, welcome: Welcome | None = None) -> AsyncIterator[RouterSide]:
    side = RouterSide(key, port, welcome)
    await side.door.open(side.listener)
    try:
        yield side
    finally:
        side.door.close("the router ends")
        for line in side.lines:
            await line.closed.wait()


def row_tokens(output: StepOutput, serial: int) -> Iterable[int]:
    rows, at = DecodedRows(output), 0
    for one, count in zip(rows.serials, rows.counts, strict=True):
        if one == serial:
            yield from rows.tokens[at : at + count]
        at += count


def ask(name: str, max_tokens: int, generated: Tokens = NO_TOKENS) -> Submission:
    prompt = frozen_tokens(np.arange(40, 80))
    sampling = Sampling(seed=0, temperature=0.0)
    return Submission(RequestId(name), prompt, sampling, max_tokens, generated=generated)
