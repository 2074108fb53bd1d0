"""The file of a flight recording: a header, then snapshots and the calls that follow each.

    file   = MAGIC, frames
    frame  = kind (1 byte), length of the body (4 bytes), checksum of the body (4 bytes), body (zlib of msgpack)
    HEADER     RecordingHeader
    SNAPSHOT   bytes of `wire.snapshot`
    GAP        the number of calls that were left out; a snapshot follows
    CALLS      hashes, and a list of (method, arguments, result, hashes up to its end)

Arguments and results are `wire.snapshot` values. A file that ends within a frame is read up to there: the process that wrote
it may have been killed. All sizes are bounded, and what is no recording raises BadRecording.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from baton.core.errors import BatonError
from baton.wire.captured_state import CapturedState, encode_state
from baton.wire.flight_recorder import RecordedCall, Segment
from baton.wire.recording_mask import ARGUMENT_MARKS, RecordingMask
from baton.wire.snapshot import BadSnapshot, encode_arguments, encode_value

MAGIC = b"baton-recording-1\n"
BODY_BYTES_MAX = 1 << 30
CALLS_A_FRAME = 256
_HEAD = struct.Struct("<BII")


class BadRecording(BatonError):
    """A file that is no recording, or a damaged one; the message says where."""


class RecordingPart(enum.IntEnum):
    HEADER = 1
    SNAPSHOT = 2
    CALLS = 3
    GAP = 4


class RecordingHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    """The version of Baton that wrote it."""
    of: str
    """"engine" or "router"."""
    name: str
    reason: str
    """Why it was written."""
    written: str
    """Date and time."""
    masked: bool
    """Whether token ids are permuted, and names and keys replaced."""


class EncodedCall(NamedTuple):
    method: str
    arguments: bytes
    result: bytes
    hashes: int
    """Hashes computed in the call."""


def write_header(header: RecordingHeader) -> bytes:
    return MAGIC + _frame(RecordingPart.HEADER, header)


def write_snapshot(state: CapturedState, mask: RecordingMask | None) -> bytes:
    return _frame(RecordingPart.SNAPSHOT, encode_state(state, mask))


def write_calls(segment: Segment, begin: int, end: int, mask: RecordingMask | None) -> bytes:
    """Frames of the calls [begin, end) of a segment."""
    frames = []
    for at in range(begin, end, CALLS_A_FRAME):
        calls = segment.calls[at : min(end, at + CALLS_A_FRAME)]
        first = segment.calls[at - 1].hashes if at else 0
        hashes = segment.hashes[first : calls[-1].hashes]
        masked = hashes if mask is None else list(map(mask.opaque, hashes))
        frames.append(_frame(RecordingPart.CALLS, (masked, list(_encoded(calls, first, mask)))))
    return b"".join(frames)


def write_gap(calls: int) -> bytes:
    """A frame that says that this many calls are left out."""
    return _frame(RecordingPart.GAP, calls)


def write_recording(header: RecordingHeader, segments: Sequence[Segment], mask: RecordingMask | None) -> bytes:
    """A whole file."""
    parts = [write_header(header)]
    for segment in segments:
        parts += [write_snapshot(segment.state, mask), write_calls(segment, 0, len(segment.calls), mask)]
    return b"".join(parts)


def _encoded(calls: Iterable[RecordedCall], hashes: int, mask: RecordingMask | None) -> Iterator[EncodedCall]:
    for call in calls:
        arguments = encode_arguments(call.arguments, mask, ARGUMENT_MARKS.get(call.method, ()))
        yield EncodedCall(call.method, arguments, encode_value(call.result, mask), call.hashes - hashes)
        hashes = call.hashes


def _frame(kind: RecordingPart, body: object) -> bytes:
    data = zlib.compress(msgspec.msgpack.encode(body), 1)
    return _HEAD.pack(kind, len(data), zlib.crc32(data)) + data


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recording:
    """A recording that was read. `frames` yields snapshots (bytes) and batches of calls, in order."""

    def __init__(self, data: bytes) -> None:
        if not data.startswith(MAGIC):
            raise BadRecording("this is no recording of Baton")
        self._data = data
        self.is_cut = False
        """Whether the file ends within a frame; known once all frames were read."""
        kind, body = next(self._frames(), (None, None))
        if kind is not RecordingPart.HEADER:
            raise BadRecording("the recording has no header")
        self.header = _converted(body, RecordingHeader)

    def frames(self) -> Iterator[bytes | int | tuple[list[bytes], list[EncodedCall]]]:
        """Snapshots, numbers of calls that were left out, and calls with their hashes."""
        frames = self._frames()
        next(frames)
        for kind, body in frames:
            match kind:
                case RecordingPart.SNAPSHOT:
                    yield bytes(_converted(body, bytes))
                case RecordingPart.GAP:
                    yield int(_converted(body, int))
                case RecordingPart.CALLS:
                    hashes, calls = _converted(body, tuple[list[bytes], list[tuple[str, bytes, bytes, int]]])
                    yield hashes, [EncodedCall(*call) for call in calls]
                case _:
                    raise BadRecording("the recording has a second header")

    def _frames(self) -> Iterator[tuple[RecordingPart, Any]]:
        at, data = len(MAGIC), memoryview(self._data)
        while at < len(data):
            body_at = at + _HEAD.size
            head = data[at:body_at]
            if len(head) < _HEAD.size or len(data) - body_at < _HEAD.unpack(head)[1]:
                self.is_cut = True
                return
            kind, size, check = _HEAD.unpack(head)
            body = data[body_at : body_at + size]
            if kind not in list(RecordingPart) or zlib.crc32(body) != check:
                raise BadRecording(f"the recording is damaged at byte {at}")
            yield RecordingPart(kind), _unpacked(body, at)
            at = body_at + size


def _unpacked(body: memoryview, at: int) -> Any:
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(body, BODY_BYTES_MAX)
        if not reader.eof:
            raise BadRecording(f"the frame at byte {at} has more than {BODY_BYTES_MAX} bytes")
        return msgspec.msgpack.decode(data)
    except (zlib.error, ValueError, RecursionError) as error:
        raise BadRecording(f"the recording is damaged at byte {at}: {error}") from None


def _converted(body: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, BadSnapshot) as error:
        raise BadRecording(f"the recording has a part that is none: {error}") from None
