"""CPU time of an instance's passes, taken around its worker."""

from __future__ import annotations

import time

from baton.core.engine.worker import Effect, Event, Launch, StepDone, Tick, Worker
from baton.sim.run_records import PassMeter


class MeteredWorker:
    """Wraps a Worker for its driver and adds the CPU time of ticks and settled steps to a meter."""

    def __init__(self, worker: Worker, meter: PassMeter) -> None:
        self._worker = worker
        self._meter = meter

    def next_deadline(self) -> int | None:
        return self._worker.next_deadline()

    def handle(self, event: Event, now_us: int) -> list[Effect]:
        if not isinstance(event, Tick | StepDone):
            return self._worker.handle(event, now_us)
        began_ns = time.process_time_ns()
        effects = self._worker.handle(event, now_us)
        self._add(event, effects, time.process_time_ns() - began_ns)
        return effects

    def _add(self, event: Tick | StepDone, effects: list[Effect], spent_ns: int) -> None:
        meter = self._meter
        if isinstance(event, StepDone):
            meter.settle_ns += spent_ns
        elif any(isinstance(effect, Launch) for effect in effects):
            meter.passes += 1
            meter.plan_ns += spent_ns
        else:
            meter.idle_passes += 1
            meter.idle_ns += spent_ns
