"""A router with its HTTP surface, and instances, in one thread beside the test: everything real but processes and sockets.

Instances are an InstanceSessions, a real Worker and the scripted executor; bytes between them and the router are the wire's.
An instance computes as fast as it can up to as many tokens as a test allows it, so that a test can do something to it in the
middle of an answer and nothing depends on time.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TypeVar

import uvicorn

from baton.api.metrics import Metrics
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.api.tracing.request_tracing import RequestTracing
from baton.core.config import OnPreempt, WorkerConfig
from baton.core.engine.driver import Answer, WorkerDriver
from baton.core.engine.orders import Accepted
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.worker import Launch, StepDone, Worker
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import Join
from baton.core.routing.router import Router
from baton.executor.scripted import ScriptedExecutor
from baton.node.clock import monotonic_us
from baton.node.dashboard import Dashboard
from baton.node.dashboard_state import DashboardState
from baton.router.app import create_router_app
from baton.router.fleet_engine import FleetEngine
from baton.router.fleet_log import FleetEventLog
from baton.router.instance_connections import InstanceConnections
from baton.wire.engine_messages import PrefillPeerAddresses, RefusedMessage, StepOutput
from baton.wire.heartbeats import EngineVitals
from baton.wire.instance_sessions import InstanceSessions, SessionEffects
from baton.wire.router_messages import decode_from_router, encode_membership
from baton.wire.router_sessions import RouterSessions
from baton.wire.sealed_stream import ConnectionEnd, ConnectionStage
from baton.wire.worker_messages import message_of
from tests.api.conftest import Served, _ending
from tests.support.driver import shape_of

T = TypeVar("T")
SECRET = b"secret"
CONFIG = WorkerConfig(slots=8, blocks=128, block_size=16, context_tokens=512, step_tokens=512, waiting_max=64)
ROUTER = RouterConfig(beat_us=5_000_000, suspect_us=60_000_000, backoff_us_max=20_000)
"""Nobody is suspected because a test was slow."""
BEAT_S = 0.5


class MemoryLine:
    """Stands for a SealedConnection, without a socket."""

    def __init__(self, member: MemoryMember) -> None:
        self.member = member
        self.is_over = False

    def send(self, frames: list[bytes]) -> None:
        for frame in frames:
            asyncio.get_running_loop().call_soon(self._arrive, frame)

    def _arrive(self, frame: bytes) -> None:
        if not self.is_over:
            self.member.hear(frame)

    def close(self, reason: str) -> None:
        self.is_over = True
        self.member.lost(reason)


class MemoryMember:
    def __init__(self, name: str, text: ModelText, config: WorkerConfig, incarnation: int) -> None:
        self.name = name
        self.executor = ScriptedExecutor(shape_of(config), text.vocabulary)
        self.worker = Worker(config, PrefixIndex(SECRET, self.executor.fingerprint, config.blocks))
        self._driver = WorkerDriver(self.worker, monotonic_us, launch=self._launch, answer=self._answer)
        self.instance_sessions = InstanceSessions(
            Join(
                name, incarnation, config.role.name, self.executor.fingerprint[:64], f"http://{name}", "", config.slots,
                config.blocks, config.block_size, config.context_tokens, text.vocabulary, 0, False,
            )
        )  # fmt: skip
        self.line: MemoryLine | None = None
        self.sessions: InstanceConnections | None = None
        self.allowed: int | None = None
        """Tokens that it may still give; None: any number."""
        self.given = 0
        self.drained = False
        self._running = asyncio.create_task(self._run())

    # ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def join(self, sessions: InstanceConnections) -> None:
        self.sessions, self.line = sessions, MemoryLine(self)
        sessions.opened(self.line)  # type: ignore[arg-type]
        self._act(SessionEffects(messages=self.instance_sessions.opened(monotonic_us())))

    def hear(self, frame: bytes) -> None:
        self._act(self.instance_sessions.receive(decode_from_router(frame), monotonic_us()))

    def lost(self, reason: str) -> None:
        self.line = None
        self.instance_sessions.lost(reason, monotonic_us())

    def die(self) -> None:
        """As after kill -9: the router sees the connection end."""
        self._running.cancel()
        line, self.line = self.line, None
        if line is not None and self.sessions is not None:
            line.is_over = True
            self.sessions.ended(line, ConnectionEnd(ConnectionStage.OPEN, None, "the connection was closed"))  # type: ignore[arg-type]

    def _act(self, out: SessionEffects) -> None:
        self.drained = self.drained or out.drain
        for order in out.orders:
            if not isinstance(order, PrefillPeerAddresses):
                self._driver.handle(order)
        for message in out.messages:
            if self.line is not None and self.sessions is not None:
                self.sessions.received(self.line, encode_membership(message))  # type: ignore[arg-type]

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        beaten_s = 0.0
        while True:
            await asyncio.sleep(0 if self._compute() else 0.002)
            now_s = asyncio.get_running_loop().time()
            if now_s - beaten_s > BEAT_S and self.line is not None:
                beaten_s = now_s
                beat = self.instance_sessions.beat(None, EngineVitals(0), monotonic_us())
                self._act(SessionEffects(messages=[] if beat is None else [beat]))

    def _compute(self) -> bool:
        if self._driver.is_due:
            self._driver.tick()
        if not self._driver.steps_in_flight or (self.allowed is not None and self.given >= self.allowed):
            return False
        self._driver.handle(StepDone(self.executor.collect()))
        return True

    def _launch(self, launch: Launch) -> None:
        self.executor.launch(launch.plan)

    def _answer(self, answer: Answer) -> None:
        message = message_of(answer, self.worker)
        if isinstance(message, Accepted | RefusedMessage | StepOutput):
            if isinstance(message, StepOutput):
                self.given += len(message.tokens) // 4
            self._act(self.instance_sessions.take(message, monotonic_us()))


class Fleet:
    """Lives on a loop in a thread; methods are called from the test's."""

    def __init__(
        self,
        text: ModelText,
        settings: ApiSettings,
        config: RouterConfig,
        admin_key: str | None,
        tracing: RequestTracing | None,
    ) -> None:
        self.members: dict[str, MemoryMember] = {}
        self.served = Served(0)
        self._text = text
        self._settings = settings
        self._config = config
        self._admin_key = admin_key
        self._tracing = tracing
        self._lives = 0
        self._loop = asyncio.new_event_loop()
        self._server: uvicorn.Server | None = None
        self._serving: list[asyncio.Task[None]] = []
        """Of every router that there was."""
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start_router()

    def do(self, work: Callable[[], T]) -> T:
        """Run it on the loop."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    # ── the router ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_router(self) -> None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.do(lambda: self._start(sock))
        while self._server is None or not self._server.started:
            self._thread.join(0.005)
        self.served = Served(sock.getsockname()[1])

    def _start(self, sock: socket.socket) -> None:
        self.router = Router(self._config, SECRET, seed=1)
        self.sessions = InstanceConnections(RouterSessions(self.router, "router"), bytes(32), "router")
        state = DashboardState(monotonic_us())
        self.engine = FleetEngine(self.sessions, state, self._text.vocabulary)
        self.metrics = Metrics(self.engine, "tiny")
        app = create_router_app(
            self.engine, self.sessions, FleetEventLog(self.sessions, self.engine),
            Dashboard(state, monotonic_us, self.engine.views),
            self._text, self._settings, self.metrics, self._config.orphan_grace_us / 1e6,
            self._admin_key, tracing=self._tracing,
        )  # fmt: skip
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        self._serving.append(asyncio.create_task(_serve(self._server, sock)))

    def kill_router(self) -> None:
        """As after kill -9: nothing is said to anybody, and everything that it knew is gone."""

        def kill() -> None:
            if self._server is not None:
                self._server.should_exit = self._server.force_exit = True
                for server in self._server.servers:
                    server.close()
                for connection in list(self._server.server_state.connections):
                    connection.transport.abort()
            self.sessions.close("killed")
            for member in self.members.values():
                if member.line is not None:
                    member.line.is_over = True
                    member.lost("the connection was closed")

        self.do(kill)

    def join_all(self) -> None:
        self.do(lambda: [member.join(self.sessions) for member in self.members.values()])

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, name: str, allowed: int | None = None, **changes: object) -> MemoryMember:
        self._lives += 1
        config = replace(CONFIG, on_preempt=OnPreempt.RESCHEDULE, **changes)  # type: ignore[arg-type]

        def make() -> MemoryMember:
            member = self.members[name] = MemoryMember(name, self._text, config, self._lives)
            member.allowed = allowed
            member.join(self.sessions)
            return member

        return self.do(make)

    def kill(self, name: str) -> None:
        self.do(self.members.pop(name).die)

    def serving(self) -> str:
        """Who has something to do."""
        (name,) = [view.facts.name for view in self.do(self.engine.views) if view.open]
        return name

    def close(self) -> None:
        def stop() -> None:
            if self._server is not None:
                self._server.should_exit = True
            for member in self.members.values():
                member.die()

        self.do(stop)
        ending = threading.Thread(target=self._end)
        ending.start()
        _ending.append(ending)

    def _end(self) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.wait(self._serving, timeout=10), self._loop).result(11)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _serve(server: uvicorn.Server, sock: socket.socket) -> None:
    with closing(sock):
        await server.serve([sock])


@contextmanager
def fleet(
    text: ModelText,
    settings: ApiSettings,
    config: RouterConfig = ROUTER,
    admin_key: str | None = None,
    tracing: RequestTracing | None = None,
) -> Iterator[Fleet]:
    made = Fleet(text, settings, config, admin_key, tracing)
    try:
        yield made
    finally:
        made.close()
