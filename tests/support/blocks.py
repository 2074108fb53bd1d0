"""Blocks that a test holds up and lets go on."""

from __future__ import annotations

import queue
import threading

from baton.core.engine.plan import Int32s
from baton.kv.block_access import Bytes2d, HostBlocks

DEADLINE_S = 20


class GatedBlocks(HostBlocks):
    """They say which are being copied, and wait there until the test lets them go on."""

    def __init__(self, pool: Bytes2d, at_once: int = 1) -> None:
        super().__init__(pool)
        self.run_bytes = at_once * self.block_bytes
        self.gate = threading.Semaphore(0)
        self._reached: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

    def read(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        self._wait(blocks)
        super().read(blocks, rows, host, begin, end)

    def write(self, blocks: Int32s, rows: Int32s, host: Bytes2d, begin: int, end: int) -> None:
        self._wait(blocks)
        super().write(blocks, rows, host, begin, end)

    def next(self) -> list[int]:
        """The blocks of the next copy, as it begins."""
        return self._reached.get(timeout=DEADLINE_S)

    @property
    def is_quiet(self) -> bool:
        """No copy has begun that `next` has not told of."""
        return self._reached.empty()

    def _wait(self, blocks: Int32s) -> None:
        self._reached.put(blocks.tolist())
        if not self.gate.acquire(timeout=DEADLINE_S):
            raise TimeoutError(f"nobody let blocks {blocks} go")
