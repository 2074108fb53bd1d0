"""Access control of the admin paths: where an admin key is set, only its holders see and change the fleet.

Owns the list of those paths: `/v1/instances` and `/dashboard` with everything below, except the page and its static parts,
which contain no data. `/health` and `/ready` answer everybody, but name instances to its holders only. Elsewhere the admin
key is one more API key, so that a dashboard opened with it can also chat. Does not know what the routes do.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.api.auth import OPEN_PATHS as PROBES
from baton.api.auth import authorization_of, bearer, tenant_of
from baton.api.errors import ApiError
from baton.node.dashboard import OPEN_PATHS

GUARDED = ("/v1/instances", "/dashboard")


def is_guarded(path: str) -> bool:
    return path not in OPEN_PATHS and any(path == root or path.startswith(f"{root}/") for root in GUARDED)


class AdminAuth:
    """Answers 401 without a key and 403 with a wrong one, before any route is looked up."""

    def __init__(self, app: ASGIApp, admin_key: str) -> None:
        self._app = app
        self._wanted = tenant_of(admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (is_guarded(scope["path"]) or scope["path"] in PROBES):
            try:
                self._check(authorization_of(Headers(scope=scope)))
            except ApiError as error:
                if scope["path"] not in PROBES:
                    return await error.response()(scope, receive, send)
                scope["state"]["is_trusted"] = False
        return await self._app(scope, receive, send)

    def _check(self, authorization: str | None) -> None:
        """Compares hashes of equal length in constant time."""
        if hmac.compare_digest(tenant_of(bearer(authorization, "this router's admin key")), self._wanted):
            return
        # The header tells the dashboard that it may ask for another key.
        headers = {"WWW-Authenticate": 'Bearer error="insufficient_scope"'}
        message = "This key may not see or change the fleet; that needs the router's admin key (its --admin-key)"
        raise ApiError(403, message, "permission_error", code="admin_key_needed", headers=headers)
