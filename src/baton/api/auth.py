"""Who is calling: API keys, and the tenant that follows from them.

A tenant is a hash of its key ("" where no key is set): it names what a caller may cancel and salts the KV cache.
`/health` and `/ready` stay open for probes; everything else needs a key once one is set, `/metrics` too, since it shows
what other tenants do.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import blake2b

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.api.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})


def tenant_of(key: str) -> str:
    return blake2b(key.encode(), digest_size=16, person=b"baton-tenant").hexdigest()


class Keys:
    def __init__(self, keys: Sequence[str]) -> None:
        self._tenants = [tenant_of(key) for key in keys]

    def tenant(self, authorization: str | None) -> str:
        """The caller's tenant; raises a 401. Every key is compared, in constant time, over hashes of equal length."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("Send an API key as 'Authorization: Bearer <key>'")
        given = tenant_of(key.strip())
        matches = [hmac.compare_digest(given, tenant) for tenant in self._tenants]
        if not any(matches):
            raise _unauthorized("This API key is not known here")
        return given


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class Auth:
    """Puts `tenant` into the request's state, or answers 401 before any route is looked up."""

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                open_path = scope["path"] in self._open_paths
                tenant = "" if open_path else self._keys.tenant(Headers(scope=scope).get("authorization"))
            except ApiError as error:
                return await error.response()(scope, receive, send)
            scope.setdefault("state", {})["tenant"] = tenant
        return await self._app(scope, receive, send)
