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
    """Blocks at `begin`… of what is expected go to `targets`, the bytes [low, high) of each."""

    pieces: PiecesFrame
    begin: int
    targets: Int32s
    low: int
    high: int


Fetched = Callable[[str | None], None]
"""Says why it could not be fetched, or None; on the lane."""


class KvSource(Protocol):
    """Where the bytes of one line are, when they do not travel on it."""

    slice_bytes: int
    reads_device: bool
    """It brings them from device to device, past the mirror."""

    def fetch(self, part: BlockSlice, fetched: Fetched) -> None:
        """Bring a slice into the pool, on the lane; call `fetched` then, now or later. After `close`, touch no pool."""

    def close(self) -> None: ...


class ReceiverKind(Protocol):
    """What is particular to a kind."""

    kind: str
    address: str
    listener: socket.socket

    def begin(self, post: Post) -> None:
        """The lane is there: what has to happen on it can be posted."""

    def admit(self, sock: socket.socket) -> str | None:
        """Why this connection is not even listened to."""

    def introduction_bytes(self, blocks: int) -> int:
        """How much follows the hello."""

    def open_source(self, introduction: bytes, fds: list[int], blocks: int) -> KvSource | str | None:
        """Where the bytes will come from; None when on the line; a string says what is wrong. Owns the fds."""

    def close(self) -> None: ...
