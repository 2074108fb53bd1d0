"""Pools that another process may map: memory in a memfd whose size is sealed.

Owns allocation and what makes a shared pool safe to map: it can neither shrink nor grow, so a reader never meets the end of
the file. Pages are zero until they are written and cost nothing before; they can be given back. Knows nothing of transfers.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.kv.block_access import BlockAccess, DeviceSharing
from baton.kv.host_mirror import HostMirror
from baton.kv.transfer_contract import KvLayout, KvMemory

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Of fallocate."""


@dataclass
class SharedBytes:
    """The memory lives as long as `array` or a view of it; the fd until `close`."""

    array: npt.NDArray[np.uint8]
    fd: int

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def why_not_shared() -> str | None:
    return None if sys.platform == "linux" else "shared pools need Linux (memfd with seals)"


def shared_bytes(size: int) -> SharedBytes:
    """`size` zero bytes in a memfd that nobody can resize any more."""
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
        return SharedBytes(np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8), fd)
    except OSError:
        os.close(fd)
        raise


def map_sealed(fd: int, size: int) -> npt.NDArray[np.uint8] | str:
    """Another process's pool, to read; a string says why it is not safe to map."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "what was passed is no memfd"
    if seals & _seals() != _seals():
        return "the pool that was passed is not sealed"
    if size <= 0 or os.fstat(fd).st_size != size:
        return "the pool that was passed has another size"
    return np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype=np.uint8)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def allocate_pool(layout: KvLayout, blocks: int) -> KvMemory:
    """A pool of its own, shared where the system can."""
    size = blocks * layout.block_bytes
    if why_not_shared() is not None:
        return KvMemory(layout, np.zeros((blocks, layout.block_bytes), dtype=np.uint8), layout.spans)
    shared = shared_bytes(size)
    return KvMemory(layout, shared.array.reshape(blocks, layout.block_bytes), layout.spans, shared.fd)


def allocate_mirror(layout: KvLayout, device: BlockAccess, sharing: DeviceSharing | None = None) -> KvMemory:
    """What stands for a pool on a device. Give it back with `release_pool`, when no transfer uses it any more."""
    shared = shared_bytes(device.blocks * layout.block_bytes)
    rows = shared.array.reshape(device.blocks, layout.block_bytes)

    def give_back(block: int) -> None:
        free_pages(shared.fd, block * layout.block_bytes, layout.block_bytes)

    return KvMemory(layout, rows, layout.spans, shared.fd, HostMirror(device, rows, give_back), sharing)


def free_pages(fd: int, offset: int, size: int) -> None:
    """These bytes of a memfd are zeros from now on, and the pages that they fill cost nothing."""
    if size and _fallocate()(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    """Through ctypes, which lets other threads run meanwhile; Python's own knows no holes."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    made: Callable[[int, int, int, int], int] = call
    return made


def release_pool(memory: KvMemory) -> None:
    """Close the fd; the memory itself goes with the last view of it."""
    if memory.fd is not None:
        os.close(memory.fd)
        memory.fd = None


def pool_bytes(memory: KvMemory) -> memoryview:
    """The pool as one run of bytes."""
    return memory.pool.data.cast("B")


def ids_within(blocks: npt.NDArray[np.signedinteger[Any]], upto: int) -> bool:
    """All of these are ids of a pool of so many blocks."""
    return not len(blocks) or (int(blocks.min()) >= 0 and int(blocks.max()) < upto)
