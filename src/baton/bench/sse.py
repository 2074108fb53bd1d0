"""Incremental parser of server-sent events.

Owns the parsing of the event-stream format and nothing of HTTP: bytes go in with `feed`, whole events come out. It
keeps at most one event of `EVENT_BYTES_MAX`; a server that sends more without ending the event gets `SseOverflow`.
"""

from __future__ import annotations

from dataclasses import dataclass

EVENT_BYTES_MAX = 8 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class SseOverflow(Exception):
    """An event exceeds the size limit."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    name: str
    """The `event:` field, or "message"."""
    data: bytes
    """The `data:` lines, joined by newlines."""


class SseParser:
    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = ""
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[SseEvent]:
        """The events that `piece` completed, in order."""
        events: list[SseEvent] = []
        for part in piece.splitlines(keepends=True) if piece else []:
            self._take(part, events)
        return events

    def close(self) -> list[SseEvent]:
        """End the stream. A last event without its empty line still counts, since some servers omit it."""
        events: list[SseEvent] = []
        if self._line:
            self._end_line(events)
        self._dispatch(events)
        return events

    def _take(self, part: bytes, events: list[SseEvent]) -> None:
        # bytes.splitlines cuts at \n, \r and \r\n only, which are exactly the line ends of the format. What it cannot
        # see is a \r at the end of one piece and its \n at the start of the next.
        if part == b"\n" and self._after_cr:
            self._after_cr = False
            return
        self._after_cr = part.endswith(b"\r")
        body = part.rstrip(b"\r\n")
        self._line += body
        if len(self._line) + self._data_bytes > self._event_bytes_max:
            raise SseOverflow(f"an event is longer than {self._event_bytes_max} bytes")
        if len(body) != len(part):
            self._end_line(events)

    def _end_line(self, events: list[SseEvent]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._at_start:
            line = line.removeprefix(_BOM)
            self._at_start = False
        if not line:
            self._dispatch(events)
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif field == b"event":
            self._name = value.decode(errors="replace")
        # a comment has an empty field; `id` and `retry` mean nothing here

    def _dispatch(self, events: list[SseEvent]) -> None:
        if self._data:
            events.append(SseEvent(self._name or "message", b"\n".join(self._data)))
        self._data = []
        self._data_bytes = 0
        self._name = ""
