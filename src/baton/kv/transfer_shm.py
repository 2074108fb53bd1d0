"""`shm`: P's pool lies in a memfd; D maps it to read, and copies from there into its own blocks.

P connects to a unix socket in a folder that only this user may enter, and passes the memfd's descriptor. D maps it after it
has seen that its size can never change and is what our layout makes of the number of blocks that P names: reading can then
not meet the end of the file, whatever P does. Our offsets come from our own layout; P says which of its blocks to read.

    introduction   blocks of P's pool, u64; what opens its device, u16 bytes of 512; the id of each expected block, i32

Where both pools are on a device that D can read, P's blocks go from there straight into D's, and neither mirror is used.

Maps are kept while any line that showed the same memory is open. P keeps its last line open for as long as it lives.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.kv.block_access import Bytes2d, RemoteBlocks
from baton.kv.io_thread import Post
from baton.kv.receiver import SLICE_BYTES, ConnectionReceiver
from baton.kv.receiver_kind import BlockSlice, Fetched, KvSource
from baton.kv.sender import ConnectionSender
from baton.kv.shared_memory import ids_within, map_sealed
from baton.kv.transfer_contract import KvMemory, Receiver, ReceiverOptions, Report, Sender, SenderOptions

log = logging.getLogger(__name__)

BACKLOG = 512
ON_DEVICE_BYTES = 64 << 20
"""What is read from a device at once."""
_POOL = struct.Struct("<QH512s")
_CREDENTIALS = struct.Struct("3i")


def shm_receiver(memory: KvMemory, report: Report, options: ReceiverOptions) -> Receiver:
    return ConnectionReceiver(memory, report, _ShmReceiverKind(memory), options)


def shm_sender(memory: KvMemory, report: Report, options: SenderOptions) -> Sender:
    return ConnectionSender(memory, report, ShmSenderKind(memory), options)


def encode_introduction(pool_blocks: int, handle: bytes, blocks: Int32s) -> bytes:
    return _POOL.pack(pool_blocks, len(handle), handle) + blocks.astype("<i4").tobytes()


def introduction_bytes(blocks: int) -> int:
    return _POOL.size + 4 * blocks


class ShmSenderKind:
    kind = "shm"
    carries_bytes = False
    keeps_last = True

    def __init__(self, memory: KvMemory) -> None:
        if memory.fd is None:
            raise InvariantViolated("shm sends only from a pool that lies in a memfd")
        self._fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        """What is passed on: whoever has it can map our pool to read, and not to write."""
        self._blocks = memory.blocks
        self._handle = b"" if memory.sharing is None else memory.sharing.share()
        self.shares_device = bool(self._handle)

    def connect(self, address: str) -> socket.socket:
        kind, _, path = address.partition(":")
        if kind != self.kind:
            raise ValueError("no address of shm")
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return sock

    def introduce(self, blocks: Int32s) -> tuple[bytes, list[int]]:
        return encode_introduction(self._blocks, self._handle, blocks), [self._fd]

    def close(self) -> None:
        os.close(self._fd)


@dataclass(eq=False)
class _Map:
    """Another process's pool, read-only."""

    blocks: Bytes2d
    connections: int
    remote: RemoteBlocks | None
    """The way to it that is shorter, where it lies on a device."""


class _ShmReceiverKind:
    kind = "shm"

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._maps: dict[tuple[int, int], _Map] = {}
        self._folder = tempfile.mkdtemp(prefix="baton-kv-")  # 0700
        path = os.path.join(self._folder, "line")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self.address = f"{self.kind}:{path}"

    def begin(self, _post: Post) -> None:
        """Nothing happens elsewhere."""

    def admit(self, sock: socket.socket) -> str | None:
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(data)
        return None if uid == os.geteuid() else "another user"

    def introduction_bytes(self, blocks: int) -> int:
        return introduction_bytes(blocks)

    def open_source(self, introduction: bytes, fds: list[int], _blocks: int) -> KvSource | str | None:
        try:
            if len(fds) != 1:
                return "no memory was passed"
            pool_blocks, handle_bytes, handle = _POOL.unpack_from(introduction)
            blocks = np.frombuffer(introduction, dtype="<i4", offset=_POOL.size).astype(np.int32)
            if not ids_within(blocks, pool_blocks):
                return "source block out of range"
            return self._source(fds[0], pool_blocks, handle[:handle_bytes], blocks)
        finally:
            for fd in fds:
                os.close(fd)

    def _source(self, fd: int, pool_blocks: int, handle: bytes, blocks: Int32s) -> KvSource | str:
        status = os.fstat(fd)
        name, size = (status.st_dev, status.st_ino), pool_blocks * self._memory.layout.block_bytes
        known = self._maps.get(name)
        if known is None:
            mapped = map_sealed(fd, size)
            if isinstance(mapped, str):
                return mapped
            remote = self._remote(handle, pool_blocks)
            known = self._maps[name] = _Map(mapped.reshape(-1, self._memory.layout.block_bytes), 0, remote)
        elif known.blocks.size != size:
            return "the pool that was passed has another size"
        known.connections += 1
        if known.remote is not None:
            return _DeviceSource(self, name, known.remote, blocks)
        return _ShmSource(self, name, known, blocks, self._memory)

    def _remote(self, handle: bytes, pool_blocks: int) -> RemoteBlocks | None:
        """None where KV comes through the host; one of both sides has no device, or it cannot be read from here."""
        if not handle or self._memory.sharing is None:
            return None
        opened = self._memory.sharing.open(handle, pool_blocks)
        if isinstance(opened, str):
            log.info("KV of a peer comes through host memory: %s", opened)
            return None
        log.info("KV of a peer is read from its device")
        return opened

    def unmap(self, name: tuple[int, int]) -> None:
        """One line fewer; with the last one the map goes."""
        known = self._maps[name]
        known.connections -= 1
        if known.connections == 0:
            del self._maps[name]
            if known.remote is not None:
                known.remote.close()

    def close(self) -> None:
        self.listener.close()
        shutil.rmtree(self._folder)


class _DeviceSource:
    slice_bytes = ON_DEVICE_BYTES
    reads_device = True

    def __init__(self, transport: _ShmReceiverKind, name: tuple[int, int], remote: RemoteBlocks, blocks: Int32s) -> None:
        self._transport = transport
        self._name = name
        self._remote: RemoteBlocks | None = remote
        self._blocks = blocks

    def fetch(self, part: BlockSlice, fetched: Fetched) -> None:
        if self._remote is None:
            raise InvariantViolated("fetched from a line that is closed")
        sources = self._blocks[part.begin : part.begin + len(part.targets)]
        self._remote.pull(sources, part.targets, part.low, part.high)
        fetched(None)

    def close(self) -> None:
        if self._remote is not None:
            self._remote = None
            self._transport.unmap(self._name)


class _ShmSource:
    slice_bytes = SLICE_BYTES
    reads_device = False

    def __init__(
        self, transport: _ShmReceiverKind, name: tuple[int, int], mapped: _Map, blocks: Int32s, memory: KvMemory
    ) -> None:
        self._transport = transport
        self._name = name
        self._mapped: _Map | None = mapped
        self._blocks = blocks
        self._memory = memory

    def fetch(self, part: BlockSlice, fetched: Fetched) -> None:
        if self._mapped is None:
            raise InvariantViolated("fetched from a line that is closed")
        to = self._memory.pool[:, part.low : part.high]
        of = self._mapped.blocks[:, part.low : part.high]
        sources = self._blocks[part.begin : part.begin + len(part.targets)]
        breaks = np.flatnonzero((np.diff(part.targets) != 1) | (np.diff(sources) != 1)) + 1
        if 2 * len(breaks) > len(sources):  # hardly any blocks that follow one another on both sides
            for target, source in zip(part.targets.tolist(), sources.tolist(), strict=True):
                to[target] = of[source]
        else:
            for begin, end in pairwise((0, *breaks.tolist(), len(sources))):
                target, source, count = int(part.targets[begin]), int(sources[begin]), end - begin
                to[target : target + count] = of[source : source + count]
        fetched(None)

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped = None
            self._transport.unmap(self._name)
