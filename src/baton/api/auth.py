"""Who is calling: API keys, and the tenant that follows from them.

A tenant is a hash of its key ("" where no key is set): it names what a caller may cancel and salts the KV cache. Keys that
an operator gives as `GROUP:KEY` share KV within the group, and nothing else; `:KEY` has no group, and may have more colons.
`/health` and `/ready` stay open for probes; everything else needs a key once one is set, `/metrics` too, since it shows
what other tenants do.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.api.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
_GROUP = re.compile(r"[A-Za-z0-9_.-]{0,64}")


def tenant_of(key: str) -> str:
    return blake2b(key.encode(), digest_size=16, person=b"baton-tenant").hexdigest()


def secret_of(key: str) -> str:
    """What callers present, of a key as an operator writes it."""
    return _split(key)[1]


def kv_owners(keys: Sequence[str]) -> Mapping[str, str]:
    """By tenant, where KV is not its own: the group whose it is. No tenant can be called like one."""
    return {tenant_of(secret): f"group:{group}" for group, secret in map(_split, keys) if group}


def why_not_keys(keys: Sequence[str]) -> str | None:
    """What is wrong with keys as an operator writes them."""
    if not all(secret_of(key) for key in keys):
        return "an API key is empty: anybody could present it"
    if not all(_GROUP.fullmatch(_split(key)[0]) for key in keys):
        return "of an API key with a colon, what is before it names a group, in letters, digits, '.', '_' and '-'"
    if len({secret_of(key) for key in keys}) < len(set(keys)):
        return "an API key is in two groups"
    return None


def _split(key: str) -> tuple[str, str]:
    """Group, "" where there is none, and secret."""
    group, colon, secret = key.partition(":")
    return (group, secret) if colon else ("", key)


class ApiKeys:
    def __init__(self, keys: Sequence[str]) -> None:
        """As an operator writes them."""
        self._tenants = [tenant_of(secret_of(key)) for key in keys]

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
    """The key that a caller sent; raises a 401 that says what to send."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized(f"Send {what} as 'Authorization: Bearer <key>'")
    return key.strip()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class AuthMiddleware:
    """Puts `tenant` into the request's state, or answers 401 before any route is looked up."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str] = OPEN_PATHS) -> None:
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
