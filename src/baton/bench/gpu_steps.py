"""Times the steps of an executor alone: plans made beforehand, several in flight, nothing decided between them.

Owns step numbers, epochs and which slot and block goes where. KV is not computed but copied into place from one real block:
a step reads as many bytes, and a long context takes no prefill to get to.

    collect ─ collect ─ … ─ collect        a window: its length over its steps is a step's time; the median of windows counts
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from baton.bench.gpu_report import middle
from baton.bench.step_plans import GREEDY, StepPlans, stop_of
from baton.core.engine.plan import Chunk, Copy, Int32s, Int64s, RowOutcome, Start, StepPlan, StepResult, Stop
from baton.core.engine.request import Sampling
from baton.core.errors import BatonError
from baton.executor.contract import Executor, KvView, LayerDone

IN_FLIGHT = 4
"""Steps in flight; enough that the device never waits for the host."""
COPIES_A_STEP = 256
WARM_UP_STEPS, WINDOWS, WINDOW_STEPS = 6, 3, 12
PREFILL_RUNS = 6


class CannotMeasure(BatonError):
    """A row of a step computed nothing, or there is too little room; the message says which."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    step_s: float
    tokens_a_step: float
    """Tokens generated per step, over all rows."""


class StepTimer:
    def __init__(self, executor: Executor, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._executor = executor
        self._clock_s = clock_s
        self._plans = StepPlans(executor.shape.block_size, (0, executor.vocabulary))

    def fill(self) -> None:
        """Write KV into every block: unwritten pages may read faster, and zeros compute faster."""
        shape = self._executor.shape
        start = self._plans.start(0, shape.block_size, 0, shape.block_size + 1, 0)
        chunk = Chunk(0, start.epoch, 0, shape.block_size, samples=True)
        plans = [self._plans.plan(starts=(start,), chunks=(chunk,)), self._plans.plan(stops=(stop_of(start),))]
        for first in range(1, shape.blocks, COPIES_A_STEP):
            targets = range(first, min(shape.blocks, first + COPIES_A_STEP))
            plans.append(self._plans.plan(copies=tuple(Copy(0, target) for target in targets)))
        self._run(iter(plans), "filling the KV pool")

    def decode(
        self, batch: int, context: int, sampling: Sampling = GREEDY, every_other: Sampling | None = None
    ) -> StepTiming:
        """Time decode steps of `batch` sequences at a context; every other one may be sampled differently."""
        steps = WARM_UP_STEPS + WINDOWS * WINDOW_STEPS
        plans = self.decode_plans(batch, context, steps, sampling, every_other)
        ends_s, results = self._run(plans, f"{batch} decodes at {context}")
        windows = [
            (ends_s[end] - ends_s[end - WINDOW_STEPS]) / WINDOW_STEPS
            for end in range(WARM_UP_STEPS + WINDOW_STEPS - 1, steps, WINDOW_STEPS)
        ]
        counted = results[WARM_UP_STEPS:steps]
        return StepTiming(middle(windows), sum(int(result.counts.sum()) for result in counted) / len(counted))

    def decode_plans(
        self,
        batch: int,
        context: int,
        steps: int,
        sampling: Sampling = GREEDY,
        every_other: Sampling | None = None,
    ) -> Iterator[StepPlan]:
        """`steps` decode steps whose mean context is `context`, then one that stops all sequences."""
        burst = self._executor.shape.burst
        known = max(1, context - steps // 2)
        starts, block = list[Start](), 0
        for slot in range(batch):
            wish = every_other if every_other is not None and slot % 2 else sampling
            starts.append(self._plans.start(slot, known, known - 1, known + steps * burst + 1, block, wish))
            block += len(starts[-1].blocks)
        self._check_room(batch, block, max(start.limit for start in starts))
        slots: Int32s = np.arange(batch, dtype=np.int32)
        epochs: Int64s = np.array([start.epoch for start in starts], dtype=np.int64)
        yield self._plans.plan(starts=tuple(starts), decode_slots=slots, decode_epochs=epochs)
        for _ in range(steps - 1):
            yield self._plans.plan(decode_slots=slots, decode_epochs=epochs)
        yield self._plans.plan(stops=tuple(stop_of(start) for start in starts))

    def prefill(self, sequences: int, tokens: int, begin: int = 0) -> StepTiming:
        """Time prefill steps of the next `tokens` tokens of each sequence, after `begin` cached ones."""
        ends_s, results = self._run(self._prefill_plans(sequences, tokens, begin), f"{sequences} × {tokens} at {begin}")
        steps_s = [after - before for before, after in pairwise(ends_s[1 : PREFILL_RUNS + 1])]
        return StepTiming(middle(steps_s), float(results[1].counts.sum()))

    def _prefill_plans(self, sequences: int, tokens: int, begin: int) -> Iterator[StepPlan]:
        """New sequences in every step, in slots that no step in flight uses."""
        groups: deque[list[Start]] = deque([] for _ in range(IN_FLIGHT + 1))
        places = deque(range(len(groups)))
        blocks = -(-(begin + tokens + 1) // self._executor.shape.block_size)
        self._check_room(len(groups) * sequences, len(groups) * sequences * blocks, begin + tokens + 1)
        for _ in range(PREFILL_RUNS + 1):
            place, before = places[0], groups.popleft()
            places.rotate(-1)
            fed = [
                self._plans.start(row, begin + tokens, begin, begin + tokens + 1, row * blocks)
                for row in range(place * sequences, (place + 1) * sequences)
            ]
            groups.append(fed)
            chunks = tuple(Chunk(start.slot, start.epoch, begin, begin + tokens, samples=True) for start in fed)
            stops = tuple(stop_of(start) for start in before)
            yield self._plans.plan(stops=stops, starts=tuple(fed), chunks=chunks)
        yield self._plans.plan(stops=tuple(stop_of(start) for fed in groups for start in fed))

    def _check_room(self, slots: int, blocks: int, tokens: int) -> None:
        shape = self._executor.shape
        for name, wanted, there in (
            ("slots", slots, shape.slots),
            ("blocks", blocks, shape.blocks),
            ("positions", tokens, shape.context_tokens),
        ):
            if wanted > there:
                raise CannotMeasure(f"{wanted} {name} are more than the {there} there are")

    def _run(self, plans: Iterator[StepPlan], what: str) -> tuple[list[float], list[StepResult]]:
        """(completion time of each step, results)."""
        ends_s: list[float] = []
        results = []
        for result in stream(self._executor, plans):
            ends_s.append(self._clock_s())
            _check(result, what)
            results.append(result)
        return ends_s, results


class SharedPool:
    """One executor for several drivers in sequence; each numbers its steps from 1 and finds empty slots."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.shape = inner.shape
        self.vocabulary = inner.vocabulary
        self.fingerprint = inner.fingerprint
        self.on_layer: LayerDone | None = None
        self._step = 0
        self._asked: deque[int] = deque()
        self._held: dict[int, int] = {}
        """Slot → epoch of sequences started and not stopped."""

    @property
    def kv(self) -> KvView:
        return self.inner.kv

    def launch(self, plan: StepPlan) -> None:
        for stop in plan.stops:
            self._held.pop(stop.slot, None)
        self._held.update((start.slot, start.epoch) for start in plan.starts)
        self._asked.append(plan.step)
        self._step += 1
        self.inner.launch(msgspec.structs.replace(plan, step=self._step, base_step=self._step - 1))

    def collect(self) -> StepResult:
        result = self.inner.collect()
        return msgspec.structs.replace(result, step=self._asked.popleft())

    def clear(self) -> None:
        """Stop every sequence that the last driver left."""
        stops = tuple(Stop(slot, epoch) for slot, epoch in self._held.items())
        if stops:
            self.launch(StepPlan(0, 0, stops))
            self.collect()

    def close(self) -> None:
        self.inner.close()


def stream(executor: Executor, plans: Iterator[StepPlan], in_flight: int = IN_FLIGHT) -> Iterator[StepResult]:
    """Results in order, with up to `in_flight` steps launched ahead."""
    waiting = 0
    for plan in plans:
        executor.launch(plan)
        waiting += 1
        if waiting == in_flight:
            yield executor.collect()
            waiting -= 1
    for _ in range(waiting):
        yield executor.collect()


def _check(result: StepResult, what: str) -> None:
    """Raise when a row of the step computed nothing. One that sat out has computed, for nothing."""
    idle = ~np.isin(result.outcomes, (RowOutcome.TOKENS, RowOutcome.PREEMPTED, RowOutcome.SAT_OUT))
    if idle.any():
        name = RowOutcome(int(result.outcomes[idle][0])).name.lower()
        raise CannotMeasure(f"{what}: {int(idle.sum())} of {len(idle)} rows computed nothing ({name})")
