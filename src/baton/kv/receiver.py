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
import time
from collections import Counter

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Handover, TransferBroken
from baton.kv.expected_handovers import ExpectedHandovers
from baton.kv.host_mirror import MirrorCopier
from baton.kv.io_thread import IoThread, ignore_events
from baton.kv.receiver_connection import ExpectedHandover, ReceiverConnection, ReceiverStage
from baton.kv.receiver_kind import BlockSlice, ReceiverKind
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

TURN_BYTES = 8 << 20
"""Most bytes read from one connection before others, and orders, get their turn."""
SLICE_BYTES = 4 << 20
"""Bytes that a source fetches in one call."""
FETCH_TURN_S = 0.002
"""Longest time of fetching from sources between two looks at the orders."""
ACCEPT_PAUSE_S = 0.1
"""Pause before accepting connections again after `accept` failed."""


class ConnectionReceiver:
    def __init__(self, memory: KvMemory, report: Report, transport: ReceiverKind, options: ReceiverOptions) -> None:
        self.address = transport.address
        self.arrived_bytes = 0
        self.refused: Counter[str] = Counter()
        self._memory = memory
        self._report = report
        self._transport = transport
        self._stall_s = options.get("stall_s", 5.0)
        self._hello_s = options.get("hello_s", 2.0)
        self._strangers_max = options.get("strangers_max", 64)
        self._accept_after_s: float | None = None
        self._connections: dict[ReceiverConnection, None] = {}
        self._pool = pool_bytes(memory)
        self._io = IoThread(f"kv-{transport.kind}-receive", self._turn, self._end)
        mirror, name = memory.mirror, f"kv-{transport.kind}-store"
        self._mirror_copier = None if mirror is None else MirrorCopier(name, mirror, mirror.store, self._io.post)
        self._handovers = ExpectedHandovers(memory, self._pool, report, options, self._mirror_copier, self._close_connection)
        self._io.watch(transport.listener, selectors.EVENT_READ, self._accept)
        transport.begin(self._io.post)
        self._io.start()

    # ── orders, from any thread ──────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        if not 0 < len(token) <= TOKEN_MAX:
            raise InvariantViolated(f"{handover}: a token of {len(token)} bytes")
        if not ids_within(blocks, self._memory.blocks):
            raise InvariantViolated(f"{handover}: blocks outside of the pool")
        if not self._io.post(lambda: self._handovers.expect(handover, token, first, blocks)):
            self._report(TransferBroken(handover, "too many orders are waiting"))

    def verify(self, handover: Handover, checks: bytes) -> None:
        if not self._io.post(lambda: self._handovers.verify(handover, checks)):
            self._report(TransferBroken(handover, "too many orders are waiting"))

    def fence(self, handover: Handover) -> None:
        self._io.post(lambda: self._handovers.fence(handover), urgent=True)

    def close(self) -> None:
        self._io.close()

    # ── connections, on the I/O thread ───────────────────────────────────────────────────────────────────────────────────

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._transport.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # The peer is gone already, or there is no descriptor left: accepting again at once would not help.
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
        conn = ReceiverConnection(sock, now_s, now_s, bytearray(), ScatterBuffers())
        conn.next_head(HELLO_BYTES, [], 0)
        self._connections[conn] = None
        self._watch_reads(conn)

    def _make_room(self) -> None:
        """Close the oldest connection without a hello when there are too many, so that idle ones cannot keep others out."""
        strangers = [conn for conn in self._connections if conn.stage is ReceiverStage.HELLO]
        if len(strangers) >= self._strangers_max:
            self._refuse(strangers[0], "too many strangers")

    def _watch_reads(self, conn: ReceiverConnection) -> None:
        self._io.watch(conn.sock, selectors.EVENT_READ, lambda _: self._read(conn))

    def _close_connection(self, conn: ReceiverConnection) -> None:
        if conn not in self._connections:
            return
        del self._connections[conn]
        self._io.watch(conn.sock, 0, ignore_events)
        conn.sock.close()
        for fd in conn.fds:
            os.close(fd)
        if conn.source is not None:
            conn.source.close()

    def _refuse(self, conn: ReceiverConnection, reason: str) -> None:
        """Close a connection whose peer broke the protocol, and count the reason."""
        self.refused[reason] += 1
        self._lose(conn, f"refused: {reason}")

    def _lose(self, conn: ReceiverConnection, reason: str) -> None:
        if conn.entry is not None:
            self._handovers.spoil(conn.entry, reason)
        else:
            self._close_connection(conn)

    def _read(self, conn: ReceiverConnection) -> None:
        done = 0
        while done < TURN_BYTES and conn in self._connections and conn.stage is not ReceiverStage.FETCHING:
            try:
                size = conn.receive()
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(conn, f"connection lost: {error}")
                return
            if size == 0:
                self._peer_closed(conn)
                return
            done += size
            if conn.source is None or conn.is_introducing:
                self._take(conn, size)
            else:
                conn.moved_at_s = time.monotonic()
                self._handle_buffered(conn)

    def _peer_closed(self, conn: ReceiverConnection) -> None:
        if conn.stage is ReceiverStage.HELLO:
            self.refused["hung up without a hello" if conn.head_left == HELLO_BYTES else "hello cut off"] += 1
        if conn.entry is not None and conn.entry.expected.complete:
            conn.entry.conn = None  # everything has arrived; only the sender's checksums are missing
            conn.entry = None
        self._lose(conn, "the sender is gone")

    def _take(self, conn: ReceiverConnection, size: int) -> None:
        """Account for `size` bytes that were read into `conn.filling`."""
        conn.moved_at_s = time.monotonic()
        conn.filling.advance(size)
        payload = min(size, conn.payload_left)
        conn.payload_left -= payload
        conn.head_left -= size - payload
        if payload and conn.entry is not None:
            self._handovers.arriving(conn.entry, conn.moved_at_s)
        if conn.pieces is not None and conn.payload_left == 0 and conn.entry is not None:
            self._landed(conn.entry, conn.pieces)
            conn.pieces = None
        if conn.head_left == 0 and conn in self._connections:
            self._handle_head(conn)

    def _handle_buffered(self, conn: ReceiverConnection) -> None:
        """Handle the buffered frames, up to one whose pieces must be fetched first."""
        while conn.stage is ReceiverStage.PIECES and len(conn.buffered) >= FRAME_BYTES and conn in self._connections:
            conn.head = conn.buffered[:FRAME_BYTES]
            del conn.buffered[:FRAME_BYTES]
            self._handle_frame(conn)
        if conn.stage is ReceiverStage.DONE and conn.buffered:
            self._refuse(conn, "spoke after the end")

    def _handle_head(self, conn: ReceiverConnection) -> None:
        match conn.stage:
            case ReceiverStage.HELLO:
                self._handle_hello(conn)
            case ReceiverStage.INTRODUCTION:
                self._open_source(conn, bytes(conn.head))
            case ReceiverStage.PIECES:
                self._handle_frame(conn)
            case _:
                self._refuse(conn, "spoke after the end")

    def _handle_hello(self, conn: ReceiverConnection) -> None:
        try:
            hello = decode_hello(self._transport.kind, conn.head)
        except MalformedFrame:
            self._refuse(conn, "no hello")
            return
        entry = self._handovers.find(hello.request, hello.attempt)
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
        conn.stage = ReceiverStage.INTRODUCTION
        if size:
            conn.next_head(size, [], 0)
        else:
            self._open_source(conn, b"")

    def _open_source(self, conn: ReceiverConnection, introduction: bytes) -> None:
        if conn.entry is None:
            raise InvariantViolated("an introduction before a hello")
        fds, conn.fds = conn.fds, []
        met = self._transport.open_source(introduction, fds, len(conn.entry.expected.blocks))
        if isinstance(met, str):
            self._refuse(conn, met)
            return
        conn.source = met
        conn.stage = ReceiverStage.PIECES
        conn.next_head(FRAME_BYTES, [], 0)
        if met is not None and met.reads_device:
            self._handovers.bypass_mirror(conn.entry)
        try:
            conn.sock.send(WELCOME_DEVICE if conn.entry.bypasses_mirror else WELCOME)
        except OSError as error:
            self._lose(conn, f"connection lost: {error}")

    def _handle_frame(self, conn: ReceiverConnection) -> None:
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
            conn.stage, conn.fetched = ReceiverStage.FETCHING, 0
            self._io.watch(conn.sock, 0, ignore_events)
            return
        low, high = self._memory.span(frame.layers)
        offsets = [block * self._memory.layout.block_bytes for block in conn.entry.expected.targets(frame).tolist()]
        payload = [self._pool[offset + low : offset + high] for offset in offsets]
        conn.next_head(FRAME_BYTES, payload, (high - low) * frame.count)

    def _handle_end(self, conn: ReceiverConnection) -> None:
        if conn.entry is not None and not conn.entry.expected.complete:
            self._refuse(conn, "ended before everything was sent")
            return
        conn.stage = ReceiverStage.DONE
        conn.next_head(1, [], 0)
        if conn.source is not None:
            with contextlib.suppress(OSError):  # the sender may be gone already
                conn.sock.send(TAKEN)

    def _landed(self, entry: ExpectedHandover, pieces: PiecesFrame) -> None:
        low, high = self._memory.span(pieces.layers)
        self.arrived_bytes += (high - low) * pieces.count
        self._handovers.landed(entry, pieces)

    # ── bytes that a source fetches ──────────────────────────────────────────────────────────────────────────────────────

    def _fetch_some(self, conn: ReceiverConnection) -> None:
        """Fetch announced pieces of a connection for at most FETCH_TURN_S."""
        begun_s = time.monotonic()
        while conn.may_fetch and conn in self._connections and time.monotonic() < begun_s + FETCH_TURN_S:
            self._fetch(conn)

    def _fetch(self, conn: ReceiverConnection) -> None:
        """Start fetching the next slice of the announced pieces."""
        if conn.entry is None or conn.source is None or conn.pieces is None:
            raise InvariantViolated("nothing to fetch")
        pieces = conn.pieces
        low, high = self._memory.span(pieces.layers)
        count = min(pieces.count - conn.fetched, max(1, conn.source.slice_bytes // max(1, high - low)))
        part = PiecesFrame(pieces.layers, pieces.first + conn.fetched, count)
        expected = conn.entry.expected
        conn.in_flight, conn.moved_at_s = True, time.monotonic()
        conn.source.fetch(
            BlockSlice(part, part.first - expected.first, expected.targets(part), low, high),
            lambda problem: self._fetched(conn, part, problem),
        )

    def _fetched(self, conn: ReceiverConnection, part: PiecesFrame, problem: str | None) -> None:
        if conn.entry is None or conn.pieces is None or conn not in self._connections:
            return  # fenced meanwhile
        if problem is not None:
            self._lose(conn, problem)
            return
        conn.in_flight, conn.moved_at_s = False, time.monotonic()
        self._handovers.arriving(conn.entry, conn.moved_at_s)
        conn.fetched += part.count
        whole = conn.fetched == conn.pieces.count
        self._landed(conn.entry, part)
        if whole and conn in self._connections:
            conn.pieces, conn.stage = None, ReceiverStage.PIECES
            self._handle_buffered(conn)
            if conn in self._connections and conn.stage is not ReceiverStage.FETCHING:
                self._watch_reads(conn)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(self, now_s: float) -> float | None:
        for conn in list(self._connections):
            self._fetch_some(conn)
        earliest_s = self._resume_accepting(now_s)
        for conn in list(self._connections):
            if conn.may_fetch:
                earliest_s = 0.0
            stranger = conn.is_introducing
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
        """Accept connections again after the pause. Returns the seconds left of the pause; None if there is none."""
        if self._accept_after_s is None:
            return None
        if now_s < self._accept_after_s:
            return self._accept_after_s - now_s
        self._accept_after_s = None
        self._io.watch(self._transport.listener, selectors.EVENT_READ, self._accept)
        return None

    def _end(self) -> None:
        self._handovers.close()
        for conn in list(self._connections):
            self._close_connection(conn)
        if self._mirror_copier is not None:
            self._mirror_copier.close()
        self._io.watch(self._transport.listener, 0, ignore_events)
        self._pool.release()
        self._transport.close()
