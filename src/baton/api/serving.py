"""Answering: a prepared body is submitted as one group and its answer sent, whole or as server-sent events.

A refusal or a dead engine before the first byte is an error status. After it, a stream gets one `error` event in the
same shape and closes without `[DONE]`: a broken answer never looks like a whole one. A client that hangs up aborts
every choice of its body.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.api.answer import Answer, ChoiceFailed, ClientGone
from baton.api.answer import Receive as ReceiveMessage
from baton.api.engine import Engine, EngineDead
from baton.api.errors import ApiError, engine_dead, refused
from baton.api.metrics import AnswerTimes, Metrics
from baton.api.preparing import Prepared
from baton.api.reader import Delta
from baton.api.registry import OpenRequests
from baton.api.writing import DONE, Choice, sse, usage_of
from baton.core.errors import Refused
from baton.core.request import FinishReason

logger = logging.getLogger("baton.api")


class Server:
    """Owns the open requests of one engine."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.open = OpenRequests()
        self._engine = engine
        self._metrics = metrics

    async def answer(self, prepared: Prepared, receive: ReceiveMessage) -> Response:
        answer = Answer(prepared.readers)
        self.open.claim(prepared.asker, answer)
        with self.open.released_on_error(prepared.asker):
            try:
                streams = await self._engine.submit(prepared.group)
            except Refused as refusal:
                raise refused(refusal.refusal, prepared.prompt_field) from None
            except EngineDead as death:
                raise engine_dead(str(death)) from None
            answer.attach(streams, receive)
        lengths = [len(ids) for ids in prepared.prompt_ids]
        times = AnswerTimes(self._metrics, prepared.arrived_s, lengths, len(prepared.group))
        run = Run(prepared, answer, times, self._ended)
        return EventStream(run) if prepared.stream else await whole(run)

    def _ended(self, prepared: Prepared) -> None:
        self.open.release(prepared.asker)
        gauges = self._engine.gauges
        logger.info(
            "%s ended: %s, prompt %d, output %d tokens; running %d, waiting %d, free %d, evictable %d, ratio %.3f",
            prepared.asker.request_id,
            ",".join(reader.finish.value if reader.finish else "cut" for reader in prepared.readers),
            sum(len(ids) for ids in prepared.prompt_ids),
            sum(reader.tokens for reader in prepared.readers),
            gauges.running,
            gauges.waiting,
            gauges.blocks.get("free", 0),
            gauges.blocks.get("evictable", 0),
            gauges.reserve_ratio,
        )


class Run:
    """One answer under way."""

    def __init__(self, prepared: Prepared, answer: Answer, times: AnswerTimes, ended: Callable[[Prepared], None]) -> None:
        self.prepared = prepared
        self.times = times
        self._answer = answer
        self._ended = ended

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Answer]:
        """However it is left, the id is free again and nothing of it stays in the engine."""
        cut_short = FinishReason.ERROR
        try:
            async with self._answer:
                yield self._answer
        except ClientGone:
            cut_short = FinishReason.ABORT
            raise
        except EngineDead as death:
            raise engine_dead(str(death)) from None
        except Refused as refusal:
            raise refused(refusal.refusal, self.prepared.prompt_field) from None
        except ChoiceFailed as failure:
            raise ApiError(503, f"{failure}; try again", "server_error", code="request_failed") from None
        finally:
            self.times.close(cut_short)
            self._ended(self.prepared)

    def usage(self) -> dict[str, object]:
        return usage_of(self.prepared.prompt_ids, self.prepared.readers)


async def whole(run: Run) -> Response:
    choices = [Choice() for _ in run.prepared.readers]
    async with run.reading() as answer:
        async for deltas in answer:
            for delta in deltas:
                run.times.seen(delta)
                choices[delta.index].add(delta)
    return Response(run.prepared.writer.whole(choices, run.usage()), media_type="application/json")


class EventStream(Response):
    """Server-sent events, sent as they are made: all that has arrived goes out in one write."""

    media_type = "text/event-stream"

    def __init__(self, run: Run) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._run.reading() as answer:
                async for deltas in answer:
                    if events := self._events(deltas):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            last = self._end()
        except ApiError as error:
            last = sse(error.body())
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _events(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._run.times.seen(delta)
        return b"".join([self._run.prepared.writer.event(delta) for delta in deltas])

    def _end(self) -> bytes:
        prepared = self._run.prepared
        return (prepared.writer.usage_event(self._run.usage()) if prepared.include_usage else b"") + DONE
