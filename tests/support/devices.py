"""A device that is none: its blocks lie in host memory, and everything else behaves as if only copies reached them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from baton.core.engine.plan import Int32s
from baton.kv.block_access import Bytes2d, HostBlocks
from baton.kv.shared_memory import map_sealed


class DeviceLike(HostBlocks):
    """Several pieces at a time. What lies in a memfd can be opened by other processes."""

    run_bytes = 20_000

    def __init__(self, pool: Bytes2d, fd: int | None = None) -> None:
        super().__init__(pool)
        self._fd = fd
        self.pulled = 0
        """Blocks that came from another device without a detour, in pieces or whole."""

    def share(self) -> bytes:
        return b"" if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}".encode()

    def open(self, handle: bytes, blocks: int) -> WindowLike | str:
        fd = os.open(handle, os.O_RDONLY | os.O_CLOEXEC)
        mapped = map_sealed(fd, blocks * self.block_bytes)
        os.close(fd)
        return mapped if isinstance(mapped, str) else WindowLike(self, mapped.reshape(blocks, -1))

    def digests(self, blocks: Int32s, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        found = [[xxh3_64_intdigest(self._pool[block, begin:end]) for block in blocks.tolist()] for begin, end in spans]
        return np.array(found, dtype=np.uint64)


class WindowLike:
    def __init__(self, ours: DeviceLike, theirs: Bytes2d) -> None:
        self._ours = ours
        self._theirs: Bytes2d | None = theirs

    def pull(self, sources: Int32s, targets: Int32s, begin: int, end: int) -> None:
        assert self._theirs is not None
        self._ours.write(targets, sources, self._theirs, begin, end)
        self._ours.pulled += len(targets)

    def close(self) -> None:
        self._theirs = None
