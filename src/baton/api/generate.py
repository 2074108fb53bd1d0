"""Generation: submits a prepared request as one group and sends the response, whole or as server-sent events.

A refusal or a dead engine before the first byte is an error status. After it, a stream gets one `error` event with the same
object and ends without `[DONE]`, so that a broken answer never looks complete. A disconnect aborts every choice. Every
accepted request gets one line in the access log, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.api.choice_streams import ChoiceFailed, ChoiceStreams, ClientGone, ConstraintFailed, EndedStream, NoInstanceLeft
from baton.api.choice_streams import Receive as ReceiveMessage
from baton.api.engine import Engine, EngineDead, Gauges, TokenStream
from baton.api.errors import ApiError, engine_dead, no_instance_left, refused
from baton.api.logs import FinishedRequest, access
from baton.api.metrics import AnswerTimes, Metrics
from baton.api.open_requests import OpenRequests
from baton.api.prepare import PreparedRequest
from baton.api.request_costs import RequestCosts, cost_of
from baton.api.responses import Event, WholeChoice, bill_fields, bill_of, places_of, usage_of
from baton.api.slot_shares import NO_PLACE, SlotPlace, SlotShares
from baton.api.stream_resume import (
    CutStream,
    EventWriter,
    NumberedEvents,
    PlainEvents,
    StreamPositions,
    UnclaimedRequests,
    fresh_marks,
)
from baton.api.text_reader import TextDelta
from baton.api.tracing.request_trace import AnswerFacts, RequestTrace
from baton.api.tracing.request_tracing import RequestTracing
from baton.api.whole_answer import WholeAnswer, next_part
from baton.core.engine.request import FinishReason
from baton.core.errors import Refused

CLIENT_CLOSED = 499
"""Status in the access log and the metrics when the client disconnected; never sent."""
CLIENT_LEFT = "client_closed"
"""The same as the error of a span."""
Constrain = Callable[[PreparedRequest], Awaitable[PreparedRequest]]
"""Gives a request its compiled constraint, if it asks for one. Raises ApiError."""
LATE_BILL_S = 60.0
"""Seconds that access log and metrics wait for the bill of an answer that ended before the engine reported it."""


class GenerationService:
    """Submits requests, tracks the open ones and writes their access log lines."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        costs: RequestCosts,
        shares: SlotShares,
        tracing: RequestTracing | None = None,
    ) -> None:
        self.open = OpenRequests()
        self._tracing = tracing
        self._engine = engine
        self._metrics = metrics
        self._costs = costs
        self._shares = shares
        self._turns = asyncio.Lock()
        """Held while a piece of a large answer is encoded."""
        self._late: dict[asyncio.Task[None], None] = {}
        """Tasks that wait for a bill, for metrics and access log; kept here since asyncio references tasks weakly."""

    async def accept(
        self,
        prepared: PreparedRequest,
        receive: ReceiveMessage,
        constrain: Constrain,
        trace: RequestTrace | None = None,
    ) -> GenerationRun:
        """Submit the request, once `constrain` has added its constraint. Raises ApiError when it is not accepted.

        Its id is taken before, so that a cancel or a disconnect ends that wait too.
        """
        carries, place = self._engine.info.carries, _PlaceHolder()
        answer = ChoiceStreams(prepared.readers, carries or not prepared.writer.is_numbered, place.end_choice)
        cost = self._open_cost(prepared, self._costs.open)
        with closed_on_error(cost), closed_on_error(place):
            self.open.claim(prepared.asker, answer)
            with self.open.released_on_error(prepared.asker), _as_api_error(prepared):
                submitting = _submitted(self._engine, self._shares, prepared, place, constrain)
                answer.attach(await answer.submitted(submitting, receive))
        marks = fresh_marks(len(prepared.readers)) if carries else None
        lengths = [len(ids) for ids in prepared.prompt_ids]
        times = AnswerTimes(self._metrics, prepared.arrived_s, lengths, len(prepared.readers))
        self._metrics.observe_asked(prepared.group, prepared.n)
        return GenerationRun(prepared, answer, times, marks, self._ended, cost, place, self._traced(trace))

    async def resume(
        self,
        prepared: PreparedRequest,
        marks: StreamPositions,
        unclaimed: UnclaimedRequests,
        receive: ReceiveMessage,
        trace: RequestTrace | None = None,
    ) -> GenerationRun:
        """Resume an unclaimed request after the last event that its client received. It was accepted before: no limit of
        a key refuses it."""
        self.open.check_unread(prepared.asker)
        answer = ChoiceStreams(prepared.readers, carried=True)
        cost = self._open_cost(prepared, self._costs.resume)
        with closed_on_error(cost):
            self.open.claim(prepared.asker, answer)
            with self.open.released_on_error(prepared.asker), _as_api_error(prepared):
                answer.attach(await answer.submitted(_claimed(prepared, marks, unclaimed), receive))
        times = AnswerTimes(self._metrics, prepared.arrived_s, (), len(prepared.readers))
        return GenerationRun(prepared, answer, times, marks, self._ended, cost, _PlaceHolder(), self._traced(trace))

    def _traced(self, trace: RequestTrace | None) -> RequestTrace | None:
        """The run holds its trace until `_report`."""
        if trace is not None:
            trace.holders += 1
        return trace

    def _open_cost(self, prepared: PreparedRequest, count: Callable[[str, int], None]) -> OpenCost:
        units = cost_of(prepared.group, self._engine.info, prepared.prompt_units)
        count(prepared.asker.tenant, units)
        return OpenCost(self._costs, prepared.asker.tenant, units)

    async def respond(self, run: GenerationRun) -> Response:
        return EventStream(run, self._turns) if run.prepared.stream else await whole(run, self._turns)

    def _ended(self, run: GenerationRun, status: int) -> None:
        self.open.release(run.prepared.asker)
        is_told = run.trace is not None or access.isEnabledFor(logging.INFO)
        finished = run.finished(status, self._engine.gauges) if is_told else None
        if run.trace is not None and self._tracing is not None:
            run.trace.ended_us = self._tracing.now_us()
        if run.answer.is_settled:
            self._report(finished, run)
            return
        # Cut by a stop string or by its client: the engine reports the bill a step later. The client does not wait for it.
        task = asyncio.create_task(self._report_late(finished, run))
        self._late[task] = None
        task.add_done_callback(self._late.pop)

    async def _report_late(self, finished: FinishedRequest | None, run: GenerationRun) -> None:
        await run.answer.settled(LATE_BILL_S)
        run.answer.close()
        self._report(finished, run)

    def _report(self, finished: FinishedRequest | None, run: GenerationRun) -> None:
        readers = run.prepared.readers
        for reader in readers:
            if reader.bill is not None:
                self._metrics.observe_bill(reader.bill)
        if finished is None:
            return
        bill = bill_of(readers)
        finished.log(bill, places_of(readers))
        if run.trace is None or self._tracing is None:
            return
        run.trace.answer = AnswerFacts(
            finishes=finished.finishes,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
            bill=bill,
            bills=[reader.bill for reader in readers],
            histories=[reader.history for reader in readers],
        )
        self._tracing.release(run.trace)


class OpenCost:
    """The units that an answer has open, until it is sent."""

    def __init__(self, costs: RequestCosts, tenant: str, units: int) -> None:
        self._costs = costs
        self._tenant = tenant
        self._units = units

    def close(self) -> None:
        """Idempotent."""
        units, self._units = self._units, 0
        if units:
            self._costs.close(self._tenant, units)


class _PlaceHolder:
    """The place of a request that may still wait for one."""

    def __init__(self) -> None:
        self.place: SlotPlace = NO_PLACE

    def end_choice(self) -> None:
        self.place.end_choice()

    def close(self) -> None:
        self.place.close()


@contextmanager
def closed_on_error(opened: OpenCost | _PlaceHolder) -> Iterator[None]:
    """Close it when the block raises; keep it open otherwise."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            opened.close()


async def _submitted(
    engine: Engine, shares: SlotShares, prepared: PreparedRequest, holder: _PlaceHolder, constrain: Constrain
) -> list[TokenStream]:
    """The streams of all choices. Of a continued answer, those that are complete already are not submitted."""
    prepared = await constrain(prepared)
    over = prepared.over
    holder.place = await shares.enter(prepared.asker.tenant, len(prepared.group))
    running = iter(await engine.submit(prepared.group, prepared.origin) if prepared.group else ())
    return [EndedStream(over[i]) if i in over else next(running) for i in range(len(prepared.readers))]


async def _claimed(prepared: PreparedRequest, marks: StreamPositions, unclaimed: UnclaimedRequests) -> list[TokenStream]:
    streams = unclaimed.claim(prepared.asker, prepared.group)
    return [CutStream(stream, mark) for stream, mark in zip(streams, marks.choices, strict=True)]


class GenerationRun:
    """One answer in progress. With `marks`, events have ids, and events that the client already has are skipped."""

    def __init__(
        self,
        prepared: PreparedRequest,
        answer: ChoiceStreams,
        times: AnswerTimes,
        marks: StreamPositions | None,
        ended: Callable[[GenerationRun, int], None],
        cost: OpenCost,
        place: _PlaceHolder,
        trace: RequestTrace | None = None,
    ) -> None:
        self.prepared = prepared
        self.trace = trace
        self.answer = answer
        self.times = times
        self._marks = marks
        self._ended = ended
        self.cost = cost
        """Closed when the answer is sent, or fails."""
        self._place = place

    def events(self) -> EventWriter:
        writer = self.prepared.writer
        if self._marks is None or not writer.is_numbered:
            return PlainEvents(writer)
        return NumberedEvents(writer, self._marks)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[ChoiceStreams]:
        """On exit, for any reason, the request id is released and open streams are aborted."""
        cut_short, status = FinishReason.ERROR, 500
        try:
            with _as_api_error(self.prepared):
                async with self.answer:
                    yield self.answer
                    if self.prepared.baton_usage:
                        await self.answer.billed()
            status = 200
        except (ClientGone, asyncio.CancelledError):
            cut_short, status = FinishReason.ABORT, CLIENT_CLOSED
            self._failed(CLIENT_LEFT, status)
            raise
        except ApiError as error:
            status = error.status
            self._failed(error.code or error.type, status)
            raise
        finally:
            self.times.close(cut_short)
            self._place.close()
            if self.prepared.stream or status != 200:
                self.cost.close()
            self._ended(self, status)

    def _failed(self, error: str, status: int) -> None:
        if self.trace is not None:
            self.trace.fail(error, status)

    def usage(self) -> dict[str, object]:
        usage = usage_of(self.prepared.prompt_ids, self.prepared.readers)
        return usage | {"baton": bill_fields(bill_of(self.prepared.readers))} if self.prepared.baton_usage else usage

    def finished(self, status: int, gauges: Gauges) -> FinishedRequest:
        prepared, readers = self.prepared, self.prepared.readers
        return FinishedRequest(
            request_id=prepared.asker.request_id,
            path=prepared.origin.path,
            status=status,
            tenant=prepared.asker.tenant,
            client=prepared.client,
            finishes=[reader.finish.value if reader.finish else "cut" for reader in readers],
            prompt_tokens=sum(len(ids) for ids in prepared.prompt_ids),
            completion_tokens=sum(reader.tokens for reader in readers),
            cached_tokens=sum(reader.cached_tokens for reader in readers[:: prepared.n]),
            gauges=gauges,
            trace_id="" if self.trace is None else self.trace.context.trace_id,
        )


@contextmanager
def _as_api_error(prepared: PreparedRequest) -> Iterator[None]:
    """Translate engine errors into ApiError."""
    try:
        yield
    except EngineDead as death:
        raise engine_dead(str(death)) from None
    except Refused as refusal:
        raise refused(refusal.refusal, prepared.prompt_field) from None
    except NoInstanceLeft as failure:
        raise no_instance_left(failure.fault, failure.token_ids if prepared.return_token_ids else None) from None
    except ConstraintFailed as failure:
        details = {"retryable": False}
        # The request's own doing, and not a 5xx: clients would send those again.
        raise ApiError(422, str(failure), "invalid_request_error", code="constraint_failed", details=details) from None
    except ChoiceFailed as failure:
        raise ApiError(503, f"{failure}; try again", "server_error", code="request_failed") from None


async def whole(run: GenerationRun, turns: asyncio.Lock) -> Response:
    # Empty unless it is continued.
    choices = [WholeChoice(tokens=array("i", reader.token_ids)) for reader in run.prepared.readers]
    async with run.reading() as answer:
        async for deltas in answer:
            for delta in deltas:
                run.times.seen(delta)
                choices[delta.index].add(delta)
    return WholeAnswer(run.prepared.writer.whole(choices, run.usage()), turns, run.cost.close)


class EventStream(Response):
    """A stream of server-sent events; all deltas that have arrived go out in one write, but for events that repeat a long
    prompt, which are sent while they are encoded."""

    media_type = "text/event-stream"

    def __init__(self, run: GenerationRun, turns: asyncio.Lock) -> None:
        """`turns` is shared by all answers."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._run = run
        self._as_events = run.events()
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with self._run.reading() as answer:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for deltas in answer:
                    async for events in self._written(self._events(deltas)):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            last = self._end()
        except ApiError as error:
            last = self._run.prepared.writer.error_event(error)
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _written(self, events: Sequence[Event]) -> AsyncIterator[bytes]:
        """One write, or several where an event is large. Raises ClientGone rather than encode on for nobody."""
        ready: list[bytes] = []
        for event in events:
            if isinstance(event, bytes):
                ready.append(event)
                continue
            is_last = False
            while not is_last:
                part, is_last = await next_part(event.pieces, self._turns)
                ready.append(part)
                if not is_last:
                    yield b"".join(ready)
                    ready.clear()
                    if self._run.answer.is_abandoned:
                        raise ClientGone
        if written := b"".join(ready):
            yield written

    def _events(self, deltas: Sequence[TextDelta]) -> list[Event]:
        times, events = self._run.times, self._as_events
        for delta in deltas:
            if events.has(delta):
                times.passed(delta)
            else:
                times.seen(delta)
        return [events.of(delta) for delta in deltas]

    def _end(self) -> bytes:
        prepared = self._run.prepared
        return (self._as_events.usage(self._run.usage()) if prepared.include_usage else b"") + prepared.writer.done
