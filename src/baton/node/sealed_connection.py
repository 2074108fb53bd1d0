"""A sealed TCP connection between two holders of the cluster key: whole frames, in order, or the end with a reason.

    SealedConnection  one connection, from handshake to frames both ways, and its end; for both sides
    Listener          accepts connections, bounds those that have proved nothing, counts and logs refusals
    connect           one attempt to connect, until the connection ends

Owns the socket and its unsent data. Promises that no frame is passed on before the other side has proved that it holds the
key, that an opened connection ends exactly once, and that an invalid frame ends the connection and nothing else. Everything
is bounded: a frame, the data that the other side leaves unread, the time of a handshake or of a graceful close. Runs on the
caller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol, cast

from baton.wire.engine_messages import FRAME_BYTES_MAX, WireError
from baton.wire.seal import NONCE_BYTES, OVERHEAD_BYTES, Seal, SealBroken

log = logging.getLogger("baton.line")

HANDSHAKE_S = 5.0
CLOSE_S = 1.0
"""Seconds that a graceful close waits for the other side to read."""
UNREAD_BYTES_MAX = FRAME_BYTES_MAX + (64 << 20)
"""Bytes written and not read by the other side; more than any one frame."""
UNACKNOWLEDGED_MS = 3000
"""Milliseconds without a TCP acknowledgement after which the other machine counts as gone."""
UNPROVED_MAX = 64
"""Accepted connections that have proved nothing yet; beyond it the oldest is closed."""
CONNECTIONS_MAX = 256
SAME_REFUSAL_S = 60.0
"""Seconds between two log lines of a refusal for the same reason."""


class ConnectionFault(StrEnum):
    """Why a connection ended abnormally, besides the faults of the seal."""

    MALFORMED = "malformed_message"
    TOO_LATE = "too_late"
    """It did not prove itself in time."""
    NOT_READING = "not_reading"
    TOO_MANY = "too_many"


class ConnectionStage(Enum):
    UNPROVED = "stranger"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    was: ConnectionStage
    fault: str | None
    """A SealFault or ConnectionFault, where the other side is at fault."""
    reason: str


class ConnectionEvents(Protocol):
    """Receives the events of connections."""

    def connected(self, connection: SealedConnection) -> None:
        """Connected; nothing is proved yet."""

    def opened(self, connection: SealedConnection) -> None:
        """Both sides have proved themselves: `connection.peer` is the other's name, and frames may be sent."""

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        """A WireError raised here ends the connection."""

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        """Called once for each connection that `connected` was called for; nothing follows."""


class SealedConnection(asyncio.Protocol):
    def __init__(
        self,
        key: bytes,
        name: str,
        events: ConnectionEvents,
        *,
        connects_to: str | None = None,
        handshake_s: float = HANDSHAKE_S,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        """`connects_to` is the address we connect to, for the log; None when we accept."""
        make = Seal.accept if connects_to is None else Seal.connect
        self._seal = make(key, name, secrets.token_bytes(NONCE_BYTES), frame_bytes_max)
        self._frame_bytes_max = frame_bytes_max
        self._events = events
        self._handshake_s = handshake_s
        self._transport: asyncio.Transport | None = None
        self._is_initiator = connects_to is not None
        self.stage = ConnectionStage.UNPROVED
        self.where = connects_to or ""
        """For the log: the remote address, or the one we connect to."""
        self.same_host = False
        self.over: asyncio.Future[ConnectionEnd] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        """Set when the socket is closed; after a graceful close that is later than `over`."""

    @property
    def peer(self) -> str:
        """The name of the other side, once it has proved that it holds the key."""
        return self._seal.peer_name

    # ── called by the event loop ─────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Always a stream transport. Transports of other event loops are not of asyncio's classes.
        self._transport = transport = cast("asyncio.Transport", transport)
        _set_options(transport.get_extra_info("socket"))
        ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self.same_host = bool(ours and theirs and ours[0] == theirs[0])
        if not self._is_initiator and theirs:
            self.where = f"{theirs[0]}:{theirs[1]}"
        asyncio.get_running_loop().call_later(self._handshake_s, self._on_handshake_timeout)
        self._events.connected(self)
        self._write(self._seal.outgoing())

    def data_received(self, data: bytes) -> None:
        if self.stage is ConnectionStage.OVER:
            return
        try:
            frames = self._seal.take(data)
            self._write(self._seal.outgoing())
            if self.stage is ConnectionStage.UNPROVED and self._seal.is_open:
                self.stage = ConnectionStage.OPEN
                self._events.opened(self)
            for frame in frames:
                if self.stage is ConnectionStage.OPEN:  # an earlier frame may have ended it
                    self._events.received(self, frame)
        except SealBroken as broken:
            self.abort(broken.fault, str(broken))
        except WireError as error:
            self.abort(ConnectionFault.MALFORMED, str(error))

    def connection_lost(self, error: Exception | None) -> None:
        reason = "the connection was closed" if error is None else f"the connection broke: {error}"
        if self.stage is ConnectionStage.UNPROVED:
            reason += " before the handshake was over (is that the right port, and the cluster key the same on both sides?)"
        self.abort(None, reason)
        self.closed.set()

    # ── sending and closing ──────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, frames: Iterable[bytes]) -> None:
        """Write these frames at once, after all earlier ones; does nothing on a connection that is over.

        Raises WireError where one of them is too large; none is sent then.
        """
        if self.stage is not ConnectionStage.OPEN:
            return
        frames = list(frames)
        for frame in frames:
            if len(frame) > self._frame_bytes_max:  # before any is sealed: a numbered frame must be sent
                raise WireError(f"a frame of {len(frame)} bytes is over the limit of {self._frame_bytes_max}")
        self._write(b"".join(map(self._seal.seal, frames)))

    def abort(self, fault: str | None, reason: str) -> None:
        """Close at once; written data may be lost."""
        if self._finish(fault, reason) and self._transport is not None:
            self._transport.abort()

    def close(self, reason: str, fault: str | None = None) -> None:
        """Close after the other side has read what was written, or after PARTING_S. Nothing more is received."""
        transport = self._transport
        if self._finish(fault, reason) and transport is not None:
            # Half-close: closing with unread input would make the other side discard our last frames.
            if transport.can_write_eof() and not transport.is_closing():
                transport.write_eof()
            asyncio.get_running_loop().call_later(CLOSE_S, transport.abort)

    def _finish(self, fault: str | None, reason: str) -> bool:
        if self.stage is ConnectionStage.OVER:
            return False
        end = ConnectionEnd(self.stage, fault, reason)
        self.stage = ConnectionStage.OVER
        self._events.ended(self, end)
        self.over.set_result(end)
        return True

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and self.stage is not ConnectionStage.OVER:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX + OVERHEAD_BYTES:
                self.abort(ConnectionFault.NOT_READING, f"it has not read {UNREAD_BYTES_MAX >> 20} MiB")

    def _on_handshake_timeout(self) -> None:
        if self.stage is ConnectionStage.UNPROVED:
            self.abort(ConnectionFault.TOO_LATE, f"it did not prove itself within {self._handshake_s:g} s")


def _set_options(connection: socket.socket) -> None:
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token must not wait for the one before
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


async def connect(connection: SealedConnection, host: str, port: int, connect_s: float) -> ConnectionEnd:
    """Open this connection and wait for its end."""
    try:
        async with asyncio.timeout(connect_s):
            await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
    except (OSError, TimeoutError) as error:
        return ConnectionEnd(ConnectionStage.UNPROVED, None, str(error) or "no answer")
    return await asyncio.shield(connection.over)  # cancelling the wait does not end the connection


class ListenerEvents(Protocol):
    """Receives the events of accepted connections that have opened."""

    def opened(self, connection: SealedConnection) -> None: ...

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        """A WireError raised here ends the connection."""

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        """Called once for each connection that opened."""


class Listener:
    """Accepts connections."""

    def __init__(self, key: bytes, name: str, events: ListenerEvents, handshake_s: float = HANDSHAKE_S) -> None:
        self.refused: Counter[str] = Counter()
        """Connections that ended through the other side's fault, by fault."""
        self._key = key
        self._name = name
        self._events = events
        self._handshake_s = handshake_s
        self._unproved: dict[SealedConnection, None] = {}
        """Connections that have proved nothing, oldest first."""
        self._connections: dict[SealedConnection, None] = {}
        self._server: asyncio.Server | None = None
        self._logged_s: dict[str, float] = {}

    async def open(self, listener: socket.socket) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._new_connection, sock=listener)

    def close(self, reason: str) -> None:
        """Accept no more, and close every connection gracefully."""
        if self._server is not None:
            self._server.close()
        for connection in (*self._unproved, *self._connections):
            connection.close(reason)

    def _new_connection(self) -> SealedConnection:
        return SealedConnection(self._key, self._name, self, handshake_s=self._handshake_s)

    # ── events of the connections ────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, connection: SealedConnection) -> None:
        if len(self._unproved) >= UNPROVED_MAX:
            # Unproved connections must not keep out one that holds the key: a handshake takes milliseconds.
            next(iter(self._unproved)).abort(ConnectionFault.TOO_MANY, "too many connections that have proved nothing")
        self._unproved[connection] = None

    def opened(self, connection: SealedConnection) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            connection.abort(ConnectionFault.TOO_MANY, f"{CONNECTIONS_MAX} lines are open already")
            return
        del self._unproved[connection]
        self._connections[connection] = None
        self._events.opened(connection)

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        self._events.received(connection, frame)

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        if end.fault is not None:
            self.refused[end.fault] += 1
            self._log(connection, end)
        self._unproved.pop(connection, None)
        if connection in self._connections:
            del self._connections[connection]
            self._events.ended(connection, end)

    def _log(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        """Log a refusal; each fault at most once per SAME_REFUSAL_S."""
        key, now_s = str(end.fault), time.monotonic()
        if now_s - self._logged_s.get(key, -SAME_REFUSAL_S) >= SAME_REFUSAL_S:
            self._logged_s[key] = now_s
            log.error("refused a connection from %s: %s", connection.where, end.reason)
