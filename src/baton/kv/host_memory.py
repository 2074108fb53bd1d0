"""Rows of host memory, and the thread that copies between them and the device's blocks.

Owns the memory of the rows and the hold that a transfer has on them (`TransferHold`). The core decides which row holds
which block. Copies into the device go before copies out of it, because requests wait for them; each kind is done in the
order in which it was given. The caller must not order a copy that depends on another one not yet reported. `copy` and
`fence` return at once and their outcome is reported. A fence takes effect after the current copy call: one block where the
host can address them, at most `run_bytes` on a device.

The caller bounds how many copies wait: each holds rows and blocks of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.tiers.transfers import CopyIn, CopyOut, StorageEvent, TransferDone, TransferFenced, TransferId
from baton.kv.block_access import BlockAccess, Bytes, Bytes2d, blocks_per_copy, zeroed
from baton.kv.shared_memory import ids_within

Report = Callable[[StorageEvent], None]
"""Called from any thread; never blocks."""


class HostMemory:
    """Host memory for blocks: `rows` is [rows, bytes a block]."""

    def __init__(self, rows: int, block_bytes: int, allocate: Callable[[int], Bytes] = zeroed) -> None:
        self.rows: Bytes2d = allocate(rows * block_bytes).reshape(rows, block_bytes)

    def demand(self, rows: Int32s) -> None:
        if not ids_within(rows, len(self.rows)):
            raise InvariantViolated(f"rows {rows.tolist()} are not all of the {len(self.rows)} that there are")


class TransferHold:
    """One transfer's hold on rows and blocks, shared by the thread that moves bytes and the thread that fences.

    The moving thread takes the hold before it touches memory and checks `fenced` between copies. If a fence finds the hold
    taken, the moving thread answers it when it lets go; otherwise the fencing thread answers. Neither thread waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self.fenced = False

    def is_abandoned(self) -> bool:
        """Fenced and not held: the core has its answer, although a call of the store may still be running."""
        return self.fenced and not self._held

    def take(self) -> bool:
        """True if memory may be touched. False if fenced, and then the fence has been answered."""
        with self._lock:
            self._held = not self.fenced
            return self._held

    def let_go(self) -> bool:
        """True unless fenced meanwhile; then the caller must answer the fence."""
        with self._lock:
            self._held = False
            return not self.fenced

    def fence(self) -> bool:
        """True if the hold is free, and then the caller must answer the fence; otherwise the holder does."""
        with self._lock:
            self.fenced = True
            return not self._held


class HostCopier:
    def __init__(self, blocks: BlockAccess, memory: HostMemory, report: Report) -> None:
        if blocks.block_bytes != memory.rows.shape[1]:
            raise InvariantViolated(f"rows of {memory.rows.shape[1]} bytes are not for blocks of {blocks.block_bytes}")
        self._blocks = blocks
        self._at_once = blocks_per_copy(blocks, blocks.block_bytes)
        self._memory = memory
        self._report = report
        self._open: dict[TransferId, TransferHold] = {}
        self._waiting_in: deque[tuple[CopyIn, TransferHold]] = deque()
        self._waiting_out: deque[tuple[CopyOut, TransferHold]] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self.out_bytes = 0
        self.in_bytes = 0
        """`out_bytes` and `in_bytes`: copied out of the device and into it since the start."""
        self._thread = threading.Thread(target=self._run, name="baton-copier", daemon=True)
        self._thread.start()

    def copy(self, order: CopyOut | CopyIn) -> None:
        self._memory.demand(order.rows)
        if not ids_within(order.blocks, self._blocks.blocks) or len(order.blocks) != len(order.rows):
            raise InvariantViolated(f"blocks {order.blocks.tolist()} cannot be copied to or from {len(order.rows)} rows")
        hold = self._open[order.transfer] = TransferHold()
        with self._condition:
            if isinstance(order, CopyIn):
                self._waiting_in.append((order, hold))
            else:
                self._waiting_out.append((order, hold))
            self._condition.notify()

    def fence(self, transfer: TransferId) -> bool:
        """False if the transfer is unknown here or finished; then no answer is reported."""
        hold = self._open.get(transfer)
        if hold is not None and hold.fence():
            self._open.pop(transfer, None)
            self._report(TransferFenced(transfer))
        return hold is not None

    def close(self) -> None:
        """Discard waiting copies; the current one ends after its current call."""
        self._closing = True
        with self._condition:
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            order, hold = task
            if not hold.take():
                continue  # fenced while it waited
            copied = self._copied(order, hold)
            done = hold.let_go()
            self._open.pop(order.transfer, None)
            if not done:
                self._report(TransferFenced(order.transfer))
            elif copied:
                self._report(TransferDone(order.transfer, (True,) * len(order.rows)))

    def _next(self) -> tuple[CopyOut | CopyIn, TransferHold] | None:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting_in or self._waiting_out or self._closing)
            if self._closing:
                return None
            return self._waiting_in.popleft() if self._waiting_in else self._waiting_out.popleft()

    def _copied(self, order: CopyOut | CopyIn, hold: TransferHold) -> bool:
        out = isinstance(order, CopyOut)
        move, size = self._blocks.read if out else self._blocks.write, self._blocks.block_bytes
        for at in range(0, len(order.rows), self._at_once):
            if hold.fenced or self._closing:
                return False
            blocks, rows = order.blocks[at : at + self._at_once], order.rows[at : at + self._at_once]
            move(blocks, rows, self._memory.rows, 0, size)
            if out:
                self.out_bytes += len(blocks) * size
            else:
                self.in_bytes += len(blocks) * size
        return True
