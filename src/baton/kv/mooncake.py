"""`mooncake`: P registers its pool with Mooncake's Transfer Engine, D reads from there, over TCP or RDMA.

D reads into a registered staging area of its own, then copies into its blocks: nothing but D's lane writes D's pool, and D's
pool is never registered. The line carries hello and announcements only, as for `shm`; it is plain TCP.

    introduction   address of P's pool, u64; its blocks, u64; name of P's engine, 64 bytes; then block ids, i32

Reading blocks, so helpers do it; the lane takes what they bring. A helper that comes back after a fence brings nothing.

The engine's own ports know no keys and listen on all addresses: whoever reaches them can read and write what is registered.
Use it where the network is trusted. P's pool is registered for reading by D's, so the same holds for P's pool.
"""

from __future__ import annotations

import ctypes
import ipaddress
import mmap
import os
import queue
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from baton.core.plan import Int32s
from baton.kv.contract import (
    Bytes2d,
    KvMemory,
    Receiver,
    ReceiverOptions,
    Report,
    Sender,
    SenderOptions,
    TransferUnavailable,
)
from baton.kv.memory import within
from baton.kv.receiving import Fetched, LineReceiver, Post, Slice, Source
from baton.kv.sending import LineSender
from baton.kv.tcp import begin_connecting, listen, written_address

HELPERS = 4
"""Reads under way at once. One that hangs on a dead peer holds up no more than itself."""
STAGING_BYTES = 4 << 20
"""Of each helper."""
READ_TIMEOUT_S = 5
LIBRARIES = Path(sys.prefix) / "lib" / "baton-mooncake"
"""Where the set-up puts what the engine needs of the system, when the system does not have it."""
_POOL = struct.Struct("<QQ64s")
_SETTINGS = {"MC_TRANSFER_TIMEOUT": str(READ_TIMEOUT_S), "MC_LOG_LEVEL": "ERROR"}
"""Of theirs, where the environment does not say otherwise."""


class _TransferEngine(Protocol):
    """What we use of theirs. Zero is success."""

    def initialize(self, name: str, metadata: str, protocol: str, device: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, size: int) -> int: ...
    def unregister_memory(self, address: int) -> int: ...
    def batch_transfer_sync_read(self, peer: str, to: list[int], of: list[int], sizes: list[int]) -> int: ...


@cache
def why_not() -> str | None:
    try:
        _engine_class()
    except ImportError as error:
        return f"mooncake's Transfer Engine cannot be loaded: {error}"
    return None


@cache
def _engine_class() -> Callable[[], _TransferEngine]:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    for library in _in_order(LIBRARIES):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from mooncake.engine import TransferEngine

    made: Callable[[], _TransferEngine] = TransferEngine
    return made


def _in_order(folder: Path) -> list[Path]:
    """Libraries of a folder, each after those that it needs: the netlink ones first."""
    return sorted(
        folder.glob("lib*.so.*"), key=lambda path: (not path.name.startswith("libnl-3"), "nl" not in path.name, path.name)
    )


class _Engine:
    """One a process and address, while somebody uses it."""

    _gate = threading.Lock()
    _open: dict[str, _Engine] = {}  # noqa: RUF012 - the one table of them, on purpose

    def __init__(self, host: str) -> None:
        self._host = host
        self._users = 0
        self._registered: Counter[int] = Counter()
        self._theirs = _engine_class()()
        if self._theirs.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise TransferUnavailable(f"mooncake's Transfer Engine does not start on {host}")
        self.name = f"{host}:{self._theirs.get_rpc_port()}"

    @classmethod
    def take(cls, host: str) -> _Engine:
        ipaddress.ip_address(host)
        with cls._gate:
            if host not in cls._open:
                cls._open[host] = cls(host)
            cls._open[host]._users += 1
            return cls._open[host]

    def give_back(self) -> None:
        with self._gate:
            self._users -= 1
            if self._users == 0:
                del self._open[self._host]
                del self._theirs  # it stops its threads and closes its ports

    def register(self, address: int, size: int) -> None:
        """Once, however many ask for it."""
        with self._gate:
            if not self._registered[address] and self._theirs.register_memory(address, size):
                raise TransferUnavailable(f"mooncake's Transfer Engine does not take {size} bytes of memory")
            self._registered[address] += 1

    def unregister(self, address: int) -> None:
        with self._gate:
            self._registered[address] -= 1
            if not self._registered[address]:
                self._theirs.unregister_memory(address)

    def read(self, peer: str, to: list[int], of: list[int], sizes: list[int]) -> bool:
        """Blocks until it is here, or cannot be had."""
        return self._theirs.batch_transfer_sync_read(peer, to, of, sizes) == 0


# ── P ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mooncake_sender(memory: KvMemory, report: Report, options: SenderOptions) -> Sender:
    return LineSender(memory, report, MooncakeRoad(memory, options.get("host", "127.0.0.1")), options)


class MooncakeRoad:
    kind = "mooncake"
    carries = False
    keeps_last = False

    def __init__(self, memory: KvMemory, host: str) -> None:
        self._engine = _Engine.take(host)
        self._address = memory.pool.ctypes.data
        self._blocks = memory.blocks
        self._engine.register(self._address, memory.pool.nbytes)

    def connect(self, address: str) -> socket.socket:
        return begin_connecting(self.kind, address)

    def introduce(self, blocks: Int32s) -> tuple[bytes, list[int]]:
        fixed = _POOL.pack(self._address, self._blocks, self._engine.name.encode())
        return fixed + blocks.astype("<i4").tobytes(), []

    def close(self) -> None:
        self._engine.unregister(self._address)
        self._engine.give_back()


# ── D ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mooncake_receiver(memory: KvMemory, report: Report, options: ReceiverOptions) -> Receiver:
    return LineReceiver(memory, report, _MooncakePort(memory, options.get("host", "127.0.0.1")), options)


@dataclass(frozen=True, slots=True)
class _Read:
    source: _MooncakeSource
    part: Slice
    fetched: Fetched


class _MooncakePort:
    kind = "mooncake"

    def __init__(self, memory: KvMemory, host: str) -> None:
        self._memory = memory
        self._engine = _Engine.take(host)
        self.listener = listen(host)
        self.address = written_address(self.kind, self.listener)
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._post: Post | None = None
        size = max(STAGING_BYTES, memory.layout.block_bytes)
        self._staging = [np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8) for _ in range(HELPERS)]
        self._free = [threading.Event() for _ in self._staging]
        self._closing = False
        for area in self._staging:
            self._engine.register(area.ctypes.data, size)
        self._helpers = [
            threading.Thread(target=self._help, args=(area, free), name=f"kv-mooncake-read-{number}", daemon=True)
            for number, (area, free) in enumerate(zip(self._staging, self._free, strict=True))
        ]

    def begin(self, post: Post) -> None:
        self._post = post
        for helper in self._helpers:
            helper.start()

    def admit(self, _sock: socket.socket) -> str | None:
        return None

    def introduction_bytes(self, blocks: int) -> int:
        return _POOL.size + 4 * blocks

    def meet(self, introduction: bytes, _fds: list[int], _blocks: int) -> Source | str | None:
        address, pool_blocks, name = _POOL.unpack_from(introduction)
        blocks = np.frombuffer(introduction, dtype="<i4", offset=_POOL.size).astype(np.int32)
        if not within(blocks, pool_blocks):
            return "source block out of range"
        try:
            peer = name.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            return "no name of an engine"
        return _MooncakeSource(self._reads, peer, address, blocks, self._memory)

    def _help(self, area: Bytes2d, free: threading.Event) -> None:
        """A helper's life: read a slice, let the lane have it, wait until the lane has copied it."""
        while (read := self._reads.get()) is not None and self._post is not None:
            problem = read.source.read(self._engine, area, read.part)
            free.clear()
            self._post(partial(self._bring, read, area, problem, free), True)
            if self._closing:
                return
            free.wait()

    def _bring(self, read: _Read, area: Bytes2d, problem: str | None, free: threading.Event) -> None:
        """On the lane: what a helper has read goes into the pool, unless nobody wants it any more."""
        if not read.source.closed:
            if problem is None:
                read.source.copy(area, read.part)
            read.fetched(problem)
        free.set()

    def close(self) -> None:
        self._closing = True
        for free in self._free:
            self._reads.put(None)
            free.set()  # the lane, which is closing us, will copy nothing any more
        for helper in self._helpers:
            helper.join()
        for area in self._staging:
            self._engine.unregister(area.ctypes.data)
        self._engine.give_back()
        self._staging.clear()
        self.listener.close()


class _MooncakeSource:
    slice_bytes = STAGING_BYTES

    def __init__(
        self, reads: queue.SimpleQueue[_Read | None], peer: str, address: int, blocks: Int32s, memory: KvMemory
    ) -> None:
        self._reads = reads
        self._peer = peer
        self._address = address
        self._blocks = blocks
        self._memory = memory
        self.closed = False

    def fetch(self, part: Slice, fetched: Fetched) -> None:
        self._reads.put(_Read(self, part, fetched))

    def read(self, engine: _Engine, area: Bytes2d, part: Slice) -> str | None:
        """By a helper: into its staging area, piece after piece."""
        if self.closed:
            return "nobody wants it any more"
        size, stride = part.high - part.low, self._memory.layout.block_bytes
        of = [
            self._address + block * stride + part.low for block in self._blocks[part.begin :][: len(part.targets)].tolist()
        ]
        to = [area.ctypes.data + number * size for number in range(len(of))]
        return None if engine.read(self._peer, to, of, [size] * len(of)) else f"cannot read from {self._peer}"

    def copy(self, area: Bytes2d, part: Slice) -> None:
        """On the lane: from the staging area into our blocks."""
        size, count = part.high - part.low, len(part.targets)
        self._memory.pool[:, part.low : part.high][part.targets] = area[: count * size].reshape(count, size)

    def close(self) -> None:
        self.closed = True
