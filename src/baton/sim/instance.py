"""One instance: the production Worker and codec on a simulated host, device and disk.

Owns what the engine process owns in service: the worker, its device, and the conversation with the front end. The order of
work is that of the real engine loop: messages first, then results of steps, then every pass that is due; an instance whose
line to the front end is full waits. Nothing about scheduling is decided here.

A life begins with the key of the prefix cache, read from disk or made anew. It ends in a crash, in a failure with a message,
or in a restart after a drain; the next life is a new object on the same host with a higher incarnation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.config import WorkerConfig
from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.orders import ReportChanges, Submit
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.progress_watch import BEAT_US, STALL_US, EngineBeat
from baton.core.engine.worker import (
    Effect,
    Event,
    FrontEndLost,
    Launch,
    PrefillComposition,
    StepDone,
    Tick,
    Worker,
)
from baton.core.handover.messages import PeerEffect, PeerEvent
from baton.core.tiers.transfers import StorageEffect, StorageEvent
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.version_skew import continued_here, has_other_version
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.scripted import SCRIPTED_CONSTRAINTS
from baton.sim.device import SimulatedDevice, StepTimeModel
from baton.sim.disk import SimulatedDisk
from baton.sim.faults import Fault
from baton.sim.metered_worker import MeteredWorker
from baton.sim.run_records import PassMeter
from baton.sim.story import tell_steps, words_of
from baton.sim.twin import TwinCheck, has_twins
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
    encode_beat,
    encode_from_engine,
    pulse,
)
from baton.wire.watched_worker import WatchedWorker
from baton.wire.worker_messages import message_of

KEY_FILE = "prefix.key"
TRIED_LONGER_US = 10_000
READ_LOOK_US = 5_000
PULSE_US = 100_000
"""Interval of the engine's pulses, once its front end has asked for them."""


class FrontEndLine(Protocol):
    """The instance's end of its line to the front end."""

    @property
    def is_full(self) -> bool: ...

    @property
    def undelivered(self) -> int:
        """Frames that the other side has not acknowledged."""

    def send(self, frame: bytes) -> None: ...


class PeerOrdersSink(Protocol):
    """Carries out the worker's orders about peers; passes messages of peers to `SimulatedInstance.hear`."""

    def before_handling(self, event: PeerEvent) -> None:
        """The worker is about to handle this."""

    def carry_out(self, effect: PeerEffect) -> None: ...

    def meet(self, addresses: tuple[str, ...]) -> None:
        """The peers that prefill from now on: connect to these, and disconnect from all others."""


class StorageOrdersSink(Protocol):
    """Carries out the worker's orders about KV outside the pool; answers with `SimulatedInstance.transfer_ended`."""

    def carry_out(self, effect: StorageEffect) -> None:
        """Returns at once."""


class InstanceWatcher(Protocol):
    """Called for each event of an instance, to check laws."""

    def began(self, instance: SimulatedInstance, secret: bytes, made: bool) -> None:
        """A life has its key of the prefix cache, read from disk or `made` anew."""

    def handled(self, instance: SimulatedInstance, event: Event, effects: Sequence[Effect]) -> None:
        """Its worker has handled an event."""

    def buried(self, instance: SimulatedInstance) -> None:
        """The life has ended."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    number: int
    config: WorkerConfig
    make_executor: Callable[[ExecutorShape], Executor]
    times: StepTimeModel
    secret: bytes | None = None
    """The key of prefix names that a fleet shares; None: each instance has its own, on its disk."""
    tick_in_flight_us: int | None = None
    """Interval of lease checks while a step computes; None: not before it ends."""
    meter: PassMeter | None = None
    """Collects the CPU time of passes; None: not measured."""
    stall_us: int = STALL_US
    """Least limit for a step that does not end."""
    constraints: CompiledConstraints = SCRIPTED_CONSTRAINTS
    prefilling: PrefillComposition | None = None
    """Composes the scheduler where the instance only prefills; None: as it serves."""

    @property
    def tried_step_us(self) -> int:
        """The longest step; longer than all real ones, as on a real machine at its start."""
        return self.times.step_us(self.config.slots, 0, self.config.step_tokens, 0) + TRIED_LONGER_US

    @property
    def shape(self) -> ExecutorShape:
        config = self.config
        return ExecutorShape(
            config.slots, config.blocks, config.block_size, config.context_tokens, config.burst, config.constrained_burst
        )


class SimulatedBeats:
    """The beats of an engine, sent while a step computes too; a paused host sends none."""

    def __init__(self, host: Host) -> None:
        self.on_beat: Callable[[bytes], None] | None = None
        """None: nobody watches its progress."""
        self.launched = self.settled = self.turns = 0
        self._host = host
        self._alarm = Alarm(host, self.beat)

    def beat(self) -> None:
        if self.on_beat is not None:
            self.on_beat(encode_beat(EngineBeat(self.launched, self.settled, self.turns, waits=True)))
            self._alarm.set(self._host.world.now_us + BEAT_US)


class SimulatedInstance:
    """One life of an instance, from start to crash."""

    def __init__(self, host: Host, disk: SimulatedDisk, spec: InstanceSpec, watcher: InstanceWatcher | None = None) -> None:
        self.host = host
        self.spec = spec
        self.life = host.lives
        self.incarnation = host.lives + 2
        """As read from its clock when it started. 1 is the incarnation of an old life."""
        self.last_plan: StepPlan | None = None
        self.worker: Worker | None = None
        self._watched: WatchedWorker | None = None
        """Where laws are checked: the worker, beside twins that are restored from snapshots of it."""
        """None until the key has been read."""
        self._driver: WorkerDriver | None = None
        """None until the key has been read."""
        self.ordered: set[type[Event]] = set()
        """Kinds of events that its worker has handled."""
        self._watcher = watcher
        self._disk = disk
        self.executor = spec.make_executor(spec.shape)
        self.device = SimulatedDevice(host, self.executor, spec.times, self._finished)
        self.device.number = spec.number
        self._conversation: FrontEndLine | None = None
        self._inbox: deque[bytes] = deque()
        self._peer_events: deque[PeerEvent] = deque()
        self.peers: PeerOrdersSink | None = None
        self._transfer_events: deque[StorageEvent] = deque()
        self.storage: StorageOrdersSink | None = None
        self.at_step: Callable[[str], None] | None = None
        """Called with the name of each hand-over step taken here, to inject faults at it."""
        self.hindered_us = 0
        """When it was last stopped by a pause or a full line."""
        self._outbox: deque[bytes] = deque()
        """Frames beyond what the line could take; no event is handled until they are sent."""
        self._results: deque[StepResult] = deque()
        """Results of ended steps; they and messages wait while the line is full."""
        self.beats = SimulatedBeats(host)
        self._alarm = Alarm(host, self._pump)
        self._pulses = Alarm(host, self._pulse)
        self._pumping = False
        self._stands_still = False
        """Whether everything waits because the line is full."""
        self.is_leaving = False
        """Whether it drains, to be followed by another life."""
        self._restart: Callable[[], None] | None = None
        self._looks = Alarm(host, self._pump)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, ready: Callable[[SimulatedInstance], None]) -> None:
        """Read the key, then call `ready`, which gives the instance its line."""
        self._disk.read(KEY_FILE, lambda data: self._begin(data, ready))

    def _begin(self, data: bytes | None, ready: Callable[[SimulatedInstance], None]) -> None:
        secret = self.spec.secret
        if secret is None:
            secret = self._own_key(data)
        config = self.spec.config
        # Unique to this life: tokens granted by an earlier one open nothing here.
        own = self.host.world.stream(f"hand-over {self.host.name} life {self.host.lives}").randbytes(16)
        prefix = PrefixIndex(secret, self.executor.fingerprint, config.blocks)
        self.worker = worker = Worker(config, prefix, own, self.spec.prefilling)
        if self._watcher is not None and has_twins(self.host.world.seed):
            self._watched = WatchedWorker(worker, TwinCheck(self.host.name, worker, worker.hashes))
        self._driver = self._drive(worker)
        ready(self)

    def _drive(self, worker: Worker) -> WorkerDriver:
        world, meter = self.host.world, self.spec.meter
        return WorkerDriver(
            self._watched or worker if meter is None else MeteredWorker(worker, meter),
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
        """Send a failure message, before the host goes down."""
        if self._conversation is not None and not self._conversation.is_full:
            self._say(FailedMessage(reason))

    def restart_when_idle(self, restart: Callable[[], None]) -> None:
        self.is_leaving = True
        self._restart = restart
        self._looks.set(self.host.world.now_us + READ_LOOK_US)  # it may be idle already

    # ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, conversation: FrontEndLine) -> None:
        """A front end has opened a session: report ready."""
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
                tried_step_us=self.spec.tried_step_us,
            )
        )
        self.beats.beat()

    def front_end_lost(self) -> None:
        """The session is lost: open requests have no receiver any more."""
        self._conversation = None
        self._inbox.clear()
        self._outbox.clear()
        self._tell(FrontEndLost())
        self._pump()

    def take(self, frames: list[bytes]) -> None:
        """Take frames that arrived; called without any when the line may have room again."""
        if frames or self._stands_still or self.is_leaving:
            self._inbox.extend(frames)
            self._pump()

    def hear(self, event: PeerEvent) -> None:
        """Take an event of a peer or of a KV transfer with it."""
        self._peer_events.append(event)
        self._pump()

    def transfer_ended(self, event: StorageEvent) -> None:
        """Take the end of a transfer of KV outside the pool."""
        self._transfer_events.append(event)
        self._pump()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Handle everything that is due. Not reentrant: frames that arrive meanwhile are handled afterwards."""
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
        self.beats.turns += 1
        worker, driver = self.require_worker(), self.require_driver()
        while self._inbox and self._has_room:
            self._obey(decode_to_engine(self._inbox.popleft()))
        while self._peer_events and self._has_room:
            heard = self._peer_events.popleft()
            if self.peers is not None:
                self.peers.before_handling(heard)
            self._tell(heard)
        while self._transfer_events and self._has_room:
            self._tell(self._transfer_events.popleft())
        while self._results and self._has_room:
            self._tell(StepDone(self._results.popleft()))
        while (has_room := self._has_room) and driver.is_due:
            self._tell(Tick())
        # While the line is full, `take` wakes the instance.
        self._alarm.set(driver.wake_us() if has_room else None)
        if self._restart is not None and worker.is_idle and not self._outbox:
            if self.undelivered:  # nobody says when it is read: look again
                self._looks.set(self.host.world.now_us + READ_LOOK_US)
            else:
                restart, self._restart = self._restart, None
                self.host.world.fire(Fault.ROLLING_RESTART, self.host.name)
                self.host.after(0, restart)

    def _obey(self, order: ToEngine) -> None:
        if isinstance(order, PrefillPeerAddresses):
            if self.peers is not None:
                self.peers.meet(order.addresses)
            return
        if isinstance(order, Submit) and has_other_version(order, self.spec.constraints.versions):
            order = _continued_here(self, order)
        self._tell(order)
        if isinstance(order, ReportChanges):
            self._pulse()

    def _pulse(self) -> None:
        """Send a pulse, even while a step computes or the line is full."""
        worker, now_us = self.require_worker(), self.host.world.now_us
        changes = (self._watched or worker).changes(now_us)
        self._say(pulse(worker.gauges(), self.require_driver().steps_in_flight > 0, changes))
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
        """Whether a message would have to wait for earlier ones."""
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
        self.beats.settled += type(event) is StepDone
        if self.at_step is not None:
            tell_steps(self.at_step, event, effects)
        if self._watcher is not None:
            self.ordered.add(type(event))
            self._watcher.handled(self, event, effects)

    # ── effects of the worker ────────────────────────────────────────────────────────────────────────────────────────────

    def _launch(self, launch: Launch) -> None:
        self._note(launch)
        self.beats.launched += 1
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


def _continued_here(instance: SimulatedInstance, order: Submit) -> Submit:
    """As the gate of an engine does it."""
    made = continued_here(order, instance.spec.constraints, instance.executor.vocabulary)
    if any(new.sampling is not old.sampling for new, old in zip(made.group, order.group, strict=True)):
        instance.host.world.fire(Fault.OTHER_VERSION, instance.host.name)
    return made
