"""The envelope of a stored KV block: it identifies the block and detects damage.

    0      6       8       24         40             48           64
    │ magic │ version │ key │ layout │ payload length │ checksum │ payload …     integers little-endian

The checksum (xxh3_128) covers everything but itself. Pure: no file, socket or clock. Stores do not look into these bytes;
fetched blocks are opened here before they are used.

Detects torn writes, flipped bits, swapped files, and blocks of another model or format version. Does not detect an attacker
who can write to the store, since anybody can compute the checksum: write access is controlled by the store's permissions.
Tenants are separated by the key, a keyed hash of the tenant's salt and of every token.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

from xxhash import xxh3_128 as hasher
from xxhash import xxh3_128_digest

from baton.core.engine.prefix import KEY_BYTES
from baton.core.errors import InvariantViolated

LAYOUT_BYTES = 16
VERSION = 1
_MAGIC = b"batnkv"
_FIELDS = struct.Struct(f"<6sH{KEY_BYTES}s{LAYOUT_BYTES}sQ")
_CHECK_BYTES = len(xxh3_128_digest(b""))
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES
_LAYOUT_CHARS = 16
"""Hex digits of the layout's digest in an object name: enough to separate models; the envelope has the whole digest."""


class EnvelopeFlaw(StrEnum):
    """Why a stored block is not used."""

    TORN = "torn"
    """The length differs from what the header says, or is shorter than a header."""
    FOREIGN = "not ours"
    VERSION = "version"
    CHECKSUM = "checksum"
    OTHER_LAYOUT = "other layout"
    """Intact, but of another model, number format or block size."""
    OTHER_KEY = "other key"
    """Intact, but of another block."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenedEnvelope:
    """An intact envelope; `payload` is a view into the opened data."""

    key: bytes
    layout: bytes
    payload: memoryview


def object_name(layout: bytes, key: bytes) -> str:
    """The name under which a store keeps the block."""
    return f"{layout.hex()[:_LAYOUT_CHARS]}/{key.hex()}"


def seal(key: bytes, layout: bytes, payload: memoryview, into: memoryview) -> int:
    """Write the block's envelope at the beginning of `into`; returns the number of bytes written."""
    size = HEADER_BYTES + len(payload)
    if len(into) < size:
        raise InvariantViolated(f"an envelope of {size} bytes does not fit into {len(into)}")
    into[HEADER_BYTES:size] = payload
    stamp(key, layout, into[:size])
    return size


def stamp(key: bytes, layout: bytes, whole: memoryview) -> None:
    """Write the header in front of a payload that is already in place: `seal` without the copy."""
    if len(key) != KEY_BYTES or len(layout) != LAYOUT_BYTES or len(whole) < HEADER_BYTES:
        raise InvariantViolated(f"no envelope has {len(key)} bytes of key, {len(layout)} of layout and {len(whole)} in all")
    _FIELDS.pack_into(whole, 0, _MAGIC, VERSION, key, layout, len(whole) - HEADER_BYTES)
    whole[_FIELDS.size : HEADER_BYTES] = _check(whole)


def unseal(key: bytes, layout: bytes, data: memoryview) -> memoryview | EnvelopeFlaw:
    """The block's bytes, as a view into `data`, or the flaw."""
    opened = open_any(data)
    if isinstance(opened, EnvelopeFlaw):
        return opened
    if opened.layout != layout:
        return EnvelopeFlaw.OTHER_LAYOUT
    return opened.payload if opened.key == key else EnvelopeFlaw.OTHER_KEY


def open_any(data: memoryview) -> OpenedEnvelope | EnvelopeFlaw:
    """Open the envelope of any block: for tools that inspect a store without knowing its keys."""
    if len(data) < HEADER_BYTES:
        return EnvelopeFlaw.TORN
    magic, version, key, layout, length = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        return EnvelopeFlaw.FOREIGN
    if version != VERSION:
        return EnvelopeFlaw.VERSION
    if length != len(data) - HEADER_BYTES:
        return EnvelopeFlaw.TORN
    if data[_FIELDS.size : HEADER_BYTES] != _check(data):
        return EnvelopeFlaw.CHECKSUM
    return OpenedEnvelope(key, layout, data[HEADER_BYTES:])


def _check(whole: memoryview) -> bytes:
    state = hasher(whole[: _FIELDS.size])
    state.update(whole[HEADER_BYTES:])
    return state.digest()
