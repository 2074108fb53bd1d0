"""A request with an Idempotency-Key is answered once, however often it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
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


async def called(app: ASGIApp, key: str, body: bytes = b"{}") -> tuple[int, bytes]:
    sent: list[Message] = []
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "path": "/v1/completions", "method": "POST", "state": {"tenant": "", "request_id": "r"},
        "headers": [(b"idempotency-key", key.encode())],
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def test_the_oldest_records_make_room_for_new_ones() -> None:
    inner = Counted([b"x" * 40])
    ring = IdempotencyMiddleware(inner, grace_s=1, bytes_max=100)
    for key in ("a", "b", "c"):
        assert (await called(ring, key))[1] == b"x" * 40
    assert inner.calls == 3
    await called(ring, "c")
    await called(ring, "b")
    assert inner.calls == 3
    await called(ring, "a")
    assert inner.calls == 4


async def test_an_answer_larger_than_all_records_is_given_and_not_kept() -> None:
    inner = Counted([b"x" * 60, b"y" * 60])
    ring = IdempotencyMiddleware(inner, grace_s=1, bytes_max=100)
    assert await called(ring, "a") == (200, b"x" * 60 + b"y" * 60)
    await called(ring, "a")
    assert inner.calls == 2


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
