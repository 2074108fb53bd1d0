"""Messages between a front end and a worker that compiles constraints: frames of msgpack, each with its length first."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec
from msgspec import Struct

LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 8 << 20


class WorkerReady(Struct, tag=True, frozen=True):
    """The first message of a worker."""

    backend: str
    version: str


class WorkerUnable(Struct, tag=True, frozen=True):
    """In place of WorkerReady: constraints cannot be had for this model."""

    reason: str


class GrammarCompiled(Struct, tag=True, frozen=True):
    source: str


class GrammarRefused(Struct, tag=True, frozen=True):
    field: str | None
    message: str


class MaskComputed(Struct, tag=True, frozen=True):
    digest: bytes
    """Empty: this process has another version of the backend, or the constraint does not permit the outputs."""


FromWorker = WorkerReady | WorkerUnable | GrammarCompiled | GrammarRefused | MaskComputed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def encoded(message: FromWorker) -> bytes:
    return framed(_encode(message))


def decoded(payload: bytes) -> FromWorker:
    """Raises a ValueError for what is no message."""
    try:
        message: FromWorker = _decode(payload)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    return message


def read_frame(stream: BinaryIO) -> bytes | None:
    """None: the other end has closed the pipe. Raises a ValueError for a frame that is too large."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes")
    payload = stream.read(length)
    return payload if len(payload) == length else None
