"""The instances' connections to this router, and the one place where the router is driven.

Owns the connections, the clock and the timer: messages of instances, requests of clients and deadlines go into the router
here, and its acts are performed here, in order. Messages are sent, connections closed, and all other acts passed to the
watchers. Promises that events raised while acts are performed are handled after them, and that a router which an error has
left half changed is driven no more: `failed` is set, later submissions raise EngineDead, and all other calls do nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from baton.api.engine import EngineDead, NotServing
from baton.core.engine.request import Submission
from baton.core.errors import BatonError
from baton.core.routing.events import FleetChanged, Session
from baton.core.routing.identity import RequestNumber
from baton.node.clock import monotonic_us
from baton.node.sealed_connection import Listener, SealedConnection
from baton.wire.engine_messages import WireError
from baton.wire.router_messages import TurnedAway, decode_from_instance, encode_membership
from baton.wire.router_sessions import Act, CloseConnection, RouterSessions, SayToInstance
from baton.wire.sealed_stream import ConnectionEnd, StreamConfig
from baton.wire.watched_sessions import WatchedSessions

log = logging.getLogger("baton.router")

WARNING_CHANGES = frozenset({"lost", "suspected", "stuck", "fenced", "refused"})
"""Changes that are logged as warnings."""
LOGGED_MAX = 1024
INSTANCE_STREAM = StreamConfig(heartbeat_us=500_000)
"""A router may have nothing to say to an instance for long. Frames are numbered: one that was taken out on the way is found
missing at the next one, so the sign of life bounds how long a request waits that was lost so. An instance that has heard
none for some time says so in its heartbeats (`RouterConfig.deaf_us`), and later ends the connection itself."""

Watcher = Callable[[Act, int], None]
"""Called with an act and its time in microseconds."""


class InstanceConnections:
    def __init__(
        self,
        router_sessions: RouterSessions | WatchedSessions,
        cluster_key: bytes,
        name: str,
        clock_us: Callable[[], int] = monotonic_us,
    ) -> None:
        self.router_sessions = router_sessions
        self.clock_us = clock_us
        self.listener = Listener(cluster_key, f"router {name}", self, INSTANCE_STREAM)
        self._connections: dict[Session, SealedConnection] = {}
        self._sessions: dict[SealedConnection, Session] = {}
        self._watchers: list[Watcher] = []
        self._turned_away: Counter[str] = Counter()
        self._last_logged: dict[str, FleetChanged] = {}
        """By name: the change last logged."""
        self._performing = False
        self.failed = asyncio.Event()
        self.failure: Exception | None = None
        """What the router, or a watcher of its acts, raised."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0

    async def open(self, listener: socket.socket) -> None:
        await self.listener.open(listener)
        self._arm()

    def close(self, reason: str) -> None:
        """Stop driving the router. Instances keep open requests for the grace period."""
        self._disarm()
        self._sessions.clear()
        self._connections.clear()
        self.listener.close(reason)

    def watch(self, watcher: Watcher) -> None:
        """Pass every act that is not for an instance to this watcher, in order."""
        self._watchers.append(watcher)

    def refused(self) -> dict[str, int]:
        """Connections, frames and instances that were rejected, by reason."""
        return dict(self.listener.refused + self._turned_away)

    @property
    def death(self) -> NotServing | None:
        """Why the router is driven no more; None while it is."""
        error = self.failure
        if error is None:
            return None
        return NotServing(
            "the router failed", str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        )

    # ── requests of clients ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, tenant: str, group: Sequence[Submission], origin: bytes, on_number: Callable[[RequestNumber, int], None]
    ) -> RequestNumber:
        """`on_number` gets the request's number before any act about it is performed."""
        self.refuse_if_dead()
        made: list[RequestNumber] = []

        def submit(now_us: int) -> Sequence[Act]:
            number, acts = self.router_sessions.submit(tenant, group, origin, now_us)
            made.append(number)
            on_number(number, now_us)
            return acts

        self._drive(submit)
        return made[0]

    def refuse_if_dead(self) -> None:
        if (death := self.death) is not None:
            raise EngineDead(str(death))

    def leave(self, number: RequestNumber) -> None:
        self._drive(partial(self.router_sessions.leave, number))

    def stop_choice(self, number: RequestNumber, choice: int, keep: int) -> None:
        self._drive(partial(self.router_sessions.stop_choice, number, choice, keep))

    def claim(self, number: RequestNumber, group: Sequence[Submission]) -> None:
        self._drive(partial(self.router_sessions.claim, number, group=group))

    def mask_came(self, number: RequestNumber, choice: int, outputs: int, digest: bytes) -> None:
        self._drive(partial(self.router_sessions.mask_came, number, choice, outputs, digest))

    def drain(self, name: str) -> None:
        self._drive(partial(self.router_sessions.drain, name))

    # ── events of connections ────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self, connection: SealedConnection) -> None:
        def connected(now_us: int) -> Sequence[Act]:
            session = self.router_sessions.connected(now_us)
            self._connections[session], self._sessions[connection] = connection, session
            return ()

        self._drive(connected)

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        """Raises WireError where the instance broke the protocol."""
        session = self._sessions.get(connection)
        if session is not None:
            self._drive(partial(self.router_sessions.receive, session, decode_from_instance(frame)), by_instance=True)

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        session = self._sessions.pop(connection, None)
        if session is None:
            return  # closed by us
        del self._connections[session]
        if self._performing:  # a connection that broke while we wrote to it: its loss is handled after the current acts
            asyncio.get_running_loop().call_soon(self._lose, session, end.reason)
        else:
            self._lose(session, end.reason)

    def _lose(self, session: Session, reason: str) -> None:
        self._drive(partial(self.router_sessions.lost, session, reason))

    # ── acts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _drive(self, decide: Callable[[int], Sequence[Act]], *, by_instance: bool = False) -> None:
        """Have the router decide, and perform its acts. A WireError is the instance's fault where it made us decide."""
        if self.failure is not None:
            return
        now_us = self.clock_us()
        try:
            acts = decide(now_us)
        except Exception as error:
            if not (by_instance and isinstance(error, WireError)):
                self._fail(error)
            raise
        try:
            self._perform(acts, now_us)
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        log.error("the router is driven no more: %s: %s", type(error).__name__, error)
        self.failure = error
        self._disarm()
        self.failed.set()

    def _perform(self, acts: Sequence[Act], now_us: int) -> None:
        frames: dict[Session, list[bytes]] = {}
        self._performing = True
        try:
            for act in acts:
                match act:
                    case SayToInstance(session, message):
                        frames.setdefault(session, []).append(encode_membership(message))
                        if isinstance(message, TurnedAway):
                            self._turned_away["fenced" if message.fenced else "turned_away"] += 1
                    case CloseConnection(session, reason):
                        self._send(session, frames.pop(session, []))
                        self._close_connection(session, reason)
                    case _:
                        self._notify(act, now_us)
            for session, ready in frames.items():
                self._send(session, ready)
        finally:
            self._performing = False
        self._arm()

    def _notify(self, act: Act, now_us: int) -> None:
        if isinstance(act, FleetChanged):
            self._log(act)
        for watcher in self._watchers:
            watcher(act, now_us)

    def _log(self, change: FleetChanged) -> None:
        """A rejected instance tries again and again: the same change is logged once."""
        level = logging.WARNING if change.what in WARNING_CHANGES else logging.INFO
        if change.what == "draining" and not self.router_sessions.router.fleet.servers:
            level = logging.WARNING
        if change == self._last_logged.get(change.name):
            level = logging.DEBUG
        self._last_logged.pop(change.name, None)
        self._last_logged[change.name] = change
        if len(self._last_logged) > LOGGED_MAX:
            del self._last_logged[next(iter(self._last_logged))]
        log.log(level, "instance %s (%d) %s: %s", change.name, change.incarnation, change.what, change.why or "-")

    def _send(self, session: Session, frames: list[bytes]) -> None:
        connection = self._connections.get(session)
        if connection is not None and frames:
            connection.send(frames)

    def _close_connection(self, session: Session, reason: str) -> None:
        connection = self._connections.pop(session, None)
        if connection is not None:
            del self._sessions[connection]
            connection.close(reason)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arm(self) -> None:
        """A timer that is too early only re-arms itself, so it is moved only for an earlier deadline."""
        deadline_us = self.router_sessions.next_deadline()
        if deadline_us is None:
            return
        if self._timer is not None:
            if self._timer_us <= deadline_us:
                return
            self._timer.cancel()
        self._timer_us = deadline_us
        delay_s = max(0, deadline_us - self.clock_us()) / 1e6
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._drive(self._tick_if_due)

    def _tick_if_due(self, now_us: int) -> Sequence[Act]:
        due_us = self.router_sessions.next_deadline()
        return self.router_sessions.tick(now_us) if due_us is not None and due_us <= now_us else ()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
