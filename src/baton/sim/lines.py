"""Lines: the connections between two simulated processes that carry frames of messages.

Two kinds with one interface; a world uses one of them. *Links* are the production `wire.link` over the simulated network: a
session may be lost, and then another is opened. *Pipes* have no faults: frames arrive in order after a delay, at the cost of
one event per frame.

Each end calls its owner: `opened`, `took` with the frames that arrived, and `lost` with the reason.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Protocol

from baton.sim.network import SimulatedNetwork
from baton.sim.world import Alarm, Host
from baton.wire.link import Acceptor, Initiator, Link, LinkConfig, LinkState, Lost, Opened, Replaced, Took

REOPEN_US = 20_000
"""Time between the loss of a session and the next attempt to open one."""


class Owner(Protocol):
    """The process at one end of a line."""

    def opened(self) -> None: ...

    def lost(self, reason: str) -> None: ...

    def took(self, frames: list[bytes]) -> None:
        """Frames arrived, in order. Also called with none when the line may have room again."""


class LineEndpoint(Protocol):
    """One end of a line, as its owner holds it."""

    wanted: bool
    """Whether an initiator that has lost its session begins another."""

    @property
    def session(self) -> int | None: ...

    @property
    def is_open(self) -> bool:
        """Whether the session has been confirmed by the other end."""

    @property
    def is_full(self) -> bool: ...

    @property
    def undelivered(self) -> int:
        """Frames that the other end has not acknowledged."""

    def open(self) -> None:
        """Initiators only."""

    def close(self, reason: str) -> None:
        """End the session without calling the owner. An initiator opens no other until `open`."""

    def reset(self, session: int | None, reason: str) -> None:
        """The other machine reports that the process is gone: the session, if it is still this one, is lost at once."""

    def send(self, frame: bytes) -> None: ...

    def moves(self) -> Counter[tuple[Enum, Enum]]:
        """Transitions that its state machine has taken."""


class Lines(Protocol):
    """Makes the lines of a world. Each end of a line has a name."""

    def initiator(self, host: Host, name: str, peer: str, owner: Owner, first_session: int = 1) -> LineEndpoint: ...

    def acceptor(self, host: Host, name: str, peer: str, owner: Owner) -> LineEndpoint: ...


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class LinkEnd:
    def __init__(self, host: Host, network: SimulatedNetwork, name: str, peer: str, link: Link, owner: Owner) -> None:
        self.link = link
        self._host = host
        self._network = network
        self._name = name
        self._peer = peer
        self._owner = owner
        self.wanted = True
        """Whether an initiator that has lost its session begins another."""
        self._alarm = Alarm(host, self._tick)

    @property
    def session(self) -> int | None:
        return self.link.session

    @property
    def is_open(self) -> bool:
        return self.link.state is LinkState.OPEN

    def moves(self) -> Counter[tuple[Enum, Enum]]:
        return Counter(self.link.moves())

    @property
    def is_full(self) -> bool:
        return self.link.is_full

    @property
    def undelivered(self) -> int:
        return self.link.undelivered

    def open(self) -> None:
        """Initiators only."""
        self.wanted = True
        self._reopen()

    def close(self, reason: str) -> None:
        """End the session without calling the owner. An initiator opens no other until `open`."""
        self._note(f"session {self.link.session} closed: {reason}")
        self.wanted = False
        self._post(self.link.close(reason))
        self._alarm.set(self.link.next_deadline())

    def reset(self, session: int | None, reason: str) -> None:
        """The other machine reports that the process is gone: the session, if it is still this one, is lost at once."""
        if session is not None and session == self.link.session:
            self._note(f"session {session} reset: {reason}")
            self._post(self.link.close(reason))
            self._owner.lost(reason)
            self._host.after(REOPEN_US, self._reopen)
            self._alarm.set(self.link.next_deadline())

    def _reopen(self) -> None:
        if isinstance(self.link, Initiator) and self.wanted and self.link.state is LinkState.CLOSED:
            self._post(self.link.open(self._host.world.now_us))
            self._alarm.set(self.link.next_deadline())

    def send(self, frame: bytes) -> None:
        self._post(self.link.send(frame, self._host.world.now_us))
        self._alarm.set(self.link.next_deadline())

    def receive(self, _sender: str, packet: bytes) -> None:
        self._carry_out(self.link.take(packet, self._host.world.now_us))

    def _tick(self) -> None:
        deadline = self.link.next_deadline()
        if deadline is not None and deadline <= self._host.world.now_us:
            self._carry_out(self.link.tick(self._host.world.now_us))
        else:
            self._alarm.set(deadline)

    def _carry_out(self, took: Took) -> None:
        self._post(took.packets)
        for news in took.news:
            match news:
                case Opened(session):
                    self._note(f"session {session} opened")
                    self._owner.opened()
                case Replaced(session):
                    self._note(f"session {session} replaced")
                    self._owner.lost("replaced by a new session")
                case Lost(session, reason):
                    self._note(f"session {session} lost: {reason}")
                    self._owner.lost(reason)
                    self._host.after(REOPEN_US, self._reopen)
        self._owner.took(took.frames)
        self._alarm.set(self.link.next_deadline())

    def _post(self, packets: list[bytes]) -> None:
        for packet in packets:
            self._network.send(self._name, self._peer, packet)

    def _note(self, what: str) -> None:
        if self._host.world.keeps_notes:
            self._host.world.note(f"{self._name}~{self._peer}", what)


class Links:
    """Lines over a network that may lose, delay and corrupt packets."""

    def __init__(self, network: SimulatedNetwork, config: LinkConfig) -> None:
        self._network = network
        self._config = config

    def initiator(self, host: Host, name: str, peer: str, owner: Owner, first_session: int = 1) -> LinkEnd:
        return self._attached(host, name, peer, Initiator(first_session, self._config), owner)

    def acceptor(self, host: Host, name: str, peer: str, owner: Owner) -> LinkEnd:
        # Lives count from 0, incarnations from 1.
        return self._attached(host, name, peer, Acceptor(host.lives + 1, self._config), owner)

    def _attached(self, host: Host, name: str, peer: str, link: Link, owner: Owner) -> LinkEnd:
        end = LinkEnd(host, self._network, name, peer, link, owner)
        self._network.attach(name, host, end.receive)
        return end


# ── pipes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PipeEnd:
    def __init__(self, pipes: Pipes, host: Host, peer: str, owner: Owner, *, opens: bool) -> None:
        self.wanted = False
        self.session: int | None = None
        self.is_full = False
        self.undelivered = 0
        self._pipes = pipes
        self._host = host
        self._peer = peer
        self._owner = owner
        self._opens = opens

    @property
    def is_open(self) -> bool:
        return self.session is not None

    def moves(self) -> Counter[tuple[Enum, Enum]]:
        return Counter()

    def open(self) -> None:
        if self._opens:
            self.wanted = True
            self._host.after(0, self.connect)

    def connect(self) -> None:
        """Open a session if both ends exist and the initiator wants one; the acceptor is called first."""
        other = self._pipes.end(self._peer)
        if other is None or self.session is not None:
            return
        if not self._opens:
            other.connect()
        elif self.wanted:
            session = self._pipes.next_session()
            other.begin(session)
            self.begin(session)

    def begin(self, session: int) -> None:
        self.session = session
        self._owner.opened()

    def close(self, reason: str) -> None:
        session, self.session, self.wanted = self.session, None, False
        other = self._pipes.end(self._peer)
        if session is not None and other is not None:
            other._host.after(self._pipes.delay_us, other.reset, session, reason)

    def reset(self, session: int | None, reason: str) -> None:
        if session is not None and session == self.session:
            self.session = None
            self._owner.lost(reason)

    def send(self, frame: bytes) -> None:
        other = self._pipes.end(self._peer)
        if other is not None:
            other._host.after(self._pipes.delay_us, other.take, self.session, frame)

    def take(self, session: int | None, frame: bytes) -> None:
        if session == self.session:
            self._owner.took([frame])


class Pipes:
    """Lines without faults: frames arrive `delay_us` later. Both ends live as long as the world."""

    def __init__(self, delay_us: int) -> None:
        self.delay_us = delay_us
        self._ends: dict[str, PipeEnd] = {}
        self._sessions = 0

    def initiator(self, host: Host, name: str, peer: str, owner: Owner, first_session: int = 1) -> PipeEnd:  # noqa: ARG002
        return self._attached(name, PipeEnd(self, host, peer, owner, opens=True))

    def acceptor(self, host: Host, name: str, peer: str, owner: Owner) -> PipeEnd:
        end = self._attached(name, PipeEnd(self, host, peer, owner, opens=False))
        host.after(0, end.connect)  # the initiator may wait for it
        return end

    def end(self, name: str) -> PipeEnd | None:
        return self._ends.get(name)

    def next_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def _attached(self, name: str, end: PipeEnd) -> PipeEnd:
        self._ends[name] = end
        return end
