"""Closes the HTTP port of an instance without API keys of its own to work that the keys of its router protect.

Whoever reaches that port could otherwise generate past the router: without a key, outside every limit and bill. Refused are
the paths that compute something for the caller. `/health`, `/ready`, `/metrics` and the list of models remain, and so do
requests with a proof of the cluster key, which the route itself checks.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.api.errors import ApiError
from baton.api.paths import CHAT_PATH, COMPLETION_PATH, COUNT_TOKENS_PATH, GENERATING_PATHS

PROVABLE_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH})
"""Their routes check the proof of the cluster key."""
CLOSED_PATHS = frozenset({*GENERATING_PATHS, COUNT_TOKENS_PATH, "/tokenize", "/detokenize"})


def closed_port_error(router: str, router_is_keyed: bool | None) -> ApiError | None:
    """What an instance without keys answers; None: it serves. `router_is_keyed`: None before the router has said so."""
    if router_is_keyed is None:
        message = f"This instance serves the router at {router}, which has not said yet whether its clients need an API key"
        return ApiError(503, message, "service_unavailable_error", code="router_not_reached", headers={"Retry-After": "1"})
    if not router_is_keyed:
        return None
    message = (
        f"This instance serves the router at {router}, whose clients need an API key, and has no key of its own: "
        "send the request to the router, or start the instance with API keys"
    )
    return ApiError(403, message, "permission_error", code="router_only")


class RouterOnlyMiddleware:
    def __init__(self, app: ASGIApp, error: Callable[[], ApiError | None], proof_header: str) -> None:
        """`error` is asked at each request: a router may be restarted with keys, or without."""
        self._app = app
        self._error = error
        self._proof_header = proof_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in CLOSED_PATHS:
            proves = scope["path"] in PROVABLE_PATHS and self._proof_header in Headers(scope=scope)
            if not proves and (error := self._error()) is not None:
                return await error.response(scope["path"])(scope, receive, send)
        return await self._app(scope, receive, send)
