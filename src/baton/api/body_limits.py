"""Limits on request bodies: size, content type, and bytes of all that have come in part.

A body over the limit is refused as soon as that is known: from its announced length, or while it arrives. The rest is
never read: the connection is closed with the answer.
"""

from __future__ import annotations

from starlette.requests import Request

from baton.api.choice_streams import ClientGone
from baton.api.errors import ApiError

PARTIAL_BYTES_MAX = 64 << 20
TENANT_PARTIAL_BYTES_MAX = 16 << 20
"""Both as much as may wait to be tokenised (`text_pool`), where a body goes next."""
_CLOSE = {"Connection": "close"}


class PartialBodies:
    """Bytes of bodies of which more is to come, in all and by tenant. Pure: counts what it is told.

    A client decides how long a body stays here. A body that comes at once is never here, so it is served while others fill
    these limits.
    """

    def __init__(self, bytes_max: int = PARTIAL_BYTES_MAX, tenant_bytes_max: int = TENANT_PARTIAL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._tenant_bytes_max = tenant_bytes_max
        self._by_tenant: dict[str, int] = {}
        self.bytes = 0

    def add(self, tenant: str, count: int) -> None:
        """Count bytes that came. Raises a 429 or 503 ApiError, and counts nothing, where there is no room for them."""
        own = self._by_tenant.get(tenant, 0) + count
        if own > self._tenant_bytes_max:
            raise _busy(429, "rate_limit_error", "rate_limited", f"{own} bytes of unfinished bodies of this key")
        if self.bytes + count > self._bytes_max:
            what = f"{self.bytes + count} bytes of unfinished bodies"
            raise _busy(503, "service_unavailable_error", "busy", what)
        self._by_tenant[tenant] = own
        self.bytes += count

    def remove(self, tenant: str, count: int) -> None:
        """A body is whole, refused or given up; `count` is all that was added for it."""
        if not count:
            return
        self.bytes -= count
        self._by_tenant[tenant] -= count
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


async def read_json_body(request: Request, tenant: str, bytes_max: int, partial: PartialBodies) -> bytes:
    """The raw body. Only JSON is taken: a browser cannot send it from a foreign page without asking first (CORS)."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, "Send the body as 'Content-Type: application/json'", code="unsupported_media_type")
    return await read_body(request, tenant, bytes_max, partial)


async def read_body(request: Request, tenant: str, bytes_max: int, partial: PartialBodies) -> bytes:
    """The raw body, counted for the tenant until it is whole. Raises ApiError or ClientGone."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()  # not a list of parts: those of a few bytes would take many times their size
    counted, is_last = 0, False
    try:
        while not is_last:
            part, is_last = await _next_part(request)
            if len(body) + len(part) > bytes_max:
                raise _too_large(bytes_max)
            if is_last and not body:
                return part
            if not is_last:
                partial.add(tenant, len(part))
                counted += len(part)
            body += part
    finally:
        partial.remove(tenant, counted)
    return bytes(body)


async def _next_part(request: Request) -> tuple[bytes, bool]:
    """The next bytes, and whether the body is whole with them."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    part: bytes = message.get("body", b"")
    return part, not message.get("more_body", False)


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"The body is larger than {bytes_max} bytes", code="request_too_large", headers=_CLOSE)


def _busy(status: int, kind: str, code: str, what: str) -> ApiError:
    message = f"{what} would be held; send them faster, or fewer at once"
    return ApiError(status, message, kind, code=code, headers=_CLOSE | {"Retry-After": "1"})
