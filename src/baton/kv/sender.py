"""The sending side of every kind of transfer: takes orders and layer signals, and drives one connection per hand-over.

Owns connections from connecting to the last byte, their time-outs, checksums and rate limit. The kind's `SenderKind` decides
the socket, what follows the hello, and whether the bytes travel on the connection. Everything runs on one I/O thread; see
`io_thread`. Blocks on a device are first copied into the host mirror and stay there until D has them; see `host_mirror`.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Fenced, Handover, ShipFailed, Shipped
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.host_mirror import MirrorCopier, MirrorStaging
from baton.kv.io_thread import IoThread, Work, ignore_events
from baton.kv.rate_limit import ByteRateLimit
from baton.kv.scatter_io import ScatterBuffers
from baton.kv.send_queue import BlockRun, LayerSignals, SendQueue
from baton.kv.sender_connection import FinishedConnections, SenderConnection, SenderStage
from baton.kv.sender_frames import CARRIED_BYTES, FrameMaker
from baton.kv.shared_memory import ids_within, pool_bytes
from baton.kv.transfer_contract import KvMemory, Report, SenderOptions
from baton.kv.transfer_frames import END_FRAME, TAKEN, TOKEN_MAX, WELCOME, WELCOME_DEVICE, encode_hello

ANNOUNCED_AT_ONCE = 64
TURN_BYTES = 8 << 20
"""Of one line before the others get their turn."""
ENDED_KEPT = 4096


class SenderKind(Protocol):
    """What is particular to a kind."""

    kind: str
    carries_bytes: bool
    """The bytes travel on the line; otherwise D fetches them when it hears of them."""
    shares_device: bool
    """It tells D how to read our device itself."""
    keeps_last: bool
    """The last line to an address stays open when it has nothing more to say: D holds on to something while we live."""

    def connect(self, address: str) -> socket.socket:
        """A socket that does not block and is connecting. Raises OSError, or ValueError for an address it cannot read."""

    def introduce(self, blocks: Int32s) -> tuple[bytes, list[int]]:
        """What follows the hello: bytes, and fds to pass."""

    def close(self) -> None: ...


class ConnectionSender:
    def __init__(self, memory: KvMemory, report: Report, transport: SenderKind, options: SenderOptions) -> None:
        self.sent_bytes = 0
        self._memory = memory
        self._report = report
        self._transport = transport
        self._verified = options.get("verified", True)
        self._stall_s = options.get("stall_s", 5.0)
        self._rate = ByteRateLimit(options.get("bytes_per_s"))
        layers = len(memory.spans)
        self._signals_lock = threading.Lock()
        self._signals = LayerSignals(layers)
        self._refill_below = CARRIED_BYTES // 2 if transport.carries_bytes else ANNOUNCED_AT_ONCE * len(END_FRAME)
        self._due = False
        """Something may be ready to go that was not."""
        self._closed = False
        tasks_max, run_layers_max = options.get("handovers_max", 1024), options.get("run_layers_max")
        self._queue = SendQueue(layers, self._signals, tasks_max, run_layers_max)
        self._connections: dict[Handover, SenderConnection] = {}
        self._ended: dict[Handover, None] = {}
        """Ended lately, however: orders for these come too late."""
        self._pool = pool_bytes(memory)
        self._io = IoThread(f"kv-{transport.kind}-send", self._turn, self._end)
        self._frames = FrameMaker(memory, self._pool, self._rate, transport.carries_bytes)
        self._finished = FinishedConnections(self._io, transport.keeps_last, self._close_connection, self._let_go)
        mirror, name = memory.mirror, f"kv-{transport.kind}-fetch"
        self._mirror_copier = None if mirror is None else MirrorCopier(name, mirror, mirror.fetch, self._io.post)
        self._io.start()

    # ── orders, from any thread ──────────────────────────────────────────────────────────────────────────────────────────

    def open(self, handover: Handover, address: str, token: bytes, first: int, blocks: Int32s) -> None:
        if not ids_within(blocks, self._memory.blocks):
            raise InvariantViolated(f"{handover}: blocks outside of the pool")
        if not 0 < len(token) <= TOKEN_MAX:
            raise InvariantViolated(f"{handover}: a token of {len(token)} bytes")
        self._order(handover, lambda: self._open(handover, address, token, first, blocks))

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        self._order(handover, lambda: self._ship(handover, step, first, upto, last))

    def layer_done(self, step: int, layer: int) -> None:
        with self._signals_lock:
            self._signals.layer_done(step, layer)
            self._due = True
        self._io.wake()

    def step_done(self, step: int) -> None:
        with self._signals_lock:
            self._signals.step_done(step)
            self._due = True
        self._io.wake()

    def fence(self, handover: Handover) -> None:
        self._io.post(lambda: self._fence(handover), urgent=True)

    def close(self) -> None:
        self._io.close()

    def _order(self, handover: Handover, work: Callable[[], None]) -> None:
        if not self._io.post(work):
            self._report(ShipFailed(handover, "too many orders are waiting"))

    # ── on the I/O thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, handover: Handover, address: str, token: bytes, first: int, blocks: Int32s) -> None:
        self._ended.pop(handover, None)  # a peer that was started anew counts its requests from the beginning
        if (before := self._finished.pop(handover)) is not None:
            self._close_connection(before)
        refusal = "the sender is closed" if self._closed else self._queue.open(handover, first, len(blocks))
        if refusal is not None:
            self._fail(handover, refusal)
            return
        try:
            sock = self._transport.connect(address)
        except (OSError, ValueError) as error:
            self._fail(handover, f"cannot connect: {error}")
            return
        hello = encode_hello(self._transport.kind, handover, self._memory.layout.digest, token)
        more, fds = self._transport.introduce(blocks)
        checks = BlockChecksums(first, len(blocks), self._memory.spans, self._pool) if self._verified else None
        waiting = ScatterBuffers()
        waiting.add([memoryview(hello + more)])
        conn = SenderConnection(handover, address, sock, first, blocks, checks, fds, waiting, time.monotonic())
        conn.staging = self._staging(conn)
        self._connections[handover] = conn
        self._watch(conn, selectors.EVENT_WRITE)

    def _staging(self, conn: SenderConnection) -> MirrorStaging | None:
        mirror, copier = self._memory.mirror, self._mirror_copier
        if mirror is None or copier is None:
            return None
        mirror.hold(conn.blocks)

        def staged() -> None:
            if self._connections.get(conn.handover) is conn:
                self._pump(conn)

        handover, spans = conn.handover, self._memory.spans
        return MirrorStaging(
            copier, mirror, spans, handover, conn.first, conn.blocks, lambda: self._ready_run(handover), staged
        )

    def _ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        if handover in self._ended:
            return
        with self._signals_lock:
            refusal = self._queue.ship(handover, step, first, upto, last)
        if self._closed or refusal is not None:
            self._fail(handover, refusal or "the sender is closed")
        elif (conn := self._connections.get(handover)) is not None:
            self._pump(conn)

    def _fence(self, handover: Handover) -> None:
        self._drop(handover, lambda: self._report(Fenced(handover)))

    def _fail(self, handover: Handover, reason: str) -> None:
        self._drop(handover, lambda: None)
        self._report(ShipFailed(handover, reason))

    def _drop(self, handover: Handover, then: Work) -> None:
        """`then` when nothing of it is read any more."""
        self._forget(handover)
        conn = self._connections.pop(handover, None) or self._finished.pop(handover)
        if conn is not None:
            self._close_connection(conn)
        if self._mirror_copier is None:
            then()
        else:
            self._mirror_copier.drop(handover, then)

    def _close_connection(self, conn: SenderConnection) -> None:
        self._io.watch(conn.sock, 0, ignore_events)
        conn.sock.close()
        self._let_go(conn)

    def _let_go(self, conn: SenderConnection) -> None:
        """Of the mirror, where there is one."""
        if self._mirror_copier is not None:
            self._mirror_copier.let_go(conn.blocks)

    def _forget(self, handover: Handover) -> None:
        self._queue.forget(handover)
        self._ended[handover] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def _turn(self, now_s: float) -> float | None:
        delay_s = self._rate.delay_s(now_s)
        if self._due and delay_s == 0.0:
            self._due = False
            for conn in list(self._connections.values()):
                self._pump(conn)
            delay_s = self._rate.delay_s(time.monotonic())
        wait_s = self._end_stalled(now_s)
        if delay_s > 0.0:
            return delay_s if wait_s is None else min(delay_s, wait_s)
        return 0.0 if self._due else wait_s

    def _end_stalled(self, now_s: float) -> float | None:
        """Seconds until the next line may have stalled."""
        earliest_s: float | None = None
        for conn in list(self._connections.values()):
            if not conn.waiting and conn.stage is not SenderStage.GREETING:
                continue  # it has nothing to send: we may be computing
            left_s = conn.moved_at_s + self._stall_s - now_s
            if left_s <= 0.0:
                self._fail(conn.handover, f"the receiver took nothing for {self._stall_s} s while {conn.stage.value}")
            elif earliest_s is None or left_s < earliest_s:
                earliest_s = left_s
        return earliest_s

    def _watch(self, conn: SenderConnection, events: int) -> None:
        self._io.watch(conn.sock, events, lambda ready: self._ready(conn, ready))

    def _ready(self, conn: SenderConnection, events: int) -> None:
        if self._connections.get(conn.handover) is not conn:
            return
        if conn.stage is SenderStage.CONNECTING:
            error = conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._fail(conn.handover, f"cannot connect: {os.strerror(error)}")
                return
            conn.stage, conn.moved_at_s = SenderStage.GREETING, time.monotonic()
        elif events & selectors.EVENT_READ and not self._read_reply(conn):
            return
        self._pump(conn)

    def _read_reply(self, conn: SenderConnection) -> bool:
        """False when the line is over."""
        try:
            said = conn.sock.recv(16)
        except BlockingIOError:
            return True
        except OSError as error:
            self._lost(conn, error)
            return False
        if said == WELCOME and conn.stage is SenderStage.GREETING and not conn.waiting:
            conn.stage, conn.moved_at_s = SenderStage.OPEN, time.monotonic()
            return True
        if (
            said == WELCOME_DEVICE
            and conn.stage is SenderStage.GREETING
            and not conn.waiting
            and self._transport.shares_device
        ):
            self._open_device(conn)
            return True
        if said == TAKEN and conn.stage is SenderStage.ENDING and not conn.waiting:
            conn.taken = True
            return True
        if said:
            reason = "said something out of place"
        elif conn.stage is SenderStage.GREETING:
            reason = "turned us away"
        else:
            reason = "hung up"
        self._fail(conn.handover, f"the receiver {reason}")
        return False

    def _open_device(self, conn: SenderConnection) -> None:
        """Nothing of it comes through the host."""
        sharing = self._memory.sharing
        if sharing is None:
            raise InvariantViolated("a device is shared that is not there")
        conn.stage, conn.moved_at_s, conn.staging = SenderStage.OPEN, time.monotonic(), None
        if conn.checks is not None:
            conn.checks = DeviceChecksums(conn.first, len(conn.blocks), self._memory.spans, sharing)

    def _lost(self, conn: SenderConnection, error: OSError) -> None:
        what = "turned us away" if conn.stage is SenderStage.GREETING else "is gone"
        self._fail(conn.handover, f"the receiver {what}: {error}")

    def _pump(self, conn: SenderConnection) -> None:
        """Send what can be sent now, and come back when more can."""
        if conn.stage is SenderStage.CONNECTING:
            return
        sent = 0
        while more := self._refill(conn):
            if sent >= TURN_BYTES:
                break  # the others' turn
            try:
                taken = conn.send()
            except BlockingIOError:
                break
            except OSError as error:
                self._lost(conn, error)
                return
            conn.moved_at_s = time.monotonic()
            sent += taken
            if self._transport.carries_bytes:
                self.sent_bytes += taken
            conn.waiting.advance(taken)
        if conn.stage is SenderStage.ENDING and not conn.waiting:
            if self._read_reply(conn):  # what we send to one who has hung up leaves, too, and arrives nowhere
                self._shipped(conn)
        else:
            self._watch(conn, selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0))

    def _refill(self, conn: SenderConnection) -> bool:
        """Whether there is anything to send. Makes more ready while there is little, so that calls stay large."""
        while conn.stage is SenderStage.OPEN and conn.waiting.left < self._refill_below:
            if self._rate.delay_s(time.monotonic()) > 0.0:
                self._due = True
                break
            if conn.run is None:
                conn.run = self._ready_run(conn.handover) if conn.staging is None else conn.staging.next()
            if conn.run is None:
                if self._queue.finished(conn.handover) and (conn.staging is None or conn.staging.is_empty):
                    conn.waiting.add([memoryview(END_FRAME)])
                    conn.stage = SenderStage.ENDING
                break
            if not conn.waiting:
                conn.moved_at_s = time.monotonic()  # from now on it owes us something
            named_bytes = self._frames.add_frame(conn, conn.run)
            if not self._transport.carries_bytes:
                self.sent_bytes += named_bytes
        return bool(conn.waiting)

    def _ready_run(self, handover: Handover) -> BlockRun | None:
        with self._signals_lock:
            return self._queue.next_run(handover)

    def _shipped(self, conn: SenderConnection) -> None:
        """Everything has left. Closing a socket does not take back what was given to it."""
        self._forget(conn.handover)
        del self._connections[conn.handover]
        if self._transport.carries_bytes or conn.taken:
            self._finished.taken(conn)
        else:
            self._finished.await_taken(conn)
        self._report(Shipped(conn.handover, conn.checks.digest() if conn.checks is not None else b""))

    def _end(self) -> None:
        self._closed = True
        for handover in list(self._connections):
            self._fail(handover, "the sender is closed")
        self._finished.close_awaiting()
        if self._mirror_copier is not None:
            self._mirror_copier.close()
        self._finished.close_kept()
        self._pool.release()
        self._transport.close()
