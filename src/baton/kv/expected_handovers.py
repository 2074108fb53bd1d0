"""The hand-overs that a receiver expects, from `expect` until they are verified, spoilt or fenced.

Owns their checksums and the copies of their pieces from the host mirror to the device. Runs on the receiver's I/O thread.
Knows connections only as something to close.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Arriving, Fenced, Handover, TransferBroken, Verified
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.expected_blocks import ExpectedBlocks
from baton.kv.host_mirror import MirrorCopier
from baton.kv.io_thread import Work
from baton.kv.receiver_connection import ExpectedHandover, ReceiverConnection
from baton.kv.transfer_contract import KvMemory, ReceiverOptions, Report
from baton.kv.transfer_frames import PiecesFrame

ARRIVING_EVERY_S = 0.25


class ExpectedHandovers:
    def __init__(
        self,
        memory: KvMemory,
        pool: memoryview,
        report: Report,
        options: ReceiverOptions,
        mirror_copier: MirrorCopier | None,
        close_connection: Callable[[ReceiverConnection], None],
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._report = report
        self._verified = options.get("verified", True)
        self._expected_max = options.get("expected_max", 4096)
        self._mirror_copier = mirror_copier
        self._close_connection = close_connection
        self._closed = False
        self._entries: dict[tuple[int, int], ExpectedHandover] = {}
        """By (request, attempt), which D itself assigns, so they are unique among all peers."""

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        key = handover.request, handover.attempt
        if self._closed or key in self._entries or len(self._entries) >= self._expected_max:
            reason = "the receiver is closed" if self._closed else "expected twice, or too many at once"
            self._report(TransferBroken(handover, reason))
            return
        expected = ExpectedBlocks(first, blocks, len(self._memory.spans))
        checks = BlockChecksums(first, len(blocks), self._memory.spans, self._pool) if self._verified else None
        self._entries[key] = ExpectedHandover(handover, token, expected, checks)
        if self._memory.mirror is not None:
            self._memory.mirror.hold(blocks)

    def find(self, request: int, attempt: int) -> ExpectedHandover | None:
        return self._entries.get((request, attempt))

    def verify(self, handover: Handover, checks: bytes) -> None:
        entry = self._entry(handover)
        if entry is None:
            self._report(TransferBroken(handover, "not expected, or not any more"))
            return
        entry.wanted = checks
        self._conclude(entry)

    def fence(self, handover: Handover) -> None:
        entry = self._entry(handover)
        if entry is not None:
            self._forget(entry)
        self._stop_copying(handover, lambda: self._report(Fenced(handover)))

    def spoil(self, entry: ExpectedHandover, reason: str) -> None:
        self._forget(entry)
        self._stop_copying(entry.handover, lambda: None)
        self._report(TransferBroken(entry.handover, reason))

    def bypass_mirror(self, entry: ExpectedHandover) -> None:
        """Its pieces are read from device to device, and hashed there."""
        sharing, expected = self._memory.sharing, entry.expected
        if sharing is None:
            raise InvariantViolated("a device is read that is not there")
        entry.bypasses_mirror = True
        if entry.checks is not None:
            entry.checks = DeviceChecksums(expected.first, len(expected.blocks), self._memory.spans, sharing)

    def arriving(self, entry: ExpectedHandover, now_s: float) -> None:
        """Report that bytes arrive, at most every ARRIVING_EVERY_S."""
        if now_s >= entry.arriving_at_s:
            entry.arriving_at_s = now_s + ARRIVING_EVERY_S
            self._report(Arriving(entry.handover))

    def landed(self, entry: ExpectedHandover, pieces: PiecesFrame) -> None:
        """All of these pieces are in the pool, or in its mirror."""
        targets = entry.expected.targets(pieces)
        if entry.checks is not None:
            entry.checks.add(pieces.layers, pieces.first, targets)
        entry.expected.keep(pieces)
        if self._mirror_copier is not None and not entry.bypasses_mirror:
            entry.copying += 1
            low, high = self._memory.span(pieces.layers)
            self._mirror_copier.copy(entry.handover, targets, low, high, lambda: self._copied(entry))
        self._conclude(entry)

    def close(self) -> None:
        """Spoil everything that is expected; expect nothing more."""
        self._closed = True
        for entry in list(self._entries.values()):
            self.spoil(entry, "the receiver is closed")

    def _entry(self, handover: Handover) -> ExpectedHandover | None:
        entry = self.find(handover.request, handover.attempt)
        return entry if entry is not None and entry.handover == handover else None

    def _forget(self, entry: ExpectedHandover) -> None:
        self._drop(entry)
        if entry.conn is not None:
            self._close_connection(entry.conn)

    def _drop(self, entry: ExpectedHandover) -> None:
        """Expect it no longer, and release its blocks of the mirror."""
        del self._entries[entry.handover.request, entry.handover.attempt]
        if self._mirror_copier is not None:
            self._mirror_copier.let_go(entry.expected.blocks)

    def _stop_copying(self, handover: Handover, then: Work) -> None:
        """Call `then` when nothing of this hand-over is written any more."""
        if self._mirror_copier is None:
            then()
        else:
            self._mirror_copier.drop(handover, then)

    def _conclude(self, entry: ExpectedHandover) -> None:
        """Compare checksums and report, once everything has arrived and the sender's checksums are known."""
        if entry.wanted is None or not entry.expected.complete or entry.copying:
            return
        if entry.checks is not None and not hmac.compare_digest(entry.checks.digest(), entry.wanted):
            self.spoil(entry, "what arrived differs from what was sent")
            return
        self._drop(entry)
        if entry.conn is not None:
            entry.conn.entry = None  # the connection may stay open: the next hand-over reuses what it holds
        self._report(Verified(entry.handover))

    def _copied(self, entry: ExpectedHandover) -> None:
        entry.copying -= 1
        if self._entry(entry.handover) is entry:
            self._conclude(entry)
