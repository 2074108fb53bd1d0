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
from baton.node.engine import monotonic_us
from baton.node.sealed_connection import ConnectionEnd, SealedConnection, call
from baton.wire.engine_messages import PrefillPeerAddresses, Pulse, RefusedMessage, StepOutput, ToEngine
from baton.wire.instance_sessions import InstanceSessions, SessionEffects
from baton.wire.router_messages import FromInstance, Welcome, decode_from_router, encode_membership

log = logging.getLogger("baton.joining")

CONNECT_S = 1.0
HANDSHAKE_S = 2.0
CALL_AGAIN_S, CALL_AGAIN_S_MAX = 0.05, 0.5
HELD_S = 2.0
"""After a session that lasted this many seconds, the next connection is made at once."""
TURNED_AWAY_S, SOON_S, SOON_CALLS = 3.0, 0.15, 10
"""Seconds between attempts after a rejection: the router may be restarted with another model. The first SOON_CALLS come
sooner: the router may hold an earlier incarnation of this name until it notices its silence."""
WELCOME_US = 10_000_000
"""Time that the router has to answer a join; it gives an instance as long to join."""
ENGINE_SILENT_US = 300_000
"""An engine whose pulses are this late is not offered to a router: it would be suspected as soon as it joined."""
LOOK_US = 100_000
"""Interval of the timer where nothing is due before."""


class InstanceFenced(BatonError):
    """The router knows a later incarnation of this instance's name: this one must not serve any more."""


class MembershipEngine(Protocol):
    """The part of the engine's client that a membership needs."""

    @property
    def silent_us(self) -> int: ...

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
        at: RouterAddress,
        sessions: InstanceSessions,
        engine: MembershipEngine,
        on_drain: Callable[[], None],
    ) -> None:
        """`on_drain` is called when the router asks this instance to drain."""
        self._name = name
        self._at = at
        self._sessions = sessions
        self._engine = engine
        self._on_drain = on_drain
        self._line: SealedConnection | None = None
        """The open connection."""
        self._welcome: Welcome | None = None
        """Of the current session."""
        self._pulses_us: int | None = None
        """Since when the engine sends pulses: it is asked to at the first welcome, and does not stop with the session."""
        self._opened_us = self._beat_due_us = 0
        self._turned_away: str | None = None
        self._fenced: str | None = None
        self._told = ""
        """The last logged reason for having no session."""
        self.beat_late_us_max = 0

    async def run(self) -> None:
        """Run for ever; raises InstanceFenced."""
        tasks = [asyncio.create_task(work) for work in (self._keep_time(), self._keep_calling())]
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
        self._say(self._sessions.leave())

    async def part(self, reason: str) -> None:
        """Close the connection after sent data has been read. Call after `run` was cancelled, so that it does not
        reconnect."""
        if (line := self._line) is not None:
            line.part(reason)
            await line.gone.wait()

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

    def arrived(self, line: SealedConnection) -> None:
        pass

    def opened(self, line: SealedConnection) -> None:
        self._line, self._opened_us = line, monotonic_us()
        self._say(self._sessions.opened(self._opened_us))

    def heard(self, line: SealedConnection, frame: bytes) -> None:
        self._carry_out(self._sessions.receive(decode_from_router(frame), monotonic_us()))
        if self._turned_away is not None:
            line.part("turned away")

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None:
        if self._line is line:
            self._line = self._welcome = None
            self._sessions.lost(end.reason, monotonic_us())

    # ── relaying ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, out: SessionEffects) -> None:
        for order in out.orders:
            self._engine.forward(order)
        self._say(out.messages)
        if out.prefill_peers is not None:
            self._engine.forward(PrefillPeerAddresses(out.prefill_peers))
        if out.welcomed is not None:
            self._begin(out.welcomed)
        self._turned_away, self._fenced = out.turned_away or self._turned_away, out.fenced or self._fenced
        if out.drain:
            log.info("the router wants this instance to finish and go")
            self._on_drain()

    def _say(self, messages: list[FromInstance]) -> None:
        if messages and self._line is not None:
            self._line.send(map(encode_membership, messages))

    def _begin(self, welcome: Welcome) -> None:
        self._welcome = welcome
        now_us = monotonic_us()
        self._pulses_us = now_us if self._pulses_us is None else self._pulses_us
        self._beat_due_us = now_us + welcome.beat_us  # with the engine's first pulse
        self._told = ""
        log.info("joined the router at %s as %s", self._at, self._name)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_time(self) -> None:
        while True:
            now_us = monotonic_us()
            if self._welcome is not None and self._beat_due_us <= now_us:
                self._beat(now_us, self._welcome)
            elif self._line is not None and self._welcome is None and self._opened_us + WELCOME_US <= now_us:
                self._line.end(None, f"it has not answered the join within {WELCOME_US // 1_000_000} s")
            deadline_us = self._sessions.next_deadline()
            if deadline_us is not None and deadline_us <= now_us:
                self._carry_out(self._sessions.tick(now_us))
            next_us = now_us + LOOK_US if self._welcome is None else min(now_us + LOOK_US, self._beat_due_us)
            await asyncio.sleep(max(0, next_us - monotonic_us()) / 1e6)

    def _beat(self, now_us: int, welcome: Welcome) -> None:
        late_us = now_us - self._beat_due_us
        self.beat_late_us_max = max(self.beat_late_us_max, late_us)
        self._beat_due_us = now_us + welcome.beat_us
        if late_us > welcome.beat_us:
            log.warning("a beat was %d ms late: this process was held up", late_us // 1000)
        # While this process was held up it received no pulses: that time is not the engine's silence.
        beat = self._sessions.beat(None, max(0, self._engine_silent_us(now_us) - late_us), now_us)
        if beat is not None:
            self._say([beat])

    def _engine_silent_us(self, now_us: int) -> int:
        """Before it was asked for pulses the engine had no reason to send any."""
        return 0 if self._pulses_us is None else min(self._engine.silent_us, now_us - self._pulses_us)

    async def _keep_calling(self) -> None:
        pause_s, times_away = CALL_AGAIN_S, 0
        loop = asyncio.get_running_loop()
        while True:
            await self._engine_answers()
            called_s = loop.time()
            line = SealedConnection(
                self._at.cluster_key, f"instance {self._name}", self, calls=str(self._at), handshake_s=HANDSHAKE_S
            )
            end = await call(line, self._at.host, self._at.port, CONNECT_S)
            if self._fenced is not None:
                raise InstanceFenced(f"the router at {self._at} has fenced this instance: {self._fenced}")
            turned_away, self._turned_away = self._turned_away, None
            self._log_once(end, turned_away)
            pause_s = CALL_AGAIN_S if loop.time() - called_s > HELD_S else min(2 * pause_s, CALL_AGAIN_S_MAX)
            times_away = 0 if turned_away is None else times_away + 1
            if times_away:
                pause_s = SOON_S if times_away <= SOON_CALLS else TURNED_AWAY_S
            # Jittered, so that the instances of a fleet do not reconnect all at once.
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)  # noqa: S311

    async def _engine_answers(self) -> None:
        if self._engine_silent_us(monotonic_us()) > ENGINE_SILENT_US:
            log.warning("the engine is silent: the router at %s is not called until it speaks again", self._at)
        while self._engine_silent_us(monotonic_us()) > ENGINE_SILENT_US:  # noqa: ASYNC110  who is silent tells nobody
            await asyncio.sleep(LOOK_US / 1e6)

    def _log_once(self, end: ConnectionEnd, turned_away: str | None) -> None:
        reason = end.reason if turned_away is None else f"turned away: {turned_away}"
        if reason != self._told:
            self._told = reason
            level = logging.WARNING if turned_away is None and end.fault is None else logging.ERROR
            log.log(level, "no session with the router at %s: %s; calling again", self._at, reason)
