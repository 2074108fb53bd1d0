"""Lines: the connections between two simulated processes that carry frames of messages.

Two kinds with one interface; a world uses one of them. *StreamLines* are the production `wire.sealed_stream` over the
simulated network: handshake, seal, deadlines and all; a connection may end, and then the side that dialed connects again
after the pauses of the production `wire.retry_pauses`. *Pipes* are for benchmarks of many requests only, where a run has no
faults and each event costs: frames arrive in order after a delay, at the cost of one event per frame.

Each end calls its owner: `opened`, `took` with the frames that arrived, and `lost` with the reason.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.sim.faults import Fault
from baton.sim.law_names import LINE_BOUND, SILENCE_NOTICED, STRANGERS, WHOLE_FRAMES, LawBroken
from baton.sim.network import SimulatedNetwork, Socket
from baton.sim.world import Alarm, Host
from baton.wire.retry_pauses import RetryConfig, RetryPauses
from baton.wire.seal import NONCE_BYTES, OVERHEAD_BYTES, SealSide
from baton.wire.sealed_stream import (
    UNREAD_SHARE,
    AcceptedStreams,
    ConnectionEnd,
    ConnectionFault,
    ConnectionStage,
    SealedStream,
    StreamConfig,
)

UNPROVED_MAX, CONNECTIONS_MAX = 8, 32
"""Fewer than in production, so that worlds reach them."""


class Owner(Protocol):
    """The process at one end of a line."""

    def opened(self) -> None: ...

    def lost(self, reason: str) -> None: ...

    def took(self, frames: list[bytes]) -> None:
        """Frames arrived, in order. Also called with none when the line may have room again."""


class LineEndpoint(Protocol):
    """One end of a line, as its owner holds it."""

    wanted: bool
    """Whether an end that dials and has lost its session connects again."""

    @property
    def session(self) -> int | None:
        """The number of the open session, the same at both ends."""

    @property
    def peer(self) -> str:
        """The name of the other end, once there was a session."""

    @property
    def is_full(self) -> bool:
        """Whether an owner that can wait should: the other end has not read what was sent."""

    @property
    def undelivered(self) -> int:
        """What the other end has not read, in bytes or frames."""

    @property
    def silent_us(self) -> int:
        """Time since bytes of the other end last came in this session; 0 without one."""

    def open(self) -> None:
        """Only for an end that dials."""

    def close(self, reason: str) -> None:
        """End the session after what was sent, without calling the owner. An end that dials connects again at `open`."""

    def drop(self, reason: str) -> None:
        """The other end has turned this one away: end the session and call the owner; an end that dials tries again."""

    def send(self, frame: bytes) -> None: ...

    def moves(self) -> Mapping[tuple[Enum, Enum], int]:
        """Transitions that its state machines have taken."""


Accepts = Callable[[LineEndpoint], Owner]
"""Called when another process has connected and proved itself; returns the owner of this end, which is then called."""


class Lines(Protocol):
    """Makes the lines of a world. Each process has a name."""

    def dial(self, host: Host, name: str, peer: str, owner: Owner) -> LineEndpoint: ...

    def listen(self, host: Host, name: str, accepts: Accepts) -> None:
        """For one life of the host."""

    def process_died(self, host: Host, *, machine_lives: bool = False) -> None:
        """Call after each crash of a host. `machine_lives`: its machine says so to all that it was connected to."""


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _StreamHolder(Protocol):
    def opened(self, connection: StreamConnection) -> None: ...

    def took(self, connection: StreamConnection, frames: list[bytes]) -> None: ...

    def ended(self, connection: StreamConnection, end: ConnectionEnd) -> None: ...


class StreamConnection:
    """Drives one production SealedStream over one simulated socket, as `node.sealed_connection` does with asyncio."""

    def __init__(self, host: Host, stream: SealedStream, holder: _StreamHolder, fires: str, config: StreamConfig) -> None:
        self.stream = stream
        self.socket: Socket | None = None
        self.is_over = False
        self._is_opened = False
        self.sent: deque[bytes] = deque()
        """Frames that were sent and have not arrived, for the law that they arrive as they are."""
        self._host = host
        self._holder = holder
        self._fires = fires
        self._config = config
        self._written_bytes = 0
        self._crowded: tuple[int, int] | None = None
        """Since when more than the limit is unread, and what the other end had read then, for the law."""
        self._silent_us = config.silent_us
        self._heard_us = 0
        self._alarm = Alarm(host, self._tick)

    # ── called by the network ────────────────────────────────────────────────────────────────────────────────────────────

    def connected(self) -> None:
        self.stream.begin(self._host.world.now_us)
        self._write()

    def received(self, data: bytes) -> None:
        self._heard_us = self._host.world.now_us
        opened, frames, end = self.stream.receive(data, self._host.world.now_us)
        self._write()
        if opened:
            self._is_opened = True
            if self.socket is not None and self.socket.is_hostile:
                raise LawBroken(STRANGERS, f"{self._fires} opened a connection of a process without the key")
            self._holder.opened(self)
        if frames:
            self._compare(frames)
            if not self.is_over:
                self._holder.took(self, frames)
        if end is not None:
            self._finish(end)

    def ended(self, error: str | None) -> None:
        end = self.stream.end_of_stream(error)
        if end is not None:
            self._finish(end)

    def has_room(self) -> None:
        if not self.is_over:
            self._holder.took(self, [])

    # ── for the holder ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_open(self) -> bool:
        return self._is_opened and not self.is_over

    @property
    def unread(self) -> int:
        return 0 if self.socket is None else self.socket.unread

    def send(self, frame: bytes) -> None:
        if self.is_open:
            self.stream.send((frame,), self._host.world.now_us)
            self.sent.append(frame)
            self._write()

    def close(self, fault: str | None, reason: str) -> ConnectionEnd | None:
        """End it after what was sent. The holder is not called."""
        end = self.stream.end(fault, reason)
        if end is not None:
            self.is_over = True
            self._alarm.set(None)
            if self.socket is not None:
                self.socket.close()
        return end

    def abort(self, fault: str | None, reason: str) -> None:
        end = self.stream.end(fault, reason)
        if end is not None:
            self._finish(end)

    def _finish(self, end: ConnectionEnd) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._alarm.set(None)
        if self.socket is not None:
            self.socket.abort()
        self._holder.ended(self, end)

    def _write(self) -> None:
        socket = self.socket
        if socket is None or self.is_over:
            return
        data = self.stream.output()
        if data:
            socket.write(data)
            self._written_bytes += len(data)
        end = self.stream.unread(socket.unread, self._host.world.now_us)
        if end is not None:
            self._host.world.fire(Fault.NOT_READING, self._fires)
            self._host.after(0, self._finish, end)  # not inside the call of the owner that wrote
        elif self.stream.stage is not ConnectionStage.OVER:  # which it is until that call
            self._check_unread(socket.unread)
        self._alarm.set(self.stream.next_deadline())

    def _check_unread(self, unread: int) -> None:
        limit, now_us = self._config.unread_bytes_max, self._host.world.now_us
        read = self._written_bytes - unread
        if unread <= limit + OVERHEAD_BYTES:
            self._crowded = None
        elif self._crowded is None or read - self._crowded[1] > limit // UNREAD_SHARE:
            self._crowded = now_us, read
        elif now_us - self._crowded[0] >= self._config.unread_us:
            raise LawBroken(LINE_BOUND, f"{self._fires} keeps {unread} bytes that are not read")

    def _tick(self) -> None:
        deadline_us = self.stream.next_deadline()
        if deadline_us is None or deadline_us > self._host.world.now_us:
            self._alarm.set(deadline_us)
            return
        now_us = self._host.world.now_us
        end = self.stream.tick(now_us)
        if end is not None:
            self._finish(end)
            return
        if self.is_open and self._silent_us is not None and now_us - self._heard_us >= self._silent_us:
            raise LawBroken(SILENCE_NOTICED, f"{self._fires} has heard nothing since {self._heard_us}, and goes on")
        self._write()

    def _compare(self, frames: list[bytes]) -> None:
        other = None if self.socket is None else self.socket.other.user
        if isinstance(other, StreamConnection):
            for frame in frames:
                if not other.sent or other.sent.popleft() != frame:
                    raise LawBroken(WHOLE_FRAMES, f"{self._fires} received {frame[:40]!r}, which was not sent next")


class _StreamLine:
    """One end of a line over streams; what ends that dial and ends that accept have in common."""

    def __init__(self, lines: StreamLines, host: Host, name: str, peer: str) -> None:
        self.wanted = False
        self.peer = peer
        self.former: Counter[tuple[Enum, Enum]] = Counter()
        """Transitions of connections that are over."""
        self._lines = lines
        self._host = host
        self._name = name
        self._connection: StreamConnection | None = None
        self._owner: Owner | None = None

    @property
    def session(self) -> int | None:
        connection = self._connection
        if connection is None or connection.socket is None or not connection.is_open:
            return None
        return connection.socket.number

    @property
    def is_full(self) -> bool:
        connection = self._connection
        if connection is None or connection.socket is None or connection.unread < self._lines.network.window_bytes:
            return False
        connection.socket.wait_for_room()
        return True

    @property
    def undelivered(self) -> int:
        return 0 if self._connection is None else self._connection.unread

    @property
    def silent_us(self) -> int:
        return 0 if self._connection is None else self._connection.stream.silent_us(self._host.world.now_us)

    def send(self, frame: bytes) -> None:
        if self._connection is not None:
            self._connection.send(frame)

    def moves(self) -> Mapping[tuple[Enum, Enum], int]:
        now = Counter[tuple[Enum, Enum]](self.former)
        if self._connection is not None:
            now.update(self._connection.stream.moves())
        return now

    def close(self, reason: str) -> None:
        self.wanted = False
        self._leave(reason)

    def took(self, _connection: StreamConnection, frames: list[bytes]) -> None:
        if self._owner is not None:
            self._owner.took(frames)

    def _leave(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._note(f"closes: {reason}")
            connection.close(None, reason)
            self.former.update(connection.stream.moves())

    def _note(self, what: str) -> None:
        if self._host.world.keeps_notes:
            self._host.world.note(f"{self._name}~{self.peer}", what)


class DialedLine(_StreamLine):
    """The end that connects, and connects again."""

    def __init__(self, lines: StreamLines, host: Host, name: str, peer: str, owner: Owner) -> None:
        super().__init__(lines, host, name, peer)
        self._owner = owner
        self._pauses = RetryPauses(lines.config.retry)
        self._draw = host.world.stream(f"retries of {name} life {host.lives} to {peer}").uniform
        self._dialed_us = 0
        self._attempt = 0

    def open(self) -> None:
        self.wanted = True
        if self._connection is None:
            self._attempt += 1
            self._dial(self._attempt)

    def drop(self, reason: str) -> None:
        was_open = self.session is not None
        self._leave(reason)
        if was_open and self._owner is not None:
            self._owner.lost(reason)
        self._retry(rejected=True)

    def opened(self, _connection: StreamConnection) -> None:
        self._note(f"session {self.session} opened")
        if self._owner is not None:
            self._owner.opened()

    def ended(self, connection: StreamConnection, end: ConnectionEnd) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self.former.update(connection.stream.moves())
        self._note(f"has no session: {end.reason}")
        self._retry(rejected=False)
        if end.was is ConnectionStage.OPEN and self._owner is not None:
            self._owner.lost(end.reason)

    def _retry(self, *, rejected: bool) -> None:
        self._attempt += 1
        lasted_us = self._host.world.now_us - self._dialed_us
        pause_us = self._pauses.after(lasted_us, self._draw(0.5, 1.0), rejected=rejected)
        self._host.after(pause_us, self._dial, self._attempt)

    def _dial(self, attempt: int) -> None:
        if not self.wanted or attempt != self._attempt or self._connection is not None:
            return
        self._dialed_us = self._host.world.now_us
        self._connection = connection = self._lines.connection(self._host, SealSide.CONNECTOR, self._name, self)
        connection.socket = self._lines.network.connect(self._name, self.peer, self._host, connection)


class AcceptedLine(_StreamLine):
    """The end that was connected to; it has one session."""

    def __init__(self, lines: StreamLines, host: Host, name: str, listener: _StreamListener) -> None:
        super().__init__(lines, host, name, "?")
        self._listener = listener
        self._connection = lines.connection(host, SealSide.ACCEPTOR, name, self)

    def begin(self, socket: Socket) -> StreamConnection:
        connection = self._connection
        if connection is None:
            raise RuntimeError("an accepted line begins once")
        connection.socket = socket
        return connection

    def refuse(self, fault: ConnectionFault, reason: str) -> None:
        if self._connection is not None:
            self._connection.abort(fault, reason)

    def open(self) -> None:
        raise RuntimeError("an end that accepts does not dial")

    def drop(self, reason: str) -> None:
        was_open = self.session is not None
        self.close(reason)
        if was_open and self._owner is not None:
            self._owner.lost(reason)

    def close(self, reason: str) -> None:
        super().close(reason)
        self._listener.ended(self)

    def opened(self, connection: StreamConnection) -> None:
        self.peer = connection.stream.peer
        if self._listener.may_open(self):
            self._note(f"session {self.session} opened")
            self._owner = owner = self._listener.accepts(self)
            owner.opened()
        else:
            connection.abort(ConnectionFault.TOO_MANY, "too many connections are open already")

    def ended(self, connection: StreamConnection, end: ConnectionEnd) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self.former.update(connection.stream.moves())
        self._note(f"has no session: {end.reason}")
        self._listener.ended(self)
        if end.was is ConnectionStage.OPEN and self._owner is not None:
            self._owner.lost(end.reason)


class _StreamListener:
    """One listening process; bounds its connections as the production Listener does."""

    def __init__(self, lines: StreamLines, host: Host, name: str, accepts: Accepts) -> None:
        self.accepts = accepts
        self._lines = lines
        self._host = host
        self._name = name
        self._accepted: AcceptedStreams[AcceptedLine] = AcceptedStreams(UNPROVED_MAX, CONNECTIONS_MAX)

    def accept(self, socket: Socket) -> StreamConnection:
        line = AcceptedLine(self._lines, self._host, self._name, self)
        self._lines.accepted.append(line)
        oldest = self._accepted.accept(line)
        if oldest is not None:
            oldest.refuse(ConnectionFault.TOO_MANY, "too many connections that have proved nothing")
        return line.begin(socket)

    def may_open(self, line: AcceptedLine) -> bool:
        return self._accepted.opened(line)

    def ended(self, line: AcceptedLine) -> None:
        self._accepted.ended(line)


@dataclass(frozen=True, slots=True)
class LineConfig:
    """Of the lines of one kind, as the processes of a deployment are configured."""

    dials: StreamConfig
    """Of the ends that connect."""
    accepts: StreamConfig
    retry: RetryConfig


class StreamLines:
    """Lines over the simulated network, between holders of one cluster key."""

    def __init__(self, network: SimulatedNetwork, key: bytes, config: LineConfig) -> None:
        self.network = network
        self.key = key
        self.config = config
        self.accepted: list[AcceptedLine] = []
        """Of all listeners and lives."""
        self._nonces: dict[str, random.Random] = {}

    def dial(self, host: Host, name: str, peer: str, owner: Owner) -> DialedLine:
        return DialedLine(self, host, name, peer, owner)

    def listen(self, host: Host, name: str, accepts: Accepts) -> None:
        self.network.listen(name, host, _StreamListener(self, host, name, accepts).accept)

    def process_died(self, host: Host, *, machine_lives: bool = False) -> None:
        self.network.process_died(host, machine_lives=machine_lives)

    def connection(self, host: Host, side: SealSide, name: str, holder: _StreamHolder) -> StreamConnection:
        nonces = self._nonces.get(name)
        if nonces is None:
            nonces = self._nonces[name] = host.world.stream(f"nonces of {name}")
        config = self.config.dials if side is SealSide.CONNECTOR else self.config.accepts
        stream = SealedStream(side, self.key, name, nonces.randbytes(NONCE_BYTES), config)
        return StreamConnection(host, stream, holder, name, config)

    def moves(self) -> Counter[tuple[Enum, Enum]]:
        """Of all ends that accepted."""
        total: Counter[tuple[Enum, Enum]] = Counter()
        for line in self.accepted:
            total.update(line.moves())
        return total


# ── pipes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PipeEnd:
    def __init__(self, pipes: Pipes, host: Host, name: str, peer: str, owner: Owner | None) -> None:
        """`owner`: of an end that dials; the other end gets its owner when it accepts."""
        self.name = name
        self.wanted = False
        self.session: int | None = None
        self.is_full = False
        self.undelivered = self.silent_us = 0
        self.peer = peer
        self.other: PipeEnd | None = None
        self._pipes = pipes
        self._host = host
        self._owner = owner

    def moves(self) -> Mapping[tuple[Enum, Enum], int]:
        return {}

    def open(self) -> None:
        self.wanted = True
        self._host.after(0, self._connect)

    def _connect(self) -> None:
        """Open a session if the other process listens; its end is called first."""
        if not self.wanted or self.session is not None:
            return
        listener = self._pipes.listener(self.peer)
        if listener is None:
            self._pipes.waiting.setdefault(self.peer, []).append(self)
            return
        host, accepts = listener
        self.other = other = PipeEnd(self._pipes, host, self.peer, self.name, None)
        other.other, session = self, self._pipes.next_session()
        self.session = other.session = session
        other.begin(accepts(other))
        if self._owner is not None:
            self.begin(self._owner)

    def listens(self) -> None:
        """The other process listens now."""
        self._host.after(0, self._connect)

    def begin(self, owner: Owner) -> None:
        self._owner = owner
        owner.opened()

    def close(self, reason: str) -> None:
        session, self.session, self.wanted = self.session, None, False
        if session is not None and self.other is not None:
            self.other._host.after(self._pipes.delay_us, self.other.end, session, reason)

    def drop(self, reason: str) -> None:
        session = self.session
        self.close(reason)
        if session is not None and self._owner is not None:
            self._owner.lost(reason)

    def end(self, session: int | None, reason: str) -> None:
        if session is not None and session == self.session:
            self.session = None
            if self._owner is not None:
                self._owner.lost(reason)

    def send(self, frame: bytes) -> None:
        if self.other is not None:
            self.other._host.after(self._pipes.delay_us, self.other.take, self.session, frame)

    def take(self, session: int | None, frame: bytes) -> None:
        if session == self.session and self._owner is not None:
            self._owner.took([frame])


class Pipes:
    """Lines without faults: frames arrive `delay_us` later. Both ends live as long as the world.

    They save benchmarks of a hundred thousand requests the cost of sealing; no law is checked on them.
    """

    def __init__(self, delay_us: int) -> None:
        self.delay_us = delay_us
        self.waiting: dict[str, list[PipeEnd]] = {}
        """By the name of a process that does not listen yet: ends that dial it."""
        self._listeners: dict[str, tuple[Host, Accepts]] = {}
        self._sessions = 0

    def dial(self, host: Host, name: str, peer: str, owner: Owner) -> PipeEnd:
        return PipeEnd(self, host, name, peer, owner)

    def listen(self, host: Host, name: str, accepts: Accepts) -> None:
        self._listeners[name] = (host, accepts)
        for end in self.waiting.pop(name, ()):
            end.listens()

    def process_died(self, host: Host, *, machine_lives: bool = False) -> None:
        """Nobody dies where there are no faults."""

    def listener(self, name: str) -> tuple[Host, Accepts] | None:
        return self._listeners.get(name)

    def next_session(self) -> int:
        self._sessions += 1
        return self._sessions
