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
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Fenced, Handover, ShipFailed, Shipped
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.host_mirror import MirrorCopier, MirrorStaging
from baton.kv.io_thread import IoThread, Work
from baton.kv.rate_limit import ByteRateLimit
from baton.kv.scatter_io import ScatterBuffers
from baton.kv.send_queue import BlockRun, LayerSignals, SendQueue
from baton.kv.shared_memory import ids_within, pool_bytes
from baton.kv.transfer_contract import KvMemory, Report, SenderOptions
from baton.kv.transfer_frames import END_FRAME, TAKEN, TOKEN_MAX, WELCOME, WELCOME_DEVICE, encode_hello, encode_pieces

CARRIED_BYTES = 8 << 20
"""In a frame that carries its pieces: frames cost time on both sides."""
ANNOUNCED_BYTES = 4 << 20
"""In a frame that only names them: D can begin when it has heard of the first."""
ON_DEVICE_BYTES = 64 << 20
"""In a frame that names what D reads from our device: each takes some tenths of a millisecond, however short."""
ANNOUNCED_AT_ONCE = 64
SEND_BUFFERS_MAX = 64
"""A call: about as much as goes at once."""
TURN_BYTES = 8 << 20
"""Of one line before the others get their turn."""
ENDED_KEPT = 4096
UNTAKEN_MAX = 1024
"""Lines on which D has heard of everything and not said yet that it has it. Where it never does, the oldest goes."""


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


class _Stage(Enum):
    CONNECTING = "connecting"
    GREETING = "greeting"
    """The hello is on its way; D has not said yes."""
    OPEN = "open"
    ENDING = "ending"
    """The end frame is waiting to be sent."""


@dataclass(eq=False)
class _Connection:
    handover: Handover
    address: str
    sock: socket.socket
    first: int
    blocks: Int32s
    checks: BlockChecksums | DeviceChecksums | None
    fds: list[int]
    waiting: ScatterBuffers
    """To be sent, in order."""
    moved_at_s: float
    """When the peer last took something, or there was nothing to take."""
    stage: _Stage = _Stage.CONNECTING
    run: BlockRun | None = None
    """What is left of the run that frames are being made of."""
    staging: MirrorStaging | None = None
    """What its runs come through, where they lie on a device and D does not read them there."""
    taken: bool = False
    """D has everything."""


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
        self._connections: dict[Handover, _Connection] = {}
        self._kept: dict[str, socket.socket] = {}
        self._awaiting_taken: dict[Handover, _Connection] = {}
        """All of these was announced, and D may still be fetching it."""
        self._ended: dict[Handover, None] = {}
        """Ended lately, however: orders for these come too late."""
        self._pool = pool_bytes(memory)
        self._io = IoThread(f"kv-{transport.kind}-send", self._turn, self._end)
        mirror = memory.mirror
        self._mirror_copier = (
            None if mirror is None else MirrorCopier(f"kv-{transport.kind}-fetch", mirror, mirror.fetch, self._io.post)
        )
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

    # ── on the lane ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, handover: Handover, address: str, token: bytes, first: int, blocks: Int32s) -> None:
        self._ended.pop(handover, None)  # a peer that was started anew counts its requests from the beginning
        if (before := self._awaiting_taken.pop(handover, None)) is not None:
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
        conn = _Connection(handover, address, sock, first, blocks, checks, fds, waiting, time.monotonic())
        conn.staging = self._staging(conn)
        self._connections[handover] = conn
        self._watch(conn, selectors.EVENT_WRITE)

    def _staging(self, conn: _Connection) -> MirrorStaging | None:
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
        conn = self._connections.pop(handover, None) or self._awaiting_taken.pop(handover, None)
        if conn is not None:
            self._close_connection(conn)
        if self._mirror_copier is None:
            then()
        else:
            self._mirror_copier.drop(handover, then)

    def _close_connection(self, conn: _Connection) -> None:
        self._io.watch(conn.sock, 0, self._ignore)
        conn.sock.close()
        self._let_go(conn)

    def _let_go(self, conn: _Connection) -> None:
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
            if not conn.waiting and conn.stage is not _Stage.GREETING:
                continue  # it has nothing to send: we may be computing
            left_s = conn.moved_at_s + self._stall_s - now_s
            if left_s <= 0.0:
                self._fail(conn.handover, f"the receiver took nothing for {self._stall_s} s while {conn.stage.value}")
            elif earliest_s is None or left_s < earliest_s:
                earliest_s = left_s
        return earliest_s

    def _watch(self, conn: _Connection, events: int) -> None:
        self._io.watch(conn.sock, events, lambda ready: self._ready(conn, ready))

    def _ready(self, conn: _Connection, events: int) -> None:
        if self._connections.get(conn.handover) is not conn:
            return
        if conn.stage is _Stage.CONNECTING:
            error = conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._fail(conn.handover, f"cannot connect: {os.strerror(error)}")
                return
            conn.stage, conn.moved_at_s = _Stage.GREETING, time.monotonic()
        elif events & selectors.EVENT_READ and not self._read_reply(conn):
            return
        self._pump(conn)

    def _read_reply(self, conn: _Connection) -> bool:
        """False when the line is over."""
        try:
            said = conn.sock.recv(16)
        except BlockingIOError:
            return True
        except OSError as error:
            self._lost(conn, error)
            return False
        if said == WELCOME and conn.stage is _Stage.GREETING and not conn.waiting:
            conn.stage, conn.moved_at_s = _Stage.OPEN, time.monotonic()
            return True
        if said == WELCOME_DEVICE and conn.stage is _Stage.GREETING and not conn.waiting and self._transport.shares_device:
            self._open_device(conn)
            return True
        if said == TAKEN and conn.stage is _Stage.ENDING and not conn.waiting:
            conn.taken = True
            return True
        if said:
            reason = "said something out of place"
        elif conn.stage is _Stage.GREETING:
            reason = "turned us away"
        else:
            reason = "hung up"
        self._fail(conn.handover, f"the receiver {reason}")
        return False

    def _open_device(self, conn: _Connection) -> None:
        """Nothing of it comes through the host."""
        sharing = self._memory.sharing
        if sharing is None:
            raise InvariantViolated("a device is shared that is not there")
        conn.stage, conn.moved_at_s, conn.staging = _Stage.OPEN, time.monotonic(), None
        if conn.checks is not None:
            conn.checks = DeviceChecksums(conn.first, len(conn.blocks), self._memory.spans, sharing)

    def _lost(self, conn: _Connection, error: OSError) -> None:
        what = "turned us away" if conn.stage is _Stage.GREETING else "is gone"
        self._fail(conn.handover, f"the receiver {what}: {error}")

    def _pump(self, conn: _Connection) -> None:
        """Send what can be sent now, and come back when more can."""
        if conn.stage is _Stage.CONNECTING:
            return
        sent = 0
        while more := self._refill(conn):
            if sent >= TURN_BYTES:
                break  # the others' turn
            try:
                taken = self._send(conn)
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
        if conn.stage is _Stage.ENDING and not conn.waiting:
            if self._read_reply(conn):  # what we send to one who has hung up leaves, too, and arrives nowhere
                self._shipped(conn)
        else:
            self._watch(conn, selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0))

    def _send(self, conn: _Connection) -> int:
        if conn.fds:
            taken = socket.send_fds(conn.sock, conn.waiting.next(1), conn.fds)
            conn.fds = []
            return taken
        return conn.sock.sendmsg(conn.waiting.next(SEND_BUFFERS_MAX))

    def _refill(self, conn: _Connection) -> bool:
        """Whether there is anything to send. Makes more ready while there is little, so that calls stay large."""
        while conn.stage is _Stage.OPEN and conn.waiting.left < self._refill_below:
            if self._rate.delay_s(time.monotonic()) > 0.0:
                self._due = True
                break
            if conn.run is None:
                conn.run = self._ready_run(conn.handover) if conn.staging is None else conn.staging.next()
            if conn.run is None:
                if self._queue.finished(conn.handover) and (conn.staging is None or conn.staging.is_empty):
                    conn.waiting.add([memoryview(END_FRAME)])
                    conn.stage = _Stage.ENDING
                break
            if not conn.waiting:
                conn.moved_at_s = time.monotonic()  # from now on it owes us something
            self._frame(conn, conn.run)
        return bool(conn.waiting)

    def _ready_run(self, handover: Handover) -> BlockRun | None:
        with self._signals_lock:
            return self._queue.next_run(handover)

    def _frame(self, conn: _Connection, run: BlockRun) -> None:
        """The next frame of a run; what is left of it stays in the line."""
        begin, end = self._memory.spans[run.layers.start][0], self._memory.spans[run.layers.stop - 1][1]
        count = min(run.upto - run.first, max(1, self._rate.at_once(self._frame_bytes(conn)) // max(1, end - begin)))
        at = run.first - conn.first
        blocks = conn.blocks[at : at + count]
        if conn.checks is not None:
            conn.checks.add(run.layers, run.first, blocks)
        conn.waiting.add([memoryview(encode_pieces(run.layers, run.first, count))])
        if self._transport.carries_bytes:
            offsets = [block * self._memory.layout.block_bytes for block in blocks.tolist()]
            conn.waiting.add([self._pool[offset + begin : offset + end] for offset in offsets])
        rest = run.first + count
        conn.run = BlockRun(run.layers, rest, run.upto) if rest < run.upto else None
        self._rate.spent((end - begin) * count, time.monotonic())
        if not self._transport.carries_bytes:
            self.sent_bytes += (end - begin) * count

    def _frame_bytes(self, conn: _Connection) -> int:
        if self._transport.carries_bytes:
            return CARRIED_BYTES
        return ON_DEVICE_BYTES if self._memory.mirror is not None and conn.staging is None else ANNOUNCED_BYTES

    def _shipped(self, conn: _Connection) -> None:
        """Everything has left. Closing a socket does not take back what was given to it."""
        self._forget(conn.handover)
        del self._connections[conn.handover]
        if self._transport.carries_bytes or conn.taken:
            self._taken(conn)
        else:
            self._await_taken(conn)
        self._report(Shipped(conn.handover, conn.checks.digest() if conn.checks is not None else b""))

    def _await_taken(self, conn: _Connection) -> None:
        if len(self._awaiting_taken) >= UNTAKEN_MAX:
            self._close_connection(self._awaiting_taken.pop(next(iter(self._awaiting_taken))))
        self._awaiting_taken[conn.handover] = conn
        self._io.watch(conn.sock, selectors.EVENT_READ, lambda _: self._read_taken(conn))

    def _read_taken(self, conn: _Connection) -> None:
        try:
            said = conn.sock.recv(16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if self._awaiting_taken.pop(conn.handover, None) is None:
            return
        if said == TAKEN:
            self._taken(conn)
        else:
            self._close_connection(conn)

    def _taken(self, conn: _Connection) -> None:
        """Nothing of it is read any more. The line may serve another purpose: see `keeps_last`."""
        if self._transport.keeps_last:
            self._let_go(conn)
            self._keep(conn)
        else:
            self._close_connection(conn)

    def _keep(self, conn: _Connection) -> None:
        """Instead of the one that was kept for this address before."""
        before = self._kept.pop(conn.address, None)
        if before is not None:
            self._io.watch(before, 0, self._ignore)
            before.close()
        self._kept[conn.address] = conn.sock
        self._io.watch(conn.sock, selectors.EVENT_READ, lambda _: self._unkeep(conn.address, conn.sock))

    def _unkeep(self, address: str, sock: socket.socket) -> None:
        self._io.watch(sock, 0, self._ignore)
        sock.close()
        if self._kept.get(address) is sock:
            del self._kept[address]

    def _end(self) -> None:
        self._closed = True
        for handover in list(self._connections):
            self._fail(handover, "the sender is closed")
        for conn in self._awaiting_taken.values():
            self._close_connection(conn)
        self._awaiting_taken.clear()
        if self._mirror_copier is not None:
            self._mirror_copier.close()
        for address, sock in list(self._kept.items()):
            self._unkeep(address, sock)
        self._pool.release()
        self._transport.close()

    @staticmethod
    def _ignore(_events: int) -> None:
        """Nobody listens any more."""
