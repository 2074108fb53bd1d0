"""The rows of a step, and the steps in flight: launched plans that wait for their results, oldest first."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.core.engine.plan import Chunk, Int8s, Int32s, Int64s, RowOutcome, StepPlan, StepResult
from baton.core.engine.slots import Slots
from baton.core.errors import InvariantViolated

Column = TypeVar("Column", bound=npt.NDArray[np.integer[Any]])
TOKENS, CHUNK_UNFINISHED = np.int8(RowOutcome.TOKENS), np.int8(RowOutcome.NOTHING_CHUNK_UNFINISHED)


class StepRows(Struct, frozen=True):
    """The rows of one step, and the properties of each that hold until the step settles. Read-only.

    All steps in which the same requests decode share one.
    """

    slots: Int64s
    """int64, which numpy indexes fastest with: a pass does so a dozen times."""
    slots_named: Int32s
    """The same as int32, for plans and results."""
    epochs: Int64s
    serials: Int64s
    allowances: Int32s
    """The most tokens that each row may yield."""
    outcomes: Int8s
    """The outcome expected of each row, without stops."""

    @classmethod
    def of(cls, slots: Slots, rows: Int64s, allowances: Int32s) -> StepRows:
        return cls(
            slots=read_only(rows),
            slots_named=read_only(rows.astype(np.int32)),
            epochs=read_only(slots.epoch[rows]),
            serials=read_only(slots.serial[rows]),
            allowances=read_only(allowances),
            outcomes=read_only(np.where(allowances > 0, TOKENS, CHUNK_UNFINISHED)),
        )

    @classmethod
    def of_decodes(cls, slots: Slots, rows: Int64s) -> StepRows:
        return cls.of(slots, rows, slots.burst[rows].astype(np.int32))


class InFlightStep(Struct, frozen=True):
    """A launched plan, kept until its result settles. Its rows are stops, then chunks, then decodes."""

    step: int
    rows: StepRows
    stops: int
    chunks: tuple[Chunk, ...]


class StepsInFlight:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._steps: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, plan: StepPlan, decodes: StepRows) -> None:
        self._steps.append(self._step_of(plan, decodes))

    def _step_of(self, plan: StepPlan, decodes: StepRows) -> InFlightStep:
        if not (plan.stops or plan.chunks):
            return InFlightStep(plan.step, decodes, 0, ())
        heads = [stop.slot for stop in plan.stops] + [chunk.slot for chunk in plan.chunks]
        may_yield = [0] * len(plan.stops) + [int(chunk.samples) for chunk in plan.chunks]
        rows = np.concatenate((np.array(heads, dtype=np.int64), decodes.slots))
        allowances = np.concatenate((np.array(may_yield, dtype=np.int32), decodes.allowances))
        return InFlightStep(plan.step, StepRows.of(self._slots, rows, allowances), len(plan.stops), plan.chunks)

    def land(self, result: StepResult) -> InFlightStep:
        """The oldest step; raises unless this is its result."""
        if not self._steps or self._steps[0].step != result.step:
            due = self._steps[0].step if self._steps else "none"
            raise InvariantViolated(f"result of step {result.step} arrived while step {due} was due")
        step = self._steps.popleft()
        if not (same(step.rows.slots_named, result.slots) and same(step.rows.epochs, result.epochs)):
            raise InvariantViolated(f"the result of step {result.step} names other rows than its plan")
        return step


def same(one: Column, other: Column) -> bool:
    """Whether two columns are equal. Compared as bytes, because numpy takes ten times as long for a few rows."""
    return len(one) == len(other) and (one.tobytes() == other.tobytes() or np.array_equal(one, other))


def read_only(column: Column) -> Column:
    column.setflags(write=False)
    return column
