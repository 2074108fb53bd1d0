"""The instances' connections to this router, and the one place where the router is driven.

Owns the lines, the clock and the timer: whatever a connection brings, whatever a client asks and whatever time brings goes
into the router here, and what the router wants done is done here, in its order. Messages go out, connections are closed, and
everything else is told to those who watch. Promises that what happens while acts are performed is heard after them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.engine.request import Submission
from baton.core.routing.events import FleetChanged, Session
from baton.core.routing.identity import RequestNumber
from baton.node.sealed_connection import ConnectionEnd, Listener, SealedConnection
from baton.wire.router_messages import TurnedAway, decode_from_instance, encode_membership
from baton.wire.router_sessions import Act, CloseConnection, RouterSessions, SayToInstance

log = logging.getLogger("baton.router")

BAD_NEWS = frozenset({"lost", "suspected", "stuck", "fenced", "refused"})
"""What an operator should see also where the log shows warnings only."""
TOLD_MAX = 1024

Watcher = Callable[[Act, int], None]
"""Told an act and when it was."""


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(frozen=True, slots=True)
class _Lost:
    session: Session
    reason: str


class InstanceConnections:
    def __init__(
        self, router_sessions: RouterSessions, cluster_key: bytes, name: str, clock_us: Callable[[], int] = monotonic_us
    ) -> None:
        self.router_sessions = router_sessions
        self.clock_us = clock_us
        self.door = Listener(cluster_key, f"router {name}", self)
        self._lines: dict[Session, SealedConnection] = {}
        self._sessions: dict[SealedConnection, Session] = {}
        self._watchers: list[Watcher] = []
        self._turned_away: Counter[str] = Counter()
        self._told: dict[str, FleetChanged] = {}
        """By name: what was last logged of it."""
        self._performing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0

    async def open(self, listener: socket.socket) -> None:
        await self.door.open(listener)
        self._arm()

    def close(self, reason: str) -> None:
        """Nothing is decided any more. Instances keep what is open for as long as they were told to."""
        if self._timer is not None:
            self._timer.cancel()
        self._sessions.clear()
        self._lines.clear()
        self.door.close(reason)

    def watch(self, watcher: Watcher) -> None:
        """Everything that is not for an instance is told to it, in order."""
        self._watchers.append(watcher)

    def refused(self) -> dict[str, int]:
        """Connections, frames and instances that were not let in, by reason."""
        return dict(self.door.refused + self._turned_away)

    # ── what clients ask ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, tenant: str, group: Sequence[Submission], origin: bytes, told: Callable[[RequestNumber, int], None]
    ) -> RequestNumber:
        """`told` hears of the request's number before anything else of it happens."""
        now_us = self.clock_us()
        number, acts = self.router_sessions.submit(tenant, group, origin, now_us)
        told(number, now_us)
        self._perform(acts, now_us)
        return number

    def leave(self, number: RequestNumber) -> None:
        now_us = self.clock_us()
        self._perform(self.router_sessions.leave(number, now_us), now_us)

    def cut(self, number: RequestNumber, choice: int, keep: int) -> None:
        now_us = self.clock_us()
        self._perform(self.router_sessions.cut(number, choice, keep, now_us), now_us)

    def claim(self, number: RequestNumber, group: Sequence[Submission]) -> None:
        now_us = self.clock_us()
        self._perform(self.router_sessions.claim(number, now_us, group), now_us)

    def drain(self, name: str) -> None:
        now_us = self.clock_us()
        self._perform(self.router_sessions.drain(name, now_us), now_us)

    # ── what lines bring ─────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self, line: SealedConnection) -> None:
        session = self.router_sessions.connected(self.clock_us())
        self._lines[session], self._sessions[line] = line, session
        self._arm()

    def heard(self, line: SealedConnection, frame: bytes) -> None:
        session = self._sessions.get(line)
        if session is not None:
            message, now_us = decode_from_instance(frame), self.clock_us()
            self._perform(self.router_sessions.heard(session, message, now_us), now_us)

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None:
        session = self._sessions.pop(line, None)
        if session is None:
            return  # we closed it
        del self._lines[session]
        if self._performing:  # a line that broke under what we wrote: its loss comes after what is being done
            asyncio.get_running_loop().call_soon(self._lose, session, end.reason)
        else:
            self._lose(session, end.reason)

    def _lose(self, session: Session, reason: str) -> None:
        now_us = self.clock_us()
        self._perform(self.router_sessions.lost(session, reason, now_us), now_us)

    # ── acts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

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
                        self._hang_up(session, reason)
                    case _:
                        self._tell(act, now_us)
            for session, ready in frames.items():
                self._send(session, ready)
        finally:
            self._performing = False
        self._arm()

    def _tell(self, act: Act, now_us: int) -> None:
        if isinstance(act, FleetChanged):
            self._log(act)
        for watcher in self._watchers:
            watcher(act, now_us)

    def _log(self, change: FleetChanged) -> None:
        """One that is turned away calls again and again: that is news only once."""
        level = logging.WARNING if change.what in BAD_NEWS else logging.INFO
        if change.what == "draining" and not self.router_sessions.router.fleet.servers:
            level = logging.WARNING
        if change == self._told.get(change.name):
            level = logging.DEBUG
        self._told.pop(change.name, None)
        self._told[change.name] = change
        if len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]
        log.log(level, "instance %s (%d) %s: %s", change.name, change.incarnation, change.what, change.why or "-")

    def _send(self, session: Session, frames: list[bytes]) -> None:
        line = self._lines.get(session)
        if line is not None and frames:
            line.send(frames)

    def _hang_up(self, session: Session, reason: str) -> None:
        line = self._lines.pop(session, None)
        if line is not None:
            del self._sessions[line]
            line.part(reason)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arm(self) -> None:
        """A timer that is too early only asks again, so it is moved for an earlier deadline alone."""
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
        now_us = self.clock_us()
        due_us = self.router_sessions.next_deadline()
        self._perform(self.router_sessions.tick(now_us) if due_us is not None and due_us <= now_us else [], now_us)
