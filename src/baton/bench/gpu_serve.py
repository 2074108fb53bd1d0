"""A whole engine without its servers: clients in a closed loop, the real worker, the executor, and planning beside it.

Owns the loop, which is that of the engine process: results are collected on a thread, the worker handles whatever has
arrived, and a pass is made whenever one is due. No messages are encoded and no text is decoded.

The time of the steps alone is measured by launching the plans of the same run again, one after the other. The difference is
the cost of planning.
"""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from baton.bench.gpu_steps import SharedPool, stream
from baton.core.config import WorkerConfig
from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.orders import Accepted, Submit
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.records import Settled
from baton.core.engine.request import RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.engine.worker import Deliver, GroupRefused, Launch, StepDone, Withdrawn, Worker
from baton.core.errors import InvariantViolated

DEPTH = 2
"""Steps in flight, as in service: one is planned while another computes."""


@dataclass(frozen=True, slots=True)
class ClosedLoopLoad:
    requests: int
    prompt_tokens: int
    output_tokens: int
    at_once: int
    """Number of clients; each sends its next request after its answer."""
    temperature: float = 0.0
    lengths: tuple[int, ...] = ()
    """Prompt lengths, when not all equal."""

    def __str__(self) -> str:
        return f"{self.requests} × ({self.prompt_tokens:,} in, {self.output_tokens:,} out)"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        draws = np.random.default_rng(1)
        lengths = self.lengths or (self.prompt_tokens,) * self.requests
        return [draws.integers(0, vocabulary, length).tolist() for length in lengths]


@dataclass(slots=True)
class ServedTotals:
    seconds: float = 0.0
    output_tokens: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    order: list[Serial] = field(default_factory=list)
    """Request ids in the order sent."""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def answers(self) -> list[list[int]]:
        """Tokens generated for each request."""
        given: dict[int, list[int]] = {serial: [] for serial in self.order}
        for step in self.settled:
            parts = np.split(step.tokens, np.cumsum(step.counts))[:-1]
            for serial, part in zip(step.serials.tolist(), parts, strict=True):
                given[serial] += part.tolist()
        return list(given.values())


Watch = Callable[[int], None]
"""Called after each settled step with the number of settled steps."""


def _nobody(_: int) -> None:
    """Default callback: does nothing."""


class ClosedLoop:
    def __init__(self, executor: SharedPool, load: ClosedLoopLoad, step_tokens: int, watch: Watch = _nobody) -> None:
        shape = executor.shape
        config = WorkerConfig(
            slots=min(load.at_once, shape.slots), blocks=shape.blocks, block_size=shape.block_size,
            context_tokens=shape.context_tokens, step_tokens=step_tokens, burst=shape.burst, depth=DEPTH,
            waiting_max=load.requests,
        )  # fmt: skip
        worker = Worker(config, PrefixIndex(b"bench", executor.fingerprint, config.blocks))
        self._driver = WorkerDriver(worker, _now_us, launch=self._launch, answer=self._hear)
        self._executor = executor
        self._load = load
        self._prompts = load.prompts(executor.vocabulary)
        self._watch = watch
        self._collector = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bench-collector")
        self._done: queue.SimpleQueue[Future[StepResult]] = queue.SimpleQueue()
        self._sent = 0
        self._open = 0
        self._settled = 0
        self._served = ServedTotals()

    def run(self) -> ServedTotals:
        """Serve the whole load. The executor's slots must be empty before, and are empty after."""
        gc.collect()
        gc.freeze()
        began_s = time.perf_counter()
        try:
            for _ in range(min(self._load.at_once, self._load.requests)):
                self._send()
            while self._open:
                self._turn()
            self._served.seconds = time.perf_counter() - began_s
            while self._driver.steps_in_flight:
                self._take(self._done.get())
            self._executor.clear()
        finally:
            gc.unfreeze()
            self._collector.shutdown(wait=True)
        return self._served

    def _turn(self) -> None:
        """Handle results that have arrived, plan if a pass is due, else wait for the next result."""
        while not self._done.empty():
            self._take(self._done.get())
        if self._driver.is_due:
            self._driver.tick()
        elif self._driver.steps_in_flight:
            self._take(self._done.get())

    def _send(self) -> None:
        number = self._sent
        self._sent += 1
        self._open += 1
        sampling = Sampling(seed=number, temperature=self._load.temperature)
        prompt = frozen_tokens(self._prompts[number])
        submission = Submission(RequestId(str(number)), prompt, sampling, self._load.output_tokens)
        self._driver.handle(Submit(number, (submission,)))

    def _take(self, done: Future[StepResult]) -> None:
        self._driver.handle(StepDone(done.result()))
        self._settled += 1
        self._watch(self._settled)

    def _launch(self, launch: Launch) -> None:
        self._served.plans.append(launch.plan)
        self._executor.launch(launch.plan)
        self._collector.submit(self._executor.collect).add_done_callback(self._done.put)

    def _hear(self, answer: Answer) -> None:
        match answer:
            case Deliver(settled):
                self._served.settled.append(settled)
                self._served.output_tokens += len(settled.tokens)
                self._open -= len(settled.ended)
                for _ in range(min(len(settled.ended), self._load.requests - self._sent)):
                    self._send()
            case Accepted(_, serials):
                self._served.order += map(Serial, serials)
            case GroupRefused(_, refusal):
                raise InvariantViolated(f"the engine refused a request of the benchmark: {refusal}")
            case Withdrawn():
                pass


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def steps_alone_s(executor: SharedPool, plans: list[StepPlan]) -> float:
    """Seconds that the same plans take when launched without planning in between."""
    began_s = time.perf_counter()
    for _ in stream(executor, iter(plans)):
        pass
    spent_s = time.perf_counter() - began_s
    executor.clear()
    return spent_s
