"""A request with an Idempotency-Key is answered once, however often it is sent."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.router.idempotency import IdempotencyMiddleware
from tests.router.fleet import ROUTER, Fleet
from tests.router.fleet import fleet as running
from tests.router.test_carrying import ask, asking, data_of, finished
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": "once"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_question_again_gets_the_same_bytes_and_costs_nothing(fleet: Fleet, stream: bool) -> None:
    member = fleet.add("a")
    first = ask(fleet.served, True, KEY, stream=stream, seed=None)
    again = ask(fleet.served, True, KEY, stream=stream, seed=None)
    assert (first.status, again.status) == (200, 200)
    assert first.body == again.body
    assert member.given == 40
    assert first.headers["x-request-id"] == again.headers["x-request-id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"


def test_while_the_first_is_open_the_second_follows_it_from_the_start(fleet: Fleet) -> None:
    member = fleet.add("a", allowed=5)
    with asking(fleet.served, headers=KEY, stream=True) as first:
        wait_until(lambda: member.given >= 5)
        with asking(fleet.served, headers=KEY, stream=True) as second:
            member.allowed = None
            one, other = finished(first), finished(second)
    assert one.body == other.body
    assert data_of(one)[-1] == "[DONE]"
    assert member.given == 40


def test_another_body_under_the_same_key_is_a_422(fleet: Fleet) -> None:
    fleet.add("a")
    assert ask(fleet.served, False, KEY).status == 200
    refused = ask(fleet.served, False, KEY, max_tokens=3)
    assert (refused.status, refused.error["param"]) == (422, "Idempotency-Key")
    assert ask(fleet.served, True, KEY).status == 422  # nor on another path


def test_keys_of_tenants_are_apart(text: ModelText) -> None:
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("one", "two"))
    with running(text, settings) as fleet:
        fleet.add("a")
        answers = [
            ask(fleet.served, False, KEY | {"Authorization": f"Bearer {key}"}).json() for key in ("one", "two", "one")
        ]
    assert answers[0] == answers[2]
    assert answers[0]["id"] != answers[1]["id"]


def test_a_client_that_hangs_up_finds_its_answer_when_it_comes_back(fleet: Fleet) -> None:
    member = fleet.add("a", allowed=5)
    with asking(fleet.served, headers=KEY, stream=True):
        wait_until(lambda: member.given >= 5)
    member.allowed = None
    with asking(fleet.served, headers=KEY, stream=True) as again:
        assert data_of(finished(again))[-1] == "[DONE]"
    assert member.given == 40


@pytest.fixture
def hasty(text: ModelText) -> Iterator[Fleet]:
    with running(text, ApiSettings(served_model_names=("tiny",)), replace(ROUTER, orphan_grace_us=50_000)) as made:
        yield made


def test_what_nobody_comes_back_for_is_cancelled_after_the_grace(hasty: Fleet) -> None:
    member = hasty.add("a", allowed=5)
    with asking(hasty.served, headers=KEY, stream=True):
        wait_until(lambda: member.given >= 5)
    wait_until(lambda: hasty.do(lambda: hasty.engine.open_requests) == 0)
    member.allowed = None
    with asking(hasty.served, headers=KEY, stream=True) as again:
        assert finished(again).status == 200
    assert member.given > 40  # it was asked for anew


def test_an_error_is_not_the_answer_for_ever(text: ModelText) -> None:
    config = replace(ROUTER, absent_us=0)
    with running(text, ApiSettings(served_model_names=("tiny",)), config) as fleet:
        assert ask(fleet.served, False, KEY).status == 503
        fleet.add("a")
        assert ask(fleet.served, False, KEY).status == 200


@pytest.mark.parametrize("key", ["", "k" * 257])
def test_a_key_has_1_to_256_characters(fleet: Fleet, key: str) -> None:
    assert ask(fleet.served, False, {"Idempotency-Key": key}).status == 400


# ── records, with an app of their own ────────────────────────────────────────────────────────────────────────────────────


class Counted:
    """Answers with a given number of bytes, and counts its requests."""

    def __init__(self, parts: list[bytes], media: bytes = b"application/json") -> None:
        self.parts = parts
        self.media = media
        self.calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", self.media)]})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def called(
    app: ASGIApp,
    key: str,
    body: bytes = b"{}",
    tenant: str = "",
    send: Send | None = None,
    sent: list[Message] | None = None,
    leaves: bool = False,
) -> tuple[int, bytes]:
    """`send` puts what it gets into `sent`; `leaves`: the client goes as soon as it has asked."""
    got: list[Message] = [] if sent is None else sent
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked and leaves:
            return {"type": "http.disconnect"}
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def take(message: Message) -> None:
        got.append(message)

    scope: dict[str, Any] = {
        "type": "http", "path": "/v1/completions", "method": "POST", "state": {"tenant": tenant, "request_id": "r"},
        "headers": [(b"idempotency-key", key.encode())],
    }  # fmt: skip
    await app(scope, receive, send or take)
    return got[0]["status"] if got else 0, b"".join(message.get("body", b"") for message in got[1:])


async def test_the_oldest_records_make_room_for_new_ones() -> None:
    inner = Counted([b"x" * 40_000])
    ring = IdempotencyMiddleware(inner, grace_s=1, bytes_max=140_000)
    for key in ("a", "b", "c", "d"):
        assert (await called(ring, key))[1] == b"x" * 40_000
    assert inner.calls == 4
    await called(ring, "d")
    await called(ring, "c")
    assert inner.calls == 4
    await called(ring, "a")
    assert inner.calls == 5


async def test_an_answer_larger_than_all_records_is_given_and_not_kept() -> None:
    inner = Counted([b"x" * 60_000, b"y" * 60_000])
    ring = IdempotencyMiddleware(inner, grace_s=1, bytes_max=100_000)
    assert await called(ring, "a") == (200, b"x" * 60_000 + b"y" * 60_000)
    assert (len(ring.records), ring.records.bytes) == (0, 0)
    await called(ring, "a")
    assert inner.calls == 2


async def test_one_tenant_cannot_push_out_the_records_of_another() -> None:
    inner = Counted([b"x" * 40_000])
    ring = IdempotencyMiddleware(inner, grace_s=1, bytes_max=1_000_000)
    for key in ("a", "b", "c"):
        await called(ring, key, tenant="quiet")
    for number in range(200):
        await called(ring, f"flood {number}", tenant="loud")
    assert inner.calls == 203
    for key in ("a", "b", "c"):
        await called(ring, key, tenant="quiet")
    assert inner.calls == 203
    assert ring.records.bytes <= 1_000_000


EVENTS = [b'data: {"choices":[{"index":0,"text":"x"}]}'.ljust(204) + b"\n\n"] * 16 + [b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    ("parts", "media"), [([b"x" * 40], b"application/json"), (EVENTS, b"text/event-stream"), ([b"x" * 20_000], b"text/json")]
)
async def test_records_are_counted_as_the_memory_that_they_take(parts: list[bytes], media: bytes) -> None:
    ring = IdempotencyMiddleware(Counted(parts, media), grace_s=1)
    for number in range(50):
        await called(ring, f"warm-up {number}")
    gc.collect()
    tracemalloc.start()
    try:
        before, counted = tracemalloc.get_traced_memory()[0], ring.records.bytes
        for number in range(400):
            await called(ring, f"{number:030d}")
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(ring.records) == 450
    assert (ring.records.bytes - counted) / taken == pytest.approx(1, abs=0.3)


class Flooding(Counted):
    """Writes as long as it may, and says how far ahead of its reader it came."""

    def __init__(self, reader: list[Message]) -> None:
        super().__init__([], b"text/event-stream")
        self.reader = reader
        self.ahead = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(200):
            await send({"type": "http.response.body", "body": bytes(50_000), "more_body": True})
            read = sum(len(message.get("body", b"")) for message in self.reader)
            self.ahead = max(self.ahead, 50_000 * (number + 1) - read)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_an_answer_without_room_is_held_back_by_its_reader_and_takes_no_memory() -> None:
    sent: list[Message] = []
    inner = Flooding(sent)
    ring = IdempotencyMiddleware(inner, grace_s=1, bytes_max=400_000)
    most = 0

    async def slowly(message: Message) -> None:
        nonlocal most
        for _ in range(5):
            await asyncio.sleep(0)
        most = max(most, ring.records.bytes)
        sent.append(message)

    status, body = await called(ring, "a", send=slowly, sent=sent)
    assert (status, len(body)) == (200, 10_000_000)
    assert most < 800_000
    assert inner.ahead < 800_000
    assert ring.records.bytes == 0


async def test_what_was_given_up_is_begun_anew_at_once() -> None:
    """Also while the old one has not ended yet."""
    begun: list[asyncio.Event] = []

    async def stubborn(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(asyncio.Event())
        if len(begun) == 1:
            await begun[0].wait()
        await Counted([b"x"])(scope, receive, send)

    ring = IdempotencyMiddleware(stubborn, grace_s=0)
    first = asyncio.create_task(called(ring, "a", leaves=True))
    await first
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(called(ring, "a"), 5) == (200, b"x")
    begun[0].set()
    await asyncio.sleep(0)
    assert len(begun) == 2
    assert len(ring.records) == 1


async def _steps_of(ring: IdempotencyMiddleware, key: str) -> int:
    """Lines of the router's code that one request runs through. Nothing here depends on the machine."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if "/baton/router/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        await called(ring, key)
        await asyncio.sleep(0)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("bytes_max", [64 << 20, 3_000_000], ids=["room for all", "room for few"])
async def test_a_request_costs_the_same_however_many_records_there_are(bytes_max: int) -> None:
    now_s = 0.0
    ring = IdempotencyMiddleware(Counted(EVENTS), grace_s=1, kept_s=1e6, bytes_max=bytes_max, clock_s=lambda: now_s)
    steps = []
    for number in range(2001):
        now_s += 1
        if number in (20, 2000):
            steps.append(await _steps_of(ring, f"traced {number}"))
        else:
            await called(ring, f"{number:030d}")
    few, many = steps
    assert many <= few + 60, "an eviction or two at most"


async def test_a_record_lives_for_a_while() -> None:
    now_s = 0.0
    inner = Counted([b"x"])
    ring = IdempotencyMiddleware(inner, grace_s=1, kept_s=600, clock_s=lambda: now_s)
    await called(ring, "a")
    now_s = 599.0
    await called(ring, "a")
    assert inner.calls == 1
    now_s = 601.0
    await called(ring, "a")
    assert inner.calls == 2


async def test_a_stream_that_broke_is_not_kept() -> None:
    inner = Counted([b'data: {"error":{}}\n\n'], b"text/event-stream; charset=utf-8")
    ring = IdempotencyMiddleware(inner, grace_s=1)
    await called(ring, "a")
    await called(ring, "a")
    assert inner.calls == 2
