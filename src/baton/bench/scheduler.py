"""Times the scheduler alone: plan, settle and the encoding of its output, without a model.

A step here does what a step in service does, apart from the matrix products: planning, block growth, stop checks, naming
full blocks for the prefix cache, and the message to the front end as bytes.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.driver import Answer, Driven, WorkerDriver
from baton.core.engine.orders import Submit
from baton.core.engine.plan import RowOutcome, StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.engine.worker import Launch, StepDone, Worker
from baton.core.errors import InvariantViolated
from baton.wire.engine_messages import encode_from_engine
from baton.wire.flight_recorder import CallWatch
from baton.wire.watched_worker import WatchedWorker
from baton.wire.worker_messages import message_of

PROMPT_TOKENS = 64
WARM_UP_STEPS = 60


@dataclass(frozen=True, slots=True)
class SchedulerTiming:
    rows: int
    steps: int
    us_per_step: float
    us_per_step_p99: float

    @property
    def ns_per_row(self) -> float:
        return self.us_per_step * 1000 / self.rows


def time_scheduler(rows: int, steps: int, *, blocks: int = 200_000, block_size: int = 16) -> SchedulerTiming:
    """`rows` requests of 64 prompt tokens each, decoding without end; microseconds a step."""
    engine = loaded_engine(rows, blocks, block_size)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    spent_us = []
    for _ in range(steps):
        began = time.perf_counter_ns()
        decoded = engine.step()
        spent_us.append((time.perf_counter_ns() - began) / 1000)
        if decoded != rows:
            raise InvariantViolated(f"{decoded} of {rows} rows decoded in a step")
    return SchedulerTiming(rows, steps, float(np.mean(spent_us)), float(np.percentile(spent_us, 99)))


def loaded_engine(rows: int, blocks: int, block_size: int) -> InstantEngine:
    config = WorkerConfig(
        slots=rows, blocks=max(blocks, rows * 128), block_size=block_size, context_tokens=8192,
        step_tokens=max(8192, rows), depth=1, waiting_max=rows,
    )  # fmt: skip
    engine = InstantEngine(config)
    draws = random.Random(0)
    for number in range(rows):
        prompt = frozen_tokens([draws.randrange(1000) for _ in range(PROMPT_TOKENS)])
        sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=(2,))
        engine.submit(Submission(RequestId(str(number)), prompt, sampling, 1984))
    while engine.worker.gauges().waiting:
        engine.step()
    return engine


class InstantEngine:
    """A Worker whose steps compute nothing and end at once. Its output is encoded as in service."""

    def __init__(self, config: WorkerConfig) -> None:
        self.worker = Worker(config, PrefixIndex(b"bench", b"bench", config.blocks))
        self._driver = self._drive(self.worker)
        self._plan: StepPlan | None = None
        self._submitted = 0

    def _drive(self, worker: Driven) -> WorkerDriver:
        return WorkerDriver(worker, lambda: 0, launch=self._launch, answer=self._encode)

    def watch(self, watch: CallWatch | None) -> None:
        """Have the worker's calls made by `watch`; None: by the driver."""
        self._driver = self._drive(self.worker if watch is None else WatchedWorker(self.worker, watch))

    def submit(self, submission: Submission) -> None:
        self._submitted += 1
        self._driver.handle(Submit(self._submitted, (submission,)))

    def step(self) -> int:
        """Plan, settle with made-up results, encode. Returns the number of decoded rows."""
        self._driver.tick()
        plan, self._plan = self._plan, None
        if plan is None:
            return 0
        self._driver.handle(StepDone(_sevens(self.worker, plan)))
        return len(plan.decode_slots)

    def _launch(self, launch: Launch) -> None:
        self._plan = launch.plan

    def _encode(self, answer: Answer) -> None:
        encode_from_engine(message_of(answer, self.worker))


def _sevens(worker: Worker, plan: StepPlan) -> StepResult:
    """A result in which every row that may yield a token yields token 7, and every stop is acknowledged."""
    heads = [stop.slot for stop in plan.stops] + [chunk.slot for chunk in plan.chunks]
    slots = np.concatenate((np.array(heads, dtype=np.int32), plan.decode_slots))
    table, stops = worker.scheduler.slots, len(plan.stops)
    counts = np.ones(len(slots), dtype=np.int32)
    counts[: len(heads)] = [0] * stops + [int(chunk.samples) for chunk in plan.chunks]
    outcomes = np.where(counts > 0, RowOutcome.TOKENS, RowOutcome.NOTHING_CHUNK_UNFINISHED).astype(np.int8)
    outcomes[:stops] = RowOutcome.PREEMPTED
    return StepResult(
        step=plan.step,
        slots=slots,
        epochs=table.epoch[slots],
        outcomes=outcomes,
        counts=counts,
        tokens=np.full(int(counts.sum()), 7, dtype=np.int32),
        known=table.known[slots] + counts,
    )


def growth_ns_per_row(timings: list[SchedulerTiming]) -> float:
    """Nanoseconds that each further row adds to a step, between the smallest and largest sizes."""
    first, last = timings[0], timings[-1]
    return (last.us_per_step - first.us_per_step) * 1000 / max(1, last.rows - first.rows)
