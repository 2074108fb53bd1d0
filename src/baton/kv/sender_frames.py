"""Makes the frames of a connection: which blocks the next one names, their checksums, and their bytes where they travel.

Owns no connection and no thread; runs on the sender's I/O thread.
"""

from __future__ import annotations

import time

from baton.kv.rate_limit import ByteRateLimit
from baton.kv.send_queue import BlockRun
from baton.kv.sender_connection import SenderConnection
from baton.kv.transfer_contract import KvMemory
from baton.kv.transfer_frames import encode_pieces

CARRIED_BYTES = 8 << 20
"""KV of one frame that carries its pieces. Frames cost time on both sides."""
ANNOUNCED_BYTES = 4 << 20
"""KV of one frame that only names its pieces. D begins to fetch when the first frame arrives."""
ON_DEVICE_BYTES = 64 << 20
"""KV of one frame that D reads from our device: each read costs tenths of a millisecond, however short."""


class FrameMaker:
    def __init__(self, memory: KvMemory, pool: memoryview, rate: ByteRateLimit, carries_bytes: bool) -> None:
        self._memory = memory
        self._pool = pool
        self._rate = rate
        self._carries_bytes = carries_bytes

    def add_frame(self, conn: SenderConnection, run: BlockRun) -> int:
        """Queue the next frame of a run on the connection; the rest of the run stays in `conn.run`.

        Returns the bytes of KV that the frame names.
        """
        begin, end = self._memory.span(run.layers)
        count = min(run.upto - run.first, max(1, self._rate.at_once(self._frame_bytes(conn)) // max(1, end - begin)))
        at = run.first - conn.first
        blocks = conn.blocks[at : at + count]
        if conn.checks is not None:
            conn.checks.add(run.layers, run.first, blocks)
        conn.waiting.add([memoryview(encode_pieces(run.layers, run.first, count))])
        if self._carries_bytes:
            offsets = [block * self._memory.layout.block_bytes for block in blocks.tolist()]
            conn.waiting.add([self._pool[offset + begin : offset + end] for offset in offsets])
        rest = run.first + count
        conn.run = BlockRun(run.layers, rest, run.upto) if rest < run.upto else None
        self._rate.spent((end - begin) * count, time.monotonic())
        return (end - begin) * count

    def _frame_bytes(self, conn: SenderConnection) -> int:
        if self._carries_bytes:
            return CARRIED_BYTES
        return ON_DEVICE_BYTES if self._memory.mirror is not None and conn.staging is None else ANNOUNCED_BYTES
