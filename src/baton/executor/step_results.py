"""Builds the rows of a StepResult, for the CPU and the CUDA executor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Int32s, Int64s, Logprobs, RowOutcome, StepPlan


@dataclass(slots=True)
class ResultRows:
    """One row for each stop, chunk and decode of the plan, in that order."""

    slots: Int32s
    epochs: Int64s
    outcomes: npt.NDArray[np.int8]
    known: Int64s


def begin_rows(plan: StepPlan) -> ResultRows:
    """The rows of a plan, as if none of its slots were occupied."""
    named = [(stop.slot, stop.epoch) for stop in plan.stops] + [(chunk.slot, chunk.epoch) for chunk in plan.chunks]
    slots = np.array([slot for slot, _ in named], dtype=np.int32)
    epochs = np.array([epoch for _, epoch in named], dtype=np.int64)
    rows = len(named) + len(plan.decode_slots)
    return ResultRows(
        slots=np.concatenate([slots, plan.decode_slots]).astype(np.int32),
        epochs=np.concatenate([epochs, plan.decode_epochs]).astype(np.int64),
        outcomes=np.full(rows, RowOutcome.NOTHING_EMPTY_SLOT, dtype=np.int8),
        known=np.zeros(rows, dtype=np.int64),
    )


def joined_logprobs(lines: list[Logprobs]) -> tuple[Logprobs, ...]:
    """Merge the log-probabilities of consecutive tokens of the same row."""
    joined = []
    for row, group in itertools.groupby(lines, key=lambda line: line.row):
        chosen, top_ids, top = zip(*((line.chosen, line.top_ids, line.top) for line in group), strict=True)
        joined.append(Logprobs(row, np.concatenate(chosen), np.concatenate(top_ids), np.concatenate(top)))
    return tuple(joined)
