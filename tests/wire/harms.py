"""Mutations of bytes, and of the trees that they encode."""

from __future__ import annotations

import random

ODD_BYTES = (0x00, 0x7F, 0x80, 0x91, 0xC0, 0xC1, 0xC6, 0xCB, 0xCF, 0xD3, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF)
"""Values where msgpack changes its mind, and the ends of the range."""
ODD_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "",
    "x" * 600, "ask", "commit", b"", b"\xff" * 7, b"\xff" * 8, bytes(65), [], [None], {}, {"type": "ask"},
    (1,) * 5000, [[1, 0.5]],
)  # fmt: skip


def mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One to four small harms, each anywhere."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(8):
            case 0 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(made):
                made[at] = draw.choice(ODD_BYTES)
            case 2:
                made[at:at] = draw.randbytes(draw.randint(1, 8))
            case 3:
                del made[at : at + draw.randint(1, 8)]
            case 4:
                del made[at:]
            case 5:
                made[at:] = other[draw.randrange(len(other) + 1) :]
            case 6:
                begin = draw.randrange(len(made) + 1)
                made[at:at] = made[begin : begin + draw.randint(1, 40)]
            case _:
                made += draw.randbytes(draw.randint(0, 40))
    return bytes(made)


def changed(value: object, draw: random.Random) -> object:
    """The same tree with one leaf, field or branch replaced, dropped or repeated."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        key = draw.choice(list(value))
        match draw.randrange(10):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return value | {draw.choice(("more", "submission", "token", "version")): draw.choice(ODD_VALUES)}
            case _:
                return value | {key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        match draw.randrange(10):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value[:at], value[at], *value[at:]]
            case _:
                return [*value[:at], changed(value[at], draw), *value[at + 1 :]]
    if isinstance(value, bytes) and draw.random() < 0.5:
        return mutated(value, b"", draw)
    if isinstance(value, int) and draw.random() < 0.5:
        return max(-(2**63), min(2**64 - 1, value + draw.choice((-1, 1, 2**31, -(2**31), 2**62))))
    return draw.choice(ODD_VALUES)
