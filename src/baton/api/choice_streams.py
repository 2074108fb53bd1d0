"""Merges the token streams of all choices of one request, in order of arrival.

All events of a response come through one mailbox: bursts of every choice, an error that ends a stream, a cancel by id, a
disconnect of the client. Leaving the context aborts every stream that has not ended, for any reason of leaving. The mailbox
holds at most the tokens of the request's own choices, however slowly the client reads.

A stream is read to its end even when its choice ended before (stop string, cancel), since the last burst has the bill.
`billed` and `settled` wait for that; `close` gives up on it.

A cancelled request ends each open choice with the finish reason "abort" and the text so far; it is not an error. A cancel
or a disconnect also ends the wait for an engine that has not accepted the request yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from functools import partial
from typing import Any, Self

from baton.api.engine import Sink, StreamEnd, TokenBurst, TokenStream
from baton.api.text_reader import ChoiceReader, TextDelta
from baton.core.engine.request import FinishReason
from baton.core.handover.faults import PdFault

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's receive callable."""
DELTAS_MAX = 128
"""Deltas that are made into one write; with log-probabilities that takes a few milliseconds."""


class ClientGone(Exception):
    """The client disconnected."""


class ChoiceFailed(Exception):
    """The engine ended a choice with an internal error; the client may retry."""


class ConstraintFailed(Exception):
    """No token could follow that the constraint of a choice permits. It would be the same if it were tried again."""


class NoInstanceLeft(Exception):
    """A router found no instance that could finish a choice."""

    def __init__(self, fault: PdFault, token_ids: list[list[int]]) -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.token_ids = token_ids
        """All generated token ids, by choice."""


class _Cancelled:
    """Mailbox item: the client cancelled by id."""


class EndedStream:
    """The stream of a choice that no engine has: it is complete already, or was cancelled before an engine accepted it."""

    def __init__(self, reason: FinishReason) -> None:
        self._reason = reason

    def pour(self, sink: Sink) -> None:
        sink(TokenBurst((), (), StreamEnd(self._reason, 0)))

    def stop(self, keep: int) -> None:
        pass

    def abort(self) -> None:
        pass


_Item = tuple[int, TokenBurst] | _Cancelled | BaseException


class ChoiceStreams:
    def __init__(
        self, readers: Sequence[ChoiceReader], carried: bool = False, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """`carried`: the engine is a router; an early end (RESCHEDULE) is then an error, since every instance was tried.
        `on_end` is called whenever the stream of a choice has ended, whether or not anybody reads it."""
        self.readers = readers
        self._carried = carried
        self._on_end = on_end
        self._streams: Sequence[TokenStream] = ()
        self._box: deque[_Item] = deque()
        self._waiting: asyncio.Future[None] | None = None
        """Set while `__anext__` waits for an item."""
        self._unsettled = len(readers)
        """Streams that have not ended yet."""
        self._settled = asyncio.Event()
        self._hangup: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        """Set when the client disconnected or cancelled."""
        self._open = len(readers)
        self._error: BaseException | None = None

    async def submitted(
        self, submitting: Coroutine[object, object, list[TokenStream]], receive: Receive
    ) -> Sequence[TokenStream]:
        """Wait until the engine has accepted the request, or the client leaves. Call `attach` next."""
        self._hangup = asyncio.create_task(_until_disconnect(receive))
        self._hangup.add_done_callback(self._failed)
        asked, over = asyncio.ensure_future(submitting), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((asked, over), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            if self._hangup.done():
                raise ClientGone
            return [EndedStream(FinishReason.ABORT) for _ in self.readers]
        except BaseException:
            self._hangup.cancel()
            _abandon(asked)
            raise
        finally:
            over.cancel()
            asked.cancel()

    def attach(self, streams: Sequence[TokenStream]) -> None:
        """Start reading the streams. Enter the context next, and call `close` at the end."""
        self._streams = streams
        for index, stream in enumerate(streams):
            stream.pour(partial(self._heard, index))

    def cancel(self) -> None:
        self._put(_Cancelled())
        self._over.set()

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
        """Every choice has its bill or its stream broke."""
        return not self._unsettled

    @property
    def is_abandoned(self) -> bool:
        """The client disconnected."""
        return self._hangup is not None and self._hangup.done()

    async def billed(self) -> None:
        """Wait inside the context until every bill has arrived, cannot arrive any more, or the client disconnected."""
        if self._hangup is not None:
            bills = asyncio.ensure_future(self._settled.wait())
            await asyncio.wait((bills, self._hangup), return_when=asyncio.FIRST_COMPLETED)
            bills.cancel()

    async def settled(self, limit_s: float) -> None:
        """The same after the context; only the access log waits for it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), limit_s)

    def close(self) -> None:
        self._unsettled = 0
        self._box.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        """The deltas since the last call, at least one; of many, those of the first DELTAS_MAX items."""
        deltas: list[TextDelta] = []
        while not deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            if not self._box:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            # An error after a complete answer is ignored.
            while self._box and self._open and self._error is None and len(deltas) < DELTAS_MAX:
                deltas += self._take(self._box.popleft())
        if len(deltas) >= DELTAS_MAX:
            await asyncio.sleep(0)  # a slow client left many behind: others have a turn before the next of them
        return deltas

    def _put(self, item: _Item) -> None:
        self._box.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _take(self, item: _Item) -> list[TextDelta]:
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

    def _read(self, index: int, burst: TokenBurst) -> list[TextDelta]:
        reader = self.readers[index]
        if reader.finish is not None:
            return []  # tokens after a stop string or a cancel are dropped
        if reader.read_prompt(burst):
            return []
        if burst.tokens and reader.lacks_prompt:
            self._error = ChoiceFailed(f"the log-probabilities of the prompt of choice {index} were lost with an instance")
            return []
        delta = reader.read(burst)
        if delta.rescheduled is not None and self._carried:
            self._error = NoInstanceLeft(delta.rescheduled.fault, [one.token_ids for one in self.readers])
            return []
        if delta.finish is FinishReason.CONSTRAINT_FAILED:
            self._error = ConstraintFailed(
                f"choice {index} could not be made to match its constraint after {reader.tokens} tokens"
            )
            return []
        if delta.finish is FinishReason.ERROR:
            self._error = ChoiceFailed(f"choice {index} failed in the engine after {reader.tokens} tokens")
            return []
        if reader.stopped_by_string:
            self._streams[index].stop(keep=reader.tokens)
        if delta.finish is not None:
            self._open -= 1
        return [delta]

    def _heard(self, index: int, news: TokenBurst | Exception) -> None:
        if not self._unsettled:
            return  # already closed
        if isinstance(news, Exception):
            self._put(news)
        else:
            self._put((index, news))
            if news.ended is None:
                return
            reader, end = self.readers[index], news.ended
            reader.bill, reader.places, reader.history = end.bill, end.places, end.history
        self._unsettled -= 1
        self._on_end()
        if not self._unsettled:
            self._settled.set()

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._put(error)
            self._over.set()


def _abandon(asked: asyncio.Future[list[TokenStream]]) -> None:
    """Abort streams that were accepted at the moment the client left."""
    if asked.done() and not asked.cancelled() and asked.exception() is None:
        for stream in asked.result():
            stream.abort()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone
