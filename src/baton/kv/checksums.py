"""One 64-bit check a block: the XOR over its layers of a hash of the piece, seeded with layer << 32 | block of the sequence.

Pieces may be added in any order and on both sides apart; the seed makes a piece in the wrong place as wrong as a
flipped bit. It finds accidents, not attackers: who may write at all is settled by tokens.

The hash is xxh3_64 where the host can address the piece, and one that a device computes where it stays there: both sides of
a hand-over know which.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from baton.core.engine.plan import Int32s
from baton.kv.block_access import DeviceSharing

Spans = tuple[tuple[int, int], ...]


class BlockChecksums:
    """Of blocks `first`… of a sequence, `blocks` of them, which lie in `pool`."""

    def __init__(self, first: int, blocks: int, spans: Spans, pool: memoryview) -> None:
        self._first = first
        self._spans = spans
        self._block_bytes = spans[-1][1] if spans else 0
        self._pool = pool
        self._values = [0] * blocks

    def add(self, layers: range, first: int, blocks: Int32s) -> None:
        """These layers of blocks `first`… of the sequence, which are blocks `blocks` of the pool."""
        spans, pool = [(layer << 32, *self._spans[layer]) for layer in layers], self._pool
        at = first - self._first
        for index, block in enumerate(blocks.tolist(), first):
            value, offset = self._values[at], block * self._block_bytes
            for seed, begin, end in spans:
                value ^= xxh3_64_intdigest(pool[offset + begin : offset + end], seed | index)
            self._values[at] = value
            at += 1

    def digest(self) -> bytes:
        """Little-endian, in the order of the sequence."""
        return np.array(self._values, dtype="<u8").tobytes()


class DeviceChecksums:
    """The same of blocks on a device, which are hashed there."""

    def __init__(self, first: int, blocks: int, spans: Spans, device: DeviceSharing) -> None:
        self._first = first
        self._spans = spans
        self._device = device
        self._values = np.zeros(blocks, dtype=np.uint64)

    def add(self, layers: range, first: int, blocks: Int32s) -> None:
        at, order = first - self._first, np.arange(first, first + len(blocks), dtype=np.uint64)
        found = self._device.digests(blocks, [self._spans[layer] for layer in layers])
        for layer, digests in zip(layers, found, strict=True):
            self._values[at : at + len(blocks)] ^= _mixed(digests ^ _mixed(order | np.uint64(layer << 32)))

    def digest(self) -> bytes:
        return self._values.astype("<u8").tobytes()


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each bit of the result depends on every bit of the value. One to one."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))
