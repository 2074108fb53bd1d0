"""Sends a response that is not streamed: a small one at once, a large one while it is encoded, piece by piece.

The event loop runs other work between two pieces, one piece of all large answers is encoded at a time, and a client that
does not read stops the encoding of its answer. Of an answer, no more than a part is ever held in its encoded form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PART_BYTES = 64 << 10
"""Sent at once; an answer that is smaller has a Content-Length."""
QUICK_BYTES = 4 << 10
"""Pieces of up to so many bytes together took no time worth mentioning."""


class WholeAnswer(Response):
    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], turns: asyncio.Lock, sent: Callable[[], None]) -> None:
        """`turns` is shared by all answers. `sent` is called once, also when the client has left."""
        super().__init__()
        del self.headers["content-length"]
        self._pieces = pieces
        self._turns = turns
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            body, is_last = await self._part()
            if is_last:
                self.headers["content-length"] = str(len(body))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            if not is_last:
                await self._send_rest(receive, send)
        finally:
            self._sent()

    async def _send_rest(self, receive: Receive, send: Send) -> None:
        gone, is_last = asyncio.create_task(_disconnected(receive)), False
        try:
            while not is_last and not gone.done():
                body, is_last = await self._part()
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        finally:
            gone.cancel()

    async def _part(self) -> tuple[bytes, bool]:
        return await next_part(self._pieces, self._turns)


async def next_part(pieces: Iterator[bytes], turns: asyncio.Lock) -> tuple[bytes, bool]:
    """The next part, and whether it is the last."""
    part: list[bytes] = []
    size = quick = 0
    while size < PART_BYTES:
        async with turns:
            piece = next(pieces, None)
        if piece is None:
            return b"".join(part), True
        part.append(piece)
        size += len(piece)
        quick += len(piece)
        if quick > QUICK_BYTES:
            quick = 0
            await asyncio.sleep(0)
    return b"".join(part), False


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
