"""The engine loop: takes peers' messages while a step computes, ends when a step or a thread fails, waits for its reader."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from baton.core.config import DECODE, Role, TierConfig, WorkerConfig
from baton.core.engine.block_contents import BlockEvents
from baton.core.engine.gauges import KvEventTraffic, PeerTraffic, SchedulerGauges, StepSizes, StoreTraffic
from baton.core.engine.orders import Accepted, ReportChanges, Submit
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefix import KEY_BYTES, PrefixIndex
from baton.core.engine.progress_watch import EngineBeat
from baton.core.engine.worker import Worker
from baton.core.handover.messages import Heard, Offer, PeerEffect, PeerEvent, PeerId, PeerOpened, Refuse, Release, Tell
from baton.core.tiers.transfers import CopyOut, FenceTransfer, StorageEffect, TransferDone, TransferFenced
from baton.executor.constraints.compiled_cache import NO_CONSTRAINTS, CompiledConstraints
from baton.executor.contract import ExecutorShape, KvView, LayerDone
from baton.executor.scripted import ScriptedExecutor
from baton.node import engine
from baton.node.engine import EngineLoop, EventPublishing, end_with_threads
from baton.node.engine_beats import SOCKET_NAME, EngineBeats, LoopProgress
from baton.node.inbox import EngineInbox, ThreadFailure
from baton.node.kv_storage import KvStorage
from baton.node.settings import EngineSettings
from baton.wire.engine_messages import (
    FailedMessage,
    FromEngine,
    PrefillPeerAddresses,
    Pulse,
    ReadyMessage,
    RefusedMessage,
    StepOutput,
    decode_beat,
    decode_from_engine,
    encode_to_engine,
)
from tests.support.constrained_submissions import HaltingBackend, asked
from tests.support.driver import submission

DEADLINE_S = 20


class GatedExecutor:
    """The scripted executor, with steps that end when the test releases them."""

    def __init__(self, shape: ExecutorShape) -> None:
        self._inner = ScriptedExecutor(shape, 64)
        self.shape, self.vocabulary, self.fingerprint = shape, 64, self._inner.fingerprint
        self.on_layer: LayerDone | None = None
        self.gate = threading.Semaphore(0)
        self.computing = threading.Event()
        self.fails = False
        self.steps = 0

    @property
    def kv(self) -> KvView:
        return self._inner.kv

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        self.computing.set()
        assert self.gate.acquire(timeout=DEADLINE_S)
        if self.fails:
            raise RuntimeError("the step failed")
        self.steps += 1
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()


class Orders:
    """Stands for peers and transfers: records its orders."""

    def __init__(self) -> None:
        self.told: list[PeerEffect] = []
        self.steps: list[int] = []
        self.calls: list[tuple[str, ...]] = []
        self.news = threading.Condition()

    def before_handling(self, event: PeerEvent) -> None:
        pass

    def carry_out(self, effect: PeerEffect) -> None:
        with self.news:
            self.told.append(effect)
            self.news.notify()

    def step_done(self, step: int) -> None:
        self.steps.append(step)

    def connect_to(self, addresses: tuple[str, ...]) -> None:
        with self.news:
            self.calls.append(addresses)
            self.news.notify()

    def traffic(self) -> PeerTraffic:
        return PeerTraffic({}, 0)

    def wait(self, count: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: len(self.told) >= count, DEADLINE_S)


class Shelves:
    """Stands for host memory and the store: records its orders, and answers only fences."""

    def __init__(self, inbox: EngineInbox) -> None:
        self.told: queue.SimpleQueue[StorageEffect] = queue.SimpleQueue()
        self._inbox = inbox

    def carry_out(self, effect: StorageEffect) -> None:
        if isinstance(effect, FenceTransfer):
            self._inbox.put(TransferFenced(effect.transfer))
        self.told.put(effect)

    def traffic(self) -> StoreTraffic:
        return StoreTraffic(saved_bytes=7)


class Bench:
    """A loop on its own thread, and the front end's side of its socket."""

    def __init__(
        self,
        role: Role | None = None,
        queued_max: int = 100,
        tiers: TierConfig | None = None,
        constraints: CompiledConstraints = NO_CONSTRAINTS,
        kv_events: EventPublishing | None = None,
    ) -> None:
        config = WorkerConfig(
            slots=4, blocks=64, block_size=4, context_tokens=200, step_tokens=64, tiers=tiers or TierConfig(),
            kv_events=kv_events is not None, **_role(role),
        )  # fmt: skip
        self.executor = GatedExecutor(ExecutorShape(config.slots, config.blocks, config.block_size, config.context_tokens))
        self.inbox, self.orders = EngineInbox(), Orders()
        self._context = zmq.Context()
        self.front, self._back = (self._context.socket(zmq.DEALER) for _ in range(2))
        for one in (self.front, self._back):
            one.set_hwm(queued_max)
            one.setsockopt(zmq.LINGER, 0)
        self.front.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        self.front.bind("inproc://loop")
        self._back.connect("inproc://loop")
        worker = Worker(config, PrefixIndex(b"secret", self.executor.fingerprint, config.blocks), b"secret")
        self.shelves = Shelves(self.inbox)
        handovers, storage = None if role is None else self.orders, None if tiers is None else self.shelves
        self.loop = EngineLoop(
            worker, self.executor, self._back, self.inbox, handovers, storage, constraints=constraints, kv_events=kv_events
        )
        self.death: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except (RuntimeError, KeyboardInterrupt) as error:
            self.death = error

    def ask(self, prompt: list[int], tokens: int) -> None:
        self.front.send(encode_to_engine(Submit(1, (submission(prompt, tokens),))))

    def hear(self) -> FromEngine:
        return decode_from_engine(self.front.recv())

    def gauges(self) -> SchedulerGauges:
        """The next gauges sent to the front end."""
        while not isinstance(message := self.hear(), StepOutput):
            pass
        return message.gauges

    def pulse(self) -> Pulse:
        while not isinstance(message := self.hear(), Pulse):
            pass
        return message

    def close(self) -> None:
        self.executor.gate.release(10_000)
        self.inbox.put(ThreadFailure(KeyboardInterrupt()))
        while self.thread.is_alive():
            while self.front.poll(20):
                self.front.recv()
        self._context.destroy(0)
        self.inbox.close()


def _role(role: Role | None) -> dict[str, Any]:
    return {} if role is None else {"role": role}


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


def test_peers_are_heard_and_answered_while_a_step_computes(benches: list[Bench]) -> None:
    bench = Bench(DECODE)
    benches.append(bench)
    bench.ask([1, 2, 3], 4)  # too short to be worth a peer
    assert bench.executor.computing.wait(DEADLINE_S)
    bench.inbox.put(PeerOpened(PeerId("p")))
    while True:
        message = bench.hear()
        if isinstance(message, StepOutput) and message.gauges.handovers.peers == 1:
            break
    bench.inbox.put(Heard(PeerId("p"), Offer(77, 1, 3)))  # of a request that nobody here knows
    bench.orders.wait(1)
    assert bench.executor.steps == 0
    (told,) = bench.orders.told
    assert isinstance(told, Tell)
    assert isinstance(told.message, Refuse | Release)


def test_others_are_served_while_a_constraint_is_compiled(benches: list[Bench]) -> None:
    backend = HaltingBackend()
    bench = Bench(constraints=CompiledConstraints([backend]))
    benches.append(bench)
    bench.executor.gate.release(10_000)
    bench.front.send(encode_to_engine(asked("constrained", 1, ticket=1)))
    backend.begun.get(timeout=DEADLINE_S)
    bench.front.send(encode_to_engine(asked("plain", None, ticket=2)))
    accepted = bench.hear()
    assert isinstance(accepted, Accepted)
    assert accepted.ticket == 2
    while not (isinstance(message := bench.hear(), StepOutput) and message.ended):
        pass
    backend.release.release()
    while not isinstance(message := bench.hear(), RefusedMessage):  # this worker has no backends, and says so only now
        pass
    assert message.ticket == 1


@pytest.mark.parametrize("role", [None, DECODE])
def test_the_front_end_feels_a_pulse_while_a_step_computes_and_while_nothing_happens(
    benches: list[Bench], role: Role | None
) -> None:
    bench = Bench(role)
    benches.append(bench)
    bench.front.send(encode_to_engine(ReportChanges()))
    first, second = bench.pulse(), bench.pulse()
    assert (first.fresh, second.fresh, second.computing) == (True, False, False)
    bench.ask([1, 2, 3, 4, 5], 2)
    assert bench.executor.computing.wait(DEADLINE_S)
    bench.pulse()  # it may be from before
    assert [bench.pulse().computing for _ in range(3)] == [True] * 3
    assert bench.executor.steps == 0
    bench.executor.gate.release(100)
    pulses: list[Pulse] = []
    while not pulses or pulses[-1].computing:
        pulses.append(bench.pulse())
    assert sum(len(pulse.named) for pulse in pulses) == KEY_BYTES, "one whole block"
    assert [phase for pulse in pulses for _, phase, _ in pulse.notes][-1] == "FINISHED"
    assert pulses[-1].gauges.steps >= 2


def test_beats_tell_of_a_step_that_computes_and_of_a_loop_that_waits(benches: list[Bench], tmp_path: Path) -> None:
    bench = Bench()
    benches.append(bench)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as front:
        front.settimeout(DEADLINE_S)
        front.bind(str(tmp_path / SOCKET_NAME))
        beats = EngineBeats(str(tmp_path / SOCKET_NAME), bench.loop.progress)
        beats.start()
        try:
            assert decode_beat(front.recv(4096)).launched == 0
            bench.ask([1, 2, 3, 4, 5], 2)
            while (beat := decode_beat(front.recv(4096))).launched == 0:
                pass
            assert beat.settled == 0
            assert beat.waits
            bench.executor.gate.release(100)
            while beat.settled < beat.launched or beat.settled < 2:
                beat = decode_beat(front.recv(4096))
            assert beat.turns > 2
        finally:
            beats.close()


def test_beats_for_a_front_end_that_does_not_read_or_is_gone_are_dropped(tmp_path: Path) -> None:
    progress, path = LoopProgress(), str(tmp_path / SOCKET_NAME)
    beats = EngineBeats(path, progress)
    beats.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as front:
        front.settimeout(DEADLINE_S)
        front.bind(path)
        assert decode_beat(front.recv(4096)) == EngineBeat(0, 0, 0, False)
    beats.close()


def test_without_being_asked_for_there_is_no_pulse(benches: list[Bench]) -> None:
    bench = Bench()
    benches.append(bench)
    bench.executor.gate.release(100)
    bench.ask([1, 2, 3], 2)
    while True:
        message = bench.hear()
        assert not isinstance(message, Pulse)
        if isinstance(message, StepOutput) and message.ended:
            break
    while bench.front.poll(0):  # the step in which the executor lets go of the slot
        assert not isinstance(bench.hear(), Pulse)


def test_whom_to_call_is_passed_on(benches: list[Bench]) -> None:
    bench, alone = Bench(DECODE), Bench()
    benches += [bench, alone]
    for addresses in (("a:1", "b:2"), ()):
        bench.front.send(encode_to_engine(PrefillPeerAddresses(addresses)))
    with bench.orders.news:
        assert bench.orders.news.wait_for(lambda: bench.orders.calls == [("a:1", "b:2"), ()], DEADLINE_S)
    alone.front.send(encode_to_engine(PrefillPeerAddresses(("a:1",))))
    alone.ask([1, 2, 3], 2)
    assert isinstance(alone.hear(), Accepted), "one that needs no peer is not told of any"


def test_transfers_are_told_of_every_step_that_is_over(benches: list[Bench]) -> None:
    bench = Bench(DECODE)
    benches.append(bench)
    bench.executor.gate.release(100)
    bench.ask([1, 2, 3], 4)
    while True:
        message = bench.hear()
        if isinstance(message, StepOutput) and message.ended:
            break
    assert bench.orders.steps[:4] == [1, 2, 3, 4]


def test_kv_is_kept_and_the_front_end_hears_of_it_though_no_step_is_left(benches: list[Bench]) -> None:
    bench = Bench(tiers=TierConfig(host_rows=8))
    benches.append(bench)
    bench.executor.gate.release(100)
    bench.ask(list(range(1, 9)), 2)
    order = bench.shelves.told.get(timeout=DEADLINE_S)
    assert isinstance(order, CopyOut)
    while bench.gauges().leaving_blocks != len(order.blocks):
        pass
    bench.inbox.put(TransferDone(order.transfer, (True,) * len(order.blocks)))
    while (gauges := bench.gauges()).leaving_blocks:
        pass
    assert (gauges.storage.host_used, gauges.storage.saved) == (len(order.blocks), len(order.blocks))


def test_the_time_limit_of_a_copy_is_kept_while_a_step_computes(benches: list[Bench]) -> None:
    bench = Bench(tiers=TierConfig(host_rows=8, copy_us=30_000))
    benches.append(bench)
    bench.ask([1, 2, 3], 50)
    bench.ask(list(range(1, 9)), 1)
    bench.executor.gate.release(4)  # the fifth step does not end
    order = bench.shelves.told.get(timeout=DEADLINE_S)
    assert isinstance(order, CopyOut)
    assert bench.shelves.told.get(timeout=DEADLINE_S) == FenceTransfer(order.transfer)
    assert bench.executor.steps <= 4
    while bench.gauges().storage.late != 1:
        pass


def test_the_front_end_hears_what_moved(benches: list[Bench]) -> None:
    bench = Bench(tiers=TierConfig(host_rows=8))
    benches.append(bench)
    while not isinstance(message := bench.hear(), StoreTraffic):
        pass
    assert message.saved_bytes == 7


def test_the_front_end_hears_how_many_tokens_the_steps_computed(benches: list[Bench]) -> None:
    bench = Bench(None)
    benches.append(bench)
    bench.executor.gate.release(4)
    bench.ask(list(range(1, 31)), 4)
    while not isinstance(message := bench.hear(), StepSizes) or sum(message.counts) < bench.executor.steps:
        pass
    assert message.counts[:6] == (3, 0, 0, 1, 0, 0), "three decodes, and a prefill of more than 16 and at most 32 tokens"
    assert (sum(message.counts), message.tokens) == (4, 30 + 3)
    assert not bench.front.poll(50), "an engine that does nothing says nothing"


def test_a_step_that_fails_ends_the_loop(benches: list[Bench]) -> None:
    bench = Bench()
    benches.append(bench)
    bench.executor.fails = True
    bench.executor.gate.release(1)
    bench.ask([1, 2, 3], 4)
    bench.thread.join(DEADLINE_S)
    assert str(bench.death) == "the step failed"


def test_a_thread_that_ends_ends_the_loop(benches: list[Bench]) -> None:
    bench = Bench()
    benches.append(bench)
    bench.inbox.put(ThreadFailure(RuntimeError("the peers' thread is gone")))
    bench.thread.join(DEADLINE_S)
    assert "peers' thread" in str(bench.death)


def test_any_thread_that_ends_with_an_exception_is_told_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    inbox, error = EngineInbox(), RuntimeError("a lane is gone")
    end_with_threads(inbox)

    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert inbox.take() == [ThreadFailure(error)]
    assert len(shown) == 1
    inbox.close()


def test_a_front_end_that_does_not_read_pauses_the_engine(benches: list[Bench]) -> None:
    bench = Bench(queued_max=2)
    benches.append(bench)
    bench.ask([1, 2, 3], 100)
    assert bench.executor.computing.wait(DEADLINE_S)
    for _ in range(100):
        bench.executor.computing.clear()
        bench.executor.gate.release(1)
        if not bench.executor.computing.wait(0.5):
            break
    paused = bench.executor.steps
    assert paused < 20
    bench.executor.gate.release(1000)
    outputs = 0
    while outputs < 100:
        message = bench.hear()
        outputs += isinstance(message, StepOutput)
    assert bench.executor.steps >= 100 > paused


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Its socket, and that of an engine, which has a context of its own: it ends with the engine."""
    context, engines_context = zmq.Context[zmq.Socket[bytes]](), zmq.Context[zmq.Socket[bytes]]()
    ours, engines = context.socket(zmq.DEALER), engines_context.socket(zmq.DEALER)
    ours.bind(f"ipc://{tmp_path}/engine")
    ours.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
    engines.connect(f"ipc://{tmp_path}/engine")
    yield ours, engines
    ours.close(0)
    engines.close(0)
    context.term()
    engines_context.term()


def test_the_front_end_hears_of_the_end_before_the_store_is_closed(
    front_end: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs takes its time to close, and requests that were lost must not wait for that."""
    ours, engines = front_end
    heard: list[FromEngine] = []

    class Closing(KvStorage):
        def close(self) -> None:
            heard.extend(decode_from_engine(ours.recv()) for _ in range(2))
            super().close()

    monkeypatch.setattr(engine, "KvStorage", Closing)
    monkeypatch.setattr(engine, "freeze_gc", lambda: None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # whatever it becomes, it is put back
    endpoint, store = f"ipc://{tmp_path}/engine", f"file:{tmp_path}/kv"
    settings = EngineSettings(endpoint, None, b"x" * 32, blocks=8, host_memory_bytes=1 << 20, kv_store=store)
    ours.send(b"no message")
    with pytest.raises(SystemExit):
        engine.serve_to_the_end(settings, engines)
    assert [type(message) for message in heard] == [ReadyMessage, FailedMessage]


def test_a_store_that_cannot_be_is_said_by_the_front_end_alone(
    front_end: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        engine.serve_to_the_end(EngineSettings("", None, b"x" * 32, kv_store=f"file:{tmp_path}/file"), front_end[1])
    assert decode_from_engine(front_end[0].recv()) == FailedMessage(
        f"{tmp_path}/file is a file, not a folder for a store", by_setup=True
    )
    assert not caplog.records


# ── KV events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Told:
    """Stands for a publisher that has room when the test says so."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[BlockEvents] = queue.SimpleQueue()
        self.room, self.asked = threading.Event(), threading.Event()

    @property
    def has_room(self) -> bool:
        return self.room.is_set()

    def publish(self, changes: BlockEvents) -> None:
        self.reports.put(changes)

    def asked_for_all(self) -> bool:
        asked = self.asked.is_set()
        self.asked.clear()
        return asked

    def traffic(self) -> KvEventTraffic:
        return KvEventTraffic(batches=7)


def test_kv_events_that_had_no_room_are_told_later_in_one(benches: list[Bench]) -> None:
    told = Told()
    bench = Bench(kv_events=told)
    benches.append(bench)
    bench.executor.gate.release(1000)
    for first in (0, 50):
        bench.ask(list(range(first, first + 12)), 2)
        while not isinstance(message := bench.hear(), StepOutput) or not message.ended:
            pass
    assert told.reports.empty()
    told.room.set()
    report = told.reports.get(timeout=DEADLINE_S)
    assert report.fresh
    assert len([block for block in report.stored if block.parent is None]) == 2
    assert len(report.stored) == 6
    assert told.reports.empty()


def test_everything_is_told_anew_for_a_reader_that_missed_too_much(benches: list[Bench]) -> None:
    told = Told()
    bench = Bench(kv_events=told)
    benches.append(bench)
    bench.executor.gate.release(1000)
    told.room.set()
    bench.ask(list(range(12)), 2)
    while not isinstance(message := bench.hear(), StepOutput) or not message.ended:
        pass
    assert told.reports.get(timeout=DEADLINE_S).fresh
    told.asked.set()
    while not (report := told.reports.get(timeout=DEADLINE_S)).fresh:
        pass
    assert [block.tokens for block in report.stored] == [
        np.arange(first, first + 4, dtype="<i4").tobytes() for first in (0, 4, 8)
    ]


def test_the_front_end_is_told_how_many_kv_events_there_were(benches: list[Bench]) -> None:
    bench = Bench(kv_events=Told())
    benches.append(bench)
    while not isinstance(message := bench.hear(), KvEventTraffic):
        pass
    assert message.batches == 7
