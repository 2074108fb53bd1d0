"""Drives a Worker with an executor in one thread, with control over how late results arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from baton.core.config import WorkerConfig
from baton.core.engine.driver import WorkerDriver
from baton.core.engine.ended import EndedRequest
from baton.core.engine.laws import audit
from baton.core.engine.orders import Accepted, Cancel, StopAt, Submit
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.engine.worker import Deliver, Effect, Event, GroupRefused, Launch, StepDone, Tick, Withdrawn, Worker
from baton.core.errors import Refusal
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.scripted import ScriptedExecutor

VOCABULARY = 64
IDLE_PASSES_MAX = 2000
"""Passes with no step in flight before a test calls it a deadlock: more than the reserve needs to fall to its floor."""


def shape_of(config: WorkerConfig) -> ExecutorShape:
    return ExecutorShape(config.slots, config.blocks, config.block_size, config.context_tokens, config.burst)


class Driver:
    def __init__(self, config: WorkerConfig, executor: Executor | None = None, audited: bool = True) -> None:
        self.config = config
        self.executor = executor or ScriptedExecutor(shape_of(config), VOCABULARY)
        self.worker = Worker(config, PrefixIndex(b"secret", self.executor.fingerprint, config.blocks))
        self._driver = WorkerDriver(
            self.worker, lambda: self.now_us, launch=self._take, answer=self._take, peers=self._take, storage=self._take
        )
        self.audited = audited
        self.in_flight: deque[int] = deque()
        self.outputs: dict[Serial, list[int]] = {}
        self.ended: dict[Serial, EndedRequest] = {}
        self.refusals: list[Refusal] = []
        self.plans: list[Launch] = []
        self.now_us = 0
        self._tickets = 0

    def send(self, event: Event) -> list[Effect]:
        effects = self._driver.handle(event)
        if self.audited:
            audit(self.worker.scheduler)
        return effects

    def submit(self, *group: Submission) -> tuple[Serial, ...]:
        self._tickets += 1
        (answer,) = self.send(Submit(self._tickets, group))
        return answer.serials if isinstance(answer, Accepted) else ()

    def cancel(self, serial: Serial) -> None:
        self.send(Cancel(serial))

    def stop_found(self, serial: Serial, keep: int) -> None:
        self.send(StopAt(serial, keep))

    def tick(self) -> None:
        if self.is_due:
            self.send(Tick())

    @property
    def is_due(self) -> bool:
        return self._driver.is_due

    def settle_one(self) -> None:
        if self.in_flight:
            self.in_flight.popleft()
            self.send(StepDone(self.executor.collect()))

    def run(self, steps_max: int = 100_000) -> None:
        """Until nothing is open. Nothing due and nothing in flight while a request is open is a deadlock."""
        idle_passes = 0
        for _ in range(steps_max):
            if self.worker.is_idle:
                return
            if self.is_due:
                self.tick()
            elif self.in_flight:
                self.settle_one()
            else:
                idle_passes += 1
                if idle_passes > IDLE_PASSES_MAX:
                    raise RuntimeError(f"deadlock: {self.worker.gauges()}")
                self.now_us = self.worker.next_deadline() or self.now_us
        raise RuntimeError("did not finish")

    def _take(self, effect: Effect) -> None:
        match effect:
            case Launch(plan):
                self.plans.append(effect)
                self.executor.launch(plan)
                self.in_flight.append(plan.step)
            case Deliver(settled):
                at = 0
                for serial, count in zip(settled.serials.tolist(), settled.counts.tolist(), strict=True):
                    if serial in self.ended:
                        raise RuntimeError(f"tokens for request {serial} after its end")
                    self.outputs.setdefault(Serial(serial), []).extend(settled.tokens[at : at + count].tolist())
                    at += count
                for ended in settled.ended:
                    self._note_end(ended)
            case Withdrawn(ended):
                self._note_end(ended)
            case GroupRefused(_, refusal):
                self.refusals.append(refusal)
            case Accepted(_, serials):
                for serial in serials:
                    self.outputs[serial] = []

    def _note_end(self, ended: EndedRequest) -> None:
        if ended.serial in self.ended:
            raise RuntimeError(f"request {ended.serial} ended twice")
        self.ended[ended.serial] = ended


def submission(
    prompt: Sequence[int],
    max_tokens: int | None = 8,
    *,
    name: str = "r",
    sampling: Sampling | None = None,
    leader: str | None = None,
    salt: bytes = b"",
    priority: int = 0,
    generated: Sequence[int] = (),
    prefill_at: str = "",
) -> Submission:
    return Submission(
        request_id=RequestId(name),
        prompt=frozen_tokens(prompt),
        sampling=sampling or Sampling(seed=0, temperature=0.0),
        max_tokens=max_tokens,
        salt=salt,
        priority=priority,
        leader=RequestId(leader) if leader else None,
        generated=frozen_tokens(generated),
        prefill_at=prefill_at,
    )
