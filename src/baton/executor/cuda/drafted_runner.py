"""Runs steps in which some decodes have more drafts than others: the tokens that their grammars force.

A `ModelRunner` gives every decode the same number of rows. Here each gets rows for its own drafts (`forced_tokens`), so that
the decodes beside it get none for nothing. It has buffers and graphs of its own, for numbers of rows; those of the other
runner stay as they are. Rows are rotated and written before attention, because rows of one slot attend to each other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import triton

from baton.core.engine.plan import NO_INT32S, NO_INT64S, Int32s
from baton.executor.contract import ExecutorShape
from baton.executor.cuda.batch import DecodePart, target_items
from baton.executor.cuda.chunks import ALIGNMENT, CHUNK_TOKENS, CHUNKS_MOST, MixedSize
from baton.executor.cuda.drafting import Propose
from baton.executor.cuda.forced_tokens import ForcedTokens, RowLayout
from baton.executor.cuda.kernels_forced import gather_rows, propose_forced
from baton.executor.cuda.kernels_steps import name_items, prepare_decodes
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import ProductScratch
from baton.executor.cuda.runner import PIECE_LEAST, PIECE_STEP, LogitRows, ModelRunner
from baton.executor.cuda.slots import DeviceSlots
from baton.executor.model_loading import LoadedModel

FORCED_ROWS = 128
"""Most rows of a step beyond those that its decodes have anyway: more would cost the others more than reading weights."""
ROWS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows of captured steps."""
FEW_ROWS = 64
NO_CELL = -1
NO_ROWS = RowLayout(NO_INT64S, NO_INT32S, NO_INT32S)


def rows_most(shape: ExecutorShape) -> int:
    return shape.slots * shape.burst + min(shape.slots * (shape.burst_max - shape.burst), FORCED_ROWS)


def row_sizes(rows_max: int) -> list[int]:
    return [*(size for size in ROWS if size < rows_max), rows_max]


def mixed_row_sizes(step_tokens: int, rows_max: int) -> list[MixedSize]:
    """Sizes of captured steps with chunks."""
    sizes = sorted({min(FEW_ROWS, rows_max), rows_max})
    return [MixedSize(tokens, size) for tokens in CHUNK_TOKENS if tokens <= step_tokens for size in sizes]


class DraftedRunner(ModelRunner):
    def __init__(
        self,
        loaded: LoadedModel,
        shape: ExecutorShape,
        slots: DeviceSlots,
        pool: CudaPool,
        scratch: ProductScratch,
        step_tokens: int,
        forced: ForcedTokens,
        propose: Propose | None,
    ) -> None:
        """`propose` drafts where nothing is forced."""
        self.rows_max = rows_most(shape)
        one_each = replace(shape, slots=self.rows_max, burst=1, constrained_burst=0)
        super().__init__(loaded, one_each, slots, pool, scratch, step_tokens, self._propose)
        self.width = shape.burst_max
        self._chunks_most = min(CHUNKS_MOST, shape.slots)
        self._decodes_max, self._others_most = shape.slots, shape.burst - 1 if propose is not None else 0
        self._forced, self._propose_others = forced, propose
        device, aligned = slots.known.device, shape.slots + -shape.slots % ALIGNMENT

        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._inputs = ints(3 * aligned + self.rows_max)
        """What the host says of a step: the slots that decode, which have plans, their rooms, and the cells of rows."""
        self.decode_slots, self._planned, self._rooms = (self._inputs[part * aligned :][: shape.slots] for part in range(3))
        self.cells = self._inputs[3 * aligned :]
        self._aligned = aligned
        self.codes, self.fed = ints(shape.slots), ints(shape.slots)
        self.drafts, self.draft_counts = ints(shape.slots * (self.width - 1)), ints(shape.slots)
        self._others, self._other_counts = ints(shape.slots * max(1, shape.burst - 1)), ints(shape.slots)
        self._cell_columns = ints(5 * shape.slots * self.width).view(5, -1)
        self._of_decodes = ints(4 * shape.slots).view(4, -1)
        """Contexts, first positions and pieces of whole decodes, of which rows make nothing."""
        self._row_slots = ints(self.rows_max)
        self._logits: torch.Tensor | None = None
        """Of captured decodes."""

    def fill(self, decodes: Int32s, left: Int32s, layout: RowLayout) -> Int32s:
        """The inputs of a step, for `take`: what decodes, and how many drafts each should find in its plan."""
        filled = np.zeros(len(self._inputs), dtype=np.int32)
        filled[: self._decodes_max] = self._slots.spare
        filled[3 * self._aligned :] = NO_CELL
        for part, column in enumerate((decodes, left, layout.rooms)):
            filled[part * self._aligned :][: len(column)] = column
        filled[3 * self._aligned :][: len(layout.cells)] = layout.cells
        return filled

    def take(self, inputs: torch.Tensor) -> None:
        self._inputs.copy_(inputs)

    def spread(self, drawn: torch.Tensor, rows: int, cells: torch.Tensor) -> None:
        """What was drawn for the rows, in the cells of their decodes."""
        cells.index_copy_(0, self.cells[:rows].long(), drawn[:rows])

    def _fill_with_nobody(self) -> None:
        self._inputs.copy_(torch.from_numpy(self.fill(NO_INT32S, NO_INT32S, NO_ROWS)))

    def _captured_decode(self, sequences: int) -> LogitRows:
        """All sizes write their logits to the same buffer: the largest is the first."""
        drawn = self._decode(sequences)
        if self._logits is None:
            self._logits = torch.empty_like(drawn.logits)
        there = self._logits[: len(drawn.logits)]
        there.copy_(drawn.logits)
        return replace(drawn, logits=there)

    def _propose(self, named: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor) -> None:
        if self._propose_others is not None:
            self._propose_others(named, self._others, self._other_counts)
        slots, plans, most = self._slots, self._forced.plans, self.width - 1
        propose_forced[(len(named),)](
            named, slots.tokens, slots.known, plans, self._planned, self._rooms, self._others, self._other_counts, drafts,
            counts, slots.tokens.stride(0), plans.stride(0), PLANNED=triton.next_power_of_2(self._forced.tokens_max),
            OTHERS=self._others_most, DRAFTS=most, DRAFTS_PADDED=triton.next_power_of_2(most), num_warps=1,
        )  # fmt: skip

    def _prepare(self, sequences: int, first: int) -> None:
        """Plan every decode in full, then take the rows that there is room for."""
        slots, work, decodes = self._slots, self._work, self._decodes_max
        ids, positions, row_slots, blocks, offsets = self._cell_columns
        contexts, first_positions, first_items, item_counts = self._of_decodes
        self._propose(self.decode_slots, self.drafts, self.draft_counts)
        prepare_decodes[(1,)](
            self.decode_slots, slots.tokens, slots.known, slots.limits, slots.tables, self.drafts, self.draft_counts, ids,
            positions, row_slots, blocks, offsets, contexts, first_positions, self.codes, self.fed, first_items,
            item_counts, work.piece_tokens, work.records, decodes, slots.spare, 0, 1, PIECE_LEAST, slots.tokens.stride(0),
            slots.tables.stride(0), BLOCK_SIZE=self._shape.block_size,
            SEQUENCES=max(16, triton.next_power_of_2(decodes)), QUERIES=self.width,
            QUERIES_PADDED=triton.next_power_of_2(self.width), ITEMS=1024, STEP=PIECE_STEP, num_warps=8,
        )  # fmt: skip
        target = target_items(sequences)
        gather_rows[(1,)](
            self.cells, ids, positions, row_slots, blocks, offsets, self._ids[first:], self._positions[first:],
            self.row_slots[first:], self._write_blocks[first:], self._write_offsets[first:], self._row_slots,
            self._contexts, self._first_positions, work.first_items, work.item_counts, work.piece_tokens, work.records,
            sequences, slots.spare, sequences + target, target, PIECE_LEAST,
            ROWS=max(16, triton.next_power_of_2(sequences)), ITEMS=1024, STEP=PIECE_STEP, num_warps=8,
        )  # fmt: skip
        name_items[(sequences,)](
            self._row_slots, self._contexts, self._first_positions, work.first_items, work.item_counts, work.piece_tokens,
            work.records, ITEMS=64, num_warps=1,
        )  # fmt: skip

    def _decodes(self, sequences: int) -> DecodePart:
        part = super()._decodes(sequences)
        slots = self._row_slots[:sequences]
        return replace(part, slots=slots, as_chunks=replace(part.as_chunks, slots=slots), share_slots=True)
