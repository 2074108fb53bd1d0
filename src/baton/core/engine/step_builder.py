"""A plan under construction: parts of the scheduler add stops, starts, grows and chunks until the budget is used up."""

from __future__ import annotations

import numpy as np

from baton.core.engine.plan import NO_INT32S, Chunk, Copy, Int32s, Start, StepPlan, Stop
from baton.core.engine.step_rows import StepRows, read_only


class StepBuilder:
    """Used for one pass."""

    def __init__(self, step: int, budget: int, decodes: StepRows) -> None:
        self.step = step
        self.budget = budget
        """Tokens that may still be added to the step."""
        self.decodes = decodes
        self.preempted = False
        self.chunk_prefill_unsatisfied = False
        self.stops: list[Stop] = []
        self.copies: list[Copy] = []
        self.starts: list[Start] = []
        self.chunks: list[Chunk] = []
        self._grows: list[tuple[Int32s, Int32s, Int32s]] = []

    @property
    def may_admit(self) -> bool:
        """False after a preemption, or when a started prefill lacks blocks."""
        return not (self.preempted or self.chunk_prefill_unsatisfied)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not (self.stops or self.starts or self.chunks or len(self.decodes.slots))

    def grow(self, slots: Int32s, at: Int32s, blocks: Int32s) -> None:
        self._grows.append((slots, at, blocks))

    def build(self) -> StepPlan:
        grow_slots = grow_at = grow_blocks = NO_INT32S
        if self._grows:
            grow_slots, grow_at, grow_blocks = (read_only(np.concatenate(part)) for part in zip(*self._grows, strict=True))
        return StepPlan(
            step=self.step,
            base_step=self.step - 1,
            stops=tuple(self.stops),
            copies=tuple(self.copies),
            starts=tuple(self.starts),
            grow_slots=grow_slots,
            grow_at=grow_at,
            grow_blocks=grow_blocks,
            chunks=tuple(self.chunks),
            decode_slots=self.decodes.slots_named,
            decode_epochs=self.decodes.epochs,
        )
