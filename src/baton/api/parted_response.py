"""A large answer that is sent in parts, each when its client has read most of those before."""

from __future__ import annotations

from collections import deque

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PART_BYTES = 64 << 10


class PartedResponse(Response):
    """What is sent is released; what is not is known to the server by the announced length."""

    def __init__(self, content: bytes, media_type: str) -> None:
        super().__init__(content, media_type=media_type)
        self.body = b""
        starts = range(0, max(1, len(content)), PART_BYTES)
        self._parts = deque(content[start : start + PART_BYTES] for start in starts)

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._parts:
            part = self._parts.popleft()
            await send({"type": "http.response.body", "body": part, "more_body": bool(self._parts)})
