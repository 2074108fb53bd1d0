"""An executor that only counts: it keeps to the contract, but has neither weights nor KV.

It is told how long each answer will be, yields filler tokens and then a stop token, and checks the plans it is given (their
order, epochs, block tables, limits). Slots are columns of arrays, so that a step over many rows costs a few array
operations. The simulator that drives it decides how long a step takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Int32s, Int64s, RowOutcome, Start, StepPlan, StepResult, Stop
from baton.core.errors import InvariantViolated
from baton.executor.contract import NO_KV, ExecutorShape, LayerDone

STOP_TOKEN, FILLER_TOKEN = 2, 7

_TOKENS, _PREEMPTED = int(RowOutcome.TOKENS), int(RowOutcome.PREEMPTED)
_EMPTY, _SHORT, _UNFINISHED = (
    int(RowOutcome.NOTHING_EMPTY_SLOT),
    int(RowOutcome.NOTHING_OUT_OF_BLOCKS),
    int(RowOutcome.NOTHING_CHUNK_UNFINISHED),
)


class CountingExecutor:
    vocabulary = FILLER_TOKEN + 1
    fingerprint = b"counting"
    kv = NO_KV

    def __init__(self, shape: ExecutorShape, answer_tokens: Callable[[int], int]) -> None:
        """`answer_tokens` maps the seed of a request to the length of its answer."""
        if shape.burst != 1:
            raise InvariantViolated(f"a decode here yields one token, not up to {shape.burst}")
        self.shape = shape
        self.on_layer: LayerDone | None = None
        """Never called: there are no layers."""
        self._answer_tokens = answer_tokens
        self._launched: deque[StepPlan] = deque()
        self._last_step = 0
        self._epoch = np.zeros(shape.slots, dtype=np.int64)
        """0 in an empty slot: epochs start at 1."""
        self._known = np.zeros(shape.slots, dtype=np.int64)
        self._limit = np.zeros(shape.slots, dtype=np.int64)
        self._last = np.zeros(shape.slots, dtype=np.int64)
        """The number of known tokens once the stop token is drawn."""
        self._room = np.zeros(shape.slots, dtype=np.int64)
        """Positions in the blocks of the slot."""

    def launch(self, plan: StepPlan) -> None:
        if plan.base_step != self._last_step:
            raise InvariantViolated(f"a plan built on step {plan.base_step} came after step {self._last_step}")
        self._last_step = plan.step
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        stopped = [self._stop(stop) for stop in plan.stops]
        for start in plan.starts:
            self._start(start)
        self._grow(plan)
        decodes = plan.decode_slots
        known = self._known[decodes]
        fits = (self._epoch[decodes] == plan.decode_epochs) & (known < self._limit[decodes]) & (known <= self._room[decodes])
        if not (plan.stops or plan.chunks) and fits.all():
            # The common step: all rows decode and each has room.
            known += 1
            self._known[decodes] = known
            tokens = np.where(known == self._last[decodes], STOP_TOKEN, FILLER_TOKEN).astype(np.int32)
            ones = np.ones(len(decodes), dtype=np.int32)
            outcomes = np.full(len(decodes), _TOKENS, dtype=np.int8)
            return StepResult(plan.step, decodes, plan.decode_epochs, outcomes, ones, tokens, known)
        return self._mixed(plan, stopped)

    def close(self) -> None:
        self._launched.clear()

    def _stop(self, stop: Stop) -> tuple[int, int]:
        """The outcome, and the number of known tokens."""
        if self._epoch[stop.slot] != stop.epoch:
            return _EMPTY, 0
        self._epoch[stop.slot] = 0
        return _PREEMPTED, int(self._known[stop.slot])

    def _start(self, start: Start) -> None:
        if self._epoch[start.slot]:
            raise InvariantViolated(f"slot {start.slot} was started while it was in use")
        self._epoch[start.slot] = start.epoch
        self._known[start.slot] = len(start.tokens)
        self._limit[start.slot] = start.limit
        self._last[start.slot] = start.prompt_tokens + self._answer_tokens(start.sampling.seed)
        self._room[start.slot] = len(start.blocks) * self.shape.block_size

    def _grow(self, plan: StepPlan) -> None:
        if len(plan.grow_slots):
            np.add.at(self._room, plan.grow_slots, self.shape.block_size)
            if bool(((plan.grow_at + 1) * self.shape.block_size > self._room[plan.grow_slots]).any()):
                raise InvariantViolated(f"step {plan.step} grows a table beyond its end")

    def _mixed(self, plan: StepPlan, stopped: list[tuple[int, int]]) -> StepResult:
        stops = np.array([stop.slot for stop in plan.stops], dtype=np.int64)
        chunk_slots = np.array([chunk.slot for chunk in plan.chunks], dtype=np.int64)
        rows = np.concatenate((chunk_slots, plan.decode_slots), dtype=np.int64)
        heads = [stop.epoch for stop in plan.stops] + [chunk.epoch for chunk in plan.chunks]
        epochs = np.concatenate((np.array(heads, dtype=np.int64), plan.decode_epochs))
        outcomes, tokens = self._compute(plan, rows, epochs[len(stops) :])
        counts = np.concatenate((np.zeros(len(stops), dtype=np.int32), outcomes == _TOKENS)).astype(np.int32)
        known = np.where(outcomes == _EMPTY, 0, self._known[rows])
        return StepResult(
            step=plan.step,
            slots=np.concatenate((stops, rows)).astype(np.int32),
            epochs=epochs,
            outcomes=np.concatenate((np.array([outcome for outcome, _ in stopped], dtype=np.int8), outcomes)),
            counts=counts,
            tokens=tokens,
            known=np.concatenate((np.array([known_then for _, known_then in stopped], dtype=np.int64), known)),
        )

    def _compute(self, plan: StepPlan, rows: Int64s, epochs: Int64s) -> tuple[npt.NDArray[np.int8], Int32s]:
        """Outcomes of chunks and decodes, and the tokens of those that yield one."""
        decodes = plan.decode_slots
        ends = np.array([chunk.end for chunk in plan.chunks], dtype=np.int64)
        samples = np.array([chunk.samples for chunk in plan.chunks], dtype=np.bool_)
        samples = np.concatenate((samples, np.ones(len(decodes), dtype=np.bool_))) & (self._known[rows] < self._limit[rows])
        reads = np.concatenate((ends, self._known[decodes]))
        outcomes = np.where(samples, _TOKENS, _UNFINISHED)
        outcomes = np.where(reads > self._room[rows], _SHORT, outcomes)
        outcomes = np.where(self._epoch[rows] != epochs, _EMPTY, outcomes).astype(np.int8)
        yielding = rows[outcomes == _TOKENS]
        self._known[yielding] += 1
        tokens = np.where(self._known[yielding] == self._last[yielding], STOP_TOKEN, FILLER_TOKEN).astype(np.int32)
        return outcomes, tokens
