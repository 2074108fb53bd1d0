"""One 64-bit check a block: the XOR over its layers of xxh3_64(piece, seed = layer << 32 | block of the sequence).

Pieces may be added in any order and on both sides apart; the seed makes a piece in the wrong place as wrong as a
flipped bit. It finds accidents, not attackers: who may write at all is settled by tokens.
"""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest


class Checks:
    """Of blocks `first`… of a sequence, `blocks` of them."""

    def __init__(self, first: int, blocks: int, spans: tuple[tuple[int, int], ...]) -> None:
        self._first = first
        self._spans = spans
        self._values = [0] * blocks

    def add(self, layers: range, first: int, pool: memoryview, offsets: list[int]) -> None:
        """These layers of blocks `first`… of the sequence, which lie at `offsets` of the pool."""
        spans = [(layer << 32, *self._spans[layer]) for layer in layers]
        at = first - self._first
        for index, offset in enumerate(offsets, first):
            value = self._values[at]
            for seed, begin, end in spans:
                value ^= xxh3_64_intdigest(pool[offset + begin : offset + end], seed | index)
            self._values[at] = value
            at += 1

    def digest(self) -> bytes:
        """Little-endian, in the order of the sequence."""
        return np.array(self._values, dtype="<u8").tobytes()
