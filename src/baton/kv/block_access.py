"""Where KV blocks are, for whoever copies them: in host memory, or on a device that only copies reach.

Owns the protocols, and the blocks that the host can address (`HostBlocks`). Those of a device come from its executor.
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


class BlockAccess(Protocol):
    """From any thread, several at once. A call returns when its bytes are where they belong; the caller owns the blocks.

    `host` is [rows, bytes a block], and what lies at an offset in a block lies at the same offset in a row.
    """

    blocks: int
    block_bytes: int
    run_bytes: int
    """So much in one call is as quick as it gets; who may have to stop in between asks for no more."""

    def read(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        """Bytes [begin, end) of block `blocks[i]` into row `rows[i]`."""

    def write(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        """Bytes [begin, end) of row `rows[i]` into block `blocks[i]`."""

    def allocate(self, size: int) -> Bytes:
        """Zeroed host memory of the kind that is quickest to copy from and to."""


class RemoteBlocks(Protocol):
    """The blocks of another process, on a device that ours can read."""

    def pull(self, sources: Int32s, targets: Int32s, begin: int, end: int) -> None:
        """Bytes [begin, end) of their block `sources[i]` into our block `targets[i]`. Returns when they are there."""

    def close(self) -> None: ...


class DeviceSharing(Protocol):
    """A device whose blocks another process of this host may read, and that can read another's."""

    def share(self) -> bytes:
        """What opens our blocks elsewhere, to read; nothing where that cannot be."""

    def open(self, handle: bytes, blocks: int) -> RemoteBlocks | str:
        """Another's, of whom we know that a block is what ours is. A string says why it cannot be."""

    def digests(self, blocks: Int32s, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        """[spans, blocks]: a hash of these bytes of each block, which differs if any of its words does."""


class HostBlocks:
    """A pool in host memory. Block by block is as quick as all at once."""

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
    """Mapped on first touch, so it costs what was written to it."""
    return np.zeros(size, dtype=np.uint8)


def blocks_per_copy(blocks: BlockAccess, piece_bytes: int) -> int:
    """How many pieces of so many bytes go in one call."""
    return max(1, blocks.run_bytes // max(1, piece_bytes))
