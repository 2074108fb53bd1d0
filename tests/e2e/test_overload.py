"""Four times more than a tiny pool can take: every request is answered whole or refused with Retry-After, none hangs."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp

from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.server import baton_serve

REQUESTS = 160
AT_ONCE = 64
OPTIONS = (
    "--executor", "scripted", "--kv-blocks", "40", "--block-size", "8", "--max-model-len", "256", "--max-num-seqs", "16",
    "--max-waiting", "24", "--reserve", "none",
)  # fmt: skip


async def _ask(session: aiohttp.ClientSession, url: str, number: int) -> str:
    draws = random.Random(number)
    prompt = [draws.randrange(256) for _ in range(draws.randrange(8, 60))]
    tokens = draws.randrange(40, 150)
    body = {
        "model": "scripted", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "return_token_ids": True, "stream_options": {"include_usage": True}, "baton_usage": True,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status in (429, 503):
            assert int(response.headers["Retry-After"]) >= 1
            return "refused"
        assert response.status == 200
        events = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    received = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
    assert received == undisturbed(prompt, Sampling(seed=0, temperature=0.0), tokens, BYTE_VOCABULARY)
    bill = chunks[-1]["usage"]["baton"]
    return "answered after preemption" if bill["preemptions"] else "answered"


async def _load(url: str) -> dict[str, int]:
    outcomes: dict[str, int] = {}
    places = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def bounded(number: int) -> None:
            async with places:
                outcome = await _ask(session, url, number)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

        async with asyncio.timeout(120):
            await asyncio.gather(*(bounded(number) for number in range(REQUESTS)))
    return outcomes


def test_overload_is_answered_or_refused_and_streams_are_unbroken() -> None:
    with baton_serve(*OPTIONS) as server:
        outcomes = asyncio.run(_load(server.url))
        print(f"\n{outcomes}")
        assert sum(outcomes.values()) == REQUESTS
        assert outcomes["refused"] > 0
        assert outcomes["answered after preemption"] > 0
        for _ in range(2000):  # the last slot comes back a step after its last token
            if server.metric("baton_kv_blocks", state="running") == 0:
                break
        assert server.metric("baton_kv_blocks", state="running") == 0
        assert server.metric("baton_num_requests_waiting") == 0
