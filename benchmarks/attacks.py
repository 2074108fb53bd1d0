"""Loads that a hostile client makes, each at full rate until it is stopped.

`python -m benchmarks.attacks NAME URL KEY MODEL` is one attacker. Owns what is sent, and reads as little of the answers as
the attack needs. Prints what it has done so far as a line of JSON, again and again. Only loopback addresses are attacked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from urllib.parse import urlsplit

PIECE = 1 << 16
PROMPT_BYTES = 4_100_000
"""Just under the limit on bodies."""
PATIENCE_S = 30.0
PAUSE_S = 0.05
"""Between two tries of one connection: a server that refuses at once is not to be attacked by a busy loop only."""
TOLD_EVERY_S = 0.25
SOCKETS = 2000
CHATS, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class NotLoopback(Exception):
    """The address is of another machine."""


@dataclass(slots=True)
class AttackTally:
    """What an attack has done so far."""

    connections: int = 0
    sent_bytes: int = 0
    answers: int = 0
    """Connections on which the server has said something."""


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    key: str
    model: str
    tally: AttackTally = field(default_factory=AttackTally)

    def head(self, path: str, length: int, *headers: str, method: str = "POST") -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", f"Authorization: Bearer {self.key}",
            "Content-Type: application/json", f"Content-Length: {length}", *headers,
        ]  # fmt: skip
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def post(self, path: str, body: dict[str, object], *headers: str) -> bytes:
        data = json.dumps({"model": self.model, **body}).encode()
        return self.head(path, len(data), "Connection: close", *headers) + data


def target_of(url: str, key: str, model: str) -> Target:
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1") or parts.port is None:
        raise NotLoopback(f"{url} is not an address of this machine")
    return Target(parts.hostname, parts.port, key, model)


async def _connected(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    opened = await asyncio.open_connection(target.host, target.port)
    target.tally.connections += 1
    return opened


async def _write(target: Target, writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    target.tally.sent_bytes += len(data)


async def _read_to_end(target: Target, reader: asyncio.StreamReader, patience_s: float | None) -> None:
    first = True
    while await asyncio.wait_for(reader.read(PIECE), patience_s):
        target.tally.answers += first
        first = False


async def _sent(target: Target, data: bytes) -> None:
    """Send, and read the answer to its end."""
    reader, writer = await _connected(target)
    try:
        await _write(target, writer, data)
        await _read_to_end(target, reader, PATIENCE_S)
    finally:
        writer.close()


async def _poured(target: Target, head: bytes, piece: bytes) -> None:
    """Send without end, and read nothing."""
    _, writer = await _connected(target)
    try:
        writer.write(head)
        while True:
            await asyncio.wait_for(_write(target, writer, piece), PATIENCE_S)
    finally:
        writer.close()


async def _held(target: Target, head: bytes) -> None:
    """Send a beginning, then nothing, for as long as the server lets."""
    reader, writer = await _connected(target)
    try:
        await _write(target, writer, head)
        await _read_to_end(target, reader, None)
    finally:
        writer.close()


async def _for_ever(once: Callable[[], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            await once()
        await asyncio.sleep(PAUSE_S)


async def _at_once(count: int, once: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(*(_for_ever(once) for _ in range(count)))


# ── the attacks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def long_prompts(target: Target) -> None:
    data = target.post(COMPLETIONS, {"prompt": "lorem ipsum " * (PROMPT_BYTES // 12), "max_tokens": 1})
    await _at_once(8, lambda: _sent(target, data))


async def long_tokenize(target: Target) -> None:
    data = target.post(TOKENIZE, {"prompt": "lorem ipsum " * (PROMPT_BYTES // 12)})
    await _at_once(8, lambda: _sent(target, data))


async def log_probabilities(target: Target) -> None:
    data = target.post(COMPLETIONS, {"prompt": ["hello"] * 256, "max_tokens": 1000, "logprobs": 20, "ignore_eos": True})
    await _at_once(4, lambda: _sent(target, data))


async def flood(target: Target) -> None:
    """More long answers than there are slots and places in the queue."""
    data = target.post(COMPLETIONS, {"prompt": "hello " * 50, "max_tokens": 2000, "ignore_eos": True, "n": 4})
    await _at_once(256, lambda: _sent(target, data))


async def short_requests(target: Target) -> None:
    data = target.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1})
    await _at_once(64, lambda: _sent(target, data))


async def idempotency_keys(target: Target) -> None:
    numbers = itertools.count()

    async def once() -> None:
        body: dict[str, object] = {"prompt": "hello", "max_tokens": 1}
        await _sent(target, target.post(COMPLETIONS, body, f"Idempotency-Key: attack-{next(numbers)}"))

    await _at_once(64, once)


async def pipelined(target: Target) -> None:
    one = f"GET /health HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode()
    await _at_once(4, lambda: _poured(target, b"", one * (PIECE // len(one))))


async def endless_header(target: Target) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {target.host}\r\nX-Long: ".encode()
    await _at_once(4, lambda: _poured(target, head, b"a" * PIECE))


async def many_headers(target: Target) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {target.host}\r\n".encode()
    await _at_once(4, lambda: _poured(target, head, b"X-Some: value\r\n" * (PIECE // 15)))


async def endless_url(target: Target) -> None:
    await _at_once(4, lambda: _poured(target, b"GET /health?", b"a" * PIECE))


async def idle_sockets(target: Target) -> None:
    await _at_once(SOCKETS, lambda: _held(target, b""))


async def half_bodies(target: Target) -> None:
    head = target.head(COMPLETIONS, 1 << 20) + b'{"prompt": "'
    await _at_once(500, lambda: _held(target, head))


async def bad_bodies(target: Target) -> None:
    data = target.head(COMPLETIONS, 9, "Connection: close") + b"{nonsense"
    await _at_once(32, lambda: _sent(target, data))


async def many_items(target: Target) -> None:
    """Bodies of the other dialects with as many parts as fit: too many, and as many as are allowed."""
    block = {"type": "text", "text": "a"}
    turn = {"role": "user", "content": [block]}
    bodies = [
        target.post(RESPONSES, {"input": [turn] * (PROMPT_BYTES // 60)}),
        target.post(RESPONSES, {"input": [{"role": "user", "content": "lorem ipsum " * 25}] * 10_000}),
        target.post(MESSAGES, {"max_tokens": 1, "messages": [turn] * (PROMPT_BYTES // 60)}),
        target.post(MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [block] * 10_000}] * 9}),
    ]
    await asyncio.gather(*(_at_once(2, partial(_sent, target, data)) for data in bodies))


async def large_tools(target: Target) -> None:
    """Tools just within the limits, and beyond each of them."""
    deep: object = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}

    def with_tools(count: int, parameters: object) -> bytes:
        tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(count)]
        return target.post(CHATS, {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 1})

    wide = {"properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(40)}}
    bodies = [with_tools(100, wide), with_tools(128, {}), with_tools(1, deep), with_tools(1, {"enum": list(range(500_000))})]
    await asyncio.gather(*(_at_once(2, partial(_sent, target, data)) for data in bodies))


async def hostile_schemas(target: Target) -> None:
    """Constraints made to be dear to compile, each time another, so that none is known already."""
    count = 0
    doubled: dict[str, object] = {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    doubled["d60"] = {"type": "string"}

    def next_body() -> bytes:
        nonlocal count
        count += 1
        dear: list[dict[str, object]] = [
            {"guided_regex": f"x{count}(a{{1000}}){{1000}}"},
            {"guided_regex": f"x{count}(a|b)*a(a|b){{500}}c"},
            {"guided_json": {"title": f"{count}", "$defs": doubled, "$ref": "#/$defs/d0"}},
            {"guided_json": {"properties": {f"p{count}-{i}": {"type": "string"} for i in range(3000)}}},
            {"guided_json": {"enum": [count, *range(500_000)]}},
        ]
        return target.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1, **dear[count % len(dear)]})

    await _at_once(8, lambda: _sent(target, next_body()))


async def many_constraints(target: Target) -> None:
    """Grammars that are accepted, in rotation: each must be compiled by an engine as well, and takes many masks."""
    numbers = itertools.count()

    def next_body() -> bytes:
        many = next(numbers) % 250
        chain = "\n".join(f'r{rule}: "{many} " r{rule + 1}' for rule in range(400))
        grammars = [f'start: r0\n{chain}\nr400: "y"', f'start: e "{many}"\ne: e /[a-z]/ | /[a-z]/']
        return target.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 50, "guided_grammar": grammars[many % 2]})

    await _at_once(48, lambda: _sent(target, next_body()))


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "long-prompts": long_prompts,
    "long-tokenize": long_tokenize,
    "log-probabilities": log_probabilities,
    "flood": flood,
    "short-requests": short_requests,
    "idempotency-keys": idempotency_keys,
    "pipelined": pipelined,
    "endless-header": endless_header,
    "many-headers": many_headers,
    "endless-url": endless_url,
    "idle-sockets": idle_sockets,
    "half-bodies": half_bodies,
    "bad-bodies": bad_bodies,
    "many-items": many_items,
    "large-tools": large_tools,
    "hostile-schemas": hostile_schemas,
    "many-constraints": many_constraints,
}


async def _tell(tally: AttackTally) -> None:
    while True:
        print(json.dumps(asdict(tally)), flush=True)  # noqa: T201  who started it reads this
        await asyncio.sleep(TOLD_EVERY_S)


async def _attack(name: str, target: Target) -> None:
    """Ends with the first error that is not the server's way to defend itself."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_tell(target.tally))
        await ATTACKS[name](target)


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1], target_of(*sys.argv[2:5])))
