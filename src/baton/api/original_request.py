"""A client's request as received: enough to reproduce its response in another process.

Owns the encoding, which instances keep with the request and return to a restarted router. It determines everything in a
response except the tokens: the drawn seed, the time of arrival, the owner. Decoding is bounded and validates everything,
since the bytes come from another process.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.core.errors import BatonError

ORIGIN_BODY_BYTES_MAX = 6 << 20
TRACE_CHARS_MAX = 128
_INT63_MAX = 2**63 - 1


class BadOrigin(BatonError):
    """Bytes that do not decode to an OriginalRequest of this version."""


class OriginalRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    path: Annotated[str, Meta(max_length=64)]
    raw: Annotated[bytes, Meta(max_length=ORIGIN_BODY_BYTES_MAX)]
    """The body as the client sent it."""
    tenant: Annotated[str, Meta(max_length=64)]
    request_id: Annotated[str, Meta(min_length=1, max_length=128)]
    seed: Annotated[int, Meta(ge=0, le=_INT63_MAX)]
    """Seed used when the body has none."""
    arrived_us: Annotated[int, Meta(ge=0, le=_INT63_MAX)]
    """Unix time at which this front end took it: its place in line everywhere."""
    trace: Annotated[str, Meta(max_length=TRACE_CHARS_MAX)] = ""
    """The trace it belongs to (`api.tracing.trace_context.CarriedTrace`); empty where none is made."""

    @property
    def created_s(self) -> int:
        return self.arrived_us // 1_000_000

    def encode(self) -> bytes:
        """Without a trace it is left out, so that routers of before there were traces read the rest."""
        return _encoder.encode(self if self.trace else msgspec.structs.astuple(self)[:-1])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(OriginalRequest)


def decode_origin(data: bytes) -> OriginalRequest:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadOrigin(f"not the origin of a request: {error}") from None
