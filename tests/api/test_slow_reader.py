"""A client that reads slowly, or not at all, costs no more than its own answer and holds nobody up."""

from __future__ import annotations

import asyncio
import json

from starlette.types import Message

from baton.api.choice_streams import DELTAS_MAX
from baton.api.generate import GenerationService
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText
from baton.api.original_request import OriginalRequest
from baton.api.paths import COMPLETION_PATH
from baton.api.prepare import RequestPreparer
from baton.api.request_costs import RequestCosts
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.slot_shares import SlotShares
from baton.api.submissions import RequestRules
from tests.api.engine import ScriptedEngine
from tests.support.unconstrained import unconstrained

TOKENS = 300


async def test_what_is_unread_is_at_most_the_answer_itself(text: ModelText) -> None:
    engine = ScriptedEngine(lambda _: [104] * TOKENS, vocabulary=320)
    server = GenerationService(
        engine, Metrics(engine, "tiny"), RequestCosts(1 << 30, 1 << 30), SlotShares(lambda: 0, 1.0, 0)
    )
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

    prepared = preparer.prepare(OriginalRequest(COMPLETION_PATH, body, "", "id", 1, 1))
    run = await server.accept(prepared, receive, unconstrained)
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
    assert len(written) <= 3 + -(-TOKENS // DELTAS_MAX)  # what had piled up went out in a few writes
