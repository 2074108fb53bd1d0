"""A sealed TCP connection between two holders of the cluster key: whole frames, in order, or the end with a reason.

    SealedConnection  one connection, from handshake to frames both ways, and its end; for both sides
    Listener          accepts connections, bounds those that have proved nothing, counts and logs refusals
    connect           one attempt to connect, until the connection ends

Owns the socket and its unsent data; the rules of a connection are those of `wire.sealed_stream`, which is driven here with
asyncio and in the simulator with a simulated network. Promises that no frame is passed on before the other side has proved
that it holds the key, that an opened connection ends exactly once, and that an invalid frame ends the connection and nothing
else. Everything is bounded: a frame, the data that the other side leaves unread, the time of a handshake or of a graceful
close. Runs on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, cast

from baton.node.clock import monotonic_us
from baton.wire.engine_messages import WireError
from baton.wire.seal import NONCE_BYTES, SealSide
from baton.wire.sealed_stream import (
    AcceptedStreams,
    ConnectionEnd,
    ConnectionFault,
    ConnectionStage,
    SealedStream,
    StreamConfig,
)

log = logging.getLogger("baton.line")

STREAM = StreamConfig()
CLOSE_S = 1.0
"""Seconds that a graceful close waits for the other side to read."""
UNACKNOWLEDGED_MS = 3000
"""Milliseconds without a TCP acknowledgement after which the other machine counts as gone."""
SAME_REFUSAL_S = 60.0
"""Seconds between two log lines of a refusal for the same reason."""


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
        config: StreamConfig = STREAM,
    ) -> None:
        """`connects_to` is the address we connect to, for the log; None when we accept."""
        side = SealSide.ACCEPTOR if connects_to is None else SealSide.CONNECTOR
        self._stream = SealedStream(side, key, name, secrets.token_bytes(NONCE_BYTES), config)
        self._events = events
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self._is_over = False
        self._is_initiator = connects_to is not None
        self.where = connects_to or ""
        """For the log: the remote address, or the one we connect to."""
        self.same_host = False
        self.over: asyncio.Future[ConnectionEnd] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        """Set when the socket is closed; after a graceful close that is later than `over`."""

    @property
    def peer(self) -> str:
        """The name of the other side, once it has proved that it holds the key."""
        return self._stream.peer

    def silent_us(self) -> int:
        """Time since bytes of the other side last came."""
        return self._stream.silent_us(monotonic_us())

    # ── called by the event loop ─────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Always a stream transport. Transports of other event loops are not of asyncio's classes.
        self._transport = transport = cast("asyncio.Transport", transport)
        _set_options(transport.get_extra_info("socket"))
        ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self.same_host = bool(ours and theirs and ours[0] == theirs[0])
        if not self._is_initiator and theirs:
            self.where = f"{theirs[0]}:{theirs[1]}"
        self._stream.begin(monotonic_us())
        self._events.connected(self)
        self._write()

    def data_received(self, data: bytes) -> None:
        received = self._stream.receive(data, monotonic_us())
        self._write()
        try:
            if received.opened:
                self._events.opened(self)
            for frame in received.frames:
                if not self._is_over:  # an earlier frame may have ended it
                    self._events.received(self, frame)
        except WireError as error:
            self.abort(ConnectionFault.MALFORMED, str(error))
        if received.end is not None and self._finish(received.end):
            self._abort_transport()

    def connection_lost(self, error: Exception | None) -> None:
        end = self._stream.end_of_stream(None if error is None else str(error))
        if end is not None:
            self._finish(end)
        self.closed.set()

    # ── sending and closing ──────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, frames: Iterable[bytes]) -> None:
        """Write these frames at once, after all earlier ones; does nothing on a connection that is over.

        Raises WireError where one of them is too large; none is sent then.
        """
        if not self._is_over:
            self._stream.send(list(frames), monotonic_us())
            self._write()

    def abort(self, fault: str | None, reason: str) -> None:
        """Close at once; written data may be lost."""
        end = self._stream.end(fault, reason)
        if end is not None and self._finish(end):
            self._abort_transport()

    def close(self, reason: str, fault: str | None = None) -> None:
        """Close after the other side has read what was written, or after CLOSE_S. Nothing more is received."""
        transport, end = self._transport, self._stream.end(fault, reason)
        if end is not None and self._finish(end) and transport is not None:
            # Half-close: closing with unread input would make the other side discard our last frames.
            if transport.can_write_eof() and not transport.is_closing():
                transport.write_eof()
            asyncio.get_running_loop().call_later(CLOSE_S, transport.abort)

    def _finish(self, end: ConnectionEnd) -> bool:
        if self._is_over:
            return False
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._events.ended(self, end)
        self.over.set_result(end)
        return True

    def _abort_transport(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write(self) -> None:
        data, transport = self._stream.output(), self._transport
        if transport is not None and not self._is_over:
            if data:
                transport.write(data)
            end = self._stream.unread(transport.get_write_buffer_size(), monotonic_us())
            if end is not None and self._finish(end):
                transport.abort()
        self._arm()

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arm(self) -> None:
        """A timer that is too early only re-arms itself, so it is moved only for an earlier deadline."""
        deadline_us = self._stream.next_deadline()
        if deadline_us is None or self._is_over or (self._timer is not None and self._timer_us <= deadline_us):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_us = deadline_us
        delay_s = max(0, deadline_us - monotonic_us()) / 1e6
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        end = self._stream.tick(monotonic_us())
        if end is not None and self._finish(end):
            self._abort_transport()
        self._write()


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

    def __init__(self, key: bytes, name: str, events: ListenerEvents, config: StreamConfig = STREAM) -> None:
        self.refused: Counter[str] = Counter()
        """Connections that ended through the other side's fault, by fault."""
        self._key = key
        self._name = name
        self._events = events
        self._config = config
        self._accepted: AcceptedStreams[SealedConnection] = AcceptedStreams()
        self._server: asyncio.Server | None = None
        self._logged_s: dict[str, float] = {}

    async def open(self, listener: socket.socket) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._new_connection, sock=listener)

    def close(self, reason: str) -> None:
        """Accept no more, and close every connection gracefully."""
        if self._server is not None:
            self._server.close()
        for connection in self._accepted:
            connection.close(reason)

    def _new_connection(self) -> SealedConnection:
        return SealedConnection(self._key, self._name, self, config=self._config)

    # ── events of the connections ────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, connection: SealedConnection) -> None:
        oldest = self._accepted.accept(connection)
        if oldest is not None:
            oldest.abort(ConnectionFault.TOO_MANY, "too many connections that have proved nothing")

    def opened(self, connection: SealedConnection) -> None:
        if self._accepted.opened(connection):
            self._events.opened(connection)
        else:
            limit = self._accepted.connections_max
            connection.abort(ConnectionFault.TOO_MANY, f"{limit} connections are open already")

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        self._events.received(connection, frame)

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        if end.fault is not None:
            self.refused[end.fault] += 1
            self._log(connection, end)
        if self._accepted.ended(connection):
            self._events.ended(connection, end)

    def _log(self, connection: SealedConnection, end: ConnectionEnd) -> None:
        """Log a refusal; each fault at most once per SAME_REFUSAL_S."""
        key, now_s = str(end.fault), time.monotonic()
        if now_s - self._logged_s.get(key, -SAME_REFUSAL_S) >= SAME_REFUSAL_S:
            self._logged_s[key] = now_s
            log.error("refused a connection from %s: %s", connection.where, end.reason)
