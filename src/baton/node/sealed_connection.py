"""A sealed TCP connection between two holders of the cluster key: whole frames, in order, or the end with a reason.

    Line    one connection, from strangers to frames both ways, and its end; for whoever calls and for whoever is called
    Door    who is called: lets callers in, keeps those that have proved nothing few, counts and logs who is refused
    call    who calls: one attempt, from connecting to the end

Owns the socket and what of it waits to be written. Promises that no frame is heard before the other side has proved that it
holds the key, that a line which opened ends exactly once, and that whatever is not a true frame in its place ends the line
and nothing else. Everything is bounded: a frame, what the other side leaves unread, the time that a handshake or a parting
takes. What frames mean, the house knows. All of it runs on the caller's event loop.
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
PARTING_S = 1.0
"""How long the last words may take to be read."""
UNREAD_BYTES_MAX = FRAME_BYTES_MAX + (64 << 20)
"""Written and not read by the other side; more than any one frame."""
UNACKNOWLEDGED_MS = 3000
"""Bytes that the other machine has not even taken for so long: it is gone, though nothing says so."""
STRANGERS_MAX = 64
"""Callers that have proved nothing yet; beyond it the oldest goes."""
LINES_MAX = 256
SAME_REFUSAL_S = 60.0
"""A refusal for the same reason is logged so often."""


class ConnectionFault(StrEnum):
    """Why a line ended that should not have, beside the faults of a seal."""

    MALFORMED = "malformed_message"
    TOO_LATE = "too_late"
    """It did not prove itself in time."""
    NOT_READING = "not_reading"
    TOO_MANY = "too_many"


class ConnectionStage(Enum):
    STRANGER = "stranger"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    was: ConnectionStage
    fault: str | None
    """Of SealFault or ConnectionFault, where the other side is to blame."""
    reason: str


class ConnectionEvents(Protocol):
    """Where lines lead: told what becomes of each."""

    def arrived(self, line: SealedConnection) -> None:
        """Its connection is there; nothing is proved yet."""

    def opened(self, line: SealedConnection) -> None:
        """Both sides have proved themselves; `line.peer` is what the other calls itself, and frames may be sent."""

    def heard(self, line: SealedConnection, frame: bytes) -> None:
        """WireError ends the line."""

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None:
        """Once, for each line that arrived. Nothing of it is heard afterwards."""


class SealedConnection(asyncio.Protocol):
    def __init__(
        self,
        key: bytes,
        name: str,
        house: ConnectionEvents,
        *,
        calls: str | None = None,
        handshake_s: float = HANDSHAKE_S,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        """`calls` is whom we call, for the log; None when we are called."""
        make = Seal.accept if calls is None else Seal.connect
        self._seal = make(key, name, secrets.token_bytes(NONCE_BYTES), frame_bytes_max)
        self._frame_bytes_max = frame_bytes_max
        self._house = house
        self._handshake_s = handshake_s
        self._transport: asyncio.Transport | None = None
        self._is_ours = calls is not None
        self.stage = ConnectionStage.STRANGER
        self.where = calls or ""
        """For the log: from where, or whom we call."""
        self.same_host = False
        self.over: asyncio.Future[ConnectionEnd] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        """Set when the connection is closed, last words included: after a parting that is later than `over`."""

    @property
    def peer(self) -> str:
        """The name of the other side, once it has proved that it holds the key."""
        return self._seal.peer_name

    # ── the event loop calls ─────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Always a stream: we are made for nothing else. Transports of other event loops are of no class of asyncio's.
        self._transport = transport = cast("asyncio.Transport", transport)
        _set_options(transport.get_extra_info("socket"))
        ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self.same_host = bool(ours and theirs and ours[0] == theirs[0])
        if not self._is_ours and theirs:
            self.where = f"{theirs[0]}:{theirs[1]}"
        asyncio.get_running_loop().call_later(self._handshake_s, self._demand_proof)
        self._house.arrived(self)
        self._write(self._seal.outgoing())

    def data_received(self, data: bytes) -> None:
        if self.stage is ConnectionStage.OVER:
            return
        try:
            frames = self._seal.take(data)
            self._write(self._seal.outgoing())
            if self.stage is ConnectionStage.STRANGER and self._seal.is_open:
                self.stage = ConnectionStage.OPEN
                self._house.opened(self)
            for frame in frames:
                if self.stage is ConnectionStage.OPEN:  # the frame before may have ended it
                    self._house.heard(self, frame)
        except SealBroken as broken:
            self.end(broken.fault, str(broken))
        except WireError as error:
            self.end(ConnectionFault.MALFORMED, str(error))

    def connection_lost(self, error: Exception | None) -> None:
        reason = "the connection was closed" if error is None else f"the connection broke: {error}"
        if self.stage is ConnectionStage.STRANGER:
            reason += " before the handshake was over (is that the right port, and the cluster key the same on both sides?)"
        self.end(None, reason)
        self.gone.set()

    # ── what we do ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, frames: Iterable[bytes]) -> None:
        """Write these in one go, after all that was sent before; on a line that is over, nothing.

        WireError: one of them is too big, and none was sent.
        """
        if self.stage is not ConnectionStage.OPEN:
            return
        frames = list(frames)
        for frame in frames:
            if len(frame) > self._frame_bytes_max:  # before any is sealed: what has a number must be sent
                raise WireError(f"a frame of {len(frame)} bytes is over the limit of {self._frame_bytes_max}")
        self._write(b"".join(map(self._seal.seal, frames)))

    def end(self, fault: str | None, reason: str) -> None:
        """Hang up at once; what was written may be lost."""
        if self._finish(fault, reason) and self._transport is not None:
            self._transport.abort()

    def part(self, reason: str, fault: str | None = None) -> None:
        """Hang up after the other side has read what was written, if it does so soon. Nothing more is heard."""
        transport = self._transport
        if self._finish(fault, reason) and transport is not None:
            # Half of it stays open: closing with something unread would have the last words thrown away at the other end.
            if transport.can_write_eof() and not transport.is_closing():
                transport.write_eof()
            asyncio.get_running_loop().call_later(PARTING_S, transport.abort)

    def _finish(self, fault: str | None, reason: str) -> bool:
        if self.stage is ConnectionStage.OVER:
            return False
        end = ConnectionEnd(self.stage, fault, reason)
        self.stage = ConnectionStage.OVER
        self._house.ended(self, end)
        self.over.set_result(end)
        return True

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and self.stage is not ConnectionStage.OVER:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX + OVERHEAD_BYTES:
                self.end(ConnectionFault.NOT_READING, f"it has not read {UNREAD_BYTES_MAX >> 20} MiB")

    def _demand_proof(self) -> None:
        if self.stage is ConnectionStage.STRANGER:
            self.end(ConnectionFault.TOO_LATE, f"it did not prove itself within {self._handshake_s:g} s")


def _set_options(connection: socket.socket) -> None:
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token must not wait for the one before
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


async def call(line: SealedConnection, host: str, port: int, connect_s: float) -> ConnectionEnd:
    """Connect a line that calls, and wait for its end."""
    try:
        async with asyncio.timeout(connect_s):
            await asyncio.get_running_loop().create_connection(lambda: line, host, port)
    except (OSError, TimeoutError) as error:
        return ConnectionEnd(ConnectionStage.STRANGER, None, str(error) or "no answer")
    return await asyncio.shield(line.over)  # whoever no longer waits has not ended it


class ListenerEvents(Protocol):
    """Who lives behind a door: hears of lines that opened, and of no others."""

    def opened(self, line: SealedConnection) -> None: ...

    def heard(self, line: SealedConnection, frame: bytes) -> None:
        """WireError ends the line."""

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None:
        """Once, for each line that opened."""


class Listener:
    """Where callers come in."""

    def __init__(self, key: bytes, name: str, guests: ListenerEvents, handshake_s: float = HANDSHAKE_S) -> None:
        self.refused: Counter[str] = Counter()
        """Lines that ended through the other side's fault, by fault."""
        self._key = key
        self._name = name
        self._guests = guests
        self._handshake_s = handshake_s
        self._strangers: dict[SealedConnection, None] = {}
        """The oldest first."""
        self._lines: dict[SealedConnection, None] = {}
        self._server: asyncio.Server | None = None
        self._logged_s: dict[str, float] = {}

    async def open(self, listener: socket.socket) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._line, sock=listener)

    def close(self, reason: str) -> None:
        """Let nobody in any more, and part from everybody."""
        if self._server is not None:
            self._server.close()
        for line in (*self._strangers, *self._lines):
            line.part(reason)

    def _line(self) -> SealedConnection:
        return SealedConnection(self._key, self._name, self, handshake_s=self._handshake_s)

    # ── the lines' house ─────────────────────────────────────────────────────────────────────────────────────────────────

    def arrived(self, line: SealedConnection) -> None:
        if len(self._strangers) >= STRANGERS_MAX:
            # Those who only wait must not keep out one that holds the key: its handshake is a matter of milliseconds.
            next(iter(self._strangers)).end(ConnectionFault.TOO_MANY, "too many connections that have proved nothing")
        self._strangers[line] = None

    def opened(self, line: SealedConnection) -> None:
        if len(self._lines) >= LINES_MAX:
            line.end(ConnectionFault.TOO_MANY, f"{LINES_MAX} lines are open already")
            return
        del self._strangers[line]
        self._lines[line] = None
        self._guests.opened(line)

    def heard(self, line: SealedConnection, frame: bytes) -> None:
        self._guests.heard(line, frame)

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None:
        if end.fault is not None:
            self.refused[end.fault] += 1
            self._log(line, end)
        self._strangers.pop(line, None)
        if line in self._lines:
            del self._lines[line]
            self._guests.ended(line, end)

    def _log(self, line: SealedConnection, end: ConnectionEnd) -> None:
        """A stranger can come often, so each fault is logged now and then only."""
        key, now_s = str(end.fault), time.monotonic()
        if now_s - self._logged_s.get(key, -SAME_REFUSAL_S) >= SAME_REFUSAL_S:
            self._logged_s[key] = now_s
            log.error("refused a connection from %s: %s", line.where, end.reason)
