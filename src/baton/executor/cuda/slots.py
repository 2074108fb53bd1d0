"""The slots on the device, one row each, and one spare row for padding.

A padding row of a batch names the spare row, which is never occupied, so it has no effect.
"""

from __future__ import annotations

import numpy as np
import torch

from baton.core.engine.plan import Int32s, Start
from baton.executor.contract import ExecutorShape
from baton.executor.cuda.kernels_slots import grow_tables, start_slots
from baton.executor.cuda.staging import StepUploads
from baton.executor.slot_table import NO_BLOCK


class DeviceSlots:
    def __init__(self, shape: ExecutorShape, device: torch.device) -> None:
        self.spare = shape.slots
        width = -(-shape.context_tokens // shape.block_size) + 1
        rows = shape.slots + 1

        def ints(*size: int, value: int = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=torch.int32, device=device)

        self.tokens = ints(rows, shape.context_tokens + shape.burst_max)
        self.tables = ints(rows, width, value=NO_BLOCK)
        """One entry wider than any sequence: drafts read one position beyond it."""
        self.known = ints(rows, value=1)
        self.limits = ints(rows)
        self._uploads = StepUploads(4 * shape.context_tokens + 16 * shape.slots + 4096, device)

    def start(self, starts: tuple[Start, ...], context_tokens: int) -> None:
        """Replace the rows (columns, tokens and tables) with one upload and one kernel."""
        token_starts = np.cumsum([0] + [len(start.tokens) for start in starts])
        block_starts = np.cumsum([0] + [len(start.blocks) for start in starts])
        heads = np.array(
            [
                (
                    start.slot,
                    len(start.tokens),
                    min(start.limit, context_tokens),
                    len(start.blocks),
                    token_starts[index],
                    block_starts[index],
                )
                for index, start in enumerate(starts)
            ],
            dtype=np.int32,
        )
        tokens = np.concatenate([start.tokens for start in starts]).astype(np.int32)
        blocks = np.concatenate([start.blocks for start in starts]).astype(np.int32)
        head, token, block = self._uploads.send([heads.reshape(-1), tokens, blocks])
        start_slots[(len(starts),)](
            head, token, block, self.tokens, self.tables, self.known, self.limits, self.tokens.stride(0),
            self.tables.stride(0), self.tables.shape[1], LANES=1024, num_warps=4,
        )  # fmt: skip

    def grow(self, slots: Int32s, at: Int32s, blocks: Int32s) -> None:
        if not len(slots):
            return
        there = self._uploads.send([slots, at, blocks])
        grow_tables[(-(-len(slots) // 256),)](*there, self.tables, len(slots), self.tables.stride(0), LANES=256, num_warps=4)
