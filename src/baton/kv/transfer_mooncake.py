"""`mooncake`: P registers its pool with Mooncake's Transfer Engine, D reads from there, over TCP or RDMA.

D reads into a registered staging area of its own, then copies into its blocks: nothing but D's lane writes D's pool, and D's
pool is never registered. The line carries hello and announcements only, as for `shm`; it is plain TCP.

    introduction   address of P's pool, u64; its blocks, u64; name of P's engine, 64 bytes; then block ids, i32

The engine's own ports know no keys and listen on all addresses: whoever reaches them can read and write what is registered,
P's pool included. Use it where the network is trusted.
"""

from __future__ import annotations

import socket
import struct

import numpy as np

from baton.core.engine.plan import Int32s
from baton.kv.io_thread import Post
from baton.kv.mooncake_engine import TransferEngine
from baton.kv.mooncake_reads import STAGING_BYTES, RemoteRead, RemoteReaders, Staging
from baton.kv.receiver import ConnectionReceiver
from baton.kv.receiver_kind import BlockSlice, Fetched, KvSource
from baton.kv.sender import ConnectionSender
from baton.kv.shared_memory import ids_within
from baton.kv.transfer_contract import KvMemory, Receiver, ReceiverOptions, Report, Sender, SenderOptions
from baton.kv.transfer_tcp import begin_connecting, listen, written_address

_POOL = struct.Struct("<QQ64s")
_ADDRESS_MAX = 1 << 63


# ── P ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mooncake_sender(memory: KvMemory, report: Report, options: SenderOptions) -> Sender:
    return ConnectionSender(memory, report, MooncakeSenderKind(memory, options.get("host", "127.0.0.1")), options)


class MooncakeSenderKind:
    kind = "mooncake"
    carries_bytes = False
    shares_device = False
    keeps_last = False

    def __init__(self, memory: KvMemory, host: str) -> None:
        self._engine = TransferEngine.take(host)
        self._memory = memory  # what is registered must not go before we do
        self._address = memory.pool.ctypes.data
        self._engine.register(self._address, memory.pool.nbytes)

    def connect(self, address: str) -> socket.socket:
        return begin_connecting(self.kind, address)

    def introduce(self, blocks: Int32s) -> tuple[bytes, list[int]]:
        fixed = _POOL.pack(self._address, self._memory.blocks, self._engine.name.encode())
        return fixed + blocks.astype("<i4").tobytes(), []

    def close(self) -> None:
        self._engine.unregister(self._address)
        self._engine.give_back()


# ── D ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mooncake_receiver(memory: KvMemory, report: Report, options: ReceiverOptions) -> Receiver:
    return ConnectionReceiver(memory, report, _MooncakeReceiverKind(memory, options.get("host", "127.0.0.1")), options)


class _MooncakeReceiverKind:
    kind = "mooncake"

    def __init__(self, memory: KvMemory, host: str) -> None:
        self._memory = memory
        self.listener = listen(host)
        self.address = written_address(self.kind, self.listener)
        self._read_threads = RemoteReaders(TransferEngine.take(host), max(STAGING_BYTES, memory.layout.block_bytes))

    def begin(self, post: Post) -> None:
        self._read_threads.begin(post)

    def admit(self, _sock: socket.socket) -> str | None:
        return None

    def introduction_bytes(self, blocks: int) -> int:
        return _POOL.size + 4 * blocks

    def open_source(self, introduction: bytes, _fds: list[int], _blocks: int) -> KvSource | str | None:
        address, pool_blocks, name = _POOL.unpack_from(introduction)
        blocks = np.frombuffer(introduction, dtype="<i4", offset=_POOL.size).astype(np.int32)
        if not ids_within(blocks, pool_blocks):
            return "source block out of range"
        if address + pool_blocks * self._memory.layout.block_bytes > _ADDRESS_MAX:
            return "no address of a pool"
        try:
            peer = name.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            return "no name of an engine"
        return _MooncakeSource(self._read_threads, peer, address, blocks, self._memory)

    def close(self) -> None:
        self.listener.close()
        self._read_threads.close()


class _MooncakeSource:
    slice_bytes = STAGING_BYTES
    reads_device = False

    def __init__(self, readers: RemoteReaders, peer: str, address: int, blocks: Int32s, memory: KvMemory) -> None:
        self._read_threads = readers
        self._peer = peer
        self._address = address
        self._blocks = blocks
        self._memory = memory
        self._read: RemoteRead | None = None

    def fetch(self, part: BlockSlice, fetched: Fetched) -> None:
        size, stride = part.high - part.low, self._memory.layout.block_bytes
        blocks = self._blocks[part.begin : part.begin + len(part.targets)].tolist()
        of = [self._address + block * stride + part.low for block in blocks]

        def take(staged: Staging, problem: str | None) -> None:
            self._read = None
            if problem is None:
                self._copy(staged, part)
            fetched(problem)

        self._read = RemoteRead(self._peer, of, size, take)
        self._read_threads.order(self._read)

    def _copy(self, staged: Staging, part: BlockSlice) -> None:
        """On the lane: from a staging area into our blocks."""
        size, count = part.high - part.low, len(part.targets)
        self._memory.pool[:, part.low : part.high][part.targets] = staged[: count * size].reshape(count, size)

    def close(self) -> None:
        if self._read is not None:
            self._read_threads.abandon(self._read)
            self._read = None
