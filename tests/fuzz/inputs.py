"""Inputs for decoders: valid messages with harm done to their bytes or to the tree that they encode, and noise.

mutated, changed     a few flipped, cut, spliced or repeated bytes; a leaf, field or branch that is another
length lies          a number of 1 to 8 bytes somewhere, as a length or count that is not true
raw pieces           what an encoder would never write: nesting without end, numbers without end, half characters
noise                random bytes
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import msgspec

from tests.wire.harms import changed, mutated

_LENGTHS = (0, 1, 0x7F, 0xFF, 0xFFFF, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
_HOLE = "a hole that a raw piece is put into"
_LONG_CHANCE = 0.002
"""Of inputs that are thousands of times longer than usual: each takes as long as hundreds of others."""

Draw = Callable[[random.Random], bytes]


def from_bytes(samples: Sequence[bytes]) -> Draw:
    """For formats with fields at fixed places."""

    def draw_input(draw: random.Random) -> bytes:
        sample = draw.choice(samples)
        match draw.randrange(10):
            case 0:
                return draw.randbytes(draw.randrange(200))
            case 1 | 2:
                return length_lie(sample, draw)
            case 3:
                return sample[: draw.randrange(len(sample) + 1)]
            case _:
                return mutated(sample, draw.choice(samples), draw)

    return draw_input


def from_msgpack(samples: Sequence[bytes]) -> Draw:
    trees = [msgspec.msgpack.decode(sample) for sample in samples]
    by_bytes = from_bytes(samples)
    hole = msgspec.msgpack.encode(_HOLE)

    def draw_input(draw: random.Random) -> bytes:
        kind = draw.randrange(10)
        if kind < 3:
            return by_bytes(draw)
        tree = _changed_often(draw.choice(trees), draw)
        if kind < 9:
            return msgspec.msgpack.encode(tree)
        return msgspec.msgpack.encode(_with_hole(tree, draw)).replace(hole, _msgpack_piece(draw), 1)

    return draw_input


def from_json(samples: Sequence[object]) -> Draw:
    texts = [json.dumps(sample).encode() for sample in samples]
    by_bytes = from_bytes(texts)
    hole = json.dumps(_HOLE).encode()

    def draw_input(draw: random.Random) -> bytes:
        kind = draw.randrange(10)
        if kind < 3:
            return by_bytes(draw)
        tree = _changed_often(draw.choice(samples), draw)
        if kind >= 7:
            tree = _with_hole(tree, draw)
        text = json.dumps(tree, default=_shown).encode()
        return text if kind < 7 else text.replace(hole, _json_piece(draw), 1)

    return draw_input


def length_lie(sample: bytes, draw: random.Random) -> bytes:
    """The sample with a number of 1, 2, 4 or 8 bytes overwritten."""
    size = draw.choice((1, 2, 4, 8))
    if len(sample) < size:
        return sample
    at = draw.randrange(len(sample) - size + 1)
    lie = (draw.choice(_LENGTHS) & ((1 << 8 * size) - 1)).to_bytes(size, draw.choice(("little", "big")))
    return sample[:at] + lie + sample[at + size :]


def _changed_often(tree: object, draw: random.Random) -> object:
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        tree = changed(tree, draw)
    return tree


def _shown(value: object) -> object:
    """JSON has no bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else None


def _with_hole(value: object, draw: random.Random) -> object:
    """The tree with one leaf or branch replaced by the hole."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        return value | {key: _with_hole(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], _with_hole(value[at], draw), *value[at + 1 :]]
    return _HOLE


def _many(draw: random.Random) -> int:
    return draw.choice((20_000, 100_000)) if draw.random() < _LONG_CHANCE else draw.choice((2, 40, 150, 300, 1200))


def _json_piece(draw: random.Random) -> bytes:
    many = _many(draw)
    match draw.randrange(12):
        case 0:
            return b"[" * many + b"]" * many
        case 1:
            return b'{"a":' * many + b"1" + b"}" * many
        case 2:
            return b"[" * many
        case 3:
            return b"9" * many
        case 4:
            return b"-" + b"9" * many + b"." + b"9" * many + b"e" + b"9" * draw.choice((1, 3, 300))
        case 5:
            return b'"' + b"x" * many + b'"'
        case 6:
            return b"[" + b"1," * many + b"1]"
        case 7:
            return b'["' + b'a","' * many + b'"]'
        case 8:
            return draw.choice((b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\\x"'))
        case 9:
            return b"{" + b",".join(b'"%d":1' % at for at in range(min(many, 20_000))) + b"}"
        case _:
            return draw.choice((b"NaN", b"-Infinity", b"1e999", b"-0", b"-0.0", b"01", b"+1", b"nul", b"", b"1 2", b"/**/1"))


def _msgpack_piece(draw: random.Random) -> bytes:
    many = _many(draw)
    match draw.randrange(9):
        case 0:
            return b"\x91" * many + b"\xc0"
        case 1:
            return b"\x81\xa1a" * many + b"\xc0"
        case 2:
            return b"\xdd" + many.to_bytes(4, "big") + b"\x01" * many
        case 3:
            return b"\xdd\xff\xff\xff\xff" + b"\x01" * min(many, 300)
        case 4:
            return b"\xdf\xff\xff\xff\xff\xa1a\x01"
        case 5:
            return b"\xc6\xff\xff\xff\xff" + bytes(min(many, 300))
        case 6:
            return b"\xc6" + many.to_bytes(4, "big") + bytes(many)
        case 7:
            return draw.choice((b"\xd9\x02\xff\xfe", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\xff\x05" + bytes(255), b"\xc1"))
        case _:
            return b"\xdb" + many.to_bytes(4, "big") + b"y" * many
