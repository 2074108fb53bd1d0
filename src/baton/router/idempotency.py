"""Requests with an `Idempotency-Key` are answered once, however often they are sent.

    first with its key     runs; its response is recorded as it is sent
    again, same body       replays the record from its start, while it is written and for a while after
    again, another body    422

Owns the exchange with clients; `idempotency_records` decides which records are kept, `recorded_answer` holds the bytes. A
client with a key that disconnects does not cancel: its answer continues for `grace_s`, and longer if the client returns.
Only complete answers are kept: after an error, or a stream that broke, the key is free again. An answer for which there is
no room is given to those who read it already and kept for nobody; what they have read is discarded, and it is written no
faster than they read. Knows HTTP and nothing of the content of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.body_limits import PartialBodies, read_body
from baton.api.choice_streams import ClientGone
from baton.api.errors import ApiError, invalid
from baton.api.paths import GENERATING_PATHS
from baton.router.idempotency_records import IdempotencyRecord, IdempotencyRecords, RecordPhase
from baton.router.recorded_answer import RECORD_BYTES, WRITING_BYTES, RecordedAnswer

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
"""Set on an answer made for an earlier request; its X-Request-Id is that request's."""
KEY_CHARS_MAX = 256
RECORDS_BYTES_MAX = 64 << 20
UNREAD_BYTES_MAX = 64 << 10
"""Of an answer that is not recorded: bytes that its slowest reader may lack before writing waits."""
KEPT_S = 600.0


@dataclass(slots=True, eq=False)
class _Reader:
    at: int = 0
    """Bytes of the body that it was given."""
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False, kw_only=True)
class _Record(IdempotencyRecord):
    digest: bytes
    request_id: str
    answer: RecordedAnswer = field(default_factory=RecordedAnswer)
    done: bool = False
    readers: dict[_Reader, None] = field(default_factory=dict)
    writing: _Writing | None = None
    """While it is written."""


@dataclass(slots=True, eq=False)
class _Writing:
    """What a record needs only while it is written."""

    body_bytes: int
    """Of the request."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it had no reader for the grace period."""
    was_read: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    leaving: asyncio.TimerHandle | None = None


class IdempotencyMiddleware:
    """Runs inside of the authentication middleware."""

    def __init__(
        self,
        app: ASGIApp,
        grace_s: float,
        bytes_max: int = RECORDS_BYTES_MAX,
        kept_s: float = KEPT_S,
        body_bytes_max: int = 4 << 20,
        partial_bodies: PartialBodies | None = None,
        clock_s: Callable[[], float] | None = None,
    ) -> None:
        self._app = app
        self._grace_s = grace_s
        self._body_bytes_max = body_bytes_max
        self._partial_bodies = partial_bodies or PartialBodies()
        self._clock_s = clock_s
        self.records: IdempotencyRecords[_Record] = IdempotencyRecords(bytes_max, int(kept_s * 1e6))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" and scope["path"] in GENERATING_PATHS else None
        if key is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            record, is_first = await self._record_of(key, scope, receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
        except ClientGone:
            pass  # the client has left before anything was begun
        else:
            scope["state"]["request_id"] = record.request_id
            await self._follow(record, receive, send if is_first else _replaying(send))

    async def _record_of(self, key: str, scope: Scope, receive: Receive) -> tuple[_Record, bool]:
        """The record, with one follower more, and whether this request begins it."""
        if not 1 <= len(key) <= KEY_CHARS_MAX:
            raise invalid(HEADER, f"{HEADER} must have 1 to {KEY_CHARS_MAX} characters")
        tenant: str = scope["state"]["tenant"]
        body = await read_body(Request(scope, receive), tenant, self._body_bytes_max, self._partial_bodies)
        name = tenant, key
        digest = blake2b(scope["path"].encode() + b"\0" + body, digest_size=32).digest()
        self.records.expire(self._now_us())
        found = self.records.find(name)
        if found is not None:
            _check_same(found, digest)
        record = found or self._begin(name, digest, scope, body)
        if not self.records.follow(record):
            message = f"Too much is being read again by {HEADER} at once; try again"
            raise ApiError(429, message, "rate_limit_error", HEADER, "idempotency_busy", {"Retry-After": "1"})
        return record, found is None

    def _begin(self, name: tuple[str, str], digest: bytes, scope: Scope, body: bytes) -> _Record:
        record, writing = _Record(name, digest=digest, request_id=scope["state"]["request_id"]), _Writing(len(body))
        record.writing = writing
        self.records.begin(record)
        self._measure(record)
        writing.task = asyncio.create_task(self._run(record, writing, scope, body))
        return record

    # ── writing a record ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, record: _Record, writing: _Writing, scope: Scope, body: bytes) -> None:
        asked = False

        async def receive() -> MutableMapping[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": body, "more_body": False}
            await writing.gone.wait()
            return {"type": "http.disconnect"}

        async def write(message: Message) -> None:
            if writing.gone.is_set():
                return
            record.answer.write(message)
            self._measure(record)
            _wake(record)
            while _is_unrecorded(record) and _unread_bytes(record) > UNREAD_BYTES_MAX and not writing.gone.is_set():
                writing.was_read.clear()
                await writing.was_read.wait()

        try:
            # The route writes into the scope's state; the request that is answered keeps its own.
            await self._app({**scope, "state": dict(scope["state"])}, receive, write)
        finally:
            self._end(record, writing)

    def _end(self, record: _Record, writing: _Writing) -> None:
        record.done, record.writing = True, None
        if writing.leaving is not None:
            writing.leaving.cancel()
        if not writing.gone.is_set():
            record.answer.settle()
            if self.records.resize(record, _bytes_of(record)) and record.answer.is_whole:
                self.records.keep(record, self._now_us())
            else:
                self.records.drop(record)
        _wake(record)

    def _give_up(self, record: _Record, writing: _Writing) -> None:
        """Nobody waits for it: it is cancelled, and the next request with its key begins anew."""
        writing.gone.set()
        writing.was_read.set()
        self.records.drop(record)

    def _measure(self, record: _Record) -> None:
        """Tell how much memory the record takes now, and discard what was read where there is no room for it."""
        if not self.records.resize(record, _bytes_of(record)):
            record.answer.cut(min((reader.at for reader in record.readers), default=0))

    # ── replaying a record ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self, record: _Record, receive: Receive, send: Send) -> None:
        reader = _Reader()
        record.readers[reader] = None
        if record.writing is not None and record.writing.leaving is not None:
            record.writing.leaving.cancel()
            record.writing.leaving = None
        hangup = asyncio.create_task(_until_disconnect(receive))
        hangup.add_done_callback(lambda _: reader.news.set())
        try:
            await self._copy(record, reader, hangup, send)
        finally:
            hangup.cancel()
            del record.readers[reader]
            self.records.unfollow(record)
            if record.writing is not None:
                self._left(record, record.writing)

    def _left(self, record: _Record, writing: _Writing) -> None:
        writing.was_read.set()
        if record.readers:
            return
        if _is_unrecorded(record):  # nobody could come back to it
            self._give_up(record, writing)
        else:
            loop = asyncio.get_running_loop()
            writing.leaving = loop.call_later(self._grace_s, self._give_up, record, writing)

    async def _copy(self, record: _Record, reader: _Reader, hangup: asyncio.Task[None], send: Send) -> None:
        answer = record.answer
        while not (answer.is_begun or record.done or hangup.done()):
            await _news(reader)
        if answer.is_begun:
            await send(answer.start())
        while answer.is_begun:
            data = answer.read(reader.at)
            reader.at += len(data)
            is_last = answer.is_ended and reader.at == answer.length
            if data or is_last:
                if record.writing is not None:
                    record.writing.was_read.set()
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if is_last or (not data and (record.done or hangup.done())):
                return
            if not data:
                await _news(reader)

    def _now_us(self) -> int:
        return int(1e6 * (asyncio.get_running_loop().time() if self._clock_s is None else self._clock_s()))


def _check_same(record: _Record, digest: bytes) -> None:
    """Raises where another body came under the key of a record, or it cannot be replayed."""
    if record.digest != digest:
        message = f"This {HEADER} was used with another body; take a new one for a new request"
        raise ApiError(422, message, param=HEADER, code="idempotency_mismatch")
    if _is_unrecorded(record):
        message = f"The answer under this {HEADER} is too large to be given twice"
        raise ApiError(409, message, param=HEADER, code="idempotency_too_large")


def _bytes_of(record: _Record) -> int:
    """Memory that the record takes; while it is written, with its request."""
    texts = sum(map(len, record.name)) + len(record.request_id)
    writing = 0 if record.writing is None else WRITING_BYTES + record.writing.body_bytes
    return RECORD_BYTES + texts + record.answer.size_bytes + writing


def _is_unrecorded(record: _Record) -> bool:
    return record.phase is RecordPhase.UNRECORDED


def _wake(record: _Record) -> None:
    for reader in record.readers:
        reader.news.set()


async def _news(reader: _Reader) -> None:
    """Wait until something was written, the record has ended, or the client has left."""
    await reader.news.wait()
    reader.news.clear()


def _unread_bytes(record: _Record) -> int:
    """What the slowest reader lacks; 0 without one."""
    return record.answer.length - min((reader.at for reader in record.readers), default=record.answer.length)


def _replaying(send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REPLAYED] = "true"
        await send(message)

    return marked


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
