"""A worker in virtual time: the deciding code as it is in service, with a machine that only counts.

Owns three things. `StepTime` says how long a step takes on the machine that is pretended. `CountingExecutor` keeps to the
executor contract (order of plans, epochs, block tables, limits) but has neither weights nor KV: it knows how long each
answer will be, yields a filler token until then, and a stop token at the end. `Clock` hands arrivals, results and passes to
the worker in the order of their times.

    pass ─ launch k ────── step k runs ──────┐
           pass ─ launch k+1   (waits)       ├─ result k ─ pass ─ launch k+2
                                             └─ step k+1 runs ──────┐

Nothing here reads a real clock or draws a random number, so equal inputs give equal runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError, InvariantViolated
from baton.core.plan import Int32s, Int64s, Outcome, Start, StepPlan, StepResult
from baton.core.prefix import PrefixIndex
from baton.core.records import EndedRequest, Settled
from baton.core.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.worker import Deliver, GroupRefused, Launch, StepDone, Submitted, Tick, Worker
from baton.executor.contract import ExecutorShape

STOP_TOKEN, FILLER_TOKEN = 2, 7
STEPS_MAX = 10_000_000


class VirtualRunFailed(BatonError):
    """The run could not be carried to its end; the message says where it stood."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes: a sum of what it must do at least, on a Qwen3-8B in bf16 on one H200.

    Fitted to measured decode steps at context 1,024 (4.98 ms alone, 6.29 for 32, 10.15 for 128, 16.81 for 256 sequences)
    within 8 %; prefill as 16.4 GFLOP a token at half of 790 TFLOP/s. Attention inside a chunk is left out.
    """

    step_us: float = 4_940.0
    """Weights read once (15.1 GB at 4.34 TB/s), and 1.45 ms of launches and leftovers."""
    prefill_token_us: float = 41.5
    decode_us: float = 11.5
    """Each sequence that decodes, without its KV."""
    context_token_us: float = 0.034
    """147 kB of KV at 4.34 TB/s, for each token of context that a sequence attends to."""

    def of(self, prefill_tokens: int, decodes: int, context_tokens: int) -> int:
        spent = self.prefill_token_us * prefill_tokens + self.decode_us * decodes + self.context_token_us * context_tokens
        return round(self.step_us + spent)


class CountingExecutor:
    """Slots as columns, so that a step over many rows costs a few array operations."""

    vocabulary = FILLER_TOKEN + 1
    fingerprint = b"counting"

    def __init__(self, shape: ExecutorShape, answer_tokens: Sequence[int], step_time: StepTime) -> None:
        """A request's seed is its index into `answer_tokens`."""
        if shape.burst != 1:
            raise InvariantViolated(f"a decode here yields one token, not up to {shape.burst}")
        self.shape = shape
        self._answer_tokens = answer_tokens
        self._step_time = step_time
        self._launched: deque[StepPlan] = deque()
        self._last_step = 0
        self._epoch = np.zeros(shape.slots, dtype=np.int64)
        """0 in an empty slot: epochs start at 1."""
        self._known = np.zeros(shape.slots, dtype=np.int64)
        self._limit = np.zeros(shape.slots, dtype=np.int64)
        self._last = np.zeros(shape.slots, dtype=np.int64)
        """How many tokens are known when the stop token has come."""
        self._held = np.zeros(shape.slots, dtype=np.int64)

    def launch(self, plan: StepPlan) -> None:
        if plan.base_step != self._last_step:
            raise InvariantViolated(f"a plan built on step {plan.base_step} came after step {self._last_step}")
        self._last_step = plan.step
        self._launched.append(plan)

    def collect(self) -> StepResult:
        return self.collect_timed()[0]

    def collect_timed(self) -> tuple[StepResult, int]:
        """The oldest step, and how many microseconds it takes."""
        plan = self._launched.popleft()
        stops = np.array([stop.slot for stop in plan.stops], dtype=np.int64)
        stops_known = self._known[stops]
        self._epoch[stops] = 0
        for start in plan.starts:
            self._start(start)
        self._grow(plan)
        chunk_slots = np.array([chunk.slot for chunk in plan.chunks], dtype=np.int64)
        ends = np.array([chunk.end for chunk in plan.chunks], dtype=np.int64)
        decodes = plan.decode_slots.astype(np.int64)
        reads = np.concatenate((ends, self._known[decodes]))
        outcomes, tokens = self._compute(plan, chunk_slots, decodes, reads)
        took_us = self._step_time.of(plan.tokens - len(decodes), len(decodes), int(reads.sum()))
        rows = np.concatenate((stops, chunk_slots, decodes))
        counts = np.concatenate((np.zeros(len(stops), dtype=np.int32), outcomes == Outcome.TOKENS)).astype(np.int32)
        epochs = [stop.epoch for stop in plan.stops] + [chunk.epoch for chunk in plan.chunks]
        result = StepResult(
            step=plan.step,
            slots=rows.astype(np.int32),
            epochs=np.concatenate((np.array(epochs, dtype=np.int64), plan.decode_epochs)),
            outcomes=np.concatenate((np.full(len(stops), Outcome.PREEMPTED, dtype=np.int8), outcomes)),
            counts=counts,
            tokens=tokens,
            known=np.concatenate((stops_known, self._known[rows[len(stops) :]])),
        )
        return result, took_us

    def close(self) -> None:
        self._launched.clear()

    def _start(self, start: Start) -> None:
        if self._epoch[start.slot]:
            raise InvariantViolated(f"slot {start.slot} was started while it was in use")
        self._epoch[start.slot] = start.epoch
        self._known[start.slot] = len(start.tokens)
        self._limit[start.slot] = start.limit
        self._last[start.slot] = start.prompt_tokens + self._answer_tokens[start.sampling.seed]
        self._held[start.slot] = len(start.blocks)

    def _grow(self, plan: StepPlan) -> None:
        """One block after the other, each at the end of its slot's table."""
        slots, at = plan.grow_slots, plan.grow_at
        np.add.at(self._held, slots, 1)
        if len(at) and bool((at >= self._held[slots]).any()):
            raise InvariantViolated(f"step {plan.step} grows a table beyond its end")

    def _compute(
        self, plan: StepPlan, chunk_slots: Int64s, decodes: Int64s, reads: Int64s
    ) -> tuple[npt.NDArray[np.int8], Int32s]:
        """Outcomes of chunks and decodes, and the tokens of those that yield one."""
        rows = np.concatenate((chunk_slots, decodes))
        epochs = np.concatenate((np.array([chunk.epoch for chunk in plan.chunks], dtype=np.int64), plan.decode_epochs))
        samples = np.concatenate(
            (np.array([chunk.samples for chunk in plan.chunks], dtype=np.bool_), self._known[decodes] < self._limit[decodes])
        )
        empty = self._epoch[rows] != epochs
        short = reads > self._held[rows] * self.shape.block_size
        outcomes = np.select(
            [empty, short, samples],
            [Outcome.NOTHING_EMPTY_SLOT, Outcome.NOTHING_OUT_OF_BLOCKS, Outcome.TOKENS],
            Outcome.NOTHING_CHUNK_UNFINISHED,
        ).astype(np.int8)
        yielding = rows[outcomes == Outcome.TOKENS]
        self._known[yielding] += 1
        tokens = np.where(self._known[yielding] == self._last[yielding], STOP_TOKEN, FILLER_TOKEN).astype(np.int32)
        return outcomes, tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    at_us: int
    prompt_tokens: int
    answer_tokens: int
    """What it will really generate; the worker learns it when the stop token comes."""
    max_tokens: int
    """What it says it may generate."""

    def submission(self, index: int) -> Submission:
        """No two prompts begin alike: nothing is shared but with its own past."""
        prompt = np.full(self.prompt_tokens, FILLER_TOKEN, dtype=np.int32)
        prompt[0] = index
        sampling = Sampling(seed=index, temperature=0.0, stop_token_ids=(STOP_TOKEN,))
        return Submission(RequestId(str(index)), frozen_tokens(prompt), sampling, self.max_tokens)


class Look(NamedTuple):
    """The worker at one moment."""

    at_us: int
    held_blocks: int
    """Of requests; what is merely cached does not count."""
    waiting: int


@dataclass(slots=True)
class VirtualRun:
    """What happened, by virtual time."""

    ttft_us: list[int] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    """One after each result."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    end_us: int = 0


class Clock:
    """Drives one worker through a list of arrivals."""

    def __init__(
        self,
        config: WorkerConfig,
        arrivals: Sequence[Arrival],
        step_time: StepTime,
        advance: Callable[[int], None] = lambda _ended: None,
    ) -> None:
        shape = ExecutorShape(config.slots, config.blocks, config.block_size, config.context_tokens)
        self._executor = CountingExecutor(shape, [arrival.answer_tokens for arrival in arrivals], step_time)
        self._worker = Worker(config, PrefixIndex(b"virtual", self._executor.fingerprint, config.blocks))
        self._arrivals = arrivals
        self._arrived = 0
        self._in_flight: deque[tuple[int, StepResult]] = deque()
        """When each launched step ends, and what it yields."""
        self._advance = advance
        self._now_us = 0
        self.run = VirtualRun()

    def to_the_end(self) -> VirtualRun:
        """Until every request has its answer."""
        for _ in range(STEPS_MAX):
            if self._arrived == len(self._arrivals) and self._worker.is_idle:
                return self._conclude()
            deadline = self._worker.next_deadline()
            if deadline is not None and deadline <= self._now_us:
                self._pass()
            else:
                self._wait(deadline)
        raise VirtualRunFailed(f"not at its end after {STEPS_MAX:,} events: {self._worker.gauges()}")

    def _wait(self, deadline_us: int | None) -> None:
        """On to whatever comes next; at one moment arrivals come before results, and results before passes."""
        arrival_us = self._arrivals[self._arrived].at_us if self._arrived < len(self._arrivals) else None
        result_us = self._in_flight[0][0] if self._in_flight else None
        due_us = [at_us for at_us in (arrival_us, result_us, deadline_us) if at_us is not None]
        if not due_us:
            raise VirtualRunFailed(f"nothing is due while requests are open: {self._worker.gauges()}")
        self._now_us = max(self._now_us, min(due_us))
        if arrival_us is not None and arrival_us <= self._now_us:
            self._submit()
        elif result_us is not None and result_us <= self._now_us:
            self._settle()

    def _submit(self) -> None:
        index = self._arrived
        self._arrived += 1
        (answer,) = self._worker.handle(Submitted(index, (self._arrivals[index].submission(index),)), self._now_us)
        if isinstance(answer, GroupRefused):
            raise VirtualRunFailed(f"request {index} was refused: {answer.refusal.message}")

    def _pass(self) -> None:
        for effect in self._worker.handle(Tick(), self._now_us):
            if isinstance(effect, Launch):
                self._executor.launch(effect.plan)
                result, took_us = self._executor.collect_timed()
                begins_us = max(self._now_us, self._in_flight[-1][0] if self._in_flight else 0)
                self._in_flight.append((begins_us + took_us, result))

    def _settle(self) -> None:
        _, result = self._in_flight.popleft()
        for effect in self._worker.handle(StepDone(result), self._now_us):
            if isinstance(effect, Deliver):
                self._note(effect.settled)

    def _note(self, settled: Settled) -> None:
        # One request a submission, so a serial is the index of its arrival.
        self.run.ttft_us += [self._now_us - self._arrivals[started.serial].at_us for started in settled.started]
        self.run.ended += settled.ended
        gauges = self._worker.gauges()
        self.run.looks.append(Look(self._now_us, gauges.blocks.running, gauges.waiting))
        if settled.ended:
            self._advance(len(settled.ended))

    def _conclude(self) -> VirtualRun:
        gauges = self._worker.gauges()
        self.run.preemptions = gauges.preemptions_for_others + gauges.preemptions_of_self
        self.run.recomputed_tokens = gauges.recomputed_tokens
        self.run.steps = gauges.steps
        self.run.end_us = self._now_us
        self._check_answers()
        return self.run

    def _check_answers(self) -> None:
        """A benchmark of a scheduler that loses tokens measures nothing."""
        for ended in self.run.ended:
            wanted = self._arrivals[ended.serial].answer_tokens
            if ended.generated_tokens != wanted:
                raise VirtualRunFailed(f"request {ended.serial} got {ended.generated_tokens} tokens, not {wanted}")
        if len(self.run.ended) != len(self._arrivals):
            raise VirtualRunFailed(f"{len(self.run.ended)} of {len(self._arrivals)} requests ended")
