"""What the front end costs: it must not be what limits a server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.api.app import create_app
from baton.api.engine import Burst, Ended
from baton.api.settings import ApiSettings
from baton.api.text import ModelText
from baton.core.request import FinishReason
from tests.api.engine import ScriptedEngine, ScriptedStream

EVENTS_PER_CPU_S = 10_000
TOKENS = 4_000


class Steady(ScriptedStream):
    """One burst a token, one turn of the loop each."""

    async def __aiter__(self) -> AsyncIterator[Burst]:
        for i in range(TOKENS):
            await asyncio.sleep(0)
            yield Burst((97 + i % 26,), (), None)
        yield Burst((), (), Ended(FinishReason.LENGTH, 0))


@pytest.mark.parametrize("fields", [{}, {"stop": ["NEVER SAID", "NOR THIS"]}, {"n": 4, "return_token_ids": True}])
async def test_ten_thousand_events_a_cpu_second(
    text: ModelText,
    settings: ApiSettings,
    engine: ScriptedEngine,
    fields: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.info = replace(engine.info, context_tokens=100_000)
    monkeypatch.setattr("tests.api.engine.ScriptedStream", Steady)
    app = create_app(engine, text, settings)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True} | fields
    unread = [{"type": "http.request", "body": json.dumps(body).encode()}]
    events = 0

    async def receive() -> dict[str, object]:
        if not unread:
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message: dict[str, bytes]) -> None:
        nonlocal events
        events += message.get("body", b"").count(b"data: ")

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    start = time.process_time()
    await app(scope, receive, send)
    assert events >= TOKENS
    assert events / (time.process_time() - start) > EVENTS_PER_CPU_S
