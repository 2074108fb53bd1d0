"""One authenticated stream connection between two holders of the cluster key: bytes in, verified frames out.

Owns the handshake, the direction keys, the frame numbers and the buffer of incomplete frames. Pure: no socket, clock or
random source. The driver passes received bytes to `take`, sends the bytes of `outgoing` and `seal`, and draws a fresh nonce
of `NONCE_BYTES` from the operating system for each connection.

    connector                                                 acceptor
      hello: version, role, name, nonce     ────────────▶       sends nothing before it has a valid hello
                                            ◀────────────       hello
      proof                                 ────────────▶       open
      open                                  ◀────────────       proof, then frames

    proof         HMAC-SHA256(cluster key, "… proof of the connector" or "… of the acceptor", both hellos)
    direction key HMAC-SHA256(cluster key, "… frames of the connector" or "… of the acceptor", both hellos)

The connector proves itself first: it chose whom to connect to, while anybody can connect to an acceptor. The acceptor
therefore sends nothing that depends on the key to a connector without the key. Roles are part of the proof, so a proof or
frame reflected to its sender is invalid. Both nonces are, so a recorded connection cannot be replayed. Every holder of the
key can take any name.

A frame, little-endian; both tags are keyed BLAKE2b with the key of their direction:

    0         8        12              28                  28 + length
    │ number  │ length │ tag of these  │ payload …         │ tag of head and payload, 16 bytes
                         two, 16 bytes

`number` counts the frames of a direction from 0, so a repeated, omitted or reordered frame is rejected. The length has its
own tag, so that a flipped bit in it is detected at once, and a sender without the key cannot make us buffer a frame. A
stream that is cut off is not detected here: no frame comes, and the driver sees the end of the stream. Stages, time limits
and signs of life are of `wire.sealed_stream`.

Frames are authenticated, not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import Enum, StrEnum
from typing import NamedTuple

from baton.core.config import BadConfig
from baton.core.errors import BatonError
from baton.wire.engine_messages import FRAME_BYTES_MAX, WireError

SEAL_VERSION = 2
NONCE_BYTES = 32
KEY_BYTES_MIN = 16
NAME_BYTES_MAX = 128
PROOF_BYTES = 32
TAG_BYTES = 16

_MAGIC = b"BTN\n"
_HELLO = struct.Struct(f"<4sBBB{NONCE_BYTES}s")
"""Magic, version, role, length of the name, nonce; the name follows."""
_HEAD = struct.Struct("<QI")
_HEAD_BYTES = _HEAD.size + TAG_BYTES
HANDSHAKE_BYTES_MAX = _HELLO.size + NAME_BYTES_MAX + PROOF_BYTES
"""Most bytes that one side sends before it has proved itself."""
OVERHEAD_BYTES = _HEAD_BYTES + TAG_BYTES
"""Bytes that sealing adds to a frame."""


class SealFault(StrEnum):
    """Why a connection was given up; the driver counts each."""

    MALFORMED = "malformed"
    """Not a valid hello: another protocol, or our own hello reflected."""
    VERSION = "version"
    SAME_NAME = "same_name"
    """The other side has our own name: misconfigured, or connected to ourselves."""
    WRONG_KEY = "wrong_key"
    """The proof does not match our key and nonce."""
    FORGED = "forged"
    """A tag does not match: corrupted, made without the key, or reflected."""
    OUT_OF_SEQUENCE = "out_of_sequence"
    """A valid frame with the wrong number: repeated, or earlier ones are missing."""
    OVERSIZED = "oversized"


class SealBroken(BatonError):
    """The connection must be closed. Frames returned before remain valid."""

    def __init__(self, fault: SealFault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


class SealClosed(BatonError):
    """The connection is not open."""


class SealSide(Enum):
    CONNECTOR = 1
    ACCEPTOR = 2

    @property
    def other(self) -> SealSide:
        return SealSide.ACCEPTOR if self is SealSide.CONNECTOR else SealSide.CONNECTOR


class SealState(Enum):
    GREETING = "greeting"
    """Waits for the other side's hello."""
    PROVING = "proving"
    """Waits for its proof."""
    OPEN = "open"
    BROKEN = "broken"


_PERSONS = (b"baton-frame-head", b"baton-frame-body")


class _Peer(NamedTuple):
    name: str
    hello: bytes


class Seal:
    """One side of a connection; made with `connect` or `accept`."""

    def __init__(self, side: SealSide, key: bytes, name: str, nonce: bytes, frame_bytes_max: int) -> None:
        if len(key) < KEY_BYTES_MIN:
            raise BadConfig(f"the cluster key has {len(key)} bytes; it needs at least {KEY_BYTES_MIN}")
        if len(nonce) != NONCE_BYTES:
            raise BadConfig(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        raw = name.encode() if name.isprintable() else b""
        if not _is_name(raw):
            raise BadConfig(f"a name has 1 … {NAME_BYTES_MAX} bytes of printable UTF-8; {name!r} is none")
        self._side = side
        self._key = key
        self._name = name
        self._hello = _HELLO.pack(_MAGIC, SEAL_VERSION, side.value, len(raw), nonce) + raw
        self._frame_bytes_max = frame_bytes_max
        self._state = SealState.GREETING
        self._fault: SealFault | None = None
        self._peer: _Peer | None = None
        self._seal_tags: _FrameTags | None = None
        self._open_tags: _FrameTags | None = None
        self._sealed = self._opened = 0
        """Frames sent and received."""
        self._buffer = bytearray()
        self._outgoing = self._hello if side is SealSide.CONNECTOR else b""

    @classmethod
    def connect(cls, key: bytes, name: str, nonce: bytes, frame_bytes_max: int = FRAME_BYTES_MAX) -> Seal:
        return cls(SealSide.CONNECTOR, key, name, nonce, frame_bytes_max)

    @classmethod
    def accept(cls, key: bytes, name: str, nonce: bytes, frame_bytes_max: int = FRAME_BYTES_MAX) -> Seal:
        return cls(SealSide.ACCEPTOR, key, name, nonce, frame_bytes_max)

    @property
    def state(self) -> SealState:
        return self._state

    @property
    def is_open(self) -> bool:
        """Whether both sides are proved, so that frames may be sealed."""
        return self._state is SealState.OPEN

    @property
    def peer_name(self) -> str:
        """The other side's name; known once it has proved that it holds the key."""
        if self._peer is None or not self.is_proved:
            raise SealClosed("the other side has not proved itself")
        return self._peer.name

    @property
    def is_proved(self) -> bool:
        """Whether both sides have proved themselves, whatever came after."""
        return self._open_tags is not None

    def outgoing(self) -> bytes:
        """Handshake bytes to send now, before anything sealed. Call at the start and after each `take`."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def seal(self, frame: bytes) -> bytes:
        """The bytes to send for a frame. All must be sent, in the order of sealing."""
        tags = self._seal_tags
        if tags is None or not self.is_open:
            raise SealClosed(f"no frame can be sealed while the connection is {self._state.value}")
        if len(frame) > self._frame_bytes_max:
            raise WireError(f"a frame of {len(frame)} bytes is over the limit of {self._frame_bytes_max}")
        head = _HEAD.pack(self._sealed, len(frame))
        self._sealed += 1
        return b"".join((head, _head_tag(tags, head), frame, _body_tag(tags, head, frame)))

    def take(self, data: bytes) -> list[bytes]:
        """The frames completed by these bytes. After SealBroken every later call raises it again."""
        frames: list[bytes] = []
        self.take_into(data, frames)
        return frames

    def take_into(self, data: bytes, frames: list[bytes]) -> None:
        """Append the frames completed by these bytes; those before the bytes that raise SealBroken are appended too."""
        if self._fault is not None:
            raise SealBroken(self._fault, "the connection was given up for this before")
        self._buffer += data
        try:
            while self._buffer and self._advance(frames):
                pass
        except SealBroken as broken:
            self._fault = broken.fault
            self._state = SealState.BROKEN
            self._buffer.clear()
            self._outgoing = b""
            raise

    def _advance(self, frames: list[bytes]) -> bool:
        """Consume the next part of the stream; False while it is incomplete."""
        match self._state:
            case SealState.OPEN:  # first: all but a few parts are frames
                return self._take_frame(frames)
            case SealState.GREETING:
                return self._take_hello()
            case SealState.PROVING:
                return self._take_proof()
            case SealState.BROKEN:
                return False

    # ── the handshake ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_hello(self) -> bool:
        buffer = self._buffer
        if not _MAGIC.startswith(buffer[: len(_MAGIC)]):
            raise SealBroken(SealFault.MALFORMED, "this is not a hello")
        if len(buffer) > len(_MAGIC) and buffer[len(_MAGIC)] != SEAL_VERSION:
            spoken = buffer[len(_MAGIC)]
            raise SealBroken(
                SealFault.VERSION, f"the other side speaks version {spoken} of the seal, this one {SEAL_VERSION}"
            )
        if len(buffer) < _HELLO.size:
            return False
        _, _, role, name_bytes, _ = _HELLO.unpack_from(buffer)
        if role != self._side.other.value:
            raise SealBroken(SealFault.MALFORMED, f"this is not a hello of the {self._side.other.name.lower()}")
        if name_bytes > NAME_BYTES_MAX:
            raise SealBroken(SealFault.OVERSIZED, f"a name of {name_bytes} bytes is over the limit of {NAME_BYTES_MAX}")
        if len(buffer) < _HELLO.size + name_bytes:
            return False
        hello = self._cut(_HELLO.size + name_bytes)
        self._greet(hello, hello[_HELLO.size :])
        return True

    def _greet(self, hello: bytes, name: bytes) -> None:
        if not _is_name(name):
            raise SealBroken(SealFault.MALFORMED, "its name is not one")
        peer = _Peer(name.decode(), hello)
        if peer.name == self._name:
            raise SealBroken(SealFault.SAME_NAME, f"both sides are called {self._name!r}")
        self._peer = peer
        self._state = SealState.PROVING
        self._outgoing += self._derived("proof", self._side) if self._side is SealSide.CONNECTOR else self._hello

    def _take_proof(self) -> bool:
        if len(self._buffer) < PROOF_BYTES:
            return False
        other = self._side.other
        if not self._proves(self._cut(PROOF_BYTES)):
            raise SealBroken(SealFault.WRONG_KEY, "the other side does not prove that it holds our key")
        if self._side is SealSide.ACCEPTOR:
            self._outgoing += self._derived("proof", self._side)
        self._seal_tags = _FrameTags.of(self._derived("frames", self._side))
        self._open_tags = _FrameTags.of(self._derived("frames", other))
        self._state = SealState.OPEN
        return True

    def _proves(self, proof: bytes) -> bool:
        """Whether the other side made this proof with our key, for this connection and its own side."""
        return hmac.compare_digest(proof, self._derived("proof", self._side.other))

    def _derived(self, what: str, side: SealSide) -> bytes:
        """A key or proof for one purpose and one side, bound to this connection."""
        theirs = b"" if self._peer is None else self._peer.hello
        first, second = (self._hello, theirs) if self._side is SealSide.CONNECTOR else (theirs, self._hello)
        # A hello contains its own length, so two different pairs never concatenate to the same bytes.
        label = f"baton seal {SEAL_VERSION} {what} of the {side.name.lower()}\n".encode()
        return hmac.digest(self._key, label + first + second, "sha256")

    # ── frames ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_frame(self, frames: list[bytes]) -> bool:
        tags = self._open_tags
        if tags is None or len(self._buffer) < _HEAD_BYTES:
            return False
        head = bytes(self._buffer[: _HEAD.size])
        if not hmac.compare_digest(self._buffer[_HEAD.size : _HEAD_BYTES], _head_tag(tags, head)):
            raise SealBroken(SealFault.FORGED, f"the head of frame {self._opened} has a wrong tag")
        number, length = _HEAD.unpack(head)
        if not self._is_due(number):
            raise SealBroken(SealFault.OUT_OF_SEQUENCE, f"frame {number} came where frame {self._opened} was due")
        if length > self._frame_bytes_max:
            raise SealBroken(SealFault.OVERSIZED, f"a frame of {length} bytes is over the limit of {self._frame_bytes_max}")
        end = _HEAD_BYTES + length
        if len(self._buffer) < end + TAG_BYTES:
            return False
        sealed = self._cut(end + TAG_BYTES)
        frame, tag = sealed[_HEAD_BYTES:end], sealed[end:]
        if not hmac.compare_digest(tag, _body_tag(tags, head, frame)):
            raise SealBroken(SealFault.FORGED, f"frame {self._opened} has a wrong tag")
        self._opened += 1
        frames.append(frame)
        return True

    def _is_due(self, number: int) -> bool:
        """Whether a frame with this number comes next in this direction."""
        return number == self._opened

    def _cut(self, count: int) -> bytes:
        with memoryview(self._buffer) as view:
            cut = bytes(view[:count])
        del self._buffer[:count]
        return cut


def _is_name(raw: bytes) -> bool:
    try:
        return 0 < len(raw) <= NAME_BYTES_MAX and raw.decode().isprintable()
    except UnicodeDecodeError:
        return False


class _FrameTags(NamedTuple):
    """Hashes of one direction that have taken its key in: a tag begins with a copy, which takes half the time."""

    head: hashlib.blake2b
    body: hashlib.blake2b

    @classmethod
    def of(cls, key: bytes) -> _FrameTags:
        made = (hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=person) for person in _PERSONS)
        return cls(*made)


def _head_tag(tags: _FrameTags, head: bytes) -> bytes:
    tag = tags.head.copy()
    tag.update(head)
    return tag.digest()


def _body_tag(tags: _FrameTags, head: bytes, payload: bytes) -> bytes:
    tag = tags.body.copy()
    tag.update(head)
    tag.update(payload)
    return tag.digest()
