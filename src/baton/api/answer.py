"""The streams of one body brought together: read in the order they arrive, ended together.

Everything that can happen to an answer comes through one mailbox: bursts of every choice, the end of a stream by an
error, a cancel by id, the client hanging up. Promises that leaving the context aborts every stream that is not at its
end, whatever the reason for leaving. The mailbox holds at most the tokens of the body's own answers.

A stream is read to its very end even when its answer was over before (a stop string, a cancel): the last burst has the
bill. `billed` and `settled` wait for that; `close` gives up on it.

A cancelled body ends each open choice with the finish reason "abort" and the text so far; it is not an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Self

from baton.api.engine import Burst, EngineDead, TokenStream
from baton.api.reader import ChoiceReader, Delta
from baton.core.request import FinishReason

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's own type: messages are free-form."""


class ClientGone(Exception):
    """The client hung up: there is nobody to answer."""


class ChoiceFailed(Exception):
    """The engine ended one choice by an error of its own; the body may be sent again."""


class _Cancelled:
    """Mailbox item: the client cancelled by id."""


_Item = tuple[int, Burst] | _Cancelled | BaseException


class Answer:
    def __init__(self, readers: Sequence[ChoiceReader]) -> None:
        self.readers = readers
        self._streams: Sequence[TokenStream] = ()
        self._box: asyncio.Queue[_Item] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._hangup: asyncio.Task[None] | None = None
        self._open = len(readers)
        self._error: BaseException | None = None

    def attach(self, streams: Sequence[TokenStream], receive: Receive) -> None:
        """Start reading. Must be followed by the context, and that by `close`."""
        self._streams = streams
        self._pumps = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(streams)]
        self._hangup = asyncio.create_task(_until_disconnect(receive))
        for task in (*self._pumps, self._hangup):
            task.add_done_callback(self._failed)

    def cancel(self) -> None:
        self._box.put_nowait(_Cancelled())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream, reader in zip(self._streams, self.readers, strict=True):
            if reader.finish is None:
                stream.abort()
        if self._hangup is not None:
            self._hangup.cancel()

    @property
    def is_settled(self) -> bool:
        """Nothing more can come: each choice has its bill, or its stream broke."""
        return all(pump.done() for pump in self._pumps)

    async def billed(self) -> None:
        """Inside the context: until the engine has told every bill, or can no longer, or the client hung up."""
        if self._hangup is not None:
            bills = asyncio.gather(*self._pumps, return_exceptions=True)
            await asyncio.wait((bills, self._hangup), return_when=asyncio.FIRST_COMPLETED)

    async def settled(self, limit_s: float) -> None:
        """After the context: the same, with nobody waiting for it but the log."""
        await asyncio.wait(self._pumps, timeout=limit_s)

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        """What has arrived since the last time, at least one delta."""
        deltas: list[Delta] = []
        while not deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            deltas += self._take(await self._box.get())
            while not self._box.empty() and self._error is None:
                deltas += self._take(self._box.get_nowait())
        return deltas

    def _take(self, item: _Item) -> list[Delta]:
        match item:
            case _Cancelled():
                deltas = [reader.cancel() for reader in self.readers if reader.finish is None]
                for delta in deltas:
                    self._streams[delta.index].abort()
                self._open = 0
                return deltas
            case BaseException():
                self._error = item
                return []
            case index, burst:
                return self._read(index, burst)

    def _read(self, index: int, burst: Burst) -> list[Delta]:
        reader = self.readers[index]
        if reader.finish is not None:
            return []  # it ran on after a stop string, or arrived together with the cancel
        delta = reader.read(burst)
        if delta.finish is FinishReason.ERROR:
            self._error = ChoiceFailed(f"choice {index} failed in the engine after {reader.tokens} tokens")
            return []
        if reader.stopped_by_string:
            self._streams[index].stop(keep=reader.tokens)
        if delta.finish is not None:
            self._open -= 1
        return [delta]

    async def _pump(self, index: int, stream: TokenStream) -> None:
        async for burst in stream:
            self._box.put_nowait((index, burst))
            if burst.ended is not None:
                self.readers[index].bill = burst.ended.bill
                return
        if self.readers[index].finish is None:
            raise EngineDead("a stream ended without saying how")

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._box.put_nowait(error)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone
