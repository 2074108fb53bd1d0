"""The receiving side of every kind of transfer: accepts connections, checks them, and puts their KV into the pool.

Owns the listening socket, the connections, tokens, time-outs and checksums. A connection is unknown until its hello names an
expected hand-over and shows that one's token; each token opens one connection, once. After that it may only name ranges
that are expected and have not arrived. The kind's `ReceiverKind` decides how bytes reach the pool: they travel on the
connection, or a `KvSource` fetches them. Everything runs on one I/O thread, so nothing writes after a fence. For a pool on a
device, bytes land in the host mirror and are copied on from there; see `host_mirror`. Checksums are compared when
everything has arrived.
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
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.expected_blocks import ExpectedBlocks
from baton.kv.host_mirror import MirrorCopier
from baton.kv.io_thread import IoThread, Post, Work
from baton.kv.scatter_io import ScatterBuffers
from baton.kv.shared_memory import ids_within, pool_bytes
from baton.kv.transfer_contract import KvMemory, ReceiverOptions, Report
from baton.kv.transfer_frames import (
    FRAME_BYTES,
    HELLO_BYTES,
    TAKEN,
    TOKEN_MAX,
    WELCOME,
    WELCOME_DEVICE,
    EndFrame,
    MalformedFrame,
    PiecesFrame,
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
BUFFERED_BYTES = 64 * FRAME_BYTES
FDS_MAX = 4
ACCEPT_PAUSE_S = 0.1
"""How long nobody is let in after that failed."""
ARRIVING_EVERY_S = 0.25

HandoverKey = tuple[int, int]
"""(request, attempt): ours, so unique here whoever the peer is."""


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


class _Stage(Enum):
    HELLO = "hello"
    INTRODUCTION = "introduction"
    PIECES = "pieces"
    FETCHING = "fetching"
    """Not listened to until what it announced is here."""
    DONE = "done"
    """Nothing more may come."""


@dataclass(eq=False)
class _ExpectedHandover:
    """One hand-over that is expected."""

    handover: Handover
    token: bytes
    expected: ExpectedBlocks
    checks: BlockChecksums | DeviceChecksums | None
    conn: _Connection | None = None
    used: bool = False
    """Its token has opened a line."""
    wanted: bytes | None = None
    """The checks to compare with, once we are told."""
    arriving_at_s: float = 0.0
    bypasses_mirror: bool = False
    copying: int = 0
    """Pieces on their way from the mirror to the device."""


@dataclass(eq=False)
class _Connection:
    sock: socket.socket
    since_s: float
    moved_at_s: float
    head: bytearray
    """Hello, introduction or frame: what is read before we know what follows."""
    filling: ScatterBuffers
    """What the next bytes go into, in order: the rest of a payload, then `head`, to spare a call."""
    payload_left: int = 0
    head_left: int = 0
    stage: _Stage = _Stage.HELLO
    entry: _ExpectedHandover | None = None
    source: KvSource | None = None
    pieces: PiecesFrame | None = None
    """What is coming in."""
    fetched: int = 0
    """Blocks of `pieces` that a source has brought."""
    in_flight: bool = False
    """The source is at it."""
    buffered: bytearray = field(default_factory=bytearray)
    """With a source: frames that have come and were not looked at."""
    fds: list[int] = field(default_factory=list)

    @property
    def is_partial(self) -> bool:
        """In the middle of something that must not take for ever."""
        if self.source is not None:
            return self.in_flight or 0 < len(self.buffered) < FRAME_BYTES
        return self.payload_left > 0 or 0 < self.head_left < len(self.head)

    @property
    def may_fetch(self) -> bool:
        return self.stage is _Stage.FETCHING and not self.in_flight

    def next_head(self, size: int, payload: list[memoryview], payload_bytes: int) -> None:
        self.head = bytearray(size)
        self.filling = ScatterBuffers()
        self.filling.add(payload)
        self.filling.add([memoryview(self.head)])
        self.payload_left, self.head_left = payload_bytes, size


class ConnectionReceiver:
    def __init__(self, memory: KvMemory, report: Report, transport: ReceiverKind, options: ReceiverOptions) -> None:
        self.address = transport.address
        self.arrived_bytes = 0
        self.refused: Counter[str] = Counter()
        self._memory = memory
        self._report = report
        self._transport = transport
        self._verified = options.get("verified", True)
        self._stall_s = options.get("stall_s", 5.0)
        self._hello_s = options.get("hello_s", 2.0)
        self._strangers_max = options.get("strangers_max", 64)
        self._expected_max = options.get("expected_max", 4096)
        self._closed = False
        self._accept_after_s: float | None = None
        self._entries: dict[HandoverKey, _ExpectedHandover] = {}
        self._connections: dict[_Connection, None] = {}
        self._pool = pool_bytes(memory)
        self._io = IoThread(f"kv-{transport.kind}-receive", self._turn, self._end)
        mirror = memory.mirror
        self._mirror_copier = (
            None if mirror is None else MirrorCopier(f"kv-{transport.kind}-store", mirror, mirror.store, self._io.post)
        )
        self._io.watch(transport.listener, selectors.EVENT_READ, self._accept)
        transport.begin(self._io.post)
        self._io.start()

    # ── orders, from any thread ──────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        if not 0 < len(token) <= TOKEN_MAX:
            raise InvariantViolated(f"{handover}: a token of {len(token)} bytes")
        if not ids_within(blocks, self._memory.blocks):
            raise InvariantViolated(f"{handover}: blocks outside of the pool")
        if not self._io.post(lambda: self._expect(handover, token, first, blocks)):
            self._report(Spoilt(handover, "too many orders are waiting"))

    def verify(self, handover: Handover, checks: bytes) -> None:
        if not self._io.post(lambda: self._verify(handover, checks)):
            self._report(Spoilt(handover, "too many orders are waiting"))

    def fence(self, handover: Handover) -> None:
        self._io.post(lambda: self._fence(handover), urgent=True)

    def close(self) -> None:
        self._io.close()

    # ── on the lane ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        key = handover.request, handover.attempt
        if self._closed or key in self._entries or len(self._entries) >= self._expected_max:
            self._report(
                Spoilt(handover, "the receiver is closed" if self._closed else "expected twice, or too many at once")
            )
            return
        expected = ExpectedBlocks(first, blocks, len(self._memory.spans))
        checks = BlockChecksums(first, len(blocks), self._memory.spans, self._pool) if self._verified else None
        self._entries[key] = _ExpectedHandover(handover, token, expected, checks)
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
        self._stop_copying(handover, lambda: self._report(Fenced(handover)))

    def _entry(self, handover: Handover) -> _ExpectedHandover | None:
        entry = self._entries.get((handover.request, handover.attempt))
        return entry if entry is not None and entry.handover == handover else None

    def _forget(self, entry: _ExpectedHandover) -> None:
        self._drop_entry(entry)
        if entry.conn is not None:
            self._close_connection(entry.conn)

    def _drop_entry(self, entry: _ExpectedHandover) -> None:
        """It is expected no longer. What of it is in the mirror is of no use any more."""
        del self._entries[entry.handover.request, entry.handover.attempt]
        if self._mirror_copier is not None:
            self._mirror_copier.let_go(entry.expected.blocks)

    def _stop_copying(self, handover: Handover, then: Work) -> None:
        """`then` when nothing of it is written any more."""
        if self._mirror_copier is None:
            then()
        else:
            self._mirror_copier.drop(handover, then)

    def _spoil(self, entry: _ExpectedHandover, reason: str) -> None:
        self._forget(entry)
        self._stop_copying(entry.handover, lambda: None)
        self._report(Spoilt(entry.handover, reason))

    def _conclude(self, entry: _ExpectedHandover) -> None:
        """Once everything is there and we know what it should be."""
        if entry.wanted is None or not entry.expected.complete or entry.copying:
            return
        if entry.checks is not None and not hmac.compare_digest(entry.checks.digest(), entry.wanted):
            self._spoil(entry, "what arrived differs from what was sent")
            return
        self._drop_entry(entry)
        if entry.conn is not None:
            entry.conn.entry = None  # the line may stay: what it holds open serves the next one
        self._report(Verified(entry.handover))

    # ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._transport.listener.accept()
        except BlockingIOError:
            return
        except (
            OSError
        ) as error:  # gone before we looked; or no descriptor for it, and then asking again at once would not help
            self.refused[f"cannot accept: {error.strerror}"] += 1
            self._io.watch(self._transport.listener, 0, self._accept)
            self._accept_after_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        sock.setblocking(False)
        reason = self._transport.admit(sock)
        if reason is not None:
            self.refused[reason] += 1
            sock.close()
            return
        self._make_room()
        now_s = time.monotonic()
        conn = _Connection(sock, now_s, now_s, bytearray(), ScatterBuffers())
        conn.next_head(HELLO_BYTES, [], 0)
        self._connections[conn] = None
        self._watch_reads(conn)

    def _make_room(self) -> None:
        """The stranger that has been here longest goes: those who only wait must not keep out one that has a token."""
        strangers = [conn for conn in self._connections if conn.stage is _Stage.HELLO]
        if len(strangers) >= self._strangers_max:
            self._refuse(strangers[0], "too many strangers")

    def _watch_reads(self, conn: _Connection) -> None:
        self._io.watch(conn.sock, selectors.EVENT_READ, lambda _: self._read(conn))

    def _close_connection(self, conn: _Connection) -> None:
        if conn not in self._connections:
            return
        del self._connections[conn]
        self._io.watch(conn.sock, 0, _ignore)
        conn.sock.close()
        for fd in conn.fds:
            os.close(fd)
        if conn.source is not None:
            conn.source.close()

    def _refuse(self, conn: _Connection, reason: str) -> None:
        """The other side did what it may not do."""
        self.refused[reason] += 1
        self._lose(conn, f"refused: {reason}")

    def _lose(self, conn: _Connection, reason: str) -> None:
        if conn.entry is not None:
            self._spoil(conn.entry, reason)
        else:
            self._close_connection(conn)

    def _read(self, conn: _Connection) -> None:
        done = 0
        while done < TURN_BYTES and conn in self._connections and conn.stage is not _Stage.FETCHING:
            try:
                size = self._receive(conn)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(conn, f"connection lost: {error}")
                return
            if size == 0:
                self._peer_closed(conn)
                return
            done += size
            if conn.source is None or conn.stage in (_Stage.HELLO, _Stage.INTRODUCTION):
                self._take(conn, size)
            else:
                conn.moved_at_s = time.monotonic()
                self._handle_buffered(conn)

    def _receive(self, conn: _Connection) -> int:
        if conn.stage in (_Stage.HELLO, _Stage.INTRODUCTION):
            return self._receive_with_fds(conn)
        if conn.source is not None:
            came = conn.sock.recv(BUFFERED_BYTES)
            conn.buffered += came
            return len(came)
        return conn.sock.recvmsg_into(conn.filling.next(RECV_BUFFERS_MAX))[0]

    def _receive_with_fds(self, conn: _Connection) -> int:
        room = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
        size, more, _, _ = conn.sock.recvmsg_into(conn.filling.next(1), room, _CLOSE_ON_EXEC)
        for level, kind, data in more:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                conn.fds.extend(memoryview(data[: len(data) // _FD_BYTES * _FD_BYTES]).cast("i").tolist())
        return size

    def _peer_closed(self, conn: _Connection) -> None:
        if conn.stage is _Stage.HELLO:
            self.refused["hung up without a hello" if conn.head_left == HELLO_BYTES else "hello cut off"] += 1
        if conn.entry is not None and conn.entry.expected.complete:
            conn.entry.conn = None  # everything is here; only the checks are still to come
            conn.entry = None
        self._lose(conn, "the sender is gone")

    def _take(self, conn: _Connection, size: int) -> None:
        """These bytes have come."""
        conn.moved_at_s = time.monotonic()
        conn.filling.advance(size)
        payload = min(size, conn.payload_left)
        conn.payload_left -= payload
        conn.head_left -= size - payload
        if payload and conn.entry is not None:
            self._arriving(conn.entry, conn.moved_at_s)
        if conn.pieces is not None and conn.payload_left == 0 and conn.entry is not None:
            self._landed(conn.entry, conn.pieces)
            conn.pieces = None
        if conn.head_left == 0 and conn in self._connections:
            self._handle_head(conn)

    def _handle_buffered(self, conn: _Connection) -> None:
        """The frames that have come, up to one whose pieces must be fetched first."""
        while conn.stage is _Stage.PIECES and len(conn.buffered) >= FRAME_BYTES and conn in self._connections:
            conn.head = conn.buffered[:FRAME_BYTES]
            del conn.buffered[:FRAME_BYTES]
            self._handle_frame(conn)
        if conn.stage is _Stage.DONE and conn.buffered:
            self._refuse(conn, "spoke after the end")

    def _handle_head(self, conn: _Connection) -> None:
        match conn.stage:
            case _Stage.HELLO:
                self._handle_hello(conn)
            case _Stage.INTRODUCTION:
                self._open_source(conn, bytes(conn.head))
            case _Stage.PIECES:
                self._handle_frame(conn)
            case _:
                self._refuse(conn, "spoke after the end")

    def _handle_hello(self, conn: _Connection) -> None:
        try:
            hello = decode_hello(self._transport.kind, conn.head)
        except MalformedFrame:
            self._refuse(conn, "no hello")
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
            self._refuse(conn, reason or "")
            return
        entry.used, entry.conn, conn.entry = True, conn, entry
        size = self._transport.introduction_bytes(len(entry.expected.blocks))
        conn.stage = _Stage.INTRODUCTION
        if size:
            conn.next_head(size, [], 0)
        else:
            self._open_source(conn, b"")

    def _open_source(self, conn: _Connection, introduction: bytes) -> None:
        if conn.entry is None:
            raise InvariantViolated("an introduction before a hello")
        fds, conn.fds = conn.fds, []
        met = self._transport.open_source(introduction, fds, len(conn.entry.expected.blocks))
        if isinstance(met, str):
            self._refuse(conn, met)
            return
        conn.source = met
        conn.stage = _Stage.PIECES
        conn.next_head(FRAME_BYTES, [], 0)
        if met is not None and met.reads_device:
            self._bypass_mirror(conn.entry)
        try:
            conn.sock.send(WELCOME_DEVICE if conn.entry.bypasses_mirror else WELCOME)
        except OSError as error:
            self._lose(conn, f"connection lost: {error}")

    def _bypass_mirror(self, entry: _ExpectedHandover) -> None:
        sharing, expected = self._memory.sharing, entry.expected
        if sharing is None:
            raise InvariantViolated("a device is read that is not there")
        entry.bypasses_mirror = True
        if entry.checks is not None:
            entry.checks = DeviceChecksums(expected.first, len(expected.blocks), self._memory.spans, sharing)

    def _handle_frame(self, conn: _Connection) -> None:
        try:
            frame = decode_frame(conn.head)
        except MalformedFrame:
            self._refuse(conn, "no frame")
            return
        if isinstance(frame, EndFrame):
            self._handle_end(conn)
            return
        reason = "not expected any more" if conn.entry is None else conn.entry.expected.claim(frame)
        if conn.entry is None or reason is not None:
            self._refuse(conn, reason or "")
            return
        conn.pieces = frame
        if conn.source is not None:
            conn.stage, conn.fetched = _Stage.FETCHING, 0
            self._io.watch(conn.sock, 0, _ignore)
            return
        low, high = self._memory.spans[frame.layers.start][0], self._memory.spans[frame.layers.stop - 1][1]
        offsets = [block * self._memory.layout.block_bytes for block in conn.entry.expected.targets(frame).tolist()]
        payload = [self._pool[offset + low : offset + high] for offset in offsets]
        conn.next_head(FRAME_BYTES, payload, (high - low) * frame.count)

    def _handle_end(self, conn: _Connection) -> None:
        if conn.entry is not None and not conn.entry.expected.complete:
            self._refuse(conn, "ended before everything was sent")
            return
        conn.stage = _Stage.DONE
        conn.next_head(1, [], 0)
        if conn.source is not None:
            with contextlib.suppress(OSError):  # whoever is gone need not hear it
                conn.sock.send(TAKEN)

    # ── what landed ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arriving(self, entry: _ExpectedHandover, now_s: float) -> None:
        if now_s >= entry.arriving_at_s:
            entry.arriving_at_s = now_s + ARRIVING_EVERY_S
            self._report(Arriving(entry.handover))

    def _landed(self, entry: _ExpectedHandover, pieces: PiecesFrame) -> None:
        """All of these are in our blocks."""
        low, high = self._memory.spans[pieces.layers.start][0], self._memory.spans[pieces.layers.stop - 1][1]
        self.arrived_bytes += (high - low) * pieces.count
        if entry.checks is not None:
            entry.checks.add(pieces.layers, pieces.first, entry.expected.targets(pieces))
        entry.expected.keep(pieces)
        if self._mirror_copier is not None and not entry.bypasses_mirror:
            entry.copying += 1
            targets = entry.expected.targets(pieces)
            self._mirror_copier.copy(entry.handover, targets, low, high, lambda: self._copied(entry))
        self._conclude(entry)

    def _copied(self, entry: _ExpectedHandover) -> None:
        entry.copying -= 1
        if self._entry(entry.handover) is entry:
            self._conclude(entry)

    def _fetch_some(self, conn: _Connection) -> None:
        """As much of what a line has announced as one turn has room for."""
        begun_s = time.monotonic()
        while conn.may_fetch and conn in self._connections and time.monotonic() < begun_s + FETCH_TURN_S:
            self._fetch(conn)

    def _fetch(self, conn: _Connection) -> None:
        """The next slice of it."""
        if conn.entry is None or conn.source is None or conn.pieces is None:
            raise InvariantViolated("nothing to fetch")
        pieces = conn.pieces
        low, high = self._memory.spans[pieces.layers.start][0], self._memory.spans[pieces.layers.stop - 1][1]
        count = min(pieces.count - conn.fetched, max(1, conn.source.slice_bytes // max(1, high - low)))
        part = PiecesFrame(pieces.layers, pieces.first + conn.fetched, count)
        expected = conn.entry.expected
        conn.in_flight, conn.moved_at_s = True, time.monotonic()
        conn.source.fetch(
            BlockSlice(part, part.first - expected.first, expected.targets(part), low, high),
            lambda problem: self._fetched(conn, part, problem),
        )

    def _fetched(self, conn: _Connection, part: PiecesFrame, problem: str | None) -> None:
        if conn.entry is None or conn.pieces is None or conn not in self._connections:
            return  # fenced meanwhile
        if problem is not None:
            self._lose(conn, problem)
            return
        conn.in_flight, conn.moved_at_s = False, time.monotonic()
        self._arriving(conn.entry, conn.moved_at_s)
        conn.fetched += part.count
        whole = conn.fetched == conn.pieces.count
        self._landed(conn.entry, part)
        if whole and conn in self._connections:
            conn.pieces, conn.stage = None, _Stage.PIECES
            self._handle_buffered(conn)
            if conn in self._connections and conn.stage is not _Stage.FETCHING:
                self._watch_reads(conn)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, now_s: float) -> float | None:
        for conn in list(self._connections):
            self._fetch_some(conn)
        earliest_s = self._resume_accepting(now_s)
        for conn in list(self._connections):
            if conn.may_fetch:
                earliest_s = 0.0
            stranger = conn.stage in (_Stage.HELLO, _Stage.INTRODUCTION)
            if not stranger and not conn.is_partial:
                continue
            left_s = (conn.since_s + self._hello_s if stranger else conn.moved_at_s + self._stall_s) - now_s
            if left_s <= 0.0 and stranger:
                self._refuse(conn, "no hello in time")
            elif left_s <= 0.0:
                self._lose(conn, f"half of a piece came, and nothing more for {self._stall_s} s")
            elif earliest_s is None or left_s < earliest_s:
                earliest_s = left_s
        return earliest_s

    def _resume_accepting(self, now_s: float) -> float | None:
        """Seconds until we accept connections again; None while we do."""
        if self._accept_after_s is None:
            return None
        if now_s < self._accept_after_s:
            return self._accept_after_s - now_s
        self._accept_after_s = None
        self._io.watch(self._transport.listener, selectors.EVENT_READ, self._accept)
        return None

    def _end(self) -> None:
        self._closed = True
        for entry in list(self._entries.values()):
            self._spoil(entry, "the receiver is closed")
        for conn in list(self._connections):
            self._close_connection(conn)
        if self._mirror_copier is not None:
            self._mirror_copier.close()
        self._io.watch(self._transport.listener, 0, _ignore)
        self._pool.release()
        self._transport.close()


_FD_BYTES = 4
_CLOSE_ON_EXEC = socket.MSG_CMSG_CLOEXEC if sys.platform == "linux" else 0


def _ignore(_events: int) -> None:
    """Nobody listens any more."""
