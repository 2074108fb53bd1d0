"""API keys and the tenant derived from each.

A tenant is a hash of its key, or "" when no key is configured. A tenant can cancel only its own requests, and its KV cache
is salted. Keys configured as `GROUP:KEY` share KV within the group, and nothing else; `:KEY` has no group and may contain
colons. `/` and `/ping` need no key; nor do `/health` and `/ready`, which tell its holders more; all other paths need one
once a key is configured, `/metrics` too, since it shows the load of other tenants. Once a metrics key or an admin key is
configured, `/metrics` needs one of these, and no API key opens it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.api.errors import ApiError

ABOUT_PATH = "/"
METRICS_PATH = "/metrics"
OPEN_PATHS = frozenset({ABOUT_PATH, "/ping", "/health", "/ready"})
_GROUP = re.compile(r"[A-Za-z0-9_.-]{0,64}")


def tenant_of(key: str) -> str:
    return blake2b(key.encode(), digest_size=16, person=b"baton-tenant").hexdigest()


def secret_of(key: str) -> str:
    """The part of a configured key that callers send."""
    return _split(key)[1]


def kv_owners(keys: Sequence[str]) -> Mapping[str, str]:
    """Tenant → group, for tenants that share KV within a group. A group name never equals a tenant."""
    return {tenant_of(secret): f"group:{group}" for group, secret in map(_split, keys) if group}


def why_not_keys(keys: Sequence[str]) -> str | None:
    """Why the configured keys are invalid; None when they are valid."""
    if not all(secret_of(key) for key in keys):
        return "an API key is empty: anybody could present it"
    if not all(_GROUP.fullmatch(_split(key)[0]) for key in keys):
        return "of an API key with a colon, what is before it names a group, in letters, digits, '.', '_' and '-'"
    if len({secret_of(key) for key in keys}) < len(set(keys)):
        return "an API key is in two groups"
    return None


def _split(key: str) -> tuple[str, str]:
    """(group or "", secret)."""
    group, colon, secret = key.partition(":")
    return (group, secret) if colon else ("", key)


class ApiKeys:
    def __init__(self, keys: Sequence[str]) -> None:
        """Keys as configured: `KEY`, `GROUP:KEY` or `:KEY`."""
        self._tenants = [tenant_of(secret_of(key)) for key in keys]

    def is_known(self, authorization: str | None) -> bool:
        """Whether the caller holds a key; everybody does where none is configured."""
        try:
            self.tenant(authorization)
        except ApiError:
            return False
        return True

    def tenant(self, authorization: str | None) -> str:
        """The caller's tenant; raises a 401. Every key is compared, in constant time, over hashes of equal length."""
        if not self._tenants:
            return ""
        given = tenant_of(bearer(authorization, "an API key"))
        matches = [hmac.compare_digest(given, tenant) for tenant in self._tenants]
        if not any(matches):
            raise _unauthorized("This API key is not known here")
        return given


def bearer(authorization: str | None, what: str) -> str:
    """The bearer token of the Authorization header; raises a 401 ApiError when it is absent."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized(f"Send {what} as 'Authorization: Bearer <key>' or 'x-api-key: <key>'")
    return key.strip()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def authorization_of(headers: Headers) -> str | None:
    """The Authorization header. A key in `x-api-key`, where clients of the Messages API send it, counts as a bearer token
    unless there is one."""
    given, key = headers.get("authorization"), headers.get("x-api-key")
    if key is None or (given is not None and given.lower().startswith("bearer ")):
        return given
    return f"Bearer {key}"


class MetricsKeys:
    """The keys that open `/metrics`. They are no API keys."""

    def __init__(self, keys: Sequence[str], api_keys: ApiKeys) -> None:
        """With no key, every API key opens it."""
        self._own = ApiKeys([f":{key}" for key in keys]) if keys else None
        self._api_keys = api_keys

    def tenant(self, authorization: str | None) -> str:
        """The caller's tenant. Raises a 401, or a 403 where the key is an API key."""
        if self._own is None:
            return self._api_keys.tenant(authorization)
        if self._own.is_known(authorization):
            return ""
        bearer(authorization, "the metrics key")
        self._api_keys.tenant(authorization)
        headers = {"WWW-Authenticate": 'Bearer error="insufficient_scope"'}
        message = "This key may not read the metrics; that needs the server's metrics key (--metrics-key) or admin key"
        raise ApiError(403, message, "permission_error", code="metrics_key_needed", headers=headers)


class AuthMiddleware:
    """Puts `tenant` into the request's state, or answers 401 before any route is looked up.

    Also puts `is_trusted`: on an open path, whether the caller holds a key all the same.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str] = OPEN_PATHS, metrics_keys: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._metrics_keys = MetricsKeys(metrics_keys, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                given = authorization_of(Headers(scope=scope))
                open_path = scope["path"] in self._open_paths
                tenant = "" if open_path else self._tenant(scope["path"], given)
            except ApiError as error:
                return await error.response(scope["path"])(scope, receive, send)
            state = scope.setdefault("state", {})
            state["tenant"], state["is_trusted"] = tenant, not open_path or self._keys.is_known(given)
        return await self._app(scope, receive, send)

    def _tenant(self, path: str, authorization: str | None) -> str:
        keys = self._metrics_keys if path == METRICS_PATH else self._keys
        return keys.tenant(authorization)
