"""Chunks of started prefills: how one is put into a step, and which of them fit into it."""

from __future__ import annotations

import numpy as np

from baton.core.engine.plan import Chunk
from baton.core.engine.request import Move
from baton.core.engine.reserve import BlockPromises, blocks_for
from baton.core.engine.running_set import RunningSet
from baton.core.engine.step_builder import StepBuilder


class PrefillChunks:
    """Puts the next chunk of a row into a step, with the blocks it needs."""

    def __init__(self, running: RunningSet) -> None:
        self._running = running
        self._block_size = running.config.block_size
        hands_over = running.config.role.gives
        self._whole_prompt = hands_over
        """Take all blocks of the prompt with its first chunk: the transfer of a hand-over needs them from then on."""
        self._last_planned = Move.HAND_OVER if hands_over else Move.PREFILL_PLANNED
        """The move of a request whose last chunk is planned."""

    def plan(self, step: StepBuilder, slot: int) -> None:
        running, slots = self._running, self._running.slots
        begin, known = int(slots.planned[slot]), int(slots.known[slot])
        end = min(known, begin + step.budget)
        self._grow_to(step, slot, known if self._whole_prompt else end)
        step.chunks.append(Chunk(slot, int(slots.epoch[slot]), begin, end, samples=end == known))
        step.budget -= end - begin
        slots.planned[slot] = end
        if end == known:
            slots.pending[slot] = 1
            running.prefilling.remove(slot)
            running.move(running.occupant(slot), self._last_planned)

    def _grow_to(self, step: StepBuilder, slot: int, tokens: int) -> None:
        slots = self._running.slots
        held = int(slots.held[slot])
        missing = blocks_for(tokens, self._block_size) - held
        if missing > 0:
            blocks = self._running.pool.take(missing)
            slots.append_blocks(slot, blocks)
            at = np.arange(held, held + missing, dtype=np.int32)
            step.grow(np.full(missing, slot, dtype=np.int32), at, blocks)


class StartedPrefills:
    """Continues started prefills in order of admission, as far as budget and blocks allow.

    A prefill is admitted only if all its tokens fit beside what earlier prefills still lack. So the prefills fit together
    when everything else is gone, and the oldest of them then need not leave a reserve.
    """

    def __init__(self, running: RunningSet, chunks: PrefillChunks, promises: BlockPromises) -> None:
        self._running = running
        self._chunks = chunks
        self._promises = promises

    def continue_all(self, step: StepBuilder) -> None:
        for slot in tuple(self._running.prefilling):
            if step.budget <= 0:
                return
            if not self._next_fits(step, slot):
                step.chunk_prefill_unsatisfied = True
                return
            self._chunks.plan(step, slot)

    def _next_fits(self, step: StepBuilder, slot: int) -> bool:
        """Whether the next chunk leaves the blocks kept for other rows."""
        slots = self._running.slots
        end = min(int(slots.known[slot]), int(slots.planned[slot]) + step.budget)
        missing = blocks_for(end, self._running.config.block_size) - int(slots.held[slot])
        if missing <= 0 or slots.protected[slot]:
            return True
        nobody_decodes = not len(slots.decoding())
        kept = self._promises.promised(slots) if nobody_decodes else self._promises.kept(slots, asker=slot)
        return missing <= self._running.pool.available - kept
