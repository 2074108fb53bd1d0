"""Event ids that say how much of a stream a client has, and resuming a stream after such an id.

    id: 12        one choice, of which the client has 12 tokens
    id: 12!,7     two choices; the first has ended
    id: 3,-       the second has not begun
    id: 5!.       the usage was sent too

Owns the numbering of events and the skipping of those that a client already has. The text does not depend on how tokens
were cut into bursts, so a new reader fed the same tokens is in the same state, and its next text is exactly what the client
lacks. Independent of where the tokens come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.api.engine import Sink, TokenBurst, TokenStream
from baton.api.errors import ApiError, invalid
from baton.api.original_request import OriginalRequest
from baton.api.responses import Event, ResponseWriter, joined
from baton.api.submissions import RequestOwner
from baton.api.text_reader import TextDelta
from baton.core.engine.request import Submission

LAST_EVENT_ID = "Last-Event-ID"
_CHARS_MAX = 1 << 16
_PART = re.compile(r"(\d{1,10})(!?)", re.ASCII)
_NOT_BEGUN = "-"


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How much a client has of one choice."""

    begun: bool = False
    tokens: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class StreamPositions:
    choices: tuple[StreamPosition, ...]
    usage_sent: bool = False


def fresh_marks(choices: int) -> StreamPositions:
    return StreamPositions((StreamPosition(),) * choices)


def parse_marks(text: str, choices: int) -> StreamPositions:
    """Parse an event id; "" means from the beginning. Raises a 400 when it does not fit `choices` choices."""
    text = text.strip()
    if not text:
        return fresh_marks(choices)
    parts = text.removesuffix(".").split(",") if len(text) <= _CHARS_MAX else []
    if len(parts) != choices:
        raise invalid(LAST_EVENT_ID, f"{LAST_EVENT_ID} is no id of an event of this answer, which has {choices} choices")
    return StreamPositions(tuple(_mark(part) for part in parts), text.endswith("."))


def check_reach(marks: StreamPositions, limits: Sequence[int]) -> None:
    """Raises a 400 when a position exceeds `limits`, the largest number of tokens by choice."""
    for mark, limit in zip(marks.choices, limits, strict=True):
        if mark.tokens > limit:
            message = f"{LAST_EVENT_ID} says {mark.tokens} tokens, and this answer has at most {limit}"
            raise invalid(LAST_EVENT_ID, message)


def _mark(part: str) -> StreamPosition:
    if part == _NOT_BEGUN:
        return StreamPosition()
    found = _PART.fullmatch(part)
    if found is None:
        raise invalid(LAST_EVENT_ID, f"{LAST_EVENT_ID} has {part[:40]!r}, which is not a number of tokens")
    return StreamPosition(begun=True, tokens=int(found[1]), finished=bool(found[2]))


class EventWriter(Protocol):
    """Formats deltas as server-sent events. An empty event is not sent."""

    def of(self, delta: TextDelta) -> Event: ...

    def usage(self, usage: Mapping[str, object]) -> bytes: ...

    def has(self, delta: TextDelta) -> bool:
        """Whether the client already has this delta. Call before `of`."""


class PlainEvents:
    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    def of(self, delta: TextDelta) -> Event:
        return joined(self._writer.opening(delta), self._writer.event(delta)) if delta.first else self._writer.event(delta)

    def usage(self, usage: Mapping[str, object]) -> bytes:
        return self._writer.usage_event(usage)

    def has(self, delta: TextDelta) -> bool:  # noqa: ARG002
        return False


class NumberedEvents:
    """Events with ids; those before the client's marks are skipped."""

    def __init__(self, writer: ResponseWriter, marks: StreamPositions) -> None:
        self._writer = writer
        self._marks = marks
        self._counts = [0] * len(marks.choices)
        self._parts = [_NOT_BEGUN.encode()] * len(marks.choices)

    def of(self, delta: TextDelta) -> Event:
        index, had = delta.index, self.has(delta)
        opening = self._opening(delta) if delta.first else b""
        event = self._writer.event(delta)
        count = self._counts[index] = self._counts[index] + len(delta.tokens)
        self._parts[index] = b"%d" % count if delta.finish is None else b"%d!" % count
        return opening if had or not event else joined(joined(opening, self._id()), event)

    def has(self, delta: TextDelta) -> bool:
        mark = self._marks.choices[delta.index]
        covered = mark.begun and self._counts[delta.index] + len(delta.tokens) <= mark.tokens
        return covered and (delta.finish is None or mark.finished)

    def usage(self, usage: Mapping[str, object]) -> bytes:
        if self._marks.usage_sent:
            return b""
        return b"id: " + b",".join(self._parts) + b".\n" + self._writer.usage_event(usage)

    def _opening(self, delta: TextDelta) -> Event:
        opening = self._writer.opening(delta)
        if not opening or self._marks.choices[delta.index].begun:
            return b""
        self._parts[delta.index] = b"0"
        return joined(self._id(), opening)

    def _id(self) -> bytes:
        return b"id: " + b",".join(self._parts) + b"\n"


class CutStream:
    """Splits a replayed stream at the position that the client has.

    No burst is partly known to the client and partly new.
    """

    def __init__(self, stream: TokenStream, mark: StreamPosition) -> None:
        self._stream = stream
        self._mark = mark

    def pour(self, sink: Sink) -> None:
        left = self._mark.tokens if self._mark.begun else 0

        def cut(burst: TokenBurst | Exception) -> None:
            nonlocal left
            if not left or isinstance(burst, Exception):
                sink(burst)
                return
            if not burst.tokens and burst.ended is None:
                sink(burst)
                return
            known, left = left, max(0, left - len(burst.tokens))
            if known < len(burst.tokens) or (burst.ended is not None and not self._mark.finished):
                prompt = burst.prompt_logprobs
                sink(TokenBurst(burst.tokens[:known], burst.logprobs[:known], None, burst.cached_tokens, prompt))
                sink(TokenBurst(burst.tokens[known:], burst.logprobs[known:], burst.ended, burst.cached_tokens))
            else:
                sink(burst)

        self._stream.pour(cut)

    def stop(self, keep: int) -> None:
        self._stream.stop(keep)

    def abort(self) -> None:
        self._stream.abort()


@dataclass(frozen=True, slots=True, eq=False)
class UnclaimedRequest:
    """A request whose router was lost, with all tokens generated for it."""

    origin: OriginalRequest
    logprobs_from: list[int]
    """By choice: index of the first token with known log-probabilities."""

    def check(self, marks: StreamPositions) -> None:
        """Raises when requested log-probabilities are missing for tokens that the client lacks."""
        for index, (first, mark) in enumerate(zip(self.logprobs_from, marks.choices, strict=True)):
            if first > mark.tokens:
                message = (
                    f"This answer cannot be resumed after {mark.tokens} tokens of choice {index}: the log-probabilities of "
                    f"the first {first} were lost with an instance"
                )
                raise ApiError(410, message, param=LAST_EVENT_ID, code="cannot_resume")


class UnclaimedRequests(Protocol):
    """Requests that wait for their clients after the loss of a router."""

    async def find(self, asker: RequestOwner) -> UnclaimedRequest | None:
        """May wait while this router is starting, until its instances have reported their requests."""

    def claim(self, asker: RequestOwner, group: Sequence[Submission]) -> list[TokenStream]:
        """Remove the request from the unclaimed ones and return its streams, each from its first token on.

        `group` is the request's submissions: a choice lost together with its router is submitted again.
        """

    def drop(self, asker: RequestOwner) -> bool:
        """Cancel an unclaimed request. False when there is none with this id."""
