"""The simulated network between processes: TCP-like connections with delays, back-pressure and faults.

Owns connections and the bytes between a write and their reading. Without faults, the bytes of one direction arrive complete
and in order after a delay with jitter; those of different connections in any order. Bytes written at one time travel as one
event. The faults are those that TCP leaves to its users: a connection is reset or cut in the middle of its bytes, and what
was on the way is lost; it stalls; a process dies or a machine vanishes and nobody says so; a bit is flipped that TCP's
checksum does not see; an attempt to connect fails; somebody in between swallows one direction. A machine that does not
acknowledge is retried until `unacknowledged_us` have passed, then the connection breaks (TCP_USER_TIMEOUT). Every fault is
counted and noted in the story.

    Socket      one end: `write`, `close` (after what was written), `abort` (at once), `unread` bytes of what was written
    SocketUser  who holds it: told `connected`, `received`, `ended` and `has_room`, each on its own host

Each pair of processes has a random stream for each direction.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.sim.faults import Fault, NetworkRates, flip_bit
from baton.sim.world import Host, World

PROBE_US = 20_000
"""Interval at which a machine repeats what is not acknowledged."""
PIECES_MAX = 4
RECORDED_BYTES_MAX = 1 << 16


class SocketUser(Protocol):
    """The process at one end of a connection."""

    def connected(self) -> None: ...

    def received(self, data: bytes) -> None: ...

    def ended(self, error: str | None) -> None:
        """The other end has closed the connection, or it broke with this error. Nothing follows."""

    def has_room(self) -> None:
        """The other end has read: fewer bytes than the window are unread, and before there were more."""


Accept = Callable[["Socket"], SocketUser]


@dataclass(slots=True)
class _Listener:
    host: Host
    life: int
    accept: Accept


@dataclass(slots=True)
class _Direction:
    """From one process to another, for all their connections."""

    source: str
    target: str
    stream: random.Random
    is_cut: bool = False


class Socket:
    """One end of a connection. Made by the network."""

    def __init__(self, network: SimulatedNetwork, number: int, host: Host, way: _Direction) -> None:
        self.number = number
        """The same at both ends, and of no other connection."""
        self.unread = 0
        """Bytes written here and not read by the other end."""
        self.is_over = False
        self.is_hostile = False
        """Whether a process without the cluster key holds the connecting end."""
        self.recording: list[bytes] | None = None
        """What was written here, where it is recorded."""
        self.way = way
        self.user: SocketUser | None = None
        """None: the connection waits to be accepted."""
        self.host = host
        self.life = host.lives
        self.other: Socket = self
        self.held: list[bytes | None] | None = None
        """Writes that wait while this direction is stalled or cut, None for the end of the stream; None: it is neither."""
        self.stalled = False
        self.swallowed = False
        """Whether somebody in between acknowledges what is written here, and passes nothing on."""
        self.early: list[bytes] = []
        """What came before the connection was accepted."""
        self._network = network
        self._last_us = 0
        """When the last bytes arrive: later ones do not overtake them."""
        self._written_us = -1
        self._batch: list[bytes] = []
        """What was written at `_written_us` and has not arrived."""
        self._waits_for_room = False
        self._probes_since_us: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the process that held it still runs."""
        return self.life == self.host.lives and self.host.up

    def write(self, data: bytes) -> None:
        if self.is_over or not data:
            return
        self.unread += len(data)
        if self.swallowed:
            self._network.fire(Fault.SWALLOWED, self)
            self.unread -= len(data)
            return
        if self.recording is not None and len(self.recording) < RECORDED_BYTES_MAX // 64:
            self.recording.append(data)
        pieces = self._network.spoilt(self, data)
        for piece in pieces:
            if len(pieces) > 1:
                self._batch = []  # so that it arrives alone
            self._put(piece)

    def wait_for_room(self) -> None:
        """Tell the user when fewer bytes than the window are unread."""
        self._waits_for_room = True

    def close(self) -> None:
        """End the stream after what was written; nothing more is received."""
        if not self.is_over:
            self.is_over = True
            self._put(None)

    def abort(self) -> None:
        """Reset the connection: the other end learns of it unless the network is cut."""
        if not self.is_over:
            self.is_over = True
            self._network.send_reset(self, "Connection reset by peer")

    def _put(self, data: bytes | None) -> None:
        network, other = self._network, self.other
        if self.swallowed:
            return
        if self.held is not None or self.way.is_cut:
            if self.way.is_cut:
                network.fire(Fault.PARTITION, self)
            if self.held is None:
                self.held = []
            self.held.append(data)
            self.probe()
        elif other.is_over or not other.is_alive:
            self.probe()
        else:
            self._launch(data)

    def _launch(self, data: bytes | None) -> None:
        network = self._network
        now_us = network.world.now_us
        if data is not None and self._batch and self._written_us == now_us:
            self._batch.append(data)  # as one segment
            return
        self._last_us = max(network.arrival_us(self), self._last_us)
        if data is None:
            network.world.at(self._last_us, network.arrive_end, self.other, None)
            return
        self._written_us = now_us
        self._batch = batch = [data]
        network.world.at(self._last_us, self._arrive, batch)

    def flush(self) -> None:
        """The direction is free again: send what was held."""
        held, self.held = self.held, None
        for data in held or ():
            if not self.other.is_over or data is None:
                self._put(data)

    def _arrive(self, batch: list[bytes]) -> None:
        if batch is self._batch:
            self._batch = []
        other = self.other
        if other.is_over or not other.is_alive:
            self.probe()
        else:
            other.host.run(other.read, b"".join(batch) if len(batch) > 1 else batch[0])

    def read(self, data: bytes) -> None:
        """The process at this end reads these bytes."""
        if self.is_over:
            return
        if self.user is None:
            self.early.append(data)
            return
        self.other.was_read(len(data))
        self.user.received(data)

    def mirror(self, data: bytes) -> None:
        """What was written here comes back as if the other end had written it."""
        if not self.is_over and self.is_alive:
            self.other.unread += len(data)
            self.host.run(self.read, data)

    def was_read(self, count: int) -> None:
        self.unread -= count
        if self._waits_for_room and self.unread < self._network.window_bytes and self.is_alive and self.user is not None:
            self._waits_for_room = False
            self.host.after(self._network.rates.delay_us, self.user.has_room)

    def probe(self) -> None:
        """What was written is not acknowledged: try again until the time limit."""
        if self._probes_since_us is None and not self.is_over:
            self._probes_since_us = self._network.world.now_us
            self._network.world.after(PROBE_US, self._probe)

    def _probe(self) -> None:
        since_us, network = self._probes_since_us, self._network
        if self.is_over or since_us is None:
            return
        is_through = self.held is None and not self.way.is_cut
        if is_through and not self.other.is_over and self.other.is_alive:
            self._probes_since_us = None
        elif is_through and not self.other.way.is_cut and self.other.host.up and not self.other.swallowed:
            network.break_off(self, "Connection reset by peer")  # its machine knows no such connection
        elif network.world.now_us - since_us >= network.unacknowledged_us:
            network.break_off(self, "Connection timed out")
        else:
            network.world.after(PROBE_US, self._probe)


class SimulatedNetwork:
    def __init__(
        self,
        world: World,
        rates: NetworkRates,
        *,
        window_bytes: int = 1 << 16,
        unacknowledged_us: int = 3_000_000,
        connect_us: int = 1_000_000,
    ) -> None:
        """`connect_us`: time after which an attempt to connect without an answer fails."""
        self.world = world
        self.rates = rates
        self.window_bytes = window_bytes
        self.unacknowledged_us = unacknowledged_us
        self.recorded: dict[str, list[bytes]] | None = None
        """By listener: what the connecting end of the last connection wrote; None: nothing is recorded."""
        self._connect_us = connect_us
        self._listeners: dict[str, _Listener] = {}
        self._directions: dict[tuple[str, str], _Direction] = {}
        self._sockets: dict[Host, list[Socket]] = {}
        self._connections = 0
        self._deaths = world.stream("network deaths")

    # ── connecting ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def listen(self, name: str, host: Host, accept: Accept) -> None:
        """`accept(socket)` is called for each connection to `name`, as long as this life of the host lasts."""
        self._listeners[name] = _Listener(host, host.lives, accept)

    def connect(self, source: str, target: str, host: Host, user: SocketUser, *, is_hostile: bool = False) -> Socket:
        """Try to connect: `user` is told `connected`, or `ended` with the reason."""
        self._connections += 1
        here = Socket(self, self._connections, host, self._direction(source, target))
        here.user, here.is_hostile = user, is_hostile
        rates, way = self.rates, here.way
        failing = bool(rates.connect_fails) and way.stream.random() < rates.connect_fails
        if failing:
            self.fire(Fault.CONNECT_FAILED, here)
            self._fail(here, self._connect_us if way.stream.random() < 0.5 else 2 * rates.delay_us, "Connection timed out")
        elif way.is_cut or self._direction(target, source).is_cut:
            self.fire(Fault.PARTITION, here)
            self._fail(here, self._connect_us, "Connection timed out")
        else:
            self.world.at(self.arrival_us(here), self._reach, here)
        return here

    def _fail(self, here: Socket, after_us: int, error: str) -> None:
        here.host.after(after_us, self._failed, here, error)

    def _failed(self, here: Socket, error: str) -> None:
        if not here.is_over and here.user is not None:
            here.is_over = True
            here.user.ended(error)

    def _reach(self, here: Socket) -> None:
        """The attempt reaches the other machine, which accepts though its process may stand still."""
        if here.is_over or not here.is_alive:
            return
        listener = self._listeners.get(here.way.target)
        if listener is None or not listener.host.up:
            self._fail(here, self._connect_us, "Connection timed out")  # the machine is down
            return
        if listener.life != listener.host.lives:
            self._fail(here, self.rates.delay_us, "Connection refused")
            return
        there = Socket(self, here.number, listener.host, self._direction(here.way.target, here.way.source))
        here.other, there.other, there.is_hostile = there, here, here.is_hostile
        self._keep(here)
        self._keep(there)
        if self.recorded is not None and not here.is_hostile:
            self.recorded[here.way.target] = here.recording = []
        listener.host.run(self._accept, listener, there)
        here.host.after(self.rates.delay_us, self._connected, here)

    def _accept(self, listener: _Listener, there: Socket) -> None:
        if there.is_over:
            return
        there.user = listener.accept(there)
        there.user.connected()
        early, there.early = there.early, []
        for data in early:
            there.read(data)

    def _connected(self, here: Socket) -> None:
        if not here.is_over and here.user is not None:
            here.user.connected()

    # ── processes that die ───────────────────────────────────────────────────────────────────────────────────────────────

    def process_died(self, host: Host, *, machine_lives: bool = False) -> None:
        """Call after a crash of the host. Its machine resets its connections if it lives, or at a drawn rate; else nobody
        says so."""
        sockets = [socket for socket in self._sockets.pop(host, []) if not socket.is_over]
        tells = machine_lives or self._deaths.random() < self.rates.tells
        for socket in sockets:
            socket.is_over = True
            if not socket.other.is_over:
                self.fire(Fault.RESET if tells else Fault.HALF_OPEN, socket)
            if tells:
                self.send_reset(socket, "Connection reset by peer")

    def _keep(self, socket: Socket) -> None:
        kept = self._sockets.setdefault(socket.host, [])
        if len(kept) > 64:
            kept[:] = [one for one in kept if not one.is_over]
        kept.append(socket)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def cut(self, source: str, target: str) -> None:
        """Hold all bytes of this direction until `heal` or `join`; attempts to connect fail."""
        self._direction(source, target).is_cut = True

    def join(self, one: str, other: str) -> None:
        """Undo `cut` in both directions."""
        for ends in ((one, other), (other, one)):
            way = self._direction(*ends)
            if way.is_cut:
                way.is_cut = False
                self._flush(way)

    def stall(self, source: str, target: str) -> None:
        """Hold the bytes of the open connections of this direction until it is cleared; new connections are not stalled."""
        for socket in self._open_sockets():
            if (socket.way.source, socket.way.target) == (source, target) and not socket.stalled:
                socket.stalled = True
                if socket.held is None:
                    socket.held = []
                self.fire(Fault.STALL, socket)

    def swallow(self, source: str, target: str) -> None:
        """From now on nothing that is written to the open connections of this direction arrives, and neither does their end;
        it is acknowledged all the same, as by a proxy that has forgotten half of a connection."""
        for socket in self._open_sockets():
            if (socket.way.source, socket.way.target) == (source, target):
                socket.swallowed = True

    def clear(self, source: str, target: str) -> None:
        way = self._direction(source, target)
        for socket in self._open_sockets():
            if socket.way is way:
                socket.stalled = False
        if not way.is_cut:
            self._flush(way)

    def reset(self, one: str, other: str) -> None:
        """Reset the open connections of these two; what is on the way is lost."""
        for socket in self._open_sockets():
            if (socket.way.source, socket.way.target) == (one, other):
                self._reset_both(socket)

    def heal(self) -> None:
        self.rates = NetworkRates(delay_us=self.rates.delay_us)
        for socket in self._open_sockets():
            socket.stalled = False
        for way in self._directions.values():
            way.is_cut = False
            self._flush(way)

    def spoilt(self, socket: Socket, data: bytes) -> list[bytes]:
        """What becomes of a write: usually the data itself; in pieces, with a flipped bit, or cut off and the last."""
        rates, stream = self.rates, socket.way.stream
        if rates.bit_flip and stream.random() < rates.bit_flip:
            self.fire(Fault.BIT_FLIP, socket)
            data = flip_bit(data, stream.randrange(len(data) * 8))
        if rates.reset and stream.random() < rates.reset:
            truncates = stream.random() < 0.5
            self.fire(Fault.TRUNCATION if truncates else Fault.RESET, socket)
            self._reset_after(socket)
            return [data[: stream.randrange(1, len(data))]] if truncates and len(data) > 1 else []
        if rates.tamper and stream.random() < rates.tamper:
            return self._tampered(socket, data)
        if rates.pieces and len(data) > 1 and stream.random() < rates.pieces:
            self.fire(Fault.PIECES, socket)
            cuts = sorted(stream.randrange(1, len(data)) for _ in range(stream.randrange(1, PIECES_MAX)))
            return [piece for at, end in zip((0, *cuts), (*cuts, len(data)), strict=True) if (piece := data[at:end])]
        return [data]

    def _tampered(self, socket: Socket, data: bytes) -> list[bytes]:
        """Somebody in between repeats the data, takes it out, or sends it back."""
        kind = socket.way.stream.choice((Fault.REPEATED, Fault.OMITTED, Fault.MIRRORED))
        self.fire(kind, socket)
        match kind:
            case Fault.REPEATED:
                socket.unread += len(data)
                return [data, data]
            case Fault.OMITTED:
                socket.unread -= len(data)
                return []
            case _:
                self.world.at(self.arrival_us(socket), socket.mirror, data)
                return [data]

    def arrival_us(self, socket: Socket) -> int:
        """When what is sent now arrives, if nothing sent before is still on the way."""
        rates, draw = self.rates, socket.way.stream.random
        arrives_us = self.world.now_us + rates.delay_us
        if rates.jitter_us:
            arrives_us += int(draw() * rates.jitter_us)
        if rates.spike and draw() < rates.spike:
            arrives_us += int(draw() * rates.spike_us)
            self.fire(Fault.DELAY, socket)
        return arrives_us

    def fire(self, fault: Fault, socket: Socket) -> None:
        self.world.fire(fault, f"{socket.way.source}→{socket.way.target}")

    # ── the end of connections ───────────────────────────────────────────────────────────────────────────────────────────

    def send_reset(self, socket: Socket, error: str) -> None:
        """This end is gone; tell the other. It overtakes nothing, and is lost where the network is cut."""
        if not socket.way.is_cut and not socket.other.is_over and not socket.swallowed:
            self.world.at(max(self.arrival_us(socket), socket._last_us), self.arrive_end, socket.other, error)

    def arrive_end(self, socket: Socket, error: str | None) -> None:
        if not socket.is_over and socket.is_alive:
            socket.host.run(self.break_off, socket, error)

    def break_off(self, socket: Socket, error: str | None) -> None:
        """The connection is over at this end; its process is told."""
        if socket.is_over:
            return
        if not socket.is_alive:
            socket.is_over = True
        elif socket.host.paused:
            socket.host.run(self.break_off, socket, error)
        else:
            socket.is_over = True
            if socket.user is not None:
                socket.user.ended(error)

    def _reset_after(self, socket: Socket) -> None:
        """A machine between the two resets the connection: both ends are told, after what already arrived."""
        self.world.after(0, self._reset_both, socket)

    def _reset_both(self, socket: Socket) -> None:
        for end in (socket, socket.other):
            self.world.at(max(self.arrival_us(end), end.other._last_us), self.arrive_end, end, "Connection reset by peer")

    def _flush(self, way: _Direction) -> None:
        for sockets in self._sockets.values():
            for socket in list(sockets):
                if socket.held is not None and socket.way is way and not socket.stalled:
                    socket.flush()

    def _open_sockets(self) -> list[Socket]:
        return [socket for sockets in self._sockets.values() for socket in sockets if not socket.is_over]

    def _direction(self, source: str, target: str) -> _Direction:
        way = self._directions.get((source, target))
        if way is None:
            way = _Direction(source, target, self.world.stream(f"network {source}→{target}"))
            self._directions[source, target] = way
        return way
