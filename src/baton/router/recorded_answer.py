"""An answer as it was sent: status, headers and the bytes of the body, which others may read while it is written.

Pure. A reader has an offset into the body and is given what is new, in larger pieces than were written where it comes late.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Message

from baton.api.responses import DONE

PIECE_BYTES = 1 << 16
RECORD_BYTES = 900
"""A record without its answer: the objects of the record, and its places in the tables that find, expire and evict it."""


WRITING_BYTES = 8000
"""What a record takes besides while it is written: a task, its frames, and another scope of the request."""


class RecordedAnswer:
    def __init__(self) -> None:
        self._status = 0
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._headers_bytes = 0
        self._body: bytearray | bytes = bytearray()
        self._cut = 0
        """Bytes at the front that were discarded."""
        self.is_ended = False
        """The last part of the body has come."""

    @property
    def is_begun(self) -> bool:
        return self._status > 0

    @property
    def length(self) -> int:
        return self._cut + len(self._body)

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self._headers_bytes + sys.getsizeof(self._body)

    @property
    def is_whole(self) -> bool:
        """A success status and the end of the body; of a stream, with its final event."""
        if self._status != 200 or not self.is_ended:
            return False
        media = Headers(raw=list(self._headers)).get("content-type", "")
        return not media.startswith("text/event-stream") or self._body.endswith(DONE)

    def write(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
            self._headers_bytes = _size_of(self._headers)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            self.is_ended = not message.get("more_body", False)

    def start(self) -> Message:
        """The first message; outer middleware may add headers to it."""
        return {"type": "http.response.start", "status": self._status, "headers": list(self._headers)}

    def read(self, at: int) -> bytes:
        """The next bytes from this offset on: at most PIECE_BYTES, none where nothing is new."""
        begin = at - self._cut
        return bytes(self._body[begin : begin + PIECE_BYTES])

    def cut(self, at: int) -> None:
        """Discard what lies before this offset."""
        if isinstance(self._body, bytearray) and at > self._cut:
            del self._body[: at - self._cut]
            self._cut = at

    def settle(self) -> None:
        """Nothing more is written: give back the room that a growing body has."""
        self._body = bytes(self._body)


def _size_of(headers: Iterable[tuple[bytes, bytes]]) -> int:
    place = 8  # in the tuple of them all
    return sum(place + sys.getsizeof(pair) + sys.getsizeof(pair[0]) + sys.getsizeof(pair[1]) for pair in headers)
