"""Traces of the requests of one server: begins the server span of each, and hands it on when everything is known of it.

    begin ─▶ asked ─▶ submitted ─▶ answered ─▶ the last part of the server releases it ─▶ RIPE_S ─▶ sink

Nothing is built while a request runs, and no span on the event loop: the sink builds them elsewhere. The pause at the end is
for notes of instances, which come with their next heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.datastructures import Headers

from baton.api.paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH
from baton.api.tracing.request_trace import FinishedTrace, RequestTrace
from baton.api.tracing.spans import new_span_id, new_trace_id
from baton.api.tracing.trace_context import HEADER, TraceContext, is_sampled, parse_carried, parse_traceparent

RIPE_S = 0.5
"""More than two heartbeats of an instance."""
TRACED_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH})
RESUMED = "/v1/requests/", "/stream"
"""Beginning and end of the path by which a stream is resumed."""


class TraceSink(Protocol):
    def put(self, finished: FinishedTrace) -> None:
        """Take a trace, or drop it; never waits."""


def clock_us() -> int:
    return time.monotonic_ns() // 1000


class RequestTracing:
    def __init__(self, sink: TraceSink, ratio: float = 1.0, now_us: Callable[[], int] = clock_us) -> None:
        """`ratio`: share of the traces that begin here which are kept."""
        self._sink = sink
        self._ratio = ratio
        self.now_us = now_us
        self._ripening: dict[RequestTrace, asyncio.TimerHandle] = {}

    def begin(self, method: str, path: str, headers: Headers) -> RequestTrace | None:
        """None for a path without traces."""
        is_resumed = path.startswith(RESUMED[0]) and path.endswith(RESUMED[1])
        if not (is_resumed or (path in TRACED_PATHS and method == "POST")):
            return None
        path = "/v1/requests/{id}/stream" if is_resumed else path
        return self._begun(method, path, parse_traceparent(headers.getlist(HEADER)))

    def _begun(self, method: str, path: str, parent: TraceContext | None) -> RequestTrace:
        if parent is not None:
            context, parent_id = TraceContext(parent.trace_id, new_span_id(), parent.sampled), parent.span_id
        else:
            trace_id = new_trace_id()
            context, parent_id = TraceContext(trace_id, new_span_id(), is_sampled(trace_id, self._ratio)), ""
        return RequestTrace(context, parent_id, method, path, self.now_us())

    def submitted(self, trace: RequestTrace | None) -> None:
        """An engine has it from now on."""
        if trace is not None:
            trace.submitted_us = self.now_us()

    def join(self, trace: RequestTrace | None, carried: str) -> None:
        """The request resumes the one that carried this, which may be nothing."""
        found = parse_carried(carried)
        if trace is not None and found is not None:
            trace.join(found)

    def ended(self, trace: RequestTrace, status: int) -> None:
        """The response was sent, or given up."""
        trace.status = trace.status or status
        trace.ended_us = max(trace.ended_us, self.now_us())
        self.release(trace)

    def release(self, trace: RequestTrace) -> None:
        """A part of the server has added what it knows; after the last, the trace ripens."""
        trace.holders -= 1
        if trace.holders == 0 and trace.context.sampled:
            self._ripening[trace] = asyncio.get_running_loop().call_later(RIPE_S, self._finish, trace)

    def flush(self) -> None:
        """Hand on what ripens still: the server stops."""
        for trace, timer in list(self._ripening.items()):
            timer.cancel()
            self._finish(trace)

    def _finish(self, trace: RequestTrace) -> None:
        del self._ripening[trace]
        histories = () if trace.answer is None else trace.answer.histories
        notes = tuple(() if history is None else history.stage_notes() for history in histories)
        offset_us = time.time_ns() // 1000 - clock_us()
        self._sink.put(FinishedTrace(trace, notes, offset_us))
