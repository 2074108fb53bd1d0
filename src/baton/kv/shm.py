"""`shm`: P's pool lies in a memfd; D maps it to read, and copies from there into its own blocks.

P connects to a unix socket in a folder that only this user may enter, and passes the memfd's descriptor. D maps it after it
has seen that its size can never change and is what our layout makes of the number of blocks that P names: reading can then
not meet the end of the file, whatever P does. Our offsets come from our own layout; P says which of its blocks to read.

    introduction   blocks of P's pool, u64; then the block id of each expected block, i32

Maps are kept while any line that showed the same memory is open. P keeps its last line open for as long as it lives.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baton.core.errors import InvariantViolated
from baton.core.plan import Int32s
from baton.kv.blocks import Bytes2d
from baton.kv.contract import KvMemory, Receiver, ReceiverOptions, Report, Sender, SenderOptions
from baton.kv.lane import Post
from baton.kv.memory import map_sealed, within
from baton.kv.receiving import SLICE_BYTES, Fetched, LineReceiver, Slice, Source
from baton.kv.sending import LineSender

BACKLOG = 512
_POOL_BLOCKS = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")


def shm_receiver(memory: KvMemory, report: Report, options: ReceiverOptions) -> Receiver:
    return LineReceiver(memory, report, _ShmPort(memory), options)


def shm_sender(memory: KvMemory, report: Report, options: SenderOptions) -> Sender:
    return LineSender(memory, report, ShmRoad(memory), options)


class ShmRoad:
    kind = "shm"
    carries = False
    keeps_last = True

    def __init__(self, memory: KvMemory) -> None:
        if memory.fd is None:
            raise InvariantViolated("shm sends only from a pool that lies in a memfd")
        self._fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        """What is passed on: whoever has it can map our pool to read, and not to write."""
        self._blocks = memory.blocks

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
        return _POOL_BLOCKS.pack(self._blocks) + blocks.astype("<i4").tobytes(), [self._fd]

    def close(self) -> None:
        os.close(self._fd)


@dataclass(eq=False)
class _Map:
    """Another process's pool, read-only."""

    blocks: Bytes2d
    lines: int


class _ShmPort:
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
        return _POOL_BLOCKS.size + 4 * blocks

    def meet(self, introduction: bytes, fds: list[int], _blocks: int) -> Source | str | None:
        try:
            if len(fds) != 1:
                return "no memory was passed"
            (pool_blocks,) = _POOL_BLOCKS.unpack_from(introduction)
            blocks = np.frombuffer(introduction, dtype="<i4", offset=_POOL_BLOCKS.size).astype(np.int32)
            if not within(blocks, pool_blocks):
                return "source block out of range"
            return self._source(fds[0], pool_blocks * self._memory.layout.block_bytes, blocks)
        finally:
            for fd in fds:
                os.close(fd)

    def _source(self, fd: int, size: int, blocks: Int32s) -> Source | str:
        status = os.fstat(fd)
        name = status.st_dev, status.st_ino
        known = self._maps.get(name)
        if known is None:
            mapped = map_sealed(fd, size)
            if isinstance(mapped, str):
                return mapped
            known = self._maps[name] = _Map(mapped.reshape(-1, self._memory.layout.block_bytes), 0)
        elif known.blocks.size != size:
            return "the pool that was passed has another size"
        known.lines += 1
        return _ShmSource(self, name, known, blocks, self._memory)

    def unmap(self, name: tuple[int, int]) -> None:
        """One line fewer; with the last one the map goes."""
        self._maps[name].lines -= 1
        if self._maps[name].lines == 0:
            del self._maps[name]

    def close(self) -> None:
        self.listener.close()
        shutil.rmtree(self._folder)


class _ShmSource:
    slice_bytes = SLICE_BYTES

    def __init__(self, port: _ShmPort, name: tuple[int, int], mapped: _Map, blocks: Int32s, memory: KvMemory) -> None:
        self._port = port
        self._name = name
        self._mapped: _Map | None = mapped
        self._blocks = blocks
        self._memory = memory

    def fetch(self, part: Slice, fetched: Fetched) -> None:
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
            self._port.unmap(self._name)
