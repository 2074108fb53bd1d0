"""An instance's membership in a router's fleet: connects, joins, sends heartbeats, and relays between router and engine.

    router ── SealedConnection ── RouterMembership ── EngineClient ── engine process
                                        │
                             wire.instance_sessions.InstanceSessions   which requests are the router's, what may be sent when

Owns the connection, its timing and the reconnecting; decides nothing about requests. It reconnects for ever, with short
pauses, so that a restarted router has its instances back at once. Each change is logged, not each attempt. Being fenced (a
later incarnation of this name has joined) ends the membership for good. Runs on the front end's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.core.engine.orders import Accepted
from baton.core.errors import BatonError
from baton.node.clock import monotonic_us
from baton.node.sealed_connection import SealedConnection, connect
from baton.wire.engine_messages import PrefillPeerAddresses, Pulse, RefusedMessage, StepOutput, ToEngine
from baton.wire.heartbeats import EngineVitals
from baton.wire.instance_sessions import InstanceSessions, SessionEffects
from baton.wire.retry_pauses import RetryConfig, RetryPauses
from baton.wire.router_messages import FromInstance, Welcome, decode_from_router, encode_membership
from baton.wire.sealed_stream import ConnectionEnd, StreamConfig

log = logging.getLogger("baton.joining")

CONNECT_S = 1.0
ROUTER_STREAM = StreamConfig(handshake_us=2_000_000, silent_us=3_000_000)
"""Beats are messages of the membership: the stream of this side needs no heartbeat of its own. The router gives a sign of
life twice a second: where none comes, its direction is broken, whatever becomes of ours."""
RETRY = RetryConfig(
    first_us=50_000,
    longest_us=500_000,
    held_us=2_000_000,
    early_rejections=10,
    early_rejected_us=150_000,
    rejected_us=3_000_000,
)
"""A router that rejects this instance may be restarted with another model."""
ENGINE_SILENT_US = 300_000
"""An engine whose pulses are this late is not offered to a router: it would be suspected as soon as it joined."""
ENGINE_DOUBTED_US = 250_000
"""Silence of the engine after which the system is asked whether its process runs."""
TIMER_US = 100_000
"""Interval of the timer where nothing is due before."""


class InstanceFenced(BatonError):
    """The router knows a later incarnation of this instance's name: this one must not serve any more."""


class MembershipEngine(Protocol):
    """The part of the engine's client that a membership needs."""

    @property
    def silent_us(self) -> int: ...

    @property
    def runs(self) -> bool:
        """Whether the process of a silent engine uses a CPU or waits for one."""

    @property
    def stall_limit_us(self) -> int: ...

    def forward(self, message: ToEngine) -> None: ...


@dataclass(frozen=True, slots=True)
class RouterAddress:
    host: str
    port: int
    cluster_key: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class RouterMembership:
    def __init__(
        self,
        name: str,
        router: RouterAddress,
        sessions: InstanceSessions,
        engine: MembershipEngine,
        on_drain: Callable[[], None],
    ) -> None:
        """`on_drain` is called when the router asks this instance to drain."""
        self._name = name
        self._router = router
        self._sessions = sessions
        self._engine = engine
        self._on_drain = on_drain
        self._connection: SealedConnection | None = None
        """The open connection."""
        self._welcome: Welcome | None = None
        """Of the current session."""
        self._pulses_us: int | None = None
        """Since when the engine sends pulses: it is asked to at the first welcome, and does not stop with the session."""
        self._beat_due_us = 0
        self._turned_away: str | None = None
        self._fenced: str | None = None
        self._last_logged = ""
        """The last logged reason for having no session."""
        self.beat_late_us_max = 0
        self._router_is_keyed: bool | None = None

    @property
    def router_is_keyed(self) -> bool | None:
        """Whether clients need an API key at the router, as it last said; None: it has not been reached yet."""
        return self._router_is_keyed

    async def run(self) -> None:
        """Run for ever; raises InstanceFenced."""
        tasks = [asyncio.create_task(work) for work in (self._run_timer(), self._keep_connected())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a task that should never end has failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self) -> None:
        """Tell the router that this instance takes no new requests; open ones continue."""
        self._send(self._sessions.leave())

    async def close(self, reason: str) -> None:
        """Close the connection after sent data has been read. Call after `run` was cancelled, so that it does not
        reconnect."""
        if (connection := self._connection) is not None:
            connection.close(reason)
            await connection.closed.wait()

    # ── messages of the engine for the router ────────────────────────────────────────────────────────────────────────────

    @property
    def open_requests(self) -> int:
        return self._sessions.open_requests

    def owns_ticket(self, ticket: int) -> bool:
        return self._sessions.owns_ticket(ticket)

    def split(self, output: StepOutput) -> tuple[StepOutput | None, StepOutput | None]:
        return self._sessions.split(output)

    def take(self, message: Accepted | RefusedMessage | StepOutput) -> None:
        self._carry_out(self._sessions.take(message, monotonic_us()))

    def record_pulse(self, pulse: Pulse) -> None:
        self._sessions.record_pulse(pulse, monotonic_us())

    # ── events of the connection ─────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, connection: SealedConnection) -> None:
        pass

    def opened(self, connection: SealedConnection) -> None:
        self._connection = connection
        self._send(self._sessions.opened(monotonic_us()))

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        self._carry_out(self._sessions.receive(decode_from_router(frame), monotonic_us()))
        if self._turned_away is not None:
            connection.close("turned away")

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        if self._connection is connection:
            self._connection = self._welcome = None
            self._sessions.lost(end.reason, monotonic_us())

    # ── relaying ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, effects: SessionEffects) -> None:
        for order in effects.orders:
            self._engine.forward(order)
        self._send(effects.messages)
        if effects.prefill_peers is not None:
            self._engine.forward(PrefillPeerAddresses(effects.prefill_peers))
        if effects.welcomed is not None:
            self._on_welcome(effects.welcomed)
        if effects.hang_up is not None and self._connection is not None:
            self._connection.abort(None, effects.hang_up)
        self._turned_away, self._fenced = effects.turned_away or self._turned_away, effects.fenced or self._fenced
        if effects.rejoins_as is not None:
            log.warning(
                "an earlier life of this instance had a higher incarnation, so the clock of one of them is wrong: "
                "joining again as incarnation %d", effects.rejoins_as,
            )  # fmt: skip
        if effects.drain:
            log.info("the router wants this instance to finish and go")
            self._on_drain()

    def _send(self, messages: list[FromInstance]) -> None:
        if messages and self._connection is not None:
            self._connection.send(map(encode_membership, messages))

    def _on_welcome(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._router_is_keyed = welcome.keyed
        now_us = monotonic_us()
        self._pulses_us = now_us if self._pulses_us is None else self._pulses_us
        self._beat_due_us = now_us + welcome.beat_us  # with the engine's first pulse
        self._last_logged = ""
        log.info("joined the router at %s as %s", self._router, self._name)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run_timer(self) -> None:
        while True:
            now_us = monotonic_us()
            if self._welcome is not None and self._beat_due_us <= now_us:
                self._beat(now_us, self._welcome)
            deadline_us = self._sessions.next_deadline()
            if deadline_us is not None and deadline_us <= now_us:
                self._carry_out(self._sessions.tick(now_us))
            next_us = now_us + TIMER_US if self._welcome is None else min(now_us + TIMER_US, self._beat_due_us)
            await asyncio.sleep(max(0, next_us - monotonic_us()) / 1e6)

    def _beat(self, now_us: int, welcome: Welcome) -> None:
        late_us = now_us - self._beat_due_us
        self.beat_late_us_max = max(self.beat_late_us_max, late_us)
        self._beat_due_us = now_us + welcome.beat_us
        if late_us > welcome.beat_us:
            log.warning("a beat was %d ms late: this process was held up", late_us // 1000)
        # While this process was held up it received no pulses: that time is not the engine's silence.
        silent_us = max(0, self._engine_silent_us(now_us) - late_us)
        # Asked only where it matters: a look takes a while in a process with many threads.
        runs = silent_us < ENGINE_DOUBTED_US or self._engine.runs
        vitals = EngineVitals(silent_us, runs, self._engine.stall_limit_us)
        # Nor was the router silent while this process could not listen.
        unheard_us = 0 if self._connection is None else self._connection.silent_us() - late_us
        beat = self._sessions.beat(None, vitals, now_us, unheard_us)
        if beat is not None:
            self._send([beat])

    def _engine_silent_us(self, now_us: int) -> int:
        """Before it was asked for pulses the engine had no reason to send any."""
        return 0 if self._pulses_us is None else min(self._engine.silent_us, now_us - self._pulses_us)

    async def _keep_connected(self) -> None:
        pauses = RetryPauses(RETRY)
        while True:
            await self._wait_for_engine()
            dialed_us = monotonic_us()
            connection = SealedConnection(
                self._router.cluster_key,
                f"instance {self._name}",
                self,
                connects_to=str(self._router),
                config=ROUTER_STREAM,
            )
            end = await connect(connection, self._router.host, self._router.port, CONNECT_S)
            if self._fenced is not None:
                raise InstanceFenced(f"the router at {self._router} has fenced this instance: {self._fenced}")
            turned_away, self._turned_away = self._turned_away, None
            self._log_once(end, turned_away)
            lasted_us, share = monotonic_us() - dialed_us, random.uniform(0.5, 1.0)  # noqa: S311
            await asyncio.sleep(pauses.after(lasted_us, share, rejected=turned_away is not None) / 1e6)

    async def _wait_for_engine(self) -> None:
        if self._engine_silent_us(monotonic_us()) > ENGINE_SILENT_US:
            log.warning("the engine is silent: the router at %s is not called until it speaks again", self._router)
        while self._engine_silent_us(monotonic_us()) > ENGINE_SILENT_US:  # noqa: ASYNC110  who is silent tells nobody
            await asyncio.sleep(TIMER_US / 1e6)

    def _log_once(self, end: ConnectionEnd, turned_away: str | None) -> None:
        reason = end.reason if turned_away is None else f"turned away: {turned_away}"
        if reason != self._last_logged:
            self._last_logged = reason
            level = logging.WARNING if turned_away is None and end.fault is None else logging.ERROR
            log.log(level, "no session with the router at %s: %s; calling again", self._router, reason)
