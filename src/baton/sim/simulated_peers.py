"""The connections of one life of an instance to its peers: message lines and KV transfers of hand-overs.

Owns the connections with peers and the receiving and sending ends of KV transfers. It drives the production `PeerSession` of
each connection, as `node.peers` does, carries out the worker's orders, passes on events, and decides nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import (
    AttemptFailed,
    Expect,
    Fence,
    Handover,
    HandoverMade,
    Heard,
    OpenShip,
    PeerEffect,
    PeerEvent,
    PeerId,
    PeerLost,
    PeerMessage,
    PeerOpened,
    Ship,
    Tell,
    Verify,
)
from baton.executor.contract import KvView
from baton.sim.device import LayerListener
from baton.sim.faults import Fault
from baton.sim.faulty_transfers import Report
from baton.sim.instance import SimulatedInstance
from baton.sim.law_names import SAME_LAYOUT, LawBroken
from baton.sim.lines import LineEndpoint, Lines
from baton.sim.world import Host
from baton.wire.peer_messages import Register
from baton.wire.peer_session import KnownSessions, PeerSession, SessionEnd, SessionStage, unfit_reason

ECHO_WITHIN_US = 300_000


def listening_name(name: str) -> str:
    """Network name of an instance that prefills, for the peers that connect to it."""
    return f"{name}, for peers"


class ReceivingEnd(Protocol):
    """Receives KV that peers have computed."""

    @property
    def open(self) -> int: ...

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None: ...

    def verify(self, handover: Handover, checks: bytes) -> None: ...

    def fence(self, handover: Handover) -> None: ...


class SendingEnd(LayerListener, Protocol):
    """Sends KV to peers as it is computed."""

    @property
    def open(self) -> int: ...

    def open_ship(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None: ...

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None: ...

    def fence(self, handover: Handover) -> None: ...


class DataConnections(Protocol):
    """KV transfers between instances: `FaultyTransfers` (bytes and faults) or `TimedTransfers` (time only)."""

    @property
    def echo(self) -> float:
        """Chance that a message between peers is delivered twice."""

    def connect(self, name: str, host: Host, kv: KvView, report: Report) -> tuple[ReceivingEnd, SendingEnd]:
        """A life of an instance begins."""

    def leave(self, name: str) -> None:
        """The life ends."""


class SimulatedPeers:
    def __init__(self, life: SimulatedInstance, lines: Lines, transfers: DataConnections, peers: Sequence[str]) -> None:
        name, host, kv = life.host.name, life.host, life.executor.kv
        self.life = life
        self.transfers = transfers
        self._gives = life.spec.config.role.gives
        self.receiver, self.sender = transfers.connect(name, host, kv, life.hear)
        self.took_us: list[int] = []
        """Durations of the hand-overs adopted here."""
        self.known = KnownSessions()
        self._sessions: dict[PeerId, _PeerLine] = {}
        """Those that are open."""
        self._dialed: dict[PeerId, _PeerLine] = {}
        """Connections that this side keeps up."""
        if self._gives:
            lines.listen(host, listening_name(name), self._accept)
        else:
            for peer in peers:
                self._dialed[PeerId(peer)] = dialed = _PeerLine(self, PeerId(peer))
                dialed.line = lines.dial(host, name, listening_name(peer), dialed)

    @property
    def lines(self) -> list[LineEndpoint]:
        """Those that it dials."""
        return [dialed.line for dialed in self._dialed.values() if dialed.line is not None]

    def open(self) -> None:
        for line in self.lines:
            line.open()

    def meet(self, addresses: tuple[str, ...]) -> None:
        """The router names the peers that prefill: connect to these, and disconnect from all others."""
        for peer, dialed in self._dialed.items():
            if dialed.line is None:
                continue
            if peer in addresses:
                dialed.line.open()
            elif dialed.line.wanted:
                dialed.hang_up("it does not prefill any more")

    def session_with(self, peer: str) -> int | None:
        """The number of the session with this peer."""
        session = self._sessions.get(PeerId(peer))
        return None if session is None else session.number

    def before_handling(self, event: PeerEvent) -> None:
        """Called before the worker handles this event: its later messages belong to the session that it then knows."""
        self.known.handles(event)

    def carry_out(self, effect: PeerEffect) -> None:
        match effect:
            case Tell(peer, message):
                session = self._sessions.get(peer)
                if session is not None and session.number == self.known.of(peer):
                    session.send(message)
            case Expect(handover, token, first, blocks):
                self.receiver.expect(handover, token, first, blocks)
            case Verify(handover, checks):
                self.receiver.verify(handover, checks)
            case OpenShip(handover, token, first, blocks):
                self.sender.open_ship(handover, token, first, blocks)
            case Ship(handover, step, first, upto, last):
                self.sender.ship(handover, step, first, upto, last)
            case Fence(handover):
                (self.sender if self._gives else self.receiver).fence(handover)
            case HandoverMade(took_us=took_us):
                self.took_us.append(took_us)
            case AttemptFailed():
                pass

    # ── from the connections ─────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, line: LineEndpoint) -> _PeerLine:
        accepted = _PeerLine(self, PeerId(line.peer))
        accepted.line = line
        return accepted

    def opened(self, session: _PeerLine) -> None:
        before, self._sessions[session.peer] = self._sessions.get(session.peer), session
        if before is not None:
            before.hang_up("it has opened another session")
        self.known.began(session.number)
        self.life.hear(PeerOpened(session.peer))

    def ended(self, session: _PeerLine, end: SessionEnd) -> None:
        if end.was is not SessionStage.OPEN:
            return
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
        self.known.ended()
        self.life.hear(PeerLost(session.peer, end.reason))

    def registration(self) -> Register:
        life, config = self.life, self.life.spec.config
        return Register(
            name=life.host.name,
            incarnation=life.life + 1,
            role=config.role.name,
            fingerprint=life.executor.fingerprint,
            dtype=life.executor.kv.dtype,
            block_size=config.block_size,
            layer_bytes=tuple(end - begin for begin, end in life.executor.kv.layers),
        )


class _PeerLine:
    """A line with one peer: over its life one session after the other, or one where the peer has connected."""

    def __init__(self, peers: SimulatedPeers, peer: PeerId) -> None:
        self.peer = peer
        self.line: LineEndpoint | None = None
        self.number = 0
        """Of the present session, the same at both ends."""
        self._peers = peers
        self._session: PeerSession | None = None
        name, life = peers.life.host.name, peers.life.life
        self._stream: random.Random = peers.life.host.world.stream(f"talk {name}~{peer} life {life}")

    def send(self, message: PeerMessage) -> None:
        frame = None if self._session is None else self._session.frame_of(message)
        if frame is not None and self.line is not None:
            self.line.send(frame)

    def hang_up(self, reason: str) -> None:
        if self.line is not None:
            self.line.close(reason)
        self.lost(reason)

    # ── from the line ────────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> None:
        peers, line = self._peers, self.line
        if line is None or line.session is None:
            raise RuntimeError(f"a session with {self.peer} began without a line")
        host, config = peers.life.host, peers.life.spec.config
        self.number = line.session
        self._session = session = PeerSession(
            gives=config.role.gives, vocabulary=peers.life.executor.vocabulary, now_us=host.world.now_us
        )
        line.send(session.opened(peers.registration()))
        deadline_us = session.next_deadline()
        if deadline_us is not None:
            host.at(deadline_us, self._look_at_clock, session)

    def lost(self, reason: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._peers.ended(self, session.end(None, reason))

    def took(self, frames: list[bytes]) -> None:
        for frame in frames:
            if self._session is None or self.line is None:  # an earlier frame ended it
                return
            step = self._session.receive(frame, self._unfit)
            for answer in step.frames:
                self.line.send(answer)
            if step.unfit is not None:
                raise LawBroken(SAME_LAYOUT, f"{self._peers.life.host.name} and {self.peer}: {step.unfit}")
            if step.opened:
                self._peers.opened(self)
            if step.message is not None:
                self._peers.life.hear(Heard(self.peer, step.message))
                self._perhaps_echo(step.message)

    def _unfit(self, theirs: Register) -> str | None:
        if theirs.name != self.peer:
            return f"{theirs.name} registered, and {self.peer} has connected"
        return unfit_reason(self._peers.registration(), theirs)

    def _look_at_clock(self, session: PeerSession) -> None:
        late = session.late(self._peers.life.host.world.now_us)
        if late is not None and session is self._session:
            self.hang_up(late[1])

    def _perhaps_echo(self, message: PeerMessage) -> None:
        """Deliver a message again at a drawn rate: connections deliver once, but a worker must not depend on it."""
        rate = self._peers.transfers.echo
        if not rate:
            return
        echo, within_us = self._stream.random(), self._stream.randrange(ECHO_WITHIN_US)
        if echo < rate:
            self._peers.life.host.after(within_us, self._echo, self._session, message)

    def _echo(self, session: PeerSession, message: PeerMessage) -> None:
        if session is self._session and session.stage is SessionStage.OPEN:
            self._peers.life.host.world.fire(Fault.PEER_ECHO, self._peers.life.host.name)
            self._peers.life.hear(Heard(self.peer, message))
