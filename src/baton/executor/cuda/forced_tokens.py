"""What grammars force, known before it is drawn: for each slot, the tokens of some positions, as drafts of later steps.

While a step computes, the host learns what may come at its position; where only one continuation may, that is the plan of
the slot. The step draws its first token, the next step is fed the rest as drafts. How much of a plan is left is found on the
device, by position, and none of it once something else was drawn: the host does not wait to know.

    plans   [slots + 1, 2 + tokens]   position of the first token, number of tokens, tokens

It is allocated once, at full size, so that a step which reads it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from baton.core.engine.plan import Int32s, Int64s
from baton.executor.contract import ExecutorShape
from baton.executor.cuda.staging import StepUploads

PLAN_HEAD = 2


class ForcedPlan(NamedTuple):
    """Of one slot."""

    slot: int
    position: int
    tokens: list[int]
    left: int
    """How many of them the next step should find ahead of it."""


class RowLayout(NamedTuple):
    """Which rows of the forward belong to each decode of a step."""

    first_rows: Int64s
    cells: Int32s
    """Of each row: decode × the most tokens of a decode + which of its tokens."""
    rooms: Int32s
    """Drafts that each decode has rows for."""


class ForcedTokens:
    def __init__(self, shape: ExecutorShape, device: torch.device) -> None:
        self._burst, self._most = shape.burst, shape.burst_max
        self.tokens_max = 2 * shape.burst_max
        """Of a plan: the drafts of the step that computes, the token after them, and as many drafts again."""
        self.plans = torch.zeros((shape.slots + 1, PLAN_HEAD + self.tokens_max), dtype=torch.int32, device=device)
        self._left: Int32s = np.zeros(shape.slots + 1, dtype=np.int32)
        """Of each slot's plan, as far as the host has counted."""
        self._uploads = StepUploads(shape.slots * (PLAN_HEAD + self.tokens_max + 1) + 64, device)

    def start(self, slot: int) -> None:
        """A request begins in the slot: it has no plan."""
        self._left[slot] = 0

    def left(self, slots: Int32s) -> Int32s:
        """How many drafts each of the slots should find in its plan."""
        return self._left[slots]

    def send(self, plans: Sequence[ForcedPlan]) -> None:
        """Replace the plans of these slots, for the steps launched from now on."""
        for plan in plans:
            self._left[plan.slot] = min(plan.left, self._most - 1)
        good = [plan for plan in plans if plan.left > 0]
        if not good:
            return
        words = np.zeros((len(good), self.plans.shape[1]), dtype=np.int32)
        for row, plan in enumerate(good):
            kept = plan.tokens[: self.tokens_max]
            words[row, :PLAN_HEAD] = plan.position, len(kept)
            words[row, PLAN_HEAD : PLAN_HEAD + len(kept)] = kept
        named, there = self._uploads.send([np.array([plan.slot for plan in good], dtype=np.int32), words.reshape(-1)])
        self.plans.index_copy_(0, named.long(), there.view(len(good), -1))

    def lay_out(self, left: Int32s, rows_max: int) -> RowLayout:
        """Rows for decodes that find so many drafts in their plans, and for those that others propose. Where there are not
        enough, the last get fewer."""
        usual = self._burst - 1
        more = np.maximum(left - usual, 0).astype(np.int64)
        spare = rows_max - len(left) * self._burst
        more = np.clip(spare - (np.cumsum(more) - more), 0, more)
        rows = self._burst + more
        first_rows = np.cumsum(rows) - rows
        owners = np.repeat(np.arange(len(left)), rows)
        nth = np.arange(len(owners)) - first_rows[owners]
        return RowLayout(first_rows, (owners * self._most + nth).astype(np.int32), (rows - 1).astype(np.int32))
