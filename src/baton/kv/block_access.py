"""Access to KV blocks for copies: blocks in host memory, or on a device that only copies reach.

Owns the protocols, and the blocks that the host can address (`HostBlocks`). An executor provides those of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Int32s

Bytes = npt.NDArray[np.uint8]
Bytes2d = npt.NDArray[np.uint8]
"""[blocks, bytes a block]"""
Spans = tuple[tuple[int, int], ...]
"""[begin, end) of each layer inside a block."""


class BlockAccess(Protocol):
    """Copies blocks to and from rows of host memory. Safe to call from several threads at once.

    A call returns when its bytes are in place; the caller owns the blocks. `host` is [rows, bytes a block], with the same
    offsets in a row as in a block.
    """

    blocks: int
    block_bytes: int
    run_bytes: int
    """Bytes per call beyond which larger calls are no faster. A caller that may be fenced copies no more at a time."""

    def read(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        """Bytes [begin, end) of block `blocks[i]` into row `rows[i]`."""

    def write(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        """Bytes [begin, end) of row `rows[i]` into block `blocks[i]`."""

    def allocate(self, size: int) -> Bytes:
        """Zeroed host memory of the kind that copies fastest, such as pinned memory."""


class RemoteBlocks(Protocol):
    """The blocks of another process, on a device that ours can read."""

    def pull(self, sources: Int32s, targets: Int32s, begin: int, end: int) -> None:
        """Bytes [begin, end) of their block `sources[i]` into our block `targets[i]`. Returns when they are there."""

    def close(self) -> None: ...


class DeviceSharing(Protocol):
    """Shares the blocks of a device with other processes of this host, and opens theirs."""

    def share(self) -> bytes:
        """A handle that opens our blocks for reading in another process; empty where that is impossible."""

    def open(self, handle: bytes, blocks: int) -> RemoteBlocks | str:
        """Open the blocks of another process, whose layout equals ours. A string says why that is impossible."""

    def digests(self, blocks: Int32s, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        """[spans, blocks]: a hash of these bytes of each block; changing any one word changes it."""


class HostBlocks:
    """A pool in host memory, copied block by block."""

    run_bytes = 1

    def __init__(self, pool: Bytes2d) -> None:
        self.blocks, self.block_bytes = pool.shape
        self._pool = pool

    def read(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            host[row, begin:end] = self._pool[block, begin:end]

    def write(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            self._pool[block, begin:end] = host[row, begin:end]

    def allocate(self, size: int) -> Bytes:
        return zeroed(size)


def zeroed(size: int) -> Bytes:
    """`size` zero bytes, whose pages are mapped when they are first written."""
    return np.zeros(size, dtype=np.uint8)


def span_of(spans: Spans, layers: range) -> tuple[int, int]:
    """[begin, end) of these neighbouring layers inside a block."""
    return spans[layers.start][0], spans[layers.stop - 1][1]


def blocks_per_copy(blocks: BlockAccess, piece_bytes: int) -> int:
    """How many pieces of `piece_bytes` to copy in one call."""
    return max(1, blocks.run_bytes // max(1, piece_bytes))
