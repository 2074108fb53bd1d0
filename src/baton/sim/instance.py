"""One instance: the production Worker and codec on a simulated host, device and disk.

Owns what the engine process owns in service: the worker, its executor's device, and the conversation with the front end. The
order of things is that of the real engine loop: messages first, then every pass that is due, then results as steps end; an
instance whose front end does not take its messages stands still. Nothing about scheduling is decided here.

A life begins with the key of the prefix cache, read from disk or made anew. It ends in a crash, in a failure with last
words, or in a restart after a drain; the next life is a new object on the same host with a higher incarnation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.config import WorkerConfig
from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.orders import ReportChanges
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.worker import (
    Effect,
    Event,
    FrontEndLost,
    Launch,
    StepDone,
    Tick,
    Worker,
)
from baton.core.handover.messages import PeerEffect, PeerEvent
from baton.core.tiers.transfers import StorageEffect, StorageEvent
from baton.executor.contract import Executor, ExecutorShape
from baton.sim.device import SimulatedDevice, StepTimeModel
from baton.sim.disk import SimulatedDisk
from baton.sim.faults import Fault
from baton.sim.metered_worker import MeteredWorker
from baton.sim.run_records import PassMeter
from baton.sim.story import tell_steps, words_of
from baton.sim.world import Alarm, Host
from baton.wire import keyfile
from baton.wire.engine_messages import (
    WIRE_VERSION,
    FailedMessage,
    FromEngine,
    PrefillPeerAddresses,
    ReadyMessage,
    ToEngine,
    decode_to_engine,
    encode_from_engine,
    pulse,
)
from baton.wire.worker_messages import message_of

KEY_FILE = "prefix.key"
PULSE_US = 100_000
"""How often the engine gives a sign of life, once its front end has asked for it."""


class FrontEndLine(Protocol):
    """The instance's end of its line to the front end."""

    @property
    def is_full(self) -> bool: ...

    @property
    def undelivered(self) -> int:
        """Frames that the other side has not acknowledged."""

    def send(self, frame: bytes) -> None: ...


class PeerOrdersSink(Protocol):
    """Carries out the worker's orders about peers; passes what peers say to `SimulatedInstance.hear`."""

    def told(self, event: PeerEvent) -> None:
        """The worker is about to handle this."""

    def carry_out(self, effect: PeerEffect) -> None: ...

    def meet(self, addresses: tuple[str, ...]) -> None:
        """Who prefills from now on: call these, and hang up on all others."""


class StorageOrdersSink(Protocol):
    """Whoever carries out what the worker orders about KV outside the pool, and answers with `SimulatedInstance.hauled`."""

    def carry_out(self, effect: StorageEffect) -> None:
        """Returns at once."""


class InstanceWatcher(Protocol):
    """Who is told what happens in an instance: where the laws are checked."""

    def began(self, instance: SimulatedInstance, secret: bytes, made: bool) -> None:
        """A life has its key of the prefix cache, read from disk or made."""

    def handled(self, instance: SimulatedInstance, event: Event, effects: Sequence[Effect]) -> None:
        """Its worker has handled an event."""

    def buried(self, instance: SimulatedInstance) -> None:
        """The life is over."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    number: int
    config: WorkerConfig
    make_executor: Callable[[ExecutorShape], Executor]
    times: StepTimeModel
    secret: bytes | None = None
    """The key of prefix names, where a fleet shares one; None: each instance has its own, on its disk."""
    tick_in_flight_us: int | None = None
    """How often leases are looked at while a step computes; None: not before it ends."""
    meter: PassMeter | None = None
    """Takes the CPU time of passes, where there is one."""

    @property
    def shape(self) -> ExecutorShape:
        config = self.config
        return ExecutorShape(config.slots, config.blocks, config.block_size, config.context_tokens, config.burst)


class SimulatedInstance:
    """One life of an instance, from start to crash."""

    def __init__(self, host: Host, disk: SimulatedDisk, spec: InstanceSpec, watcher: InstanceWatcher | None = None) -> None:
        self.host = host
        self.spec = spec
        self.life = host.lives
        self.last_plan: StepPlan | None = None
        self.worker: Worker | None = None
        """None until the key is there."""
        self._driver: WorkerDriver | None = None
        """Comes with the worker."""
        self.ordered: set[type[Event]] = set()
        """What kinds of events its worker has handled."""
        self._watcher = watcher
        self._disk = disk
        self.executor = spec.make_executor(spec.shape)
        self.device = SimulatedDevice(host, self.executor, spec.times, self._finished)
        self.device.number = spec.number
        self._conversation: FrontEndLine | None = None
        self._inbox: deque[bytes] = deque()
        self._heard: deque[PeerEvent] = deque()
        self.peers: PeerOrdersSink | None = None
        self._hauled: deque[StorageEvent] = deque()
        self.storage: StorageOrdersSink | None = None
        self.at_step: Callable[[str], None] | None = None
        """Told of each step of a hand-over that is taken here, by name: for whoever makes crashes happen then."""
        self.hindered_us = 0
        """When it was last kept from its work, by a pause or a full line."""
        self._outbox: deque[bytes] = deque()
        """What one event brought beyond what the line could take; nothing else happens until it has left."""
        self._results: deque[StepResult] = deque()
        """Steps that have ended; they and messages wait here while the line is full."""
        self._alarm = Alarm(host, self._pump)
        self._pulses = Alarm(host, self._pulse)
        self._pumping = False
        self._stands_still = False
        """The line is full, and everything waits for the front end."""
        self.is_leaving = False
        """It drains, and will be followed by another life."""
        self._restart: Callable[[], None] | None = None

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, ready: Callable[[SimulatedInstance], None]) -> None:
        """Read the key; then `ready` is called, which gives the instance its line."""
        self._disk.read(KEY_FILE, lambda data: self._begin(data, ready))

    def _begin(self, data: bytes | None, ready: Callable[[SimulatedInstance], None]) -> None:
        secret = self.spec.secret
        if secret is None:
            secret = self._own_key(data)
        config = self.spec.config
        # Of this life alone: what an earlier one granted opens nothing here.
        own = self.host.world.stream(f"hand-over {self.host.name} life {self.host.lives}").randbytes(16)
        self.worker = worker = Worker(config, PrefixIndex(secret, self.executor.fingerprint, config.blocks), own)
        self._driver = self._drive(worker)
        ready(self)

    def _drive(self, worker: Worker) -> WorkerDriver:
        world, meter = self.host.world, self.spec.meter
        return WorkerDriver(
            worker if meter is None else MeteredWorker(worker, meter),
            lambda: world.now_us,
            launch=self._launch,
            answer=self._reply,
            peers=self._order_of_peers,
            storage=self._order_of_storage,
            tick_in_flight_us=self.spec.tick_in_flight_us,
        )

    def _own_key(self, data: bytes | None) -> bytes:
        secret = keyfile.read_key(data) if data is not None else None
        made = secret is None
        if secret is None:
            secret = self.host.world.stream(f"key {self.host.name} life {self.host.lives}").randbytes(keyfile.KEY_BYTES)
            self._disk.write(KEY_FILE, keyfile.write_key(secret), lambda _placed: None)
        if self._watcher is not None:
            self._watcher.began(self, secret, made)
        return secret

    def fail(self, reason: str) -> None:
        """The engine cannot go on: its last words, before the host goes down."""
        if self._conversation is not None and not self._conversation.is_full:
            self._say(FailedMessage(reason))

    def restart_when_idle(self, restart: Callable[[], None]) -> None:
        self.is_leaving = True
        self._restart = restart

    # ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, conversation: FrontEndLine) -> None:
        """A front end has opened a session: say who we are."""
        worker = self.require_worker()
        self._conversation = conversation
        config = worker.config
        self._say(
            ReadyMessage(
                version=WIRE_VERSION,
                context_tokens=config.sequence_tokens_max,
                vocabulary=self.executor.vocabulary,
                slots=config.slots,
                blocks=config.blocks,
                block_size=config.block_size,
                details=f"{self.host.name}, simulated",
                gauges=worker.gauges(),
            )
        )

    def orphan(self) -> None:
        """The session is over: nobody will hear of what is open."""
        self._conversation = None
        self._inbox.clear()
        self._outbox.clear()
        self._tell(FrontEndLost())
        self._pump()

    def take(self, frames: list[bytes]) -> None:
        """What has arrived; also when nothing has, but the line may have room again."""
        if frames or self._stands_still or self.is_leaving:
            self._inbox.extend(frames)
            self._pump()

    def hear(self, event: PeerEvent) -> None:
        """Of a peer, or of the KV that passes between us."""
        self._heard.append(event)
        self._pump()

    def hauled(self, event: StorageEvent) -> None:
        """Something that was ordered of KV outside the pool is over."""
        self._hauled.append(event)
        self._pump()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Not within itself: what a front end on the same machine answers at once waits for its turn."""
        if self._pumping:
            return
        self._pumping = True
        try:
            self._work_through()
            while self._inbox and self._has_room:
                self._work_through()
        finally:
            self._pumping = False

    def _work_through(self) -> None:
        worker, driver = self.require_worker(), self.require_driver()
        while self._inbox and self._has_room:
            self._obey(decode_to_engine(self._inbox.popleft()))
        while self._heard and self._has_room:
            heard = self._heard.popleft()
            if self.peers is not None:
                self.peers.told(heard)
            self._tell(heard)
        while self._hauled and self._has_room:
            self._tell(self._hauled.popleft())
        while self._results and self._has_room:
            self._tell(StepDone(self._results.popleft()))
        while self._has_room and driver.is_due:
            self._tell(Tick())
        # A full line is waited for by whoever empties it.
        self._alarm.set(driver.wake_us() if self._has_room else None)
        if self._restart is not None and worker.is_idle and not self._outbox and not self.undelivered:
            restart, self._restart = self._restart, None
            self.host.world.fire(Fault.ROLLING_RESTART, self.host.name)
            self.host.after(0, restart)

    def _obey(self, order: ToEngine) -> None:
        if isinstance(order, PrefillPeerAddresses):
            if self.peers is not None:
                self.peers.meet(order.addresses)
            return
        self._tell(order)
        if isinstance(order, ReportChanges):
            self._pulse()

    def _pulse(self) -> None:
        """Whatever else happens: a step may compute, the line may be full."""
        worker, now_us = self.require_worker(), self.host.world.now_us
        self._say(pulse(worker.gauges(), self.require_driver().steps_in_flight > 0, worker.changes(now_us)))
        self._pulses.set(now_us + PULSE_US)

    @property
    def _has_room(self) -> bool:
        if self._outbox:
            self._post()
        if self._conversation is None or not self._conversation.is_full:
            self._stands_still = False
            return True
        self.hindered_us = self.host.world.now_us
        if not self._stands_still:
            self._stands_still = True
            self.host.world.fire(Fault.LINE_FULL, self.host.name)
        return False

    @property
    def is_behind(self) -> bool:
        """Whether what it would say now had to wait for what it has said before."""
        return bool(self._outbox) or (self._conversation is not None and self._conversation.is_full)

    @property
    def undelivered(self) -> int:
        """Frames that the front end has not acknowledged."""
        return 0 if self._conversation is None else self._conversation.undelivered

    def _finished(self, result: StepResult) -> None:
        self._results.append(result)
        self._pump()

    def _tell(self, event: Event) -> None:
        effects = self.require_driver().handle(event)
        if self.at_step is not None:
            tell_steps(self.at_step, event, effects)
        if self._watcher is not None:
            self.ordered.add(type(event))
            self._watcher.handled(self, event, effects)

    # ── what the worker orders ───────────────────────────────────────────────────────────────────────────────────────────

    def _launch(self, launch: Launch) -> None:
        self._note(launch)
        self.last_plan = launch.plan
        self.device.launch(launch.plan)

    def _reply(self, answer: Answer) -> None:
        self._note(answer)
        if self._conversation is not None:
            self._say(message_of(answer, self.require_worker()))

    def _order_of_peers(self, effect: PeerEffect) -> None:
        self._note(effect)
        if self.peers is not None:
            self.peers.carry_out(effect)

    def _order_of_storage(self, effect: StorageEffect) -> None:
        self._note(effect)
        if self.storage is not None:
            self.storage.carry_out(effect)

    def _note(self, effect: Effect) -> None:
        world = self.host.world
        if world.keeps_notes:
            world.progressed()
            world.note(self.host.name, words_of(effect))

    def _say(self, message: FromEngine) -> None:
        if self._conversation is not None:
            self._outbox.append(encode_from_engine(message))
            self._post()

    def _post(self) -> None:
        while self._outbox and self._conversation is not None and not self._conversation.is_full:
            self._conversation.send(self._outbox.popleft())

    def require_worker(self) -> Worker:
        if self.worker is None:
            raise RuntimeError(f"{self.host.name} was spoken to before it had started")
        return self.worker

    def require_driver(self) -> WorkerDriver:
        if self._driver is None:
            raise RuntimeError(f"{self.host.name} was spoken to before it had started")
        return self._driver
