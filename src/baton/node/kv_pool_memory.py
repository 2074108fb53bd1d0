"""The memory of an instance's KV: where the pool is allocated, the layout of its blocks, and access to them.

Transfers read and write a pool in host memory directly; it is allocated where a peer on this host can map it if we send. For
a pool on a device, transfers use a *mirror* in host memory with the same block ids and offsets; it takes memory only for
blocks under transfer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.core.config import ROLES
from baton.executor.contract import Executor, zeroed
from baton.kv.block_access import BlockAccess, HostBlocks
from baton.kv.shared_memory import allocate_mirror, shared_bytes
from baton.kv.transfer_contract import KvLayout, KvMemory
from baton.node.kv_transfers import kinds_of
from baton.node.settings import EngineSettings


class PoolMemory:
    def __init__(self, settings: EngineSettings) -> None:
        self._shares = ROLES[settings.role].gives and "shm" in kinds_of(settings.transfer)
        self._fd: int | None = None

    def allocate(self, size: int) -> npt.NDArray[np.uint8]:
        """Allocate a pool in host memory, for an executor."""
        if not self._shares:
            return zeroed(size)
        shared = shared_bytes(size)
        self._fd = shared.fd
        return shared.array

    def of(self, executor: Executor) -> KvMemory:
        """The KV memory for transfers. Call once per executor: a mirror is made here."""
        layout, kv = layout_of(executor), executor.kv
        if kv.device is not None:
            return allocate_mirror(layout, kv.device, kv.device)
        return KvMemory(layout, kv.pool, kv.layers, self._fd)


def layout_of(executor: Executor) -> KvLayout:
    sizes = tuple(end - begin for begin, end in executor.kv.layers)
    return KvLayout(executor.fingerprint, executor.kv.dtype, executor.shape.block_size, sizes)


def blocks_of(executor: Executor) -> BlockAccess:
    return HostBlocks(executor.kv.pool) if executor.kv.device is None else executor.kv.device
