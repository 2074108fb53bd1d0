"""A mirror in host memory of a pool on a device, so that every kind of transfer can address the blocks.

    P   device ──copy──▶ mirror ──▶ transfer             D   transfer ──▶ mirror ──copy──▶ device

The mirror has the pool's block ids and offsets. Owns the copies between the two, on one thread per sender or receiver, and
the pages of the mirror: a block uses memory from its first write until the last hand-over that holds it lets go. A copy
belongs to a hand-over; once that is dropped, nothing more of it is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import Handover
from baton.kv.block_access import BlockAccess, Bytes2d, Spans, blocks_per_copy, span_of
from baton.kv.io_thread import Post, Work
from baton.kv.send_queue import BlockRun

PARTS_AHEAD = 4
"""Most parts of one connection that are in the mirror, or being copied there, before they are sent."""


class HostMirror:
    def __init__(self, device: BlockAccess, rows: Bytes2d, give_back: Callable[[int], None]) -> None:
        """`give_back` frees the memory of a block, which reads as zeros afterwards."""
        self._device = device
        self._rows = rows
        self._give_back = give_back
        self._holders = np.zeros(device.blocks, dtype=np.int32)
        """Number of hand-overs that hold each block. Several may: prefixes are shared, and blocks are reused."""
        self._lock = threading.Lock()

    def parts(self, piece_bytes: int) -> int:
        """How many pieces of `piece_bytes` one copy call takes."""
        return blocks_per_copy(self._device, piece_bytes)

    def hold(self, blocks: Int32s) -> None:
        with self._lock:
            np.add.at(self._holders, blocks, 1)

    def let_go(self, blocks: Int32s) -> None:
        with self._lock:
            np.subtract.at(self._holders, blocks, 1)
        for block in blocks.tolist():
            with self._lock:  # for each block alone, so that `hold` never waits for all of them
                if not self._holders[block]:
                    self._give_back(block)

    def fetch(self, blocks: Int32s, low: int, high: int) -> None:
        """Copy bytes [low, high) of these blocks from the device to the mirror."""
        self._device.read(blocks, blocks, self._rows, low, high)

    def store(self, blocks: Int32s, low: int, high: int) -> None:
        """Copy bytes [low, high) of these blocks from the mirror to the device."""
        self._device.write(blocks, blocks, self._rows, low, high)


@dataclass(eq=False, slots=True)
class _CopyTask:
    handover: Handover
    blocks: Int32s
    low: int
    high: int
    done: Work


class MirrorCopier:
    """One thread that copies in the order given and posts each completion to the I/O thread. Called on the I/O thread."""

    def __init__(self, name: str, mirror: HostMirror, move: Callable[[Int32s, int, int], None], post: Post) -> None:
        """`move`: `mirror.fetch` or `mirror.store`."""
        self._mirror = mirror
        self._move = move
        self._post = post
        self._waiting: deque[_CopyTask] = deque()
        self._to_release: deque[Int32s] = deque()
        """Blocks to release. Freeing pages is slow, so it happens on this thread."""
        self._moving: _CopyTask | None = None
        self._after: list[Work] = []
        """Posted when the copy under way ends, instead of its own completion: its hand-over was dropped."""
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, handover: Handover, blocks: Int32s, low: int, high: int, done: Work) -> None:
        with self._condition:
            self._waiting.append(_CopyTask(handover, blocks, low, high, done))
            self._condition.notify()

    def drop(self, handover: Handover, then: Work) -> None:
        """Discard the copies of this hand-over; call `then` as soon as none is under way, possibly at once."""
        with self._condition:
            self._waiting = deque(task for task in self._waiting if task.handover != handover)
            if self._moving is not None and self._moving.handover == handover:
                self._after.append(then)
                return
        then()

    def let_go(self, blocks: Int32s) -> None:
        with self._condition:
            self._to_release.append(blocks)
            self._condition.notify()

    def close(self) -> None:
        """Discard waiting copies; wait for the one under way."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    # ── on the copying thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while (task := self._next()) is not None:
            if isinstance(task, _CopyTask):
                self._move(task.blocks, task.low, task.high)
                self._finish(task)
            else:
                self._mirror.let_go(task)

    def _next(self) -> _CopyTask | Int32s | None:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._to_release or self._closing)
            if self._waiting and not self._closing:
                self._moving = self._waiting.popleft()
                return self._moving
            return self._to_release.popleft() if self._to_release else None

    def _finish(self, task: _CopyTask) -> None:
        with self._condition:
            told, self._after, self._moving = self._after or [task.done], [], None
        for work in told:
            self._post(work, True)


class MirrorStaging:
    """Copies the runs of one connection into the mirror ahead of sending, at most PARTS_AHEAD parts at a time.

    Runs on the I/O thread. Parts arrive in the order in which they were ordered.
    """

    def __init__(
        self,
        copier: MirrorCopier,
        mirror: HostMirror,
        spans: Spans,
        handover: Handover,
        first: int,
        blocks: Int32s,
        next_run: Callable[[], BlockRun | None],
        on_part: Work,
    ) -> None:
        """`blocks[i]` is block `first + i` of the sequence. `on_part` is called when a part has arrived."""
        self._mirror_copier = copier
        self._mirror = mirror
        self._spans = spans
        self._handover = handover
        self._first = first
        self._blocks = blocks
        self._next_run = next_run
        self._on_part = on_part
        self._run: BlockRun | None = None
        """The rest of the run that parts are being made of."""
        self._coming = 0
        self._there: deque[BlockRun] = deque()

    @property
    def is_empty(self) -> bool:
        return self._run is None and not self._coming and not self._there

    def next(self) -> BlockRun | None:
        part = self._there.popleft() if self._there else None
        self._order()
        return part

    def _order(self) -> None:
        """Order parts until PARTS_AHEAD are in the mirror or being copied."""
        while self._coming + len(self._there) < PARTS_AHEAD:
            self._run = self._run or self._next_run()
            if self._run is None:
                return
            self._order_part(self._run)

    def _order_part(self, run: BlockRun) -> None:
        low, high = span_of(self._spans, run.layers)
        upto = min(run.upto, run.first + self._mirror.parts(high - low))
        part = BlockRun(run.layers, run.first, upto)
        self._run = run.rest(upto)
        self._coming += 1
        blocks = self._blocks[part.first - self._first : part.upto - self._first]
        self._mirror_copier.copy(self._handover, blocks, low, high, lambda: self._arrived(part))

    def _arrived(self, part: BlockRun) -> None:
        self._coming -= 1
        self._there.append(part)
        self._on_part()
