"""The peers of an instance, on their own thread and event loop: a decode instance connects, a prefill instance accepts.

Owns the sessions. Passes session starts, session ends and messages to the engine loop, in order, through its inbox; messages
of the engine to a peer are sent in order too. The addresses to connect to can change at any time; failed connections are
retried with growing pauses. Unproved connections, sessions and queued events are bounded; refused connections are counted
by reason and logged when the reason changes. The meaning of messages is known to the worker, the movement of KV to the
transfers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
import threading
import time
from collections import Counter
from typing import Protocol

from baton.core.errors import BatonError
from baton.core.handover.messages import Heard, PeerEvent, PeerId, PeerLost, PeerMessage, PeerOpened
from baton.node.clock import monotonic_us
from baton.node.inbox import EngineInbox, ThreadFailure
from baton.node.peer_connection import CONNECT_S, LocalInstance, PeerConnection
from baton.wire.peer_messages import Register
from baton.wire.peer_session import KnownSessions, SessionEnd, SessionFault, SessionStage, unfit_reason
from baton.wire.retry_pauses import RetryConfig, RetryPauses
from baton.wire.sealed_stream import ConnectionFault

log = logging.getLogger("baton.peers")

UNREGISTERED_MAX = 64
"""Accepted connections that are not sessions yet; beyond it the oldest unproved one is closed."""
SESSIONS_MAX = 256
INBOX_MAX = 4096
"""Events that the engine loop has not taken; beyond it, the session that adds one is closed."""
REDIAL = RetryConfig(first_us=50_000, longest_us=2_000_000, held_us=2_000_000)
SAME_REFUSAL_S = 60.0
"""Seconds between two log lines of the same refusal."""


class CannotListen(BatonError):
    """The address for peers cannot be bound."""


class TransferChooser(Protocol):
    """Agrees with a peer, as it registers, on how KV is sent."""

    def offer(self, peer: PeerId, same_host: bool) -> tuple[str, ...]:
        """The addresses to which this peer shall send KV; empty where we are the sender."""

    def accept(self, peer: PeerId, addresses: tuple[str, ...]) -> str | None:
        """Send this peer's KV to one of these addresses from now on. Returns the reason where that is impossible."""

    def forget(self, peer: PeerId) -> None: ...


def listen(host: str, port: int) -> socket.socket:
    """Bind the port at once, so that a port in use is reported before anything else happens."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        which = "--peer-host" if error.errno == errno.EADDRNOTAVAIL else "--peer-port"
        raise CannotListen(f"cannot listen for peers on {host}:{port}: {reason}. Choose another with {which}.") from None


class PeerConnections:
    def __init__(
        self,
        local: LocalInstance,
        transfers: TransferChooser,
        inbox: EngineInbox,
        listener: socket.socket | None,
        addresses: tuple[str, ...],
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._local = local
        self._transfers = transfers
        self._inbox = inbox
        self._listener = listener
        self._dials: dict[str, asyncio.Task[None]] = {}
        """By address: the connections we keep up."""
        self._first_addresses = addresses
        self._failure: BaseException | None = None
        """The error of a connection task that ended though none should."""
        self._unregistered: dict[PeerConnection, None] = {}
        """Accepted connections that have not registered, oldest first."""
        self._sessions: dict[PeerId, PeerConnection] = {}
        self._last_logged: dict[str, str] = {}
        """By address: the last reason logged."""
        self._logged_s: dict[str, float] = {}
        self._known = KnownSessions()
        """Written on both threads, one end each."""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="baton-peers", daemon=True)
        self._thread.start()

    # ── for the engine loop ──────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, peer: PeerId, message: PeerMessage) -> None:
        """Send a message, after all earlier ones. In a session that is over nothing is sent; its PeerLost is on the way."""
        self._loop.call_soon_threadsafe(self._send, peer, self._known.of(peer), message)

    def before_handling(self, event: PeerEvent) -> None:
        """The worker is about to handle this: what it says from here on belongs to the session that it then knows."""
        self._known.handles(event)

    def connect_to(self, addresses: tuple[str, ...]) -> None:
        """Connect to these addresses from now on and end sessions with all others."""
        self._loop.call_soon_threadsafe(self._connect_to, addresses)

    def close(self) -> None:
        """Close all sessions and end the thread. Not needed by a process that exits."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._inbox.put(ThreadFailure(error))
            raise
        finally:
            self._loop.close()

    async def _main(self) -> None:
        self._connect_to(self._first_addresses)
        tasks = [asyncio.create_task(work) for work in (self._accept(), self._until_stopped())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for session in list(self._sessions.values()):
            session.close(None, "this instance was stopped")
        rest = [*tasks, *self._dials.values()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            task.result()  # a task that should never end has failed
        if self._failure is not None:
            raise self._failure

    async def _accept(self) -> None:
        if self._listener is not None:
            server = await self._loop.create_server(
                lambda: PeerConnection(self._local, self, None).connection, sock=self._listener
            )
            await server.serve_forever()
        await self._until_stopped()

    async def _until_stopped(self) -> None:
        await self._stop.wait()

    def _send(self, peer: PeerId, number: int | None, message: PeerMessage) -> None:
        session = self._sessions.get(peer)
        if session is not None and session.number == number:
            session.send(message)

    def _connect_to(self, addresses: tuple[str, ...]) -> None:
        if self._local.role.gives or self._stop.is_set():
            return  # prefill instances are connected to; they do not connect
        wanted = dict.fromkeys(address for address in addresses if self._is_address(address))
        for address in [address for address in self._dials if address not in wanted]:
            self._dials.pop(address).cancel()
            self._last_logged.pop(address, None)
        for address in list(wanted)[:SESSIONS_MAX]:
            if address not in self._dials:
                self._dials[address] = task = asyncio.create_task(self._dial(address))
                task.add_done_callback(self._on_dial_end)

    def _is_address(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        if host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16:
            return True
        log.error("no peer can be called at %r: it is not HOST:PORT", address)
        return False

    def _on_dial_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stop.set()

    async def _dial(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        pauses = RetryPauses(REDIAL)
        while True:
            dialed_us = monotonic_us()
            end = await self._dial_once(PeerId(address), host.strip("[]"), int(port))
            if self._last_logged.get(address) != end.reason:
                self._last_logged[address] = end.reason
                level = logging.ERROR if end.fault == SessionFault.UNFIT else logging.WARNING
                log.log(level, "no session with %s: %s; calling again", address, end.reason)
            lasted_us = monotonic_us() - dialed_us if end.was is SessionStage.OPEN else 0
            await asyncio.sleep(pauses.after(lasted_us, random.uniform(0.5, 1.0)) / 1e6)  # noqa: S311

    async def _dial_once(self, peer: PeerId, host: str, port: int) -> SessionEnd:
        session = PeerConnection(self._local, self, peer)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.create_connection(lambda: session.connection, host, port)
        except (OSError, TimeoutError) as error:
            return SessionEnd(SessionStage.UNPROVED, None, str(error) or "no answer")
        try:
            return await asyncio.shield(session.over)
        finally:
            session.close(None, "it is not one of our peers any more")  # when this task was cancelled

    # ── events of the sessions ───────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, session: PeerConnection) -> None:
        if session.dialed is not None:
            return
        if len(self._unregistered) >= UNREGISTERED_MAX:
            # Unproved connections must not keep out one that holds the key: a handshake takes milliseconds.
            silent = (one for one in self._unregistered if one.stage is SessionStage.UNPROVED)
            oldest = next(silent, next(iter(self._unregistered)))
            oldest.close(ConnectionFault.TOO_MANY, "too many connections that have not registered")
        self._unregistered[session] = None

    def transfers_for(self, session: PeerConnection) -> tuple[str, ...]:
        return self._transfers.offer(session.peer, session.connection.same_host)

    def unfit(self, session: PeerConnection, register: Register) -> str | None:
        reason = unfit_reason(self._local.registration(), register)
        if reason is not None:
            return reason
        if len(self._sessions) >= SESSIONS_MAX and session.peer not in self._sessions:
            return f"{SESSIONS_MAX} peers have sessions already"
        return self._transfers.accept(session.peer, register.transfers)

    def opened(self, session: PeerConnection) -> None:
        self._unregistered.pop(session, None)
        before, self._sessions[session.peer] = self._sessions.get(session.peer), session
        if before is not None:
            before.close(None, "it has opened another session")
        self._last_logged.pop(session.peer, None)
        log.info("session with %s", session.peer)
        self._known.began(session.number)
        self._inbox.put(PeerOpened(session.peer))

    def received(self, session: PeerConnection, message: PeerMessage) -> bool:
        if len(self._inbox) >= INBOX_MAX:
            return False
        self._inbox.put(Heard(session.peer, message))
        return True

    def ended(self, session: PeerConnection, end: SessionEnd) -> None:
        if end.fault is not None:
            self.refused[end.fault] += 1
        if end.was is SessionStage.OPEN:
            if self._sessions.get(session.peer) is session:
                del self._sessions[session.peer]
                self._transfers.forget(session.peer)
            self._known.ended()
            self._inbox.put(PeerLost(session.peer, end.reason))
        self._unregistered.pop(session, None)
        if session.dialed is None and (end.fault is not None or end.was is SessionStage.OPEN):
            self._log_end(session, end)

    def _log_end(self, session: PeerConnection, end: SessionEnd) -> None:
        """Log the end of an accepted connection; each reason at most once per SAME_REFUSAL_S."""
        if end.was is SessionStage.OPEN:
            level = logging.INFO if end.fault is None else logging.WARNING
            log.log(level, "session with %s is over: %s", session.peer, end.reason)
            return
        key, now_s = f"{end.fault} {end.reason}" if end.fault == SessionFault.UNFIT else str(end.fault), time.monotonic()
        if now_s - self._logged_s.get(key, -SAME_REFUSAL_S) >= SAME_REFUSAL_S:
            if len(self._logged_s) >= UNREGISTERED_MAX:
                self._logged_s.clear()
            self._logged_s[key] = now_s
            log.error("refused a connection from %s: %s", session.connection.where, end.reason)
