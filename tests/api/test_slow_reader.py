"""A client that reads slowly, or not at all, costs no more than its own answer and holds nobody up."""

from __future__ import annotations

import asyncio
import json

from starlette.types import Message

from baton.api.generate import GenerationService
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText, SamplingDefaults
from baton.api.original_request import OriginalRequest
from baton.api.prepare import COMPLETION_PATH, RequestPreparer
from baton.api.submissions import RequestRules
from tests.api.engine import ScriptedEngine

TOKENS = 300


async def test_what_is_unread_is_at_most_the_answer_itself(text: ModelText) -> None:
    engine = ScriptedEngine(lambda _: [104] * TOKENS, vocabulary=320)
    server = GenerationService(engine, Metrics(engine, "tiny"))
    preparer = RequestPreparer(text, lambda: RequestRules(engine.info, frozenset(), SamplingDefaults()), ("tiny",))
    body = json.dumps({"prompt": "hi", "max_tokens": TOKENS, "stream": True}).encode()
    reads, written = asyncio.Event(), list[bytes]()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        written.append(message.get("body", b""))
        if len(written) > 1:  # the head went through
            await reads.wait()

    run = await server.accept(preparer.prepare(OriginalRequest(COMPLETION_PATH, body, "", "id", 1, 1)), receive)
    response = await server.respond(run)
    answering = asyncio.create_task(response({"type": "http"}, receive, send))
    while not engine.streams[0].ended:  # noqa: ASYNC110  it tells nobody
        await asyncio.sleep(0)
    assert len(written) == 2
    assert TOKENS - 2 <= len(run.answer._box) <= TOKENS
    reads.set()
    await answering
    assert b"".join(written).count(b'"text":"h"') == TOKENS
    assert b"".join(written).endswith(b"data: [DONE]\n\n")
    assert len(written) <= 5  # what had piled up went out in one write
