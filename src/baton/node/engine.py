"""The engine process: drives one Worker and one executor, and talks to the front end over one ZeroMQ socket.

    python -m baton.node.engine [--import-torch]        settings come as JSON on standard input

The loop takes in what has arrived, plans the next steps, and waits for the next event: a message of the front end, the end
of a step, a peer's message, a transfer. Steps are collected, peers answered and KV moved on separate threads, which put
their results into the inbox; only the loop touches the worker. The queue to the front end is bounded: when the front end
does not drain it, the engine pauses. When standard input closes, the front end is gone and this process exits.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import zmq

from baton.core.config import BadConfig
from baton.core.engine.block_contents import BlockEvents
from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.gauges import KvEventTraffic, PeerTraffic, StoreTraffic
from baton.core.engine.orders import Drain, ReportChanges, Submit
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.worker import Event, GroupRefused, Launch, StepDone, Tick, Worker
from baton.core.errors import EXIT_SETUP, BatonError, InvariantViolated, SetupError
from baton.core.handover.messages import PeerEffect, PeerEvent
from baton.core.tiers.transfers import StorageEffect
from baton.executor.constraints.compiled_cache import NO_CONSTRAINTS, CompiledConstraints
from baton.executor.contract import Executor
from baton.executor.scratch_folder import remove_lock_last
from baton.node.clock import monotonic_us
from baton.node.constraint_gate import ConstraintGate, GatePassed, GateRefused
from baton.node.engine_beats import SOCKET_NAME, EngineBeats, LoopProgress
from baton.node.engine_launch import IMPORT_TORCH
from baton.node.engine_setup import build_executor, warn_of_small_pool, worker_config
from baton.node.gc_pauses import freeze_gc, without_gc
from baton.node.handovers import open_handovers
from baton.node.inbox import EngineInbox, EventItem, ThreadFailure
from baton.node.kv_event_publisher import open_kv_events
from baton.node.kv_pool_memory import PoolMemory, blocks_of, layout_of
from baton.node.kv_storage import KvStorage, describe, open_kv_store
from baton.node.log_lines import formatter_of
from baton.node.parent_process import die_with_parent
from baton.node.preemption_log import PreemptionLog
from baton.node.recording import (
    DUMPED_NAME,
    ProcessRecorder,
    close_recorders,
    dump_on_signal,
    ignore_dump_signal,
    open_recorder,
)
from baton.node.settings import EngineSettings, decode_settings
from baton.node.starting_share import full_share, lower_share
from baton.node.stderr_queue import EXIT_S_MAX, drain_stderr, queue_stderr
from baton.node.step_sizes import StepSizeCounts
from baton.wire.engine_messages import (
    QUEUED_MESSAGES_MAX,
    WIRE_VERSION,
    DrainBegun,
    FailedMessage,
    FromEngine,
    PrefillPeerAddresses,
    ReadyMessage,
    StartStage,
    StepOutput,
    Traffic,
    decode_to_engine,
    encode_from_engine,
    gauges_output,
    pulse,
)
from baton.wire.watched_worker import WatchedWorker, weight_of
from baton.wire.worker_messages import message_of

log = logging.getLogger("baton.engine")

MESSAGES_A_TURN = 256
"""Messages taken in before the next step is planned."""
TICK_IN_FLIGHT_US = 20_000
"""Interval at which leases, renewals and transfer timeouts are checked while a step computes."""
PULSE_US = 100_000
"""Interval of pulses to the front end, once it has asked for them."""
GAUGES_US = 50_000
"""Age at which the front end's gauges are refreshed when peers or KV transfers change them and no step does."""
TRAFFIC_US = 1_000_000
"""Interval of the counts of refused connections, of received bytes and of the sizes of steps."""
EVENTS_WAIT_US = 10_000
"""Interval at which KV events are offered again that the publisher had no room for."""
FINAL_SEND_MS = 1000
THREAD_STACK_BYTES = 16 << 20
"""Of every thread here. Grammars are compiled by recursion; processes that try them first do with a quarter of this."""

EXIT_FAILED = 1
EXIT_NO_PARENT = 3

_IPC = "ipc://"


class PeerOrders(Protocol):
    """Carries out orders that concern peers. Every method returns at once."""

    def before_handling(self, event: PeerEvent) -> None:
        """The worker is about to handle this."""

    def carry_out(self, effect: PeerEffect) -> None: ...

    def step_done(self, step: int) -> None: ...

    def connect_to(self, addresses: tuple[str, ...]) -> None: ...

    def traffic(self) -> PeerTraffic: ...


class StorageOrders(Protocol):
    """Carries out orders that concern KV beyond the pool. Every method returns at once."""

    def carry_out(self, effect: StorageEffect) -> None: ...

    def traffic(self) -> StoreTraffic: ...


class EventPublishing(Protocol):
    """Tells others which KV blocks come and go. Every method returns at once."""

    @property
    def has_room(self) -> bool: ...

    def publish(self, changes: BlockEvents) -> None: ...

    def asked_for_all(self) -> bool:
        """Whether a reader has missed too much, since the last call."""

    def traffic(self) -> KvEventTraffic: ...


class EngineLoop:
    def __init__(
        self,
        worker: Worker,
        executor: Executor,
        socket: zmq.Socket[bytes],
        inbox: EngineInbox | None = None,
        handovers: PeerOrders | None = None,
        storage: StorageOrders | None = None,
        now_us: Callable[[], int] = monotonic_us,
        recorder: ProcessRecorder | None = None,
        constraints: CompiledConstraints = NO_CONSTRAINTS,
        kv_events: EventPublishing | None = None,
    ) -> None:
        self.progress = LoopProgress()
        self._worker = worker
        self._watched = worker if recorder is None else WatchedWorker(worker, recorder.watch)
        """The worker, through its recorder."""
        self._executor = executor
        self._socket = socket
        self._inbox = EngineInbox() if inbox is None else inbox
        self._gate = ConstraintGate(constraints, executor.vocabulary, self._inbox.put, now_us)
        self._handovers = handovers
        self._storage = storage
        self._kv_events = kv_events
        self._counted = [service for service in (handovers, storage, kv_events) if service is not None]
        """What counts its traffic."""
        self._has_services = handovers is not None or storage is not None
        """Whether there are hand-overs or storage, whose deadlines run on while a step computes."""
        self._now_us = now_us
        self._driver = WorkerDriver(
            self._watched,
            now_us,
            launch=self._launch,
            answer=self._answer,
            peers=None if handovers is None else handovers.carry_out,
            storage=None if storage is None else storage.carry_out,
            tick_in_flight_us=TICK_IN_FLIGHT_US if self._has_services else None,
        )
        self._collector = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-collector")
        self._preemptions = PreemptionLog(worker.scheduler.running.preempted, executor.kv.block_bytes)
        self._gauges_changed = False
        """Whether peers or storage may have changed the gauges since they were last sent."""
        self._traffic: dict[type[Traffic], Traffic] = {
            PeerTraffic: PeerTraffic({}, 0),
            StoreTraffic: StoreTraffic(),
            KvEventTraffic: KvEventTraffic(),
        }
        """The counts last sent, by type."""
        self._step_sizes = StepSizeCounts()
        self._report_us: int | None = 0 if self._counted else None
        """When counts, and gauges that changed outside of steps, are next sent; None until there is something to send."""
        self._pulse_us: int | None = None
        """When the next Pulse is due; None until the front end asks for them."""
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._inbox.fileno(), zmq.POLLIN)

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """Take in what has arrived, plan what is due, then wait for the next event."""
        self.progress.turns += 1
        self._take_messages()
        for item in self._inbox.take():
            if isinstance(item, GateRefused):
                self._refuse(item)
            else:
                self._handle(self._event(item))
        if self._kv_events is not None:
            self._publish_events(self._kv_events)
        now_us = self._now_us()
        if self._pulse_us is not None and self._pulse_us <= now_us:
            self._send_pulse(now_us)
        if self._driver.is_due:
            self._handle(Tick())
        elif self._report_us is not None and self._report_us <= now_us:
            self._report(now_us)
        else:
            self.progress.waits = True
            self._poller.poll(self._poll_timeout_ms(now_us))
            self.progress.waits = False

    def _poll_timeout_ms(self, now_us: int) -> int | None:
        events_us = now_us + EVENTS_WAIT_US if self._kv_events is not None and self._watched.has_block_events else None
        deadlines = (self._driver.wake_us(), self._pulse_us, self._report_us, events_us)
        until_us = min((due_us for due_us in deadlines if due_us is not None), default=None)
        return None if until_us is None else -(-(until_us - now_us) // 1000)

    def _report(self, now_us: int) -> None:
        self._report_us = now_us + TRAFFIC_US if self._counted else None
        if (sizes := self._step_sizes.take()) is not None:
            self._send(sizes)
        if self._gauges_changed:
            self._send(gauges_output(self._worker.gauges(), self._worker.scheduler.drafts()))
        for service in self._counted:
            if (traffic := service.traffic()) != self._traffic[type(traffic)]:
                self._traffic[type(traffic)] = traffic
                self._send(traffic)

    def _publish_events(self, publisher: EventPublishing) -> None:
        if publisher.asked_for_all():  # at the latest when the traffic is next counted: nothing wakes the loop for it
            self._watched.retell_blocks()
        while self._watched.has_block_events and publisher.has_room:
            publisher.publish(self._watched.block_events())

    def _send_pulse(self, now_us: int) -> None:
        self._pulse_us = now_us + PULSE_US
        self._send(pulse(self._worker.gauges(), self._driver.steps_in_flight > 0, self._watched.changes(now_us)))

    def _take_messages(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            # A malformed frame ends the engine: dropping it would leave a submitter waiting for ever.
            message = decode_to_engine(frame)
            if isinstance(message, PrefillPeerAddresses):
                self._connect_peers(message.addresses)
            elif isinstance(message, Submit) and not self._gate.passes(message):
                self._refuse(self._gate.hold(message))
            else:
                self._handle(message)
            if isinstance(message, ReportChanges):
                self._pulse_us = self._now_us()
            elif isinstance(message, Drain):
                self._send(DrainBegun(self._worker.gauges()))

    def _connect_peers(self, addresses: tuple[str, ...]) -> None:
        if self._handovers is not None:  # otherwise this instance has no peers
            self._handovers.connect_to(addresses)

    def _refuse(self, refused: GateRefused | None) -> None:
        if refused is not None:
            self._answer(GroupRefused(refused.ticket, refused.refusal))

    def _event(self, item: EventItem) -> Event:
        if isinstance(item, ThreadFailure):
            raise item.error
        if isinstance(item, GatePassed):
            return item.submit
        if not isinstance(item, Future):
            if self._handovers is not None and isinstance(item, PeerEvent):
                self._handovers.before_handling(item)
            return item
        done = item.result()  # raises the step's exception
        if self._handovers is not None:
            self._handovers.step_done(done.result.step)
        return done

    def _handle(self, event: Event) -> None:
        if self._has_services and not self._gauges_changed:
            self._gauges_changed = True
            self._report_soon(GAUGES_US)
        self._driver.handle(event)
        self._preemptions.look()
        if type(event) is StepDone:
            self.progress.settled += 1

    def _report_soon(self, within_us: int) -> None:
        due_us = self._now_us() + within_us
        self._report_us = due_us if self._report_us is None else min(self._report_us, due_us)

    def _launch(self, launch: Launch) -> None:
        self.progress.launched += 1
        self._step_sizes.add(launch.plan.tokens)
        if self._report_us is None:
            self._report_soon(TRAFFIC_US)
        self._executor.launch(launch.plan)
        self._collector.submit(self._collect).add_done_callback(self._inbox.put)

    def _answer(self, answer: Answer) -> None:
        self._send(message_of(answer, self._worker))

    def _collect(self) -> StepDone:
        return StepDone(self._executor.collect())

    def _send(self, message: FromEngine) -> None:
        frame = encode_from_engine(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # At the high-water mark: a front end that does not read pauses the engine instead of filling memory.
            self.progress.waits = True
            self._socket.send(frame)
            self.progress.waits = False
        if isinstance(message, StepOutput):
            self._gauges_changed = False


def serve(settings: EngineSettings, socket: zmq.Socket[bytes], closing: contextlib.ExitStack) -> None:
    """Resources are registered with `closing`, not closed here: closing may take a while, and the front end is told of a
    failure first."""
    inbox = EngineInbox()
    end_with_threads(inbox)
    if settings.router is not None:
        lower_share()
    store = open_kv_store(settings)  # first: loading a model takes long, and the address may be wrong
    events = open_kv_events(settings, closing)
    pool = PoolMemory(settings)
    built = build_executor(settings, pool.allocate, lambda stage: socket.send(encode_from_engine(StartStage(stage))))
    executor, details = built.executor, built.details
    config = worker_config(settings, executor.shape, executor.kv.block_bytes, built.constraints.versions)
    warn_of_small_pool(settings, config, executor.kv.block_bytes)
    prefix = PrefixIndex(settings.prefix_secret, executor.fingerprint, config.blocks)
    worker = Worker(config, prefix, handover_secret=secrets.token_bytes(32))
    storage = None
    if rows := config.tiers.host_rows:
        storage = KvStorage(blocks_of(executor), layout_of(executor), rows, store, inbox.put)
        closing.callback(storage.close)
        details = f"{details}, {describe(settings, rows)}"
    handovers = open_handovers(settings, executor, pool, inbox) if settings.has_peers else None
    if settings.router is not None:
        full_share()
    ready = ReadyMessage(
        version=WIRE_VERSION,
        context_tokens=config.sequence_tokens_max,
        vocabulary=executor.vocabulary,
        slots=config.slots,
        blocks=config.blocks,
        block_size=config.block_size,
        details=details if handovers is None else f"{details}, {handovers.details}",
        gauges=worker.gauges(),
        fingerprint=executor.fingerprint,
        peer_address="" if handovers is None else handovers.address,
        tried_step_us=built.tried_step_us,
    )
    recorder = open_recorder("engine", settings.name, worker, worker.hashes, weight_of, settings)
    if recorder is not None:
        dump_on_signal(recorder, _folder_of(settings) / DUMPED_NAME)
        closing.callback(recorder.close)
    loop = EngineLoop(
        worker, executor, socket, inbox, handovers, storage,
        recorder=recorder, constraints=built.constraints, kv_events=events,
    )  # fmt: skip
    beats = EngineBeats(f"{_folder_of(settings)}/{SOCKET_NAME}", loop.progress)
    closing.callback(beats.close)
    socket.send(encode_from_engine(ready))
    freeze_gc()
    beats.start()
    try:
        loop.run()
    except Exception as error:
        if recorder is not None:
            recorder.failed(error)
        raise


def _folder_of(settings: EngineSettings) -> Path:
    """The front end's private folder, with its sockets."""
    if not settings.endpoint.startswith(_IPC):
        raise BadConfig(f"the endpoint {settings.endpoint!r} is no socket in a folder")
    return Path(settings.endpoint.removeprefix(_IPC)).parent


def end_with_threads(inbox: EngineInbox) -> None:
    """A thread that ends with an exception ends the engine: without that thread it would look healthy and serve nothing."""
    show = threading.excepthook

    def ended(what: threading.ExceptHookArgs) -> None:
        show(what)
        inbox.put(ThreadFailure(what.exc_value or what.exc_type()))

    threading.excepthook = ended


def _exit_with_front_end(folder: Path) -> None:
    """End this process when standard input closes, whatever the main thread is doing, and remove the folder."""
    # Not through sys.stdin: its lock would be held when the main thread ends the process for another reason.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    close_recorders()
    remove_lock_last(folder)  # the system may kill this process at any moment: its parent is dead
    drain_stderr(EXIT_S_MAX)
    os._exit(EXIT_NO_PARENT)


def main() -> None:
    die_with_parent()  # a stopped front end does not close the pipe
    ignore_dump_signal()
    threading.stack_size(THREAD_STACK_BYTES)
    with without_gc():
        _main()


def _main() -> None:
    if IMPORT_TORCH in sys.argv:
        with contextlib.suppress(Exception):  # what is wrong with it is told when the settings are there
            importlib.import_module("torch")
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(EXIT_NO_PARENT)
    settings = decode_settings(line)
    queue_stderr(settings.log_format)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(settings.log_format))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    folder = _folder_of(settings)
    tempfile.tempdir = str(folder)  # the front end's private folder, removed with it: this process may end abruptly
    threading.Thread(target=_exit_with_front_end, args=(folder,), daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, FINAL_SEND_MS)
    socket.connect(settings.endpoint)
    serve_to_the_end(settings, socket)


def serve_to_the_end(settings: EngineSettings, socket: zmq.Socket[bytes]) -> None:
    with contextlib.ExitStack() as closing:
        try:
            serve(settings, socket, closing)
        except Exception as error:
            # Reported, not swallowed: the front end gets the reason, the traceback goes to the log, and the process ends.
            reason = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
            socket.send(encode_from_engine(FailedMessage(reason, isinstance(error, SetupError))))
            socket.close()
            socket.context.term()
            if not isinstance(error, BatonError):
                raise
            if isinstance(error, InvariantViolated):
                log.error("%s", reason)
            log.debug("%s", reason, exc_info=error)  # the front end reports it, in one line
            sys.exit(EXIT_SETUP if isinstance(error, SetupError) else EXIT_FAILED)


if __name__ == "__main__":
    main()
