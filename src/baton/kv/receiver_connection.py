"""The state of a receiver: one connection from P, and one hand-over that D expects.

A connection reads into memory that is decided before the bytes arrive. Nothing here decides whether they were expected.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, field
from enum import Enum

from baton.core.handover.messages import Handover
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.expected_blocks import ExpectedBlocks
from baton.kv.receiver_kind import KvSource
from baton.kv.scatter_io import ScatterBuffers
from baton.kv.transfer_frames import FRAME_BYTES, PiecesFrame

RECV_BUFFERS_MAX = 64
"""Most buffers given to one recvmsg call."""
BUFFERED_BYTES = 64 * FRAME_BYTES
FDS_MAX = 4
_FD_BYTES = 4
_CLOSE_ON_EXEC = socket.MSG_CMSG_CLOEXEC if sys.platform == "linux" else 0


class ReceiverStage(Enum):
    HELLO = "hello"
    INTRODUCTION = "introduction"
    PIECES = "pieces"
    FETCHING = "fetching"
    """Not read from until the announced pieces are fetched."""
    DONE = "done"
    """The end frame has arrived; any further byte is an error."""


@dataclass(eq=False)
class ExpectedHandover:
    """One hand-over that is expected, and how far it has arrived."""

    handover: Handover
    token: bytes
    expected: ExpectedBlocks
    checks: BlockChecksums | DeviceChecksums | None
    conn: ReceiverConnection | None = None
    used: bool = False
    """Its token has opened a connection."""
    wanted: bytes | None = None
    """The sender's checksums, once known."""
    arriving_at_s: float = 0.0
    """Earliest time of the next Arriving report."""
    bypasses_mirror: bool = False
    copying: int = 0
    """Pieces that are being copied from the mirror to the device."""


@dataclass(eq=False)
class ReceiverConnection:
    sock: socket.socket
    since_s: float
    """When it was accepted."""
    moved_at_s: float
    """When bytes last arrived."""
    head: bytearray
    """The hello, introduction or frame that is being read."""
    filling: ScatterBuffers
    """Where the next bytes go, in order: the rest of a payload, then `head`, so that one call reads both."""
    payload_left: int = 0
    head_left: int = 0
    stage: ReceiverStage = ReceiverStage.HELLO
    entry: ExpectedHandover | None = None
    source: KvSource | None = None
    pieces: PiecesFrame | None = None
    """The announced pieces that are arriving."""
    fetched: int = 0
    """Blocks of `pieces` that the source has fetched."""
    in_flight: bool = False
    """The source is fetching a slice."""
    buffered: bytearray = field(default_factory=bytearray)
    """With a source: frames that have arrived and are not handled yet."""
    fds: list[int] = field(default_factory=list)

    @property
    def is_partial(self) -> bool:
        """Part of a piece or frame has arrived: the rest must follow within the stall time-out."""
        if self.source is not None:
            return self.in_flight or 0 < len(self.buffered) < FRAME_BYTES
        return self.payload_left > 0 or 0 < self.head_left < len(self.head)

    @property
    def may_fetch(self) -> bool:
        return self.stage is ReceiverStage.FETCHING and not self.in_flight

    @property
    def is_introducing(self) -> bool:
        return self.stage in (ReceiverStage.HELLO, ReceiverStage.INTRODUCTION)

    def next_head(self, size: int, payload: list[memoryview], payload_bytes: int) -> None:
        """Read `payload` next, then a head of `size` bytes."""
        self.head = bytearray(size)
        self.filling = ScatterBuffers()
        self.filling.add(payload)
        self.filling.add([memoryview(self.head)])
        self.payload_left, self.head_left = payload_bytes, size

    def receive(self) -> int:
        """Read from the socket into `filling`, or into `buffered` with a source. Returns the bytes read; 0 at the end."""
        if self.is_introducing:
            return self._receive_with_fds()
        if self.source is not None:
            came = self.sock.recv(BUFFERED_BYTES)
            self.buffered += came
            return len(came)
        return self.sock.recvmsg_into(self.filling.next(RECV_BUFFERS_MAX))[0]

    def _receive_with_fds(self) -> int:
        room = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
        size, more, _, _ = self.sock.recvmsg_into(self.filling.next(1), room, _CLOSE_ON_EXEC)
        for level, kind, data in more:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(memoryview(data[: len(data) // _FD_BYTES * _FD_BYTES]).cast("i").tolist())
        return size
