"""Clients that leave at random moments leave nothing behind. BATON_TEST_DISCONNECTS sets how many come (few by default)."""

from __future__ import annotations

import asyncio
import os
import random

import aiohttp

from tests.support.server import ServerProcess, baton_serve

REQUESTS = int(os.environ.get("BATON_TEST_DISCONNECTS", "400"))
AT_ONCE = 48


async def _one(session: aiohttp.ClientSession, url: str, draws: random.Random) -> str:
    """Ask, and leave before, during or after the answer."""
    body = {
        "model": "scripted",
        "prompt": [draws.randrange(256) for _ in range(draws.randrange(1, 200))],
        "max_tokens": draws.randrange(1, 60),
        "n": draws.choice([1, 1, 1, 3]),
        "stream": draws.random() < 0.7,
    }
    leave_after_bytes = draws.choice([0, 300, 2000, None, None, None])
    try:
        async with asyncio.timeout(draws.choice([0.002, 0.05, 30, 30])):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                seen = 0
                async for piece in response.content.iter_any():
                    seen += len(piece)
                    if leave_after_bytes is not None and seen > leave_after_bytes:
                        return "left"
                return "answered" if response.status == 200 else f"status {response.status}"
    except TimeoutError:
        return "left"


async def _load(url: str) -> dict[str, int]:
    draws = random.Random(1)
    outcomes: dict[str, int] = {}
    places = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:

        async def bounded() -> None:
            async with places:
                outcome = await _one(session, url, draws)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1

        await asyncio.gather(*(bounded() for _ in range(REQUESTS)))
    return outcomes


def _settled(server: ServerProcess) -> bool:
    return (
        server.metric("baton_num_requests_running") == 0
        and server.metric("baton_num_requests_waiting") == 0
        and server.metric("baton_kv_blocks", state="running") == 0
    )


def test_random_disconnects_leave_no_block_held() -> None:
    with baton_serve("--executor", "scripted", "--kv-blocks", "600", "--max-num-seqs", "32") as server:
        outcomes = asyncio.run(_load(server.url))
        print(f"\n{REQUESTS} requests: {outcomes}")
        assert set(outcomes) == {"left", "answered"}
        assert sum(outcomes.values()) == REQUESTS
        for _ in range(2000):
            if _settled(server):
                break
        assert _settled(server)
        blocks = [server.metric("baton_kv_blocks", state=state) for state in ("free", "evictable", "running")]
        assert sum(blocks) == 600
        assert server.stop() == 0
