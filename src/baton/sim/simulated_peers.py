"""The connections of one life of an instance to its peers: message lines and KV transfers of hand-overs.

Owns one line to each peer and the receiving and sending ends of KV transfers. It carries out the worker's orders, passes on
events, and decides nothing. Each session begins with a registration by both sides, as in production.
"""

from __future__ import annotations

import random
from collections import deque
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
from baton.sim.law_names import LINE_BOUND, SAME_LAYOUT, LawBroken
from baton.sim.lines import LineEndpoint, Lines
from baton.sim.world import Host
from baton.wire.peer_messages import (
    Register,
    decode_registration,
    decode_to_decode_side,
    decode_to_prefill_side,
    encode_peer,
    encode_registration,
)

OUTBOX_MAX = 512
"""Bound on messages waiting for room on one line; exceeding it breaks a law."""
ECHO_WITHIN_US = 300_000
SESSIONS_A_LIFE = 1_000_000
"""Session numbers must rise over the lives of the process that opens them."""


def end_name(one: str, other: str) -> str:
    """Network name of `one`'s end of the line to `other`."""
    return f"{one}~{other}"


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
        self.transfers = transfers
        self._gives = life.spec.config.role.gives
        self.receiver, self.sender = transfers.connect(name, host, kv, life.hear)
        self.took_us: list[int] = []
        """Durations of the hand-overs adopted here."""
        self._conversations = {PeerId(peer): _PeerConversation(self, life, lines, peer) for peer in peers}
        self.lines = [conversation.line for conversation in self._conversations.values()]

    def open(self) -> None:
        for line in self.lines:
            line.open()

    def meet(self, addresses: tuple[str, ...]) -> None:
        """The router names the peers that prefill: connect to these, and disconnect from all others."""
        for peer, conversation in self._conversations.items():
            if peer in addresses:
                conversation.line.open()
            else:
                conversation.hang_up()

    def session_with(self, peer: str) -> int | None:
        """The number of the session if the peer has registered in it."""
        conversation = self._conversations[PeerId(peer)]
        return conversation.line.session if conversation.registered else None

    def before_handling(self, event: PeerEvent) -> None:
        """Called before the worker handles this event: its later messages belong to the session that it then knows."""
        match event:
            case PeerOpened(peer) | PeerLost(peer):
                self._conversations[peer].known_to_worker()

    def carry_out(self, effect: PeerEffect) -> None:
        match effect:
            case Tell(peer, message):
                self._conversations[peer].tell(message)
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


class _PeerConversation:
    """The conversation with one peer."""

    def __init__(self, ours: SimulatedPeers, life: SimulatedInstance, lines: Lines, peer: str) -> None:
        self.registered = False
        self._ours = ours
        self._unhandled_sessions: deque[int | None] = deque()
        """Sessions that began, or None for one that ended, in order; the worker has not handled these events yet."""
        self._known: int | None = None
        """The session that the worker knows; its messages are sent only in that one."""
        self._life = life
        self._peer = PeerId(peer)
        self._outbox: deque[bytes] = deque()
        self._stream: random.Random = life.host.world.stream(f"talk {end_name(life.host.name, peer)} life {life.life}")
        ends = end_name(life.host.name, peer), end_name(peer, life.host.name)
        self._gives = life.spec.config.role.gives
        if self._gives:
            self.line: LineEndpoint = lines.acceptor(life.host, *ends, self)
        else:
            self.line = lines.initiator(life.host, *ends, self, life.life * SESSIONS_A_LIFE + 1)

    def tell(self, message: PeerMessage) -> None:
        if self.registered and self._known == self.line.session:
            self._outbox.append(encode_peer(message))
            self._post()
        if len(self._outbox) > OUTBOX_MAX:
            raise LawBroken(LINE_BOUND, f"{len(self._outbox)} messages wait at {self._life.host.name} for {self._peer}")

    def known_to_worker(self) -> None:
        self._known = self._unhandled_sessions.popleft()

    def hang_up(self) -> None:
        if self.line.wanted:
            self.line.close("it does not prefill any more")
            self.lost("it does not prefill any more")

    # ── from the line ────────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> None:
        self._outbox.append(encode_registration(self._registration()))
        self._post()

    def lost(self, reason: str) -> None:
        was_there, self.registered = self.registered, False
        self._outbox.clear()
        if was_there:
            self._unhandled_sessions.append(None)
            self._hear(PeerLost(self._peer, reason))

    def took(self, frames: list[bytes]) -> None:
        self._post()
        for frame in frames:
            if not self.registered:
                self._register(frame)
            else:
                message = decode_to_prefill_side(frame) if self._gives else decode_to_decode_side(frame)
                self._hear(Heard(self._peer, message))
                self._perhaps_echo(message)

    def _register(self, frame: bytes) -> None:
        ours, theirs = self._registration(), decode_registration(frame)
        if not isinstance(theirs, Register) or theirs.name != self._peer:
            raise LawBroken(SAME_LAYOUT, f"{self._life.host.name} heard {theirs} first, not {self._peer}")
        for name in ("fingerprint", "dtype", "block_size", "layer_bytes"):
            if getattr(ours, name) != getattr(theirs, name):
                raise LawBroken(SAME_LAYOUT, f"{name} of {ours.name} and {theirs.name} differ: {ours} {theirs}")
        self.registered = True
        self._unhandled_sessions.append(self.line.session)
        self._hear(PeerOpened(self._peer))

    def _registration(self) -> Register:
        life, config = self._life, self._life.spec.config
        return Register(
            name=life.host.name,
            incarnation=life.life + 1,
            role=config.role.name,
            fingerprint=life.executor.fingerprint,
            dtype=life.executor.kv.dtype,
            block_size=config.block_size,
            layer_bytes=tuple(end - begin for begin, end in life.executor.kv.layers),
        )

    def _post(self) -> None:
        while self._outbox and self.line.session is not None and not self.line.is_full:
            self.line.send(self._outbox.popleft())

    def _perhaps_echo(self, message: PeerMessage) -> None:
        """Deliver a message again at a drawn rate: links deliver once, but a worker must not depend on it."""
        rate = self._ours.transfers.echo
        if not rate:
            return
        echo, within_us = self._stream.random(), self._stream.randrange(ECHO_WITHIN_US)
        if echo < rate:
            self._life.host.after(within_us, self._echo, self.line.session, message)

    def _echo(self, session: int | None, message: PeerMessage) -> None:
        if self.registered and self.line.session == session:
            self._life.host.world.fire(Fault.PEER_ECHO, self._life.host.name)
            self._hear(Heard(self._peer, message))

    def _hear(self, event: PeerEvent) -> None:
        self._life.hear(event)
