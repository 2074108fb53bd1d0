"""An instance that nothing happens to: the production Worker and codec, a device, and peers if it has any.

What `instance` is to worlds with faults, this is to measurements: the same order of things (messages, results, then every
pass that is due), and no crashes, full lines or restarts. Nothing about scheduling is decided here.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.plan import StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.worker import Launch, StepDone, Worker
from baton.core.handover.messages import PeerEffect, PeerEvent
from baton.sim.carrying import Carrier
from baton.sim.device import Device
from baton.sim.instance import InstanceSpec
from baton.sim.meter import MeteredWorker
from baton.sim.records import PassMeter, StepSpan
from baton.sim.world import Alarm, Host
from baton.wire.engine_messages import WIRE_VERSION, Ready, ToWorker, decode_to_engine, encode_from_engine, wire_gauges
from baton.wire.worker_messages import event_of, message_of

SECRET = bytes(32)
TICK_IN_FLIGHT_US = 20_000
"""As the engine process looks at its peers while a step computes."""


class Line(Protocol):
    def send(self, frame: bytes) -> None: ...


class Machine:
    def __init__(self, host: Host, spec: InstanceSpec, meter: PassMeter | None = None, *, has_peers: bool = False) -> None:
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
        self._driver = WorkerDriver(
            self.worker if meter is None else MeteredWorker(self.worker, meter),
            lambda: host.world.now_us,
            launch=self._launch,
            answer=self._reply,
            peers=self._order_of_peers,
            tick_in_flight_us=TICK_IN_FLIGHT_US if has_peers else None,
        )
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
            gauges=wire_gauges(self.worker.gauges()),
        )
        line.send(encode_from_engine(ready))

    def take(self, frames: list[bytes]) -> None:
        for frame in frames:
            message = decode_to_engine(frame)
            if isinstance(message, ToWorker):
                self._driver.handle(event_of(message))
        self._pump()

    def hear(self, event: PeerEvent) -> None:
        """What peers said, or became of their KV."""
        self._driver.handle(event)
        self._pump()

    def _finished(self, result: StepResult) -> None:
        self._driver.handle(StepDone(result))
        self._pump()

    def _pump(self) -> None:
        while self._driver.is_due:
            self._driver.tick()
        self._alarm.set(self._driver.wake_us())

    def _order_of_peers(self, effect: PeerEffect) -> None:
        if self.carrier is None:
            raise RuntimeError(f"{self.host.name} has no peers, and was ordered to {effect}")
        self.carrier.carry(effect)

    def _reply(self, answer: Answer) -> None:
        if self._line is not None:
            self._line.send(encode_from_engine(message_of(answer, self.worker.gauges)))

    def _launch(self, launch: Launch) -> None:
        plan = launch.plan
        self.device.launch(plan)
        spans = self.device.spans
        if self.carrier is not None and spans:
            self.carrier.launched(plan.step, spans[-1].begin_us, spans[-1].end_us)
