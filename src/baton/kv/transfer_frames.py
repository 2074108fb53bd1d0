"""What P says on a line to D: one hello, then frames of sixteen bytes that name ranges, then the end.

    hello   magic, kind, request, attempt, digest of the layout, token      then what the kind adds (see its module)
    PIECES  layers [lo, hi) of blocks [first, first + count)                then, where the bytes travel here, block by block
    END     nothing more will come

D says `WELCOME` when it has accepted the hello, or `WELCOME_DEVICE` where it will read P's device itself; until then P sends
nothing that follows. Where it fetches the bytes, it says `TAKEN` after the end: from then on it reads nothing of P's memory
for this hand-over.

Owns the encoding. Decoding checks form only; whether a range was expected is `expected`'s business.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Handover

TOKEN_MAX = 64
_MAGIC = b"BKV1"
_HELLO = struct.Struct("<4sB3xQI16sB64s")
_FRAME = struct.Struct("<BxHHxxII")
WELCOME = b"+"
WELCOME_DEVICE = b"*"
TAKEN = b"."
HELLO_BYTES = _HELLO.size
FRAME_BYTES = _FRAME.size
_KIND_NUMBERS = {"shm": 1, "tcp": 2, "mooncake": 3}


class FrameKind(IntEnum):
    PIECES = 1
    END = 2


@dataclass(frozen=True, slots=True)
class HelloFrame:
    request: int
    attempt: int
    layout_digest: bytes
    token: bytes


@dataclass(frozen=True, slots=True)
class PiecesFrame:
    layers: range
    first: int
    count: int


class EndFrame:
    """Nothing more will come."""


class MalformedFrame(ValueError):
    """A peer said something that is not in this language."""


def encode_hello(kind: str, handover: Handover, layout_digest: bytes, token: bytes) -> bytes:
    if not 0 < len(token) <= TOKEN_MAX:
        raise InvariantViolated(f"a token has 1 to {TOKEN_MAX} bytes, not {len(token)}")
    number = _KIND_NUMBERS[kind]
    return _HELLO.pack(_MAGIC, number, handover.request, handover.attempt, layout_digest, len(token), token)


def decode_hello(kind: str, data: bytes | bytearray) -> HelloFrame:
    magic, number, request, attempt, digest, size, token = _HELLO.unpack(data)
    if magic != _MAGIC or number != _KIND_NUMBERS[kind] or not 0 < size <= TOKEN_MAX:
        raise MalformedFrame("no hello")
    return HelloFrame(request, attempt, digest, token[:size])


def encode_pieces(layers: range, first: int, count: int) -> bytes:
    return _FRAME.pack(FrameKind.PIECES, layers.start, layers.stop, first, count)


END_FRAME = _FRAME.pack(FrameKind.END, 0, 0, 0, 0)


def decode_frame(data: bytes | bytearray) -> PiecesFrame | EndFrame:
    kind, low, high, first, count = _FRAME.unpack(data)
    if kind == FrameKind.END:
        return EndFrame()
    if kind != FrameKind.PIECES:
        raise MalformedFrame(f"no frame is of kind {kind}")
    return PiecesFrame(range(low, high), first, count)
