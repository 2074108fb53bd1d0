"""Token streams between the engine's client and their readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from baton.api.engine import EngineDead, Sink, StreamEnd, TokenBurst
from baton.api.logprob_columns import LogprobColumns, TokenLogprob
from baton.api.tracing.stage_notes import ChoiceHistory
from baton.core.engine.ended import EndedRequest
from baton.core.routing.events import ChoiceOutcome
from baton.wire.engine_messages import LogprobLine

Key = TypeVar("Key", contravariant=True)


class TokenSource(Protocol[Key]):
    """The source of the tokens; identifies each stream by its own key."""

    def stop(self, key: Key, keep: int) -> None: ...

    def abort(self, key: Key) -> None: ...


class BufferedTokenStream(Generic[Key]):
    """The tokens of one accepted request: pushed into a sink, or read burst by burst.

    Unread bursts are bounded by the request's own token limit.
    """

    def __init__(self, source: TokenSource[Key], key: Key) -> None:
        self._source = source
        self._key = key
        self._bursts: deque[TokenBurst] = deque()
        self._death: str | None = None
        self._news = asyncio.Event()
        self._sink: Sink | None = None

    def pour(self, sink: Sink) -> None:
        self._sink = sink
        while self._bursts:
            sink(self._bursts.popleft())
        if self._death is not None:
            sink(EngineDead(self._death))

    async def __aiter__(self) -> AsyncIterator[TokenBurst]:
        while True:
            while self._bursts:
                burst = self._bursts.popleft()
                yield burst
                if burst.ended is not None:
                    return
            if self._death is not None:
                raise EngineDead(self._death)
            self._news.clear()
            await self._news.wait()

    def stop(self, keep: int) -> None:
        self._source.stop(self._key, keep)

    def abort(self) -> None:
        self._source.abort(self._key)

    def push(self, burst: TokenBurst) -> None:
        if self._sink is not None:
            self._sink(burst)
            return
        self._bursts.append(burst)
        self._news.set()

    def fail(self, reason: str) -> None:
        if self._sink is not None:
            self._sink(EngineDead(reason))
            return
        self._death = reason
        self._news.set()


def logprobs_of(tokens: Sequence[int], lines: Sequence[LogprobLine] | None) -> Sequence[TokenLogprob]:
    """In arrays: a client that does not read leaves them waiting."""
    if lines is None:
        return ()
    columns = LogprobColumns()
    for token, (value, top) in zip(tokens, lines, strict=True):
        columns.append(token, value, top)
    return columns


def ended_of(end: EndedRequest | ChoiceOutcome) -> StreamEnd:
    """The end of a request, as its stream reports it."""
    return StreamEnd(end.reason, end.bill.cached_tokens, end.bill, end.fault)


def with_history(burst: TokenBurst, ended: StreamEnd, history: ChoiceHistory) -> TokenBurst:
    return replace(burst, ended=replace(ended, history=history))
