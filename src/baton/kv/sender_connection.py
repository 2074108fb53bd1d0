"""One connection of a sender, and the connections that have nothing more to send.

Runs on the sender's I/O thread. `FinishedConnections` owns a connection from its last byte until D has said that it took
everything, and afterwards where the kind keeps the last connection to an address open.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import Handover
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.host_mirror import MirrorStaging
from baton.kv.io_thread import IoThread, ignore_events
from baton.kv.scatter_io import ScatterBuffers
from baton.kv.send_queue import BlockRun
from baton.kv.transfer_frames import TAKEN

SEND_BUFFERS_MAX = 64
"""Most buffers given to one sendmsg call."""
UNTAKEN_MAX = 1024
"""Connections that wait for TAKEN; beyond it the oldest is closed."""


class SenderStage(Enum):
    CONNECTING = "connecting"
    GREETING = "greeting"
    """The hello is being sent; D has not welcomed it yet."""
    OPEN = "open"
    ENDING = "ending"
    """The end frame is waiting to be sent."""


@dataclass(eq=False)
class SenderConnection:
    handover: Handover
    address: str
    sock: socket.socket
    first: int
    """`blocks[i]` is block `first + i` of the sequence."""
    blocks: Int32s
    checks: BlockChecksums | DeviceChecksums | None
    fds: list[int]
    """File descriptors to pass with the first bytes."""
    waiting: ScatterBuffers
    """Bytes to send, in order."""
    moved_at_s: float
    """When the peer last took bytes, or there were none to take."""
    stage: SenderStage = SenderStage.CONNECTING
    run: BlockRun | None = None
    """The rest of the run that frames are being made of."""
    staging: MirrorStaging | None = None
    """Copies its runs into the mirror; None where the pool is in host memory or D reads our device."""
    taken: bool = False
    """D has said TAKEN."""

    def send(self) -> int:
        """Send what fits into the socket now; returns the bytes sent."""
        if self.fds:
            taken = socket.send_fds(self.sock, self.waiting.next(1), self.fds)
            self.fds = []
            return taken
        return self.sock.sendmsg(self.waiting.next(SEND_BUFFERS_MAX))


class FinishedConnections:
    """Connections that have sent everything."""

    def __init__(
        self,
        io: IoThread,
        keeps_last: bool,
        hang_up: Callable[[SenderConnection], None],
        let_go: Callable[[SenderConnection], None],
    ) -> None:
        """`hang_up` closes a connection and releases its blocks of the mirror; `let_go` does only the latter."""
        self._io = io
        self._keeps_last = keeps_last
        self._hang_up = hang_up
        self._let_go = let_go
        self._awaiting_taken: dict[Handover, SenderConnection] = {}
        """D has heard of everything and may still be fetching it."""
        self._kept: dict[str, socket.socket] = {}
        """The last connection to each address, where the kind keeps it."""

    def pop(self, handover: Handover) -> SenderConnection | None:
        """Give up waiting for TAKEN; the caller owns the connection."""
        return self._awaiting_taken.pop(handover, None)

    def await_taken(self, conn: SenderConnection) -> None:
        if len(self._awaiting_taken) >= UNTAKEN_MAX:
            self._hang_up(self._awaiting_taken.pop(next(iter(self._awaiting_taken))))
        self._awaiting_taken[conn.handover] = conn
        self._io.watch(conn.sock, selectors.EVENT_READ, lambda _: self._read_taken(conn))

    def taken(self, conn: SenderConnection) -> None:
        """D reads nothing of it any more. It stays open where the kind keeps the last connection."""
        if self._keeps_last:
            self._let_go(conn)
            self._keep(conn)
        else:
            self._hang_up(conn)

    def close_awaiting(self) -> None:
        for conn in self._awaiting_taken.values():
            self._hang_up(conn)
        self._awaiting_taken.clear()

    def close_kept(self) -> None:
        for address, sock in list(self._kept.items()):
            self._unkeep(address, sock)

    def _read_taken(self, conn: SenderConnection) -> None:
        try:
            said = conn.sock.recv(16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if self._awaiting_taken.pop(conn.handover, None) is None:
            return
        if said == TAKEN:
            self.taken(conn)
        else:
            self._hang_up(conn)

    def _keep(self, conn: SenderConnection) -> None:
        """Close the connection that was kept for this address, and keep this one."""
        before = self._kept.pop(conn.address, None)
        if before is not None:
            self._io.watch(before, 0, ignore_events)
            before.close()
        self._kept[conn.address] = conn.sock
        self._io.watch(conn.sock, selectors.EVENT_READ, lambda _: self._unkeep(conn.address, conn.sock))

    def _unkeep(self, address: str, sock: socket.socket) -> None:
        self._io.watch(sock, 0, ignore_events)
        sock.close()
        if self._kept.get(address) is sock:
            del self._kept[address]
