"""The executor's table of slots: tokens, lengths and block tables, one row per slot.

The scheduler has a table of its own; the two are synchronised only through plans and results. `known` may be ahead of the
scheduler's, because a sampled token is written here at once and feeds the next decode. Entries behind the known tokens are
scratch: drafts of the current step, and remains of earlier ones.
"""

from __future__ import annotations

import numpy as np

from baton.core.engine.plan import Chunk, Int32s, Int64s, RowOutcome, Start
from baton.core.engine.request import Tokens
from baton.core.errors import InvariantViolated
from baton.executor.contract import ExecutorShape
from baton.executor.drafts import DraftTokens

NO_BLOCK = -1
"""Marks an entry of a block table that was never grown; block ids start at 0."""


class SlotTable:
    def __init__(self, shape: ExecutorShape) -> None:
        self.shape = shape
        width = -(-shape.context_tokens // shape.block_size)
        self.occupied = np.zeros(shape.slots, dtype=np.bool_)
        self.epochs: Int64s = np.zeros(shape.slots, dtype=np.int64)
        self.known: Int64s = np.zeros(shape.slots, dtype=np.int64)
        self.computed: Int64s = np.zeros(shape.slots, dtype=np.int64)
        self.limits: Int64s = np.zeros(shape.slots, dtype=np.int64)
        self.starved = np.zeros(shape.slots, dtype=np.bool_)
        """The last attempt to compute lacked a block, so that later positions of plans already launched are allowed."""
        self.tokens: Int32s = np.zeros((shape.slots, shape.context_tokens), dtype=np.int32)
        self.table: Int32s = np.full((shape.slots, width), NO_BLOCK, dtype=np.int32)

    def holds(self, slot: int, epoch: int) -> bool:
        return 0 <= slot < self.shape.slots and bool(self.occupied[slot]) and int(self.epochs[slot]) == epoch

    def start(self, start: Start) -> None:
        slot, known = start.slot, len(start.tokens)
        self._check_start(start, known)
        self.occupied[slot] = True
        self.starved[slot] = False
        self.epochs[slot] = start.epoch
        self.known[slot] = known
        self.computed[slot] = start.computed
        self.limits[slot] = min(start.limit, self.shape.context_tokens)
        self.tokens[slot, :known] = start.tokens
        self.table[slot] = NO_BLOCK
        self.table[slot, : len(start.blocks)] = start.blocks

    def _check_start(self, start: Start, known: int) -> None:
        slot = start.slot
        if not 0 <= slot < self.shape.slots:
            raise InvariantViolated(f"start names slot {slot}, but there are {self.shape.slots}")
        if self.occupied[slot]:
            raise InvariantViolated(f"start names slot {slot}, which still holds epoch {self.epochs[slot]}")
        if not 0 < known <= self.shape.context_tokens or len(start.blocks) > self.table.shape[1]:
            raise InvariantViolated(f"start of slot {slot}: {known} tokens, {len(start.blocks)} blocks do not fit")
        if not 0 <= start.computed < known or start.computed > len(start.blocks) * self.shape.block_size:
            raise InvariantViolated(f"start of slot {slot}: {start.computed} computed of {known} tokens is impossible")
        self._check_blocks(start.blocks)

    def _check_blocks(self, blocks: Int32s) -> None:
        if len(blocks) and not (int(blocks.min()) >= 0 and int(blocks.max()) < self.shape.blocks):
            raise InvariantViolated(f"a plan names a block outside 0..{self.shape.blocks - 1}")

    def stop(self, slot: int) -> int:
        """Empty the slot; returns its number of known tokens."""
        self.occupied[slot] = False
        return int(self.known[slot])

    def grow(self, slots: Int32s, at: Int32s, blocks: Int32s) -> None:
        if len(slots):
            self._check_blocks(blocks)
            self.table[slots, at] = blocks

    def has_blocks(self, slot: int, begin: int, end: int) -> bool:
        size = self.shape.block_size
        return bool((self.table[slot, begin // size : -(-end // size)] != NO_BLOCK).all())

    def judge(self, chunk: Chunk) -> RowOutcome:
        """The outcome of a chunk of an occupied slot. A chunk that lacks blocks marks its slot as starved."""
        slot, begin, end = chunk.slot, chunk.begin, chunk.end
        known, computed = int(self.known[slot]), int(self.computed[slot])
        if not 0 <= begin < end <= known or (chunk.samples and end != known):
            raise InvariantViolated(f"chunk [{begin}, {end}) of slot {slot} does not fit its {known} known tokens")
        if begin > computed and not self.starved[slot]:
            raise InvariantViolated(f"chunk [{begin}, {end}) of slot {slot} leaves a gap: only {computed} are computed")
        if begin > computed or not self.has_blocks(slot, begin, end):
            self.starved[slot] = True
            return RowOutcome.NOTHING_OUT_OF_BLOCKS
        return RowOutcome.TOKENS if chunk.samples else RowOutcome.NOTHING_CHUNK_UNFINISHED

    def room(self, slots: Int32s, tokens: int) -> Int64s:
        """How many of the next `tokens` positions after the last known token have a block, for each slot."""
        positions = self.known[slots][:, None] + np.arange(tokens)
        at = np.minimum(positions // self.shape.block_size, self.table.shape[1] - 1)
        present = self.table[slots[:, None], at] != NO_BLOCK
        return np.asarray(np.logical_and.accumulate(present, axis=1).sum(axis=1), dtype=np.int64)

    def draft(self, slots: Int32s, drafts: DraftTokens) -> None:
        """Write drafts behind the known tokens for a step to read; they do not become known."""
        rows, nth = drafts.within.nonzero()
        self.tokens[slots[rows], self.known[slots[rows]] + nth] = drafts.tokens[rows, nth]

    def append(self, slots: Int32s, tokens: Tokens, counts: Int32s) -> None:
        """Append to each of these distinct slots its `counts[i]` tokens, which come slot after slot."""
        rows = np.repeat(slots, counts)
        nth = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.tokens[rows, self.known[rows] + nth] = tokens
        self.known[slots] += counts
