"""The sender of every kind: orders and signals in, one line a hand-over out.

Owns lines from connecting to the last byte, their time-outs, checks and pace. What a line is (which socket, what its hello
adds, whether the bytes travel on it) is the kind's `Road`. All of it happens on one lane; see `lane`. What lies on a device
is first brought into its mirror, and stays there until D has it; see `mirror`.
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
from baton.kv.checksums import Checks, DeviceChecks
from baton.kv.host_mirror import Ferry, Staging
from baton.kv.io_thread import Lane, Work
from baton.kv.rate_limit import Pace
from baton.kv.scatter_io import Vectors
from baton.kv.send_queue import Run, ShipBook, Signals
from baton.kv.shared_memory import flat, within
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
OVER_KEPT = 4096
UNTAKEN_MAX = 1024
"""Lines on which D has heard of everything and not said yet that it has it. Where it never does, the oldest goes."""


class Road(Protocol):
    """What is particular to a kind."""

    kind: str
    carries: bool
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
class _Line:
    handover: Handover
    address: str
    sock: socket.socket
    first: int
    blocks: Int32s
    checks: Checks | DeviceChecks | None
    fds: list[int]
    waiting: Vectors
    """To be sent, in order."""
    moved_at_s: float
    """When the peer last took something, or there was nothing to take."""
    stage: _Stage = _Stage.CONNECTING
    run: Run | None = None
    """What is left of the run that frames are being made of."""
    staging: Staging | None = None
    """What its runs come through, where they lie on a device and D does not read them there."""
    taken: bool = False
    """D has everything."""


class LineSender:
    def __init__(self, memory: KvMemory, report: Report, road: Road, options: SenderOptions) -> None:
        self.sent_bytes = 0
        self._memory = memory
        self._report = report
        self._road = road
        self._verified = options.get("verified", True)
        self._stall_s = options.get("stall_s", 5.0)
        self._pace = Pace(options.get("bytes_per_s"))
        layers = len(memory.spans)
        self._signals_gate = threading.Lock()
        self._signals = Signals(layers)
        self._refill_below = CARRIED_BYTES // 2 if road.carries else ANNOUNCED_AT_ONCE * len(END_FRAME)
        self._due = False
        """Something may be ready to go that was not."""
        self._closed = False
        tasks_max, run_layers_max = options.get("handovers_max", 1024), options.get("run_layers_max")
        self._book = ShipBook(layers, self._signals, tasks_max, run_layers_max)
        self._lines: dict[Handover, _Line] = {}
        self._kept: dict[str, socket.socket] = {}
        self._untaken: dict[Handover, _Line] = {}
        """All of these was announced, and D may still be fetching it."""
        self._over: dict[Handover, None] = {}
        """Ended lately, however: orders for these come too late."""
        self._pool = flat(memory)
        self._lane = Lane(f"kv-{road.kind}-send", self._turn, self._end)
        mirror = memory.mirror
        self._ferry = None if mirror is None else Ferry(f"kv-{road.kind}-fetch", mirror, mirror.fetch, self._lane.post)
        self._lane.start()

    # ── orders, from any thread ──────────────────────────────────────────────────────────────────────────────────────────

    def open(self, handover: Handover, address: str, token: bytes, first: int, blocks: Int32s) -> None:
        if not within(blocks, self._memory.blocks):
            raise InvariantViolated(f"{handover}: blocks outside of the pool")
        if not 0 < len(token) <= TOKEN_MAX:
            raise InvariantViolated(f"{handover}: a token of {len(token)} bytes")
        self._order(handover, lambda: self._open(handover, address, token, first, blocks))

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        self._order(handover, lambda: self._ship(handover, step, first, upto, last))

    def layer_done(self, step: int, layer: int) -> None:
        with self._signals_gate:
            self._signals.layer_done(step, layer)
            self._due = True
        self._lane.wake()

    def step_done(self, step: int) -> None:
        with self._signals_gate:
            self._signals.step_done(step)
            self._due = True
        self._lane.wake()

    def fence(self, handover: Handover) -> None:
        self._lane.post(lambda: self._fence(handover), urgent=True)

    def close(self) -> None:
        self._lane.close()

    def _order(self, handover: Handover, work: Callable[[], None]) -> None:
        if not self._lane.post(work):
            self._report(ShipFailed(handover, "too many orders are waiting"))

    # ── on the lane ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, handover: Handover, address: str, token: bytes, first: int, blocks: Int32s) -> None:
        self._over.pop(handover, None)  # a peer that was started anew counts its requests from the beginning
        if (before := self._untaken.pop(handover, None)) is not None:
            self._hang_up(before)
        refusal = "the sender is closed" if self._closed else self._book.open(handover, first, len(blocks))
        if refusal is not None:
            self._fail(handover, refusal)
            return
        try:
            sock = self._road.connect(address)
        except (OSError, ValueError) as error:
            self._fail(handover, f"cannot connect: {error}")
            return
        hello = encode_hello(self._road.kind, handover, self._memory.layout.digest, token)
        more, fds = self._road.introduce(blocks)
        checks = Checks(first, len(blocks), self._memory.spans, self._pool) if self._verified else None
        waiting = Vectors()
        waiting.add([memoryview(hello + more)])
        line = _Line(handover, address, sock, first, blocks, checks, fds, waiting, time.monotonic())
        line.staging = self._staging(line)
        self._lines[handover] = line
        self._watch(line, selectors.EVENT_WRITE)

    def _staging(self, line: _Line) -> Staging | None:
        mirror, ferry = self._memory.mirror, self._ferry
        if mirror is None or ferry is None:
            return None
        mirror.hold(line.blocks)

        def staged() -> None:
            if self._lines.get(line.handover) is line:
                self._pump(line)

        handover, spans = line.handover, self._memory.spans
        return Staging(ferry, mirror, spans, handover, line.first, line.blocks, lambda: self._ready_run(handover), staged)

    def _ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        if handover in self._over:
            return
        with self._signals_gate:
            refusal = self._book.ship(handover, step, first, upto, last)
        if self._closed or refusal is not None:
            self._fail(handover, refusal or "the sender is closed")
        elif (line := self._lines.get(handover)) is not None:
            self._pump(line)

    def _fence(self, handover: Handover) -> None:
        self._drop(handover, lambda: self._report(Fenced(handover)))

    def _fail(self, handover: Handover, reason: str) -> None:
        self._drop(handover, lambda: None)
        self._report(ShipFailed(handover, reason))

    def _drop(self, handover: Handover, then: Work) -> None:
        """`then` when nothing of it is read any more."""
        self._forget(handover)
        line = self._lines.pop(handover, None) or self._untaken.pop(handover, None)
        if line is not None:
            self._hang_up(line)
        if self._ferry is None:
            then()
        else:
            self._ferry.drop(handover, then)

    def _hang_up(self, line: _Line) -> None:
        self._lane.watch(line.sock, 0, self._nothing)
        line.sock.close()
        self._let_go(line)

    def _let_go(self, line: _Line) -> None:
        """Of the mirror, where there is one."""
        if self._ferry is not None:
            self._ferry.let_go(line.blocks)

    def _forget(self, handover: Handover) -> None:
        self._book.forget(handover)
        self._over[handover] = None
        if len(self._over) > OVER_KEPT:
            del self._over[next(iter(self._over))]

    def _turn(self, now_s: float) -> float | None:
        delay_s = self._pace.delay_s(now_s)
        if self._due and delay_s == 0.0:
            self._due = False
            for line in list(self._lines.values()):
                self._pump(line)
            delay_s = self._pace.delay_s(time.monotonic())
        wait_s = self._end_stalled(now_s)
        if delay_s > 0.0:
            return delay_s if wait_s is None else min(delay_s, wait_s)
        return 0.0 if self._due else wait_s

    def _end_stalled(self, now_s: float) -> float | None:
        """Seconds until the next line may have stalled."""
        earliest_s: float | None = None
        for line in list(self._lines.values()):
            if not line.waiting and line.stage is not _Stage.GREETING:
                continue  # it has nothing to send: we may be computing
            left_s = line.moved_at_s + self._stall_s - now_s
            if left_s <= 0.0:
                self._fail(line.handover, f"the receiver took nothing for {self._stall_s} s while {line.stage.value}")
            elif earliest_s is None or left_s < earliest_s:
                earliest_s = left_s
        return earliest_s

    def _watch(self, line: _Line, events: int) -> None:
        self._lane.watch(line.sock, events, lambda ready: self._ready(line, ready))

    def _ready(self, line: _Line, events: int) -> None:
        if self._lines.get(line.handover) is not line:
            return
        if line.stage is _Stage.CONNECTING:
            error = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._fail(line.handover, f"cannot connect: {os.strerror(error)}")
                return
            line.stage, line.moved_at_s = _Stage.GREETING, time.monotonic()
        elif events & selectors.EVENT_READ and not self._listen(line):
            return
        self._pump(line)

    def _listen(self, line: _Line) -> bool:
        """False when the line is over."""
        try:
            said = line.sock.recv(16)
        except BlockingIOError:
            return True
        except OSError as error:
            self._lost(line, error)
            return False
        if said == WELCOME and line.stage is _Stage.GREETING and not line.waiting:
            line.stage, line.moved_at_s = _Stage.OPEN, time.monotonic()
            return True
        if said == WELCOME_DEVICE and line.stage is _Stage.GREETING and not line.waiting and self._road.shares_device:
            self._open_device(line)
            return True
        if said == TAKEN and line.stage is _Stage.ENDING and not line.waiting:
            line.taken = True
            return True
        if said:
            reason = "said something out of place"
        elif line.stage is _Stage.GREETING:
            reason = "turned us away"
        else:
            reason = "hung up"
        self._fail(line.handover, f"the receiver {reason}")
        return False

    def _open_device(self, line: _Line) -> None:
        """Nothing of it comes through the host."""
        sharing = self._memory.sharing
        if sharing is None:
            raise InvariantViolated("a device is shared that is not there")
        line.stage, line.moved_at_s, line.staging = _Stage.OPEN, time.monotonic(), None
        if line.checks is not None:
            line.checks = DeviceChecks(line.first, len(line.blocks), self._memory.spans, sharing)

    def _lost(self, line: _Line, error: OSError) -> None:
        what = "turned us away" if line.stage is _Stage.GREETING else "is gone"
        self._fail(line.handover, f"the receiver {what}: {error}")

    def _pump(self, line: _Line) -> None:
        """Send what can be sent now, and come back when more can."""
        if line.stage is _Stage.CONNECTING:
            return
        sent = 0
        while more := self._refill(line):
            if sent >= TURN_BYTES:
                break  # the others' turn
            try:
                taken = self._send(line)
            except BlockingIOError:
                break
            except OSError as error:
                self._lost(line, error)
                return
            line.moved_at_s = time.monotonic()
            sent += taken
            if self._road.carries:
                self.sent_bytes += taken
            line.waiting.advance(taken)
        if line.stage is _Stage.ENDING and not line.waiting:
            if self._listen(line):  # what we send to one who has hung up leaves, too, and arrives nowhere
                self._shipped(line)
        else:
            self._watch(line, selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0))

    def _send(self, line: _Line) -> int:
        if line.fds:
            taken = socket.send_fds(line.sock, line.waiting.next(1), line.fds)
            line.fds = []
            return taken
        return line.sock.sendmsg(line.waiting.next(SEND_BUFFERS_MAX))

    def _refill(self, line: _Line) -> bool:
        """Whether there is anything to send. Makes more ready while there is little, so that calls stay large."""
        while line.stage is _Stage.OPEN and line.waiting.left < self._refill_below:
            if self._pace.delay_s(time.monotonic()) > 0.0:
                self._due = True
                break
            if line.run is None:
                line.run = self._ready_run(line.handover) if line.staging is None else line.staging.next()
            if line.run is None:
                if self._book.finished(line.handover) and (line.staging is None or line.staging.is_empty):
                    line.waiting.add([memoryview(END_FRAME)])
                    line.stage = _Stage.ENDING
                break
            if not line.waiting:
                line.moved_at_s = time.monotonic()  # from now on it owes us something
            self._frame(line, line.run)
        return bool(line.waiting)

    def _ready_run(self, handover: Handover) -> Run | None:
        with self._signals_gate:
            return self._book.next_run(handover)

    def _frame(self, line: _Line, run: Run) -> None:
        """The next frame of a run; what is left of it stays in the line."""
        begin, end = self._memory.spans[run.layers.start][0], self._memory.spans[run.layers.stop - 1][1]
        count = min(run.upto - run.first, max(1, self._pace.at_once(self._frame_bytes(line)) // max(1, end - begin)))
        at = run.first - line.first
        blocks = line.blocks[at : at + count]
        if line.checks is not None:
            line.checks.add(run.layers, run.first, blocks)
        line.waiting.add([memoryview(encode_pieces(run.layers, run.first, count))])
        if self._road.carries:
            offsets = [block * self._memory.layout.block_bytes for block in blocks.tolist()]
            line.waiting.add([self._pool[offset + begin : offset + end] for offset in offsets])
        rest = run.first + count
        line.run = Run(run.layers, rest, run.upto) if rest < run.upto else None
        self._pace.spent((end - begin) * count, time.monotonic())
        if not self._road.carries:
            self.sent_bytes += (end - begin) * count

    def _frame_bytes(self, line: _Line) -> int:
        if self._road.carries:
            return CARRIED_BYTES
        return ON_DEVICE_BYTES if self._memory.mirror is not None and line.staging is None else ANNOUNCED_BYTES

    def _shipped(self, line: _Line) -> None:
        """Everything has left. Closing a socket does not take back what was given to it."""
        self._forget(line.handover)
        del self._lines[line.handover]
        if self._road.carries or line.taken:
            self._taken(line)
        else:
            self._await_taken(line)
        self._report(Shipped(line.handover, line.checks.digest() if line.checks is not None else b""))

    def _await_taken(self, line: _Line) -> None:
        if len(self._untaken) >= UNTAKEN_MAX:
            self._hang_up(self._untaken.pop(next(iter(self._untaken))))
        self._untaken[line.handover] = line
        self._lane.watch(line.sock, selectors.EVENT_READ, lambda _: self._hear_taken(line))

    def _hear_taken(self, line: _Line) -> None:
        try:
            said = line.sock.recv(16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if self._untaken.pop(line.handover, None) is None:
            return
        if said == TAKEN:
            self._taken(line)
        else:
            self._hang_up(line)

    def _taken(self, line: _Line) -> None:
        """Nothing of it is read any more. The line may serve another purpose: see `keeps_last`."""
        if self._road.keeps_last:
            self._let_go(line)
            self._keep(line)
        else:
            self._hang_up(line)

    def _keep(self, line: _Line) -> None:
        """Instead of the one that was kept for this address before."""
        before = self._kept.pop(line.address, None)
        if before is not None:
            self._lane.watch(before, 0, self._nothing)
            before.close()
        self._kept[line.address] = line.sock
        self._lane.watch(line.sock, selectors.EVENT_READ, lambda _: self._unkeep(line.address, line.sock))

    def _unkeep(self, address: str, sock: socket.socket) -> None:
        self._lane.watch(sock, 0, self._nothing)
        sock.close()
        if self._kept.get(address) is sock:
            del self._kept[address]

    def _end(self) -> None:
        self._closed = True
        for handover in list(self._lines):
            self._fail(handover, "the sender is closed")
        for line in self._untaken.values():
            self._hang_up(line)
        self._untaken.clear()
        if self._ferry is not None:
            self._ferry.close()
        for address, sock in list(self._kept.items()):
            self._unkeep(address, sock)
        self._pool.release()
        self._road.close()

    @staticmethod
    def _nothing(_events: int) -> None:
        """Nobody listens any more."""
