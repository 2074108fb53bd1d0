"""Rows of host memory, and the one thread that copies between them and the device's blocks.

Owns the memory of the rows and what a haul's hold on them is (`Grip`). Which row holds what is known to the core alone.
Copies into the device go before those out of it: for the first a request waits, for the others nobody. Of each kind they are
made in the order in which they were ordered. Who orders sees to it that none needs what another, not yet reported, brings.
Orders and fences return at once, and what became of them is reported. A fence is answered after the blocks that are being
copied in one go, however long the copy is: one block where the host can address them, a run of them on a device.

How many copies wait is bounded by whoever orders them: each holds rows and blocks of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.tiers.transfers import CopyIn, CopyOut, Haul, Hauled, HaulFenced, StorageEvent
from baton.kv.block_access import Blocks, Bytes, Bytes2d, at_once, zeroed
from baton.kv.shared_memory import within

Report = Callable[[StorageEvent], None]
"""Called from any thread; never blocks."""


class HostMemory:
    """[rows, bytes a block]. What it costs, and when, is the allocator's business."""

    def __init__(self, rows: int, block_bytes: int, allocate: Callable[[int], Bytes] = zeroed) -> None:
        self.rows: Bytes2d = allocate(rows * block_bytes).reshape(rows, block_bytes)

    def demand(self, rows: Int32s) -> None:
        if not within(rows, len(self.rows)):
            raise InvariantViolated(f"rows {rows.tolist()} are not all of the {len(self.rows)} that there are")


class Grip:
    """One haul's hold on rows and blocks: between the thread that moves bytes and the one that fences it.

    The thread takes the grip before it touches any, and looks at `fenced` between two of its copies. A fence that finds the
    grip held is answered by the thread as it lets go, any other by whoever fences. So nobody waits for anybody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self.fenced = False

    def strays(self) -> bool:
        """Fenced and let go: what goes on with this haul, if anything does, is no business of the core."""
        return self.fenced and not self._held

    def take(self) -> bool:
        """False: it was fenced, and must not touch anything any more. The fence has been answered."""
        with self._lock:
            self._held = not self.fenced
            return self._held

    def let_go(self) -> bool:
        """False: it was fenced meanwhile, and the answer is the caller's to give."""
        with self._lock:
            self._held = False
            return not self.fenced

    def fence(self) -> bool:
        """True: nothing of it touches anything, and the answer is the caller's to give; otherwise the holder's."""
        with self._lock:
            self.fenced = True
            return not self._held


class Copier:
    def __init__(self, blocks: Blocks, memory: HostMemory, report: Report) -> None:
        if blocks.block_bytes != memory.rows.shape[1]:
            raise InvariantViolated(f"rows of {memory.rows.shape[1]} bytes are not for blocks of {blocks.block_bytes}")
        self._blocks = blocks
        self._at_once = at_once(blocks, blocks.block_bytes)
        self._memory = memory
        self._report = report
        self._open: dict[Haul, Grip] = {}
        self._waiting_in: deque[tuple[CopyIn, Grip]] = deque()
        self._waiting_out: deque[tuple[CopyOut, Grip]] = deque()
        self._news = threading.Condition()
        self._closing = False
        self.out_bytes = 0
        self.in_bytes = 0
        """Copied since the start, out of the device and into it."""
        self._thread = threading.Thread(target=self._run, name="baton-copier", daemon=True)
        self._thread.start()

    def copy(self, order: CopyOut | CopyIn) -> None:
        self._memory.demand(order.rows)
        if not within(order.blocks, self._blocks.blocks) or len(order.blocks) != len(order.rows):
            raise InvariantViolated(f"blocks {order.blocks.tolist()} cannot be copied to or from {len(order.rows)} rows")
        grip = self._open[order.haul] = Grip()
        with self._news:
            if isinstance(order, CopyIn):
                self._waiting_in.append((order, grip))
            else:
                self._waiting_out.append((order, grip))
            self._news.notify()

    def fence(self, haul: Haul) -> bool:
        """False: it is not one of ours, or is over, and is not answered here."""
        grip = self._open.get(haul)
        if grip is not None and grip.fence():
            self._open.pop(haul, None)
            self._report(HaulFenced(haul))
        return grip is not None

    def close(self) -> None:
        """What waits is not copied, and what is being copied ends after its run of blocks."""
        self._closing = True
        with self._news:
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            order, grip = task
            if not grip.take():
                continue  # fenced while it waited
            copied = self._copied(order, grip)
            done = grip.let_go()
            self._open.pop(order.haul, None)
            if not done:
                self._report(HaulFenced(order.haul))
            elif copied:
                self._report(Hauled(order.haul, (True,) * len(order.rows)))

    def _next(self) -> tuple[CopyOut | CopyIn, Grip] | None:
        with self._news:
            self._news.wait_for(lambda: self._waiting_in or self._waiting_out or self._closing)
            if self._closing:
                return None
            return self._waiting_in.popleft() if self._waiting_in else self._waiting_out.popleft()

    def _copied(self, order: CopyOut | CopyIn, grip: Grip) -> bool:
        out = isinstance(order, CopyOut)
        move, size = self._blocks.read if out else self._blocks.write, self._blocks.block_bytes
        for at in range(0, len(order.rows), self._at_once):
            if grip.fenced or self._closing:
                return False
            blocks, rows = order.blocks[at : at + self._at_once], order.rows[at : at + self._at_once]
            move(blocks, rows, self._memory.rows, 0, size)
            if out:
                self.out_bytes += len(blocks) * size
            else:
                self.in_bytes += len(blocks) * size
        return True
