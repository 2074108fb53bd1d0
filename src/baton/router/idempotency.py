"""Requests with an `Idempotency-Key` are answered once, however often they are sent.

    first with its key     runs; its response is recorded as it is sent
    again, same body       replays the record from its start, while it is written and for a while after
    again, another body    422

Owns the records: bytes of responses, by tenant and key, bounded in size and in time. A client with a key that disconnects
does not cancel: its answer continues for `grace_s`, and longer if the client returns. Only complete answers are kept: after
an error, or a stream that broke, the key is free again. Knows HTTP and nothing of the content of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.errors import ApiError, invalid
from baton.api.prepare import CHAT_PATH, COMPLETION_PATH
from baton.api.responses import DONE

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
"""Set on an answer made for an earlier request; its X-Request-Id is that request's."""
KEY_CHARS_MAX = 256
RECORDS_BYTES_MAX = 64 << 20
KEPT_S = 600.0
_PATHS = (CHAT_PATH, COMPLETION_PATH)

Name = tuple[str, str]
"""Tenant and key."""


@dataclass(slots=True, eq=False)
class _Record:
    digest: bytes
    request_id: str
    messages: list[Message] = field(default_factory=list)
    bytes: int = 0
    done: bool = False
    ended_s: float = 0.0
    too_large: bool = False
    """Whether the record exceeded the limit, so that it cannot be replayed."""
    followers: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it had no follower for the grace period."""
    running: asyncio.Task[None] | None = None
    leaving: asyncio.TimerHandle | None = None

    def is_whole(self) -> bool:
        """A success status, and a stream with its final event."""
        head = self.messages[0] if self.messages else {}
        if head.get("status") != 200 or not self.done:
            return False
        media = Headers(raw=head["headers"]).get("content-type", "")
        return not media.startswith("text/event-stream") or self.messages[-1].get("body", b"").endswith(DONE)


class IdempotencyMiddleware:
    """Runs inside of the authentication middleware."""

    def __init__(
        self,
        app: ASGIApp,
        grace_s: float,
        bytes_max: int = RECORDS_BYTES_MAX,
        kept_s: float = KEPT_S,
        body_bytes_max: int = 4 << 20,
        clock_s: Callable[[], float] | None = None,
    ) -> None:
        self._app = app
        self._grace_s = grace_s
        self._bytes_max = bytes_max
        self._kept_s = kept_s
        self._body_bytes_max = body_bytes_max
        self._clock_s = clock_s
        self._records: dict[Name, _Record] = {}
        """Oldest first."""
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" and scope["path"] in _PATHS else None
        if key is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            record, is_first = await self._record_of(key, scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientDisconnect:
            pass  # the client has left before anything was begun
        else:
            scope["state"]["request_id"] = record.request_id
            await self._follow(record, receive, send if is_first else _replaying(send))

    async def _record_of(self, key: str, scope: Scope, receive: Receive) -> tuple[_Record, bool]:
        """The record, and whether this request begins it."""
        if not 1 <= len(key) <= KEY_CHARS_MAX:
            raise invalid(HEADER, f"{HEADER} must have 1 to {KEY_CHARS_MAX} characters")
        body, name = await self._body(scope, receive), (scope["state"]["tenant"], key)
        digest = blake2b(scope["path"].encode() + b"\0" + body, digest_size=32).digest()
        self._expire()
        record = self._records.get(name)
        is_first = record is None
        if record is None:
            record = self._records[name] = _Record(digest, scope["state"]["request_id"])
            record.running = asyncio.create_task(self._run(name, record, scope, body))
        elif record.digest != digest:
            message = f"This {HEADER} was used with another body; take a new one for a new request"
            raise ApiError(422, message, param=HEADER, code="idempotency_mismatch")
        elif record.too_large:
            message = f"The answer under this {HEADER} is too large to be given twice"
            raise ApiError(409, message, param=HEADER, code="idempotency_too_large")
        return record, is_first

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """At most one byte beyond the limit: the route rejects it."""
        parts: list[bytes] = []
        size = 0
        async for part in Request(scope, receive).stream():
            parts.append(part)
            size += len(part)
            if size > self._body_bytes_max:
                break
        return b"".join(parts)[: self._body_bytes_max + 1]

    # ── writing a record ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, name: Name, record: _Record, scope: Scope, body: bytes) -> None:
        asked = False

        async def receive() -> MutableMapping[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": body, "more_body": False}
            await record.gone.wait()
            return {"type": "http.disconnect"}

        async def write(message: Message) -> None:
            if record.gone.is_set():
                return
            record.messages.append(message)
            self._count(record, len(message.get("body", b"")))
            self._wake(record)

        try:
            # The route writes into the scope's state; the request that is answered keeps its own.
            await self._app({**scope, "state": dict(scope["state"])}, receive, write)
        finally:
            record.done, record.ended_s = True, self._now_s()
            if not record.is_whole() or record.too_large:
                self._drop(name, record)
            self._wake(record)

    def _wake(self, record: _Record) -> None:
        news, record.news = record.news, asyncio.Event()
        news.set()

    def _count(self, record: _Record, size: int) -> None:
        record.bytes += size
        self._bytes += size
        for name, other in list(self._records.items()):
            if self._bytes <= self._bytes_max:
                return
            if other.done and not other.followers:
                self._drop(name, other)
        if self._bytes > self._bytes_max:
            record.too_large = True

    # ── replaying a record ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self, record: _Record, receive: Receive, send: Send) -> None:
        record.followers += 1
        if record.leaving is not None:
            record.leaving.cancel()
            record.leaving = None
        hangup = asyncio.create_task(_until_disconnect(receive))
        try:
            await self._copy(record, hangup, send)
        finally:
            hangup.cancel()
            record.followers -= 1
            if not record.followers and not record.done:
                loop = asyncio.get_running_loop()
                record.leaving = loop.call_later(self._grace_s, record.gone.set)

    async def _copy(self, record: _Record, hangup: asyncio.Task[None], send: Send) -> None:
        at = 0
        while True:
            while at < len(record.messages):
                message = dict(record.messages[at])
                if "headers" in message:
                    message["headers"] = list(message["headers"])  # outer middleware adds its own headers to it
                at += 1
                await send(message)
            if record.done or hangup.done():
                return
            news = asyncio.ensure_future(record.news.wait())
            await asyncio.wait((news, hangup), return_when=asyncio.FIRST_COMPLETED)
            news.cancel()

    # ── expiry ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _expire(self) -> None:
        oldest_s = self._now_s() - self._kept_s
        for name, record in list(self._records.items()):
            if record.done and record.ended_s < oldest_s:
                self._drop(name, record)

    def _drop(self, name: Name, record: _Record) -> None:
        if self._records.get(name) is record:
            del self._records[name]
            self._bytes -= record.bytes

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() if self._clock_s is None else self._clock_s()


def _replaying(send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REPLAYED] = "true"
        await send(message)

    return marked


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
