"""The outermost middleware: every response has an X-Request-Id, every request is counted, who is denied is logged, and where
traces are made, a request that generates has one.

A client's own id is used if it is valid (1 to 128 letters, digits, `.`, `_`, `-`), else a new one is made. Routes that
generate text refuse an invalid id, since the client could not cancel by it.
"""

from __future__ import annotations

import uuid
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.errors import invalid
from baton.api.logs import DenialLog
from baton.api.metrics import Metrics
from baton.api.open_requests import is_sane_id
from baton.api.submissions import RequestOwner
from baton.api.tracing.request_trace import RequestTrace
from baton.api.tracing.request_tracing import RequestTracing
from baton.api.tracing.trace_context import HEADER as TRACE_HEADER

HEADER = "X-Request-Id"
TRACE = "trace"
"""Name in the scope's state."""


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: RequestTracing | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._denials = DenialLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(HEADER)
        sane = given is not None and is_sane_id(given)
        scope.setdefault("state", {})["request_id"] = given if sane else uuid.uuid4().hex
        status = 500
        trace = self._begin_trace(scope)

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Read only now: an inner middleware may have replaced the id with that of a resumed request.
                MutableHeaders(scope=message)[HEADER] = scope["state"]["request_id"]
                if trace is not None:
                    MutableHeaders(scope=message)[TRACE_HEADER] = trace.context.header
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        finally:
            self._metrics.count_http(scope["method"], _path_label(scope), status)
            if status in DenialLog.STATUSES:
                self._denials.log(scope["state"]["request_id"], scope["path"], status, client_of(scope))
            if trace is not None and self._tracing is not None:
                trace.request_id = trace.request_id or scope["state"]["request_id"]
                self._tracing.ended(trace, status)

    def _begin_trace(self, scope: Scope) -> RequestTrace | None:
        if self._tracing is None:
            return None
        trace = self._tracing.begin(scope["method"], scope["path"], Headers(scope=scope))
        scope["state"][TRACE] = trace
        return trace


def client_of(scope: Scope) -> str:
    """The sender's address; a proxy may have passed on what is none."""
    try:
        return str(ip_address((scope.get("client") or ("",))[0]))
    except ValueError:
        return "unknown"


def _path_label(scope: Scope) -> str:
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "other"


def owner_of(request: Request) -> RequestOwner:
    """The tenant and request id of a request; raises a 400 when the client's id is invalid."""
    given = request.headers.get(HEADER)
    if given is not None and not is_sane_id(given):
        raise invalid(HEADER, f"{HEADER} must be 1 to 128 letters, digits, '.', '_' or '-'")
    return RequestOwner(request.state.tenant, request.state.request_id)


def trace_of(request: Request) -> RequestTrace | None:
    """The trace of a request; None where none is made."""
    trace = request.scope.get("state", {}).get(TRACE)
    return trace if isinstance(trace, RequestTrace) else None
