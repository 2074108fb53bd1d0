"""Limits on request bodies: size and content type.

A body over the limit is refused as soon as that is known: from its announced length, or while it arrives. The rest is
never read: the connection is closed with the answer.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from baton.api.choice_streams import ClientGone
from baton.api.errors import ApiError


async def read_json_body(request: Request, bytes_max: int) -> bytes:
    """The raw body. Only JSON is taken: a browser cannot send it from a foreign page without asking first (CORS)."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, "Send the body as 'Content-Type: application/json'", code="unsupported_media_type")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > bytes_max:
        raise _too_large(bytes_max)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > bytes_max:
                raise _too_large(bytes_max)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def _too_large(bytes_max: int) -> ApiError:
    message = f"The body is larger than {bytes_max} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
