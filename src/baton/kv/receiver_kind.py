"""The parts of a receiver that differ between the kinds of transfer: how a connection is met and where its bytes are.

Owns the protocols only. Implementations are in `transfer_tcp`, `transfer_shm` and `transfer_mooncake`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.engine.plan import Int32s
from baton.kv.io_thread import Post
from baton.kv.transfer_frames import PiecesFrame


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """Bytes [low, high) of the expected blocks from index `begin` on, which go to the blocks `targets`."""

    pieces: PiecesFrame
    begin: int
    targets: Int32s
    low: int
    high: int


Fetched = Callable[[str | None], None]
"""Called on the I/O thread when a slice was fetched: with None, or the reason why it failed."""


class KvSource(Protocol):
    """Fetches the KV of one connection whose bytes do not travel on it."""

    slice_bytes: int
    reads_device: bool
    """It copies from device to device and bypasses the mirror."""

    def fetch(self, part: BlockSlice, fetched: Fetched) -> None:
        """Fetch a slice into the pool and call `fetched`, at once or later. Must not touch the pool after `close`."""

    def close(self) -> None: ...


class ReceiverKind(Protocol):
    """The part of a receiver that is particular to a kind of transfer."""

    kind: str
    address: str
    listener: socket.socket

    def begin(self, post: Post) -> None:
        """Called once, before the I/O thread starts; `post` queues work on it."""

    def admit(self, sock: socket.socket) -> str | None:
        """None, or the reason to reject this connection before its hello."""

    def introduction_bytes(self, blocks: int) -> int:
        """Length of what follows the hello of a hand-over of `blocks` blocks."""

    def open_source(self, introduction: bytes, fds: list[int], blocks: int) -> KvSource | str | None:
        """The source of the bytes; None if they travel on the connection; a string to reject it. Owns the fds."""

    def close(self) -> None: ...
