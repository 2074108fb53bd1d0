"""Host memory in the place of a pool that lies on a device, so that every transfer works as if it could address the pool.

    P   device ──Ferry──▶ mirror ──▶ transfer             D   transfer ──▶ mirror ──Ferry──▶ device

The mirror has the pool's block ids and offsets. Owns the copies between the two, on a thread of each transfer's own, and the
pages of the mirror: a block costs memory from when something of a hand-over is written there until the last hand-over that
holds it lets go. What a copy moves belongs to a hand-over; once that is dropped, nothing more of it moves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import Handover
from baton.kv.block_access import BlockAccess, Bytes2d, blocks_per_copy
from baton.kv.io_thread import Post, Work
from baton.kv.send_queue import BlockRun

PARTS_AHEAD = 4
"""Of one line that may lie in the mirror, or be on their way there, before they are sent."""


class HostMirror:
    def __init__(self, device: BlockAccess, rows: Bytes2d, give_back: Callable[[int], None]) -> None:
        """`give_back` frees the memory of a block; it reads as zeros then."""
        self._device = device
        self._rows = rows
        self._give_back = give_back
        self._holders = np.zeros(device.blocks, dtype=np.int32)
        """Hand-overs by block: prefixes are shared, and what is late may hold a block that another uses already."""
        self._lock = threading.Lock()

    def parts(self, piece_bytes: int) -> int:
        """How many pieces of so many bytes are copied in one go."""
        return blocks_per_copy(self._device, piece_bytes)

    def hold(self, blocks: Int32s) -> None:
        with self._lock:
            np.add.at(self._holders, blocks, 1)

    def let_go(self, blocks: Int32s) -> None:
        with self._lock:
            np.subtract.at(self._holders, blocks, 1)
        for block in blocks.tolist():
            with self._lock:  # for each alone: who holds others meanwhile shall not wait for all of them
                if not self._holders[block]:
                    self._give_back(block)

    def fetch(self, blocks: Int32s, low: int, high: int) -> None:
        """Bytes [low, high) of these blocks, from the device."""
        self._device.read(blocks, blocks, self._rows, low, high)

    def store(self, blocks: Int32s, low: int, high: int) -> None:
        """The same, to the device."""
        self._device.write(blocks, blocks, self._rows, low, high)


@dataclass(eq=False, slots=True)
class _CopyTask:
    handover: Handover
    blocks: Int32s
    low: int
    high: int
    done: Work


class MirrorCopier:
    """One thread that copies what it is given, in that order, and tells the lane when each is done. Called on the lane."""

    def __init__(self, name: str, mirror: HostMirror, move: Callable[[Int32s, int, int], None], post: Post) -> None:
        """`move`: `mirror.fetch` or `mirror.store`."""
        self._mirror = mirror
        self._move = move
        self._post = post
        self._waiting: deque[_CopyTask] = deque()
        self._to_release: deque[Int32s] = deque()
        """Blocks that nobody of ours holds any more. Freeing them takes a while, and nobody waits for it."""
        self._moving: _CopyTask | None = None
        self._after: list[Work] = []
        """To be told when that one ends; it was dropped then, and its own end is nobody's business."""
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, handover: Handover, blocks: Int32s, low: int, high: int, done: Work) -> None:
        with self._condition:
            self._waiting.append(_CopyTask(handover, blocks, low, high, done))
            self._condition.notify()

    def drop(self, handover: Handover, then: Work) -> None:
        """Nothing more of this hand-over; `then` as soon as nothing of it moves, which may be now."""
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
        """What waits is left, what moves ends."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    # ── on the ferry's thread ────────────────────────────────────────────────────────────────────────────────────────────

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
    """The runs of one line on their way through the mirror: taken as they may be sent, given out when they are there.

    On the lane. Parts arrive in the order in which they were asked for.
    """

    def __init__(
        self,
        copier: MirrorCopier,
        mirror: HostMirror,
        spans: tuple[tuple[int, int], ...],
        handover: Handover,
        first: int,
        blocks: Int32s,
        next_run: Callable[[], BlockRun | None],
        on_part: Work,
    ) -> None:
        """`blocks[i]` is block `first + i` of the sequence. `on_part`: there is something to give out."""
        self._mirror_copier = copier
        self._mirror = mirror
        self._spans = spans
        self._handover = handover
        self._first = first
        self._blocks = blocks
        self._next_run = next_run
        self._on_part = on_part
        self._run: BlockRun | None = None
        """What is left of the run that parts are being made of."""
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
        """As many parts as may lie ahead."""
        while self._coming + len(self._there) < PARTS_AHEAD:
            self._run = self._run or self._next_run()
            if self._run is None:
                return
            self._order_part(self._run)

    def _order_part(self, run: BlockRun) -> None:
        low, high = self._spans[run.layers.start][0], self._spans[run.layers.stop - 1][1]
        upto = min(run.upto, run.first + self._mirror.parts(high - low))
        part = BlockRun(run.layers, run.first, upto)
        self._run = BlockRun(run.layers, upto, run.upto) if upto < run.upto else None
        self._coming += 1
        blocks = self._blocks[part.first - self._first : part.upto - self._first]
        self._mirror_copier.copy(self._handover, blocks, low, high, lambda: self._arrived(part))

    def _arrived(self, part: BlockRun) -> None:
        self._coming -= 1
        self._there.append(part)
        self._on_part()
