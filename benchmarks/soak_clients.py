"""Clients of a soak: those who ask and read, and those who leave, send half a body, have no key, or ask twice.

Each request's kind is drawn from the seed. Owns the connections and the count of what came of them; a request that must be
answered and is not ends up in `wrong`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

PATH = "/v1/completions"
IDEMPOTENCY_KEYS = 500
"""Distinct ones: asked again and again, so that records are replayed and their number settles early."""
WRONG_MAX = 20
LIMIT_S = 120.0
KINDS = {"whole": 35, "streamed": 25, "aborted": 12, "half a body": 8, "wrong key": 8, "keyed": 12}
"""Kind of a request → its weight."""


@dataclass(slots=True)
class SoakClients:
    url: str
    api_key: str
    seed: int
    sent: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, first: int, end: int, concurrency: int, each: Callable[[int], Awaitable[None]]) -> None:
        """Send the requests of these numbers. `each` is called after each, with how many have ended."""
        numbers = iter(range(first, end))
        ended = first
        connector = aiohttp.TCPConnector(limit=concurrency)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(LIMIT_S)) as http:

            async def work() -> None:
                nonlocal ended
                for number in numbers:
                    await self._send(http, number)
                    ended += 1
                    await each(ended)

            await asyncio.gather(*(work() for _ in range(concurrency)))

    async def _send(self, http: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(self.seed * 1_000_003 + number)
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        self.sent[kind] += 1
        try:
            await self._one(http, kind, draw)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._note(f"request {number}, {kind}: {error!r}")

    async def _one(self, http: aiohttp.ClientSession, kind: str, draw: random.Random) -> None:
        body = self._body(draw)
        match kind:
            case "half a body":
                await self._half_body(draw)
            case "wrong key":
                await self._ask(http, body, "not the key", {}, 401)
            case "aborted":
                await self._abort(http, body | {"stream": True, "max_tokens": 200}, draw)
            case "keyed":
                key = draw.randrange(IDEMPOTENCY_KEYS)
                same = self._body(random.Random(key)) | {"stream": bool(key % 2)}
                await self._ask(http, same, self.api_key, {"Idempotency-Key": f"soak-{self.seed}-{key}"}, 200)
            case _:
                await self._ask(http, body | {"stream": kind == "streamed"}, self.api_key, {}, 200)

    def _body(self, draw: random.Random) -> dict[str, object]:
        prompt = [draw.randrange(1, 256) for _ in range(draw.randint(1, 60))]
        return {"model": "scripted", "prompt": prompt, "max_tokens": draw.randint(1, 24), "ignore_eos": True}

    async def _ask(
        self, http: aiohttp.ClientSession, body: dict[str, object], key: str, headers: dict[str, str], status: int
    ) -> None:
        sent = {"Authorization": f"Bearer {key}", **headers}
        async with http.post(f"{self.url}{PATH}", json=body, headers=sent) as response:
            data = await response.read()
            if response.status != status or (status == 200 and body.get("stream") and not data.endswith(b"[DONE]\n\n")):
                self._note(f"{response.status} in place of {status}: {data[-200:]!r}")

    async def _abort(self, http: aiohttp.ClientSession, body: dict[str, object], draw: random.Random) -> None:
        """Read a few events, or none, and go."""
        sent = {"Authorization": f"Bearer {self.api_key}"}
        async with http.post(f"{self.url}{PATH}", json=body, headers=sent) as response:
            for _ in range(draw.randint(0, 3)):
                await response.content.readline()
            response.close()

    async def _half_body(self, draw: random.Random) -> None:
        """Announce a body, send a part of it and go."""
        at = urlsplit(self.url)
        _, writer = await asyncio.open_connection(at.hostname, at.port)
        size = draw.randint(1, 5000)
        head = f"POST {PATH} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self.api_key}\r\nContent-Length: {2 * size}\r\n\r\n"
        writer.write(head.encode() + b"x" * size)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.transport.abort()

    def _note(self, what: str) -> None:
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(what)
