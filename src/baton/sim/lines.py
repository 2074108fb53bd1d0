"""Lines between the front end and an instance: what carries the frames of their conversation.

Two kinds behind one small surface. A *link* is the production `wire.link` over the simulated network: it may lose its
session, and then opens another. A *pipe* is what two processes on one machine have: in order, whole, after a delay.

Each end tells its owner three things: `opened`, the frames that arrived, and `lost` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.sim.network import Network
from baton.sim.world import Alarm, Host
from baton.wire.link import Acceptor, Initiator, Link, LinkConfig, LinkState, Lost, Opened, Replaced, Took

REOPEN_US = 20_000
"""How long the front end waits after a loss before it tries again."""


class Owner(Protocol):
    """Whoever speaks at one end of a line."""

    def opened(self) -> None: ...

    def lost(self, reason: str) -> None: ...

    def took(self, frames: list[bytes]) -> None:
        """In order. Also called with none, when the line may have room again."""


class LinkEnd:
    def __init__(self, host: Host, network: Network, name: str, peer: str, link: Link, owner: Owner) -> None:
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
        """End the session; the owner is not told of it. An initiator begins no other until `open`."""
        self._note(f"session {self.link.session} closed: {reason}")
        self.wanted = False
        self._post(self.link.close(reason))
        self._alarm.set(self.link.next_deadline())

    def reset(self, session: int | None, reason: str) -> None:
        """The machine at the other end says that nobody is there: a loss, noticed at once. Only in that session."""
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


def initiator(
    host: Host, network: Network, name: str, peer: str, owner: Owner, config: LinkConfig, first_session: int = 1
) -> LinkEnd:
    end = LinkEnd(host, network, name, peer, Initiator(first_session, config), owner)
    network.attach(name, host, end.receive)
    return end


def acceptor(host: Host, network: Network, name: str, peer: str, owner: Owner, config: LinkConfig) -> LinkEnd:
    # Lives count from 0, incarnations from 1.
    end = LinkEnd(host, network, name, peer, Acceptor(host.lives + 1, config), owner)
    network.attach(name, host, end.receive)
    return end


@dataclass(slots=True)
class PipeEnd:
    """What is sent into it is delivered on `host` a little later."""

    host: Host
    delay_us: int
    deliver: Callable[[list[bytes]], None]

    @property
    def is_full(self) -> bool:
        return False

    @property
    def undelivered(self) -> int:
        return 0

    def send(self, frame: bytes) -> None:
        self.host.after(self.delay_us, self.deliver, [frame])
