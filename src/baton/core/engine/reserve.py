"""Reserve policies: the blocks that admission keeps free for running requests.

A reserve is an estimate of how much the running requests will still grow. If it is too small, requests are preempted and
computed again; if it is too large, blocks stay unused. A policy returns for every row the number of blocks kept beyond those
that the row holds. Decodes grow without asking it.

`new-token-ratio` keeps a share of the tokens that each request may still generate. The share falls a little in every pass,
and every preemption raises it to the share that was needed.

`fixed-blocks` keeps a number of blocks for each request, and only after a preemption.
"""

from __future__ import annotations

import numpy as np

from baton.core.config import ReservePolicy, WorkerConfig
from baton.core.engine.masks import any_true
from baton.core.engine.plan import Int64s
from baton.core.engine.slots import DECODING, Slots

BLOCKS_EXPECTED_A_DECODE = 16
"""Blocks that each decoding request is expected to add soon, when the ratio is set after a preemption."""


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class NewTokenRatio:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.ratio = config.ratio_initial

    def blocks(self, slots: Slots, rows: Int64s) -> Int64s:
        """⌈⌊min(remaining, clip) × ratio⌋ / block_size⌉ for each row; a row past its limit keeps nothing."""
        remaining = np.minimum(slots.limit[rows] - slots.known[rows], self._config.ratio_clip_tokens)
        tokens = np.maximum(0, (remaining * self.ratio).astype(np.int64))
        return np.asarray(-(-tokens // self._config.block_size))

    def after_pass(self) -> None:
        self.ratio = max(self._config.ratio_floor, self.ratio - self._config.ratio_decay)

    def after_preemption(self, slots: Slots) -> None:
        """Set the ratio to the share of their limits that the running requests have used and will soon use."""
        rows = slots.running()
        if not len(rows):
            self.ratio = self._config.ratio_initial
            return
        decoding = int(np.count_nonzero(slots.phase[rows] == DECODING))
        used = int((slots.known[rows] - slots.prompt[rows]).sum())
        allowed = int((slots.limit[rows] - slots.prompt[rows]).sum())
        soon = BLOCKS_EXPECTED_A_DECODE * self._config.block_size * decoding
        self.ratio = min(self._config.ratio_initial, (used + soon) / (allowed + 1))


class FixedBlocks:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.ratio = 0.0
        """Blocks kept for each request, before rounding down; 0 until the first preemption."""

    def blocks(self, slots: Slots, rows: Int64s) -> Int64s:
        del slots
        return np.full(len(rows), int(self.ratio), dtype=np.int64)

    def after_pass(self) -> None:
        self.ratio = max(0.0, self.ratio - self._config.fixed_blocks_decay)

    def after_preemption(self, slots: Slots) -> None:
        del slots
        self.ratio = float(self._config.fixed_blocks)


class NoReserve:
    """Keeps nothing, like vLLM; the baseline for the other two."""

    ratio = 0.0

    def blocks(self, slots: Slots, rows: Int64s) -> Int64s:
        del slots
        return np.zeros(len(rows), dtype=np.int64)

    def after_pass(self) -> None:
        """The ratio is always 0."""

    def after_preemption(self, slots: Slots) -> None:
        """The ratio is always 0."""


Reserve = NewTokenRatio | FixedBlocks | NoReserve


def reserve_for(config: WorkerConfig) -> Reserve:
    match config.reserve:
        case ReservePolicy.NEW_TOKEN_RATIO:
            return NewTokenRatio(config)
        case ReservePolicy.FIXED_BLOCKS:
            return FixedBlocks(config)
        case ReservePolicy.NONE:
            return NoReserve()


class BlockPromises:
    """Blocks promised to running requests, and blocks kept for them beyond that.

    A row that can no longer be a victim is promised its whole remaining need. Every other row is promised nothing; one that
    still prefills keeps the blocks that the rest of its tokens will fill, and every row keeps its policy's reserve.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._block_size = config.block_size
        self.policy = reserve_for(config)

    def promised(self, slots: Slots) -> int:
        """Blocks promised to protected rows: no other row may take them."""
        if not any_true(slots.protected):
            return 0  # nearly always
        rows = slots.running()
        rows = rows[slots.protected[rows]]
        return int(self._whole_need(slots, rows).sum())

    def kept(self, slots: Slots, asker: int | None = None) -> int:
        """Blocks that a prefill may not take: those kept for every running row except `asker`."""
        rows = slots.running()
        if asker is not None:
            rows = rows[rows != asker]
        if not len(rows):
            return 0
        promised = 0
        protected = slots.protected[rows]
        if any_true(protected):
            promised = int(self._whole_need(slots, rows[protected]).sum())
            rows = rows[~protected]
        unfilled = -(-slots.known[rows] // self._block_size) - slots.held[rows]
        return promised + int(np.add.reduce(np.maximum(0, unfilled) + self.policy.blocks(slots, rows)))

    def _whole_need(self, slots: Slots, rows: Int64s) -> Int64s:
        return np.asarray(np.maximum(0, -(-slots.limit[rows] // self._block_size) - slots.held[rows]))
