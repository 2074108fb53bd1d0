"""StepPlans for an executor that is timed without a scheduler.

Owns step numbers, epochs and random prompts. The caller chooses slots and blocks.
"""

from __future__ import annotations

import numpy as np

from baton.core.engine.plan import NO_INT32S, NO_INT64S, Chunk, Copy, Int32s, Int64s, Start, StepPlan, Stop
from baton.core.engine.request import Sampling, frozen_tokens

GREEDY = Sampling(seed=0, temperature=0.0)


class StepPlans:
    def __init__(self, block_size: int, token_ids: tuple[int, int]) -> None:
        """Prompts are drawn from token ids in [low, high)."""
        self._block_size = block_size
        self._token_ids = token_ids
        self._step = 0
        self._epoch = 0
        self._draws = np.random.default_rng(0)

    def start(
        self, slot: int, known: int, computed: int, limit: int, first_block: int, sampling: Sampling = GREEDY
    ) -> Start:
        """A sequence of `known` random tokens in consecutive blocks."""
        self._epoch += 1
        tokens = frozen_tokens(self._draws.integers(*self._token_ids, known))
        count = -(-limit // self._block_size)
        blocks: Int32s = np.arange(first_block, first_block + count, dtype=np.int32)
        return Start(slot, self._epoch, tokens, known, computed, limit, sampling, blocks)

    def plan(
        self,
        *,
        stops: tuple[Stop, ...] = (),
        copies: tuple[Copy, ...] = (),
        starts: tuple[Start, ...] = (),
        chunks: tuple[Chunk, ...] = (),
        decode_slots: Int32s = NO_INT32S,
        decode_epochs: Int64s = NO_INT64S,
    ) -> StepPlan:
        self._step += 1
        return StepPlan(
            self._step, self._step - 1, stops, copies, starts, chunks=chunks, decode_slots=decode_slots,
            decode_epochs=decode_epochs,
        )  # fmt: skip


def stop_of(start: Start) -> Stop:
    return Stop(start.slot, start.epoch)
