"""An instance that nothing happens to: the production Worker and codec, a device, and peers if it has any.

What `instance` is to worlds with faults, this is to measurements: the same order of things (messages, results, then every
pass that is due), and no crashes, full lines or restarts. Nothing about scheduling is decided here.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol, get_args

from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.worker import Effect, Event, Launch, StepDone, Tick, Worker
from baton.core.handover.messages import PeerEffect, PeerEvent
from baton.sim.carrying import Carrier
from baton.sim.device import Device
from baton.sim.instance import InstanceSpec
from baton.sim.records import PassMeter, StepSpan
from baton.sim.world import Alarm, Host
from baton.wire.engine_messages import WIRE_VERSION, Ready, ToWorker, decode_to_engine, encode_from_engine
from baton.wire.worker_messages import message_of

SECRET = bytes(32)
PEER_EFFECTS = get_args(PeerEffect)
TICK_IN_FLIGHT_US = 20_000
"""As the engine process looks at its peers while a step computes."""


class Line(Protocol):
    def send(self, frame: bytes) -> None: ...


class Machine:
    def __init__(self, host: Host, spec: InstanceSpec) -> None:
        self.host = host
        self.spec = spec
        self.carrier: Carrier | None = None
        """None: it has no peers."""
        executor = spec.make_executor(spec.shape)
        self._vocabulary = executor.vocabulary
        self.device = Device(host, executor, spec.times, self._finished)
        self.device.number = spec.number
        self.device.spans = deque(maxlen=1)
        self.worker = Worker(spec.config, PrefixIndex(SECRET, executor.fingerprint, spec.config.blocks))
        self.meter: PassMeter | None = None
        self._line: Line | None = None
        """To the front end."""
        self.fingerprint = executor.fingerprint
        self._alarm = Alarm(host, self._pump)

    def keep_spans(self, spans: deque[StepSpan]) -> None:
        """Steps are noted there, which must have room for the latest at least."""
        self.device.spans = spans

    def answer(self, line: Line) -> None:
        """A front end is there: say who we are."""
        self._line = line
        config = self.spec.config
        ready = Ready(
            version=WIRE_VERSION,
            context_tokens=config.sequence_tokens_max,
            vocabulary=self._vocabulary,
            slots=config.slots,
            blocks=config.blocks,
            block_size=config.block_size,
            details=f"{self.host.name}, simulated",
            gauges=self.worker.gauges(),
        )
        line.send(encode_from_engine(ready))

    def take(self, frames: list[bytes]) -> None:
        for frame in frames:
            message = decode_to_engine(frame)
            if isinstance(message, ToWorker):
                self._tell(message)
        self._pump()

    def hear(self, event: PeerEvent) -> None:
        """What peers said, or became of their KV."""
        self._tell(event)
        self._pump()

    def _finished(self, result: StepResult) -> None:
        self._tell(StepDone(result))
        self._pump()

    def _pump(self) -> None:
        worker, now_us = self.worker, self.host.world.now_us
        while (deadline := worker.next_deadline()) is not None and deadline <= now_us:
            self._tell(Tick())
        due_us = worker.next_deadline()
        if due_us is not None and self.device.in_flight:
            # Its end is what the loop waits for; only leases and renewals with peers run on meanwhile.
            due_us = None if self.carrier is None else max(due_us, now_us + TICK_IN_FLIGHT_US)
        self._alarm.set(due_us)

    def _tell(self, event: Event) -> None:
        for effect in self._handle(event):
            if isinstance(effect, Launch):
                self._launch(effect.plan)
            elif isinstance(effect, PEER_EFFECTS):
                if self.carrier is None:
                    raise RuntimeError(f"{self.host.name} has no peers, and was ordered to {effect}")
                self.carrier.carry(effect)
            elif self._line is not None and (message := message_of(effect, self.worker)) is not None:
                self._line.send(encode_from_engine(message))

    def _handle(self, event: Event) -> list[Effect]:
        meter, now_us = self.meter, self.host.world.now_us
        if meter is None or not isinstance(event, Tick | StepDone):
            return self.worker.handle(event, now_us)
        began_ns = time.process_time_ns()
        effects = self.worker.handle(event, now_us)
        spent_ns = time.process_time_ns() - began_ns
        if isinstance(event, StepDone):
            meter.settle_ns += spent_ns
        elif any(isinstance(effect, Launch) for effect in effects):
            meter.passes += 1
            meter.plan_ns += spent_ns
        else:
            meter.idle_passes += 1
            meter.idle_ns += spent_ns
        return effects

    def _launch(self, plan: StepPlan) -> None:
        self.device.launch(plan)
        spans = self.device.spans
        if self.carrier is not None and spans:
            self.carrier.launched(plan.step, spans[-1].begin_us, spans[-1].end_us)
