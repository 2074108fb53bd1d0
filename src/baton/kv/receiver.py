"""The receiver of every kind: what is expected, who may bring it, and where it lands.

Owns the listening socket, the lines, tokens, time-outs and checks. A connection is a stranger until its hello names a
hand-over that is expected and shows that one's token; each token opens one line, once. Then it may only name ranges that are
expected and have not come. How bytes get from there into our blocks is the kind's `Port`: they travel on the line, or a
`Source` fetches them. All of it happens on one lane, so after a fence there is nobody left who would write. For a pool on a
device what has landed in its mirror goes on from there; see `mirror`. Nothing is verified before all of it has arrived.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Arriving, Fenced, Handover, Spoilt, Verified
from baton.kv.checksums import Checks, DeviceChecks
from baton.kv.expected_blocks import Expected
from baton.kv.host_mirror import Ferry
from baton.kv.io_thread import Lane, Post, Work
from baton.kv.scatter_io import Vectors
from baton.kv.shared_memory import flat, within
from baton.kv.transfer_contract import KvMemory, ReceiverOptions, Report
from baton.kv.transfer_frames import (
    FRAME_BYTES,
    HELLO_BYTES,
    TAKEN,
    TOKEN_MAX,
    WELCOME,
    WELCOME_DEVICE,
    End,
    Malformed,
    Pieces,
    decode_frame,
    decode_hello,
)

RECV_BUFFERS_MAX = 64
"""A call: about as much as comes at once."""
TURN_BYTES = 8 << 20
"""Of one line before the others, and the orders, get their turn."""
SLICE_BYTES = 4 << 20
"""What a source fetches at once."""
FETCH_TURN_S = 0.002
"""How long a source fetches between two looks at the orders."""
AHEAD_BYTES = 64 * FRAME_BYTES
FDS_MAX = 4
DEAF_S = 0.1
"""How long nobody is let in after that failed."""
ARRIVING_EVERY_S = 0.25

Key = tuple[int, int]
"""(request, attempt): ours, so unique here whoever the peer is."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Blocks at `begin`… of what is expected go to `targets`, the bytes [low, high) of each."""

    pieces: Pieces
    begin: int
    targets: Int32s
    low: int
    high: int


Fetched = Callable[[str | None], None]
"""Says why it could not be fetched, or None; on the lane."""


class Source(Protocol):
    """Where the bytes of one line are, when they do not travel on it."""

    slice_bytes: int
    reads_device: bool
    """It brings them from device to device, past the mirror."""

    def fetch(self, part: Slice, fetched: Fetched) -> None:
        """Bring a slice into the pool, on the lane; call `fetched` then, now or later. After `close`, touch no pool."""

    def close(self) -> None: ...


class Port(Protocol):
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

    def meet(self, introduction: bytes, fds: list[int], blocks: int) -> Source | str | None:
        """Where the bytes will come from; None when on the line; a string says what is wrong. Owns the fds."""

    def close(self) -> None: ...


class _Stage(Enum):
    HELLO = "hello"
    INTRODUCTION = "introduction"
    PIECES = "pieces"
    FETCHING = "fetching"
    """Not listened to until what it announced is here."""
    DONE = "done"
    """Nothing more may come."""


@dataclass(eq=False)
class _Entry:
    """One hand-over that is expected."""

    handover: Handover
    token: bytes
    expected: Expected
    checks: Checks | DeviceChecks | None
    line: _Line | None = None
    used: bool = False
    """Its token has opened a line."""
    wanted: bytes | None = None
    """The checks to compare with, once we are told."""
    arriving_at_s: float = 0.0
    past_mirror: bool = False
    crossing: int = 0
    """Pieces on their way from the mirror to the device."""


@dataclass(eq=False)
class _Line:
    sock: socket.socket
    since_s: float
    moved_at_s: float
    head: bytearray
    """Hello, introduction or frame: what is read before we know what follows."""
    filling: Vectors
    """What the next bytes go into, in order: the rest of a payload, then `head`, to spare a call."""
    payload_left: int = 0
    head_left: int = 0
    stage: _Stage = _Stage.HELLO
    entry: _Entry | None = None
    source: Source | None = None
    pieces: Pieces | None = None
    """What is coming in."""
    fetched: int = 0
    """Blocks of `pieces` that a source has brought."""
    in_flight: bool = False
    """The source is at it."""
    ahead: bytearray = field(default_factory=bytearray)
    """With a source: frames that have come and were not looked at."""
    fds: list[int] = field(default_factory=list)

    @property
    def half(self) -> bool:
        """In the middle of something that must not take for ever."""
        if self.source is not None:
            return self.in_flight or 0 < len(self.ahead) < FRAME_BYTES
        return self.payload_left > 0 or 0 < self.head_left < len(self.head)

    @property
    def may_fetch(self) -> bool:
        return self.stage is _Stage.FETCHING and not self.in_flight

    def next_head(self, size: int, payload: list[memoryview], payload_bytes: int) -> None:
        self.head = bytearray(size)
        self.filling = Vectors()
        self.filling.add(payload)
        self.filling.add([memoryview(self.head)])
        self.payload_left, self.head_left = payload_bytes, size


class LineReceiver:
    def __init__(self, memory: KvMemory, report: Report, port: Port, options: ReceiverOptions) -> None:
        self.address = port.address
        self.arrived_bytes = 0
        self.refused: Counter[str] = Counter()
        self._memory = memory
        self._report = report
        self._port = port
        self._verified = options.get("verified", True)
        self._stall_s = options.get("stall_s", 5.0)
        self._hello_s = options.get("hello_s", 2.0)
        self._strangers_max = options.get("strangers_max", 64)
        self._expected_max = options.get("expected_max", 4096)
        self._closed = False
        self._deaf_until_s: float | None = None
        self._entries: dict[Key, _Entry] = {}
        self._lines: dict[_Line, None] = {}
        self._pool = flat(memory)
        self._lane = Lane(f"kv-{port.kind}-receive", self._turn, self._end)
        mirror = memory.mirror
        self._ferry = None if mirror is None else Ferry(f"kv-{port.kind}-store", mirror, mirror.store, self._lane.post)
        self._lane.watch(port.listener, selectors.EVENT_READ, self._accept)
        port.begin(self._lane.post)
        self._lane.start()

    # ── orders, from any thread ──────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        if not 0 < len(token) <= TOKEN_MAX:
            raise InvariantViolated(f"{handover}: a token of {len(token)} bytes")
        if not within(blocks, self._memory.blocks):
            raise InvariantViolated(f"{handover}: blocks outside of the pool")
        if not self._lane.post(lambda: self._expect(handover, token, first, blocks)):
            self._report(Spoilt(handover, "too many orders are waiting"))

    def verify(self, handover: Handover, checks: bytes) -> None:
        if not self._lane.post(lambda: self._verify(handover, checks)):
            self._report(Spoilt(handover, "too many orders are waiting"))

    def fence(self, handover: Handover) -> None:
        self._lane.post(lambda: self._fence(handover), urgent=True)

    def close(self) -> None:
        self._lane.close()

    # ── on the lane ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        key = handover.request, handover.attempt
        if self._closed or key in self._entries or len(self._entries) >= self._expected_max:
            self._report(
                Spoilt(handover, "the receiver is closed" if self._closed else "expected twice, or too many at once")
            )
            return
        expected = Expected(first, blocks, len(self._memory.spans))
        checks = Checks(first, len(blocks), self._memory.spans, self._pool) if self._verified else None
        self._entries[key] = _Entry(handover, token, expected, checks)
        if self._memory.mirror is not None:
            self._memory.mirror.hold(blocks)

    def _verify(self, handover: Handover, checks: bytes) -> None:
        entry = self._entry(handover)
        if entry is None:
            self._report(Spoilt(handover, "not expected, or not any more"))
            return
        entry.wanted = checks
        self._conclude(entry)

    def _fence(self, handover: Handover) -> None:
        entry = self._entry(handover)
        if entry is not None:
            self._forget(entry)
        self._stop_crossing(handover, lambda: self._report(Fenced(handover)))

    def _entry(self, handover: Handover) -> _Entry | None:
        entry = self._entries.get((handover.request, handover.attempt))
        return entry if entry is not None and entry.handover == handover else None

    def _forget(self, entry: _Entry) -> None:
        self._strike(entry)
        if entry.line is not None:
            self._hang_up(entry.line)

    def _strike(self, entry: _Entry) -> None:
        """It is expected no longer. What of it is in the mirror is of no use any more."""
        del self._entries[entry.handover.request, entry.handover.attempt]
        if self._ferry is not None:
            self._ferry.let_go(entry.expected.blocks)

    def _stop_crossing(self, handover: Handover, then: Work) -> None:
        """`then` when nothing of it is written any more."""
        if self._ferry is None:
            then()
        else:
            self._ferry.drop(handover, then)

    def _spoil(self, entry: _Entry, reason: str) -> None:
        self._forget(entry)
        self._stop_crossing(entry.handover, lambda: None)
        self._report(Spoilt(entry.handover, reason))

    def _conclude(self, entry: _Entry) -> None:
        """Once everything is there and we know what it should be."""
        if entry.wanted is None or not entry.expected.complete or entry.crossing:
            return
        if entry.checks is not None and not hmac.compare_digest(entry.checks.digest(), entry.wanted):
            self._spoil(entry, "what arrived differs from what was sent")
            return
        self._strike(entry)
        if entry.line is not None:
            entry.line.entry = None  # the line may stay: what it holds open serves the next one
        self._report(Verified(entry.handover))

    # ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._port.listener.accept()
        except BlockingIOError:
            return
        except (
            OSError
        ) as error:  # gone before we looked; or no descriptor for it, and then asking again at once would not help
            self.refused[f"cannot accept: {error.strerror}"] += 1
            self._lane.watch(self._port.listener, 0, self._accept)
            self._deaf_until_s = time.monotonic() + DEAF_S
            return
        sock.setblocking(False)
        reason = self._port.admit(sock)
        if reason is not None:
            self.refused[reason] += 1
            sock.close()
            return
        self._make_room()
        now_s = time.monotonic()
        line = _Line(sock, now_s, now_s, bytearray(), Vectors())
        line.next_head(HELLO_BYTES, [], 0)
        self._lines[line] = None
        self._listen(line)

    def _make_room(self) -> None:
        """The stranger that has been here longest goes: those who only wait must not keep out one that has a token."""
        strangers = [line for line in self._lines if line.stage is _Stage.HELLO]
        if len(strangers) >= self._strangers_max:
            self._refuse(strangers[0], "too many strangers")

    def _listen(self, line: _Line) -> None:
        self._lane.watch(line.sock, selectors.EVENT_READ, lambda _: self._read(line))

    def _hang_up(self, line: _Line) -> None:
        if line not in self._lines:
            return
        del self._lines[line]
        self._lane.watch(line.sock, 0, _nothing)
        line.sock.close()
        for fd in line.fds:
            os.close(fd)
        if line.source is not None:
            line.source.close()

    def _refuse(self, line: _Line, reason: str) -> None:
        """The other side did what it may not do."""
        self.refused[reason] += 1
        self._lose(line, f"refused: {reason}")

    def _lose(self, line: _Line, reason: str) -> None:
        if line.entry is not None:
            self._spoil(line.entry, reason)
        else:
            self._hang_up(line)

    def _read(self, line: _Line) -> None:
        done = 0
        while done < TURN_BYTES and line in self._lines and line.stage is not _Stage.FETCHING:
            try:
                size = self._receive(line)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(line, f"connection lost: {error}")
                return
            if size == 0:
                self._hung_up(line)
                return
            done += size
            if line.source is None or line.stage in (_Stage.HELLO, _Stage.INTRODUCTION):
                self._take(line, size)
            else:
                line.moved_at_s = time.monotonic()
                self._take_ahead(line)

    def _receive(self, line: _Line) -> int:
        if line.stage in (_Stage.HELLO, _Stage.INTRODUCTION):
            return self._receive_with_fds(line)
        if line.source is not None:
            came = line.sock.recv(AHEAD_BYTES)
            line.ahead += came
            return len(came)
        return line.sock.recvmsg_into(line.filling.next(RECV_BUFFERS_MAX))[0]

    def _receive_with_fds(self, line: _Line) -> int:
        room = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
        size, more, _, _ = line.sock.recvmsg_into(line.filling.next(1), room, _CLOSE_ON_EXEC)
        for level, kind, data in more:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                line.fds.extend(memoryview(data[: len(data) // _FD_BYTES * _FD_BYTES]).cast("i").tolist())
        return size

    def _hung_up(self, line: _Line) -> None:
        if line.stage is _Stage.HELLO:
            self.refused["hung up without a hello" if line.head_left == HELLO_BYTES else "hello cut off"] += 1
        if line.entry is not None and line.entry.expected.complete:
            line.entry.line = None  # everything is here; only the checks are still to come
            line.entry = None
        self._lose(line, "the sender is gone")

    def _take(self, line: _Line, size: int) -> None:
        """These bytes have come."""
        line.moved_at_s = time.monotonic()
        line.filling.advance(size)
        payload = min(size, line.payload_left)
        line.payload_left -= payload
        line.head_left -= size - payload
        if payload and line.entry is not None:
            self._arriving(line.entry, line.moved_at_s)
        if line.pieces is not None and line.payload_left == 0 and line.entry is not None:
            self._landed(line.entry, line.pieces)
            line.pieces = None
        if line.head_left == 0 and line in self._lines:
            self._take_head(line)

    def _take_ahead(self, line: _Line) -> None:
        """The frames that have come, up to one whose pieces must be fetched first."""
        while line.stage is _Stage.PIECES and len(line.ahead) >= FRAME_BYTES and line in self._lines:
            line.head = line.ahead[:FRAME_BYTES]
            del line.ahead[:FRAME_BYTES]
            self._take_frame(line)
        if line.stage is _Stage.DONE and line.ahead:
            self._refuse(line, "spoke after the end")

    def _take_head(self, line: _Line) -> None:
        match line.stage:
            case _Stage.HELLO:
                self._take_hello(line)
            case _Stage.INTRODUCTION:
                self._meet(line, bytes(line.head))
            case _Stage.PIECES:
                self._take_frame(line)
            case _:
                self._refuse(line, "spoke after the end")

    def _take_hello(self, line: _Line) -> None:
        try:
            hello = decode_hello(self._port.kind, line.head)
        except Malformed:
            self._refuse(line, "no hello")
            return
        entry = self._entries.get((hello.request, hello.attempt))
        reason = None
        if entry is None:
            reason = "not expected"
        elif not hmac.compare_digest(entry.token, hello.token):
            reason = "wrong token"
        elif entry.used:
            reason = "token used"
        elif not hmac.compare_digest(hello.layout_digest, self._memory.layout.digest):
            reason = "different layout"
        if entry is None or reason is not None:
            self._refuse(line, reason or "")
            return
        entry.used, entry.line, line.entry = True, line, entry
        size = self._port.introduction_bytes(len(entry.expected.blocks))
        line.stage = _Stage.INTRODUCTION
        if size:
            line.next_head(size, [], 0)
        else:
            self._meet(line, b"")

    def _meet(self, line: _Line, introduction: bytes) -> None:
        if line.entry is None:
            raise InvariantViolated("an introduction before a hello")
        fds, line.fds = line.fds, []
        met = self._port.meet(introduction, fds, len(line.entry.expected.blocks))
        if isinstance(met, str):
            self._refuse(line, met)
            return
        line.source = met
        line.stage = _Stage.PIECES
        line.next_head(FRAME_BYTES, [], 0)
        if met is not None and met.reads_device:
            self._go_past_mirror(line.entry)
        try:
            line.sock.send(WELCOME_DEVICE if line.entry.past_mirror else WELCOME)
        except OSError as error:
            self._lose(line, f"connection lost: {error}")

    def _go_past_mirror(self, entry: _Entry) -> None:
        sharing, expected = self._memory.sharing, entry.expected
        if sharing is None:
            raise InvariantViolated("a device is read that is not there")
        entry.past_mirror = True
        if entry.checks is not None:
            entry.checks = DeviceChecks(expected.first, len(expected.blocks), self._memory.spans, sharing)

    def _take_frame(self, line: _Line) -> None:
        try:
            frame = decode_frame(line.head)
        except Malformed:
            self._refuse(line, "no frame")
            return
        if isinstance(frame, End):
            self._take_end(line)
            return
        reason = "not expected any more" if line.entry is None else line.entry.expected.claim(frame)
        if line.entry is None or reason is not None:
            self._refuse(line, reason or "")
            return
        line.pieces = frame
        if line.source is not None:
            line.stage, line.fetched = _Stage.FETCHING, 0
            self._lane.watch(line.sock, 0, _nothing)
            return
        low, high = self._memory.spans[frame.layers.start][0], self._memory.spans[frame.layers.stop - 1][1]
        offsets = [block * self._memory.layout.block_bytes for block in line.entry.expected.targets(frame).tolist()]
        payload = [self._pool[offset + low : offset + high] for offset in offsets]
        line.next_head(FRAME_BYTES, payload, (high - low) * frame.count)

    def _take_end(self, line: _Line) -> None:
        if line.entry is not None and not line.entry.expected.complete:
            self._refuse(line, "ended before everything was sent")
            return
        line.stage = _Stage.DONE
        line.next_head(1, [], 0)
        if line.source is not None:
            with contextlib.suppress(OSError):  # whoever is gone need not hear it
                line.sock.send(TAKEN)

    # ── what landed ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arriving(self, entry: _Entry, now_s: float) -> None:
        if now_s >= entry.arriving_at_s:
            entry.arriving_at_s = now_s + ARRIVING_EVERY_S
            self._report(Arriving(entry.handover))

    def _landed(self, entry: _Entry, pieces: Pieces) -> None:
        """All of these are in our blocks."""
        low, high = self._memory.spans[pieces.layers.start][0], self._memory.spans[pieces.layers.stop - 1][1]
        self.arrived_bytes += (high - low) * pieces.count
        if entry.checks is not None:
            entry.checks.add(pieces.layers, pieces.first, entry.expected.targets(pieces))
        entry.expected.keep(pieces)
        if self._ferry is not None and not entry.past_mirror:
            entry.crossing += 1
            targets = entry.expected.targets(pieces)
            self._ferry.carry(entry.handover, targets, low, high, lambda: self._crossed(entry))
        self._conclude(entry)

    def _crossed(self, entry: _Entry) -> None:
        entry.crossing -= 1
        if self._entry(entry.handover) is entry:
            self._conclude(entry)

    def _fetch_some(self, line: _Line) -> None:
        """As much of what a line has announced as one turn has room for."""
        begun_s = time.monotonic()
        while line.may_fetch and line in self._lines and time.monotonic() < begun_s + FETCH_TURN_S:
            self._fetch(line)

    def _fetch(self, line: _Line) -> None:
        """The next slice of it."""
        if line.entry is None or line.source is None or line.pieces is None:
            raise InvariantViolated("nothing to fetch")
        pieces = line.pieces
        low, high = self._memory.spans[pieces.layers.start][0], self._memory.spans[pieces.layers.stop - 1][1]
        count = min(pieces.count - line.fetched, max(1, line.source.slice_bytes // max(1, high - low)))
        part = Pieces(pieces.layers, pieces.first + line.fetched, count)
        expected = line.entry.expected
        line.in_flight, line.moved_at_s = True, time.monotonic()
        line.source.fetch(
            Slice(part, part.first - expected.first, expected.targets(part), low, high),
            lambda problem: self._fetched(line, part, problem),
        )

    def _fetched(self, line: _Line, part: Pieces, problem: str | None) -> None:
        if line.entry is None or line.pieces is None or line not in self._lines:
            return  # fenced meanwhile
        if problem is not None:
            self._lose(line, problem)
            return
        line.in_flight, line.moved_at_s = False, time.monotonic()
        self._arriving(line.entry, line.moved_at_s)
        line.fetched += part.count
        whole = line.fetched == line.pieces.count
        self._landed(line.entry, part)
        if whole and line in self._lines:
            line.pieces, line.stage = None, _Stage.PIECES
            self._take_ahead(line)
            if line in self._lines and line.stage is not _Stage.FETCHING:
                self._listen(line)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, now_s: float) -> float | None:
        for line in list(self._lines):
            self._fetch_some(line)
        earliest_s = self._hear_again(now_s)
        for line in list(self._lines):
            if line.may_fetch:
                earliest_s = 0.0
            stranger = line.stage in (_Stage.HELLO, _Stage.INTRODUCTION)
            if not stranger and not line.half:
                continue
            left_s = (line.since_s + self._hello_s if stranger else line.moved_at_s + self._stall_s) - now_s
            if left_s <= 0.0 and stranger:
                self._refuse(line, "no hello in time")
            elif left_s <= 0.0:
                self._lose(line, f"half of a piece came, and nothing more for {self._stall_s} s")
            elif earliest_s is None or left_s < earliest_s:
                earliest_s = left_s
        return earliest_s

    def _hear_again(self, now_s: float) -> float | None:
        """Seconds until we accept connections again; None while we do."""
        if self._deaf_until_s is None:
            return None
        if now_s < self._deaf_until_s:
            return self._deaf_until_s - now_s
        self._deaf_until_s = None
        self._lane.watch(self._port.listener, selectors.EVENT_READ, self._accept)
        return None

    def _end(self) -> None:
        self._closed = True
        for entry in list(self._entries.values()):
            self._spoil(entry, "the receiver is closed")
        for line in list(self._lines):
            self._hang_up(line)
        if self._ferry is not None:
            self._ferry.close()
        self._lane.watch(self._port.listener, 0, _nothing)
        self._pool.release()
        self._port.close()


_FD_BYTES = 4
_CLOSE_ON_EXEC = socket.MSG_CMSG_CLOEXEC if sys.platform == "linux" else 0


def _nothing(_events: int) -> None:
    """Nobody listens any more."""
