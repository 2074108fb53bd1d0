"""One connection with a peer: drives a `PeerSession` over a `SealedConnection` on one event loop.

    TCP bytes ── wire.sealed_stream ── wire.peer_session: registration, then peer messages

Owns neither the rules of the connection nor those of the session. Promises that everything sent is bounded, and that invalid
input ends the connection with a reason, and nothing but the connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from baton.core.config import Role
from baton.core.handover.messages import PeerId, PeerMessage
from baton.kv.transfer_contract import KvLayout
from baton.node.clock import monotonic_us
from baton.node.sealed_connection import SealedConnection
from baton.wire.peer_messages import Register
from baton.wire.peer_session import PeerSession, SessionEnd, SessionFault, SessionStage
from baton.wire.sealed_stream import ConnectionEnd, StreamConfig

PEER_STREAM = StreamConfig(heartbeat_us=500_000, silent_us=2_500_000)
"""A peer on a busy machine may be late."""
CONNECT_S = 5.0
REGISTER_S = 5.0
"""Seconds that a connection may take to become a session."""

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class LocalInstance:
    """The identity and layout that this instance registers with."""

    name: str
    incarnation: int
    role: Role
    layout: KvLayout
    vocabulary: int
    cluster_key: bytes

    def registration(self, transfers: tuple[str, ...] = ()) -> Register:
        layout = self.layout
        return Register(
            name=self.name,
            incarnation=self.incarnation,
            role=self.role.name,
            fingerprint=layout.fingerprint,
            dtype=layout.dtype,
            block_size=layout.block_size,
            layer_bytes=layout.layer_bytes,
            transfers=transfers,
        )


class SessionEvents(Protocol):
    """Receives the events of sessions."""

    def connected(self, connection: PeerConnection) -> None:
        """The connection is made; nothing is proved yet."""

    def transfers_for(self, connection: PeerConnection) -> tuple[str, ...]:
        """The addresses to which this peer shall send KV."""

    def unfit(self, connection: PeerConnection, register: Register) -> str | None:
        """Why this peer and we cannot hand over to each other; None where we can."""

    def opened(self, connection: PeerConnection) -> None: ...

    def received(self, connection: PeerConnection, message: PeerMessage) -> bool:
        """Returns False when no more can be taken."""

    def ended(self, connection: PeerConnection, end: SessionEnd) -> None:
        """Called once for each connection that `connected` was called for."""


class PeerConnection:
    def __init__(self, local: LocalInstance, events: SessionEvents, dialed: PeerId | None) -> None:
        """`dialed` is the peer we connected to; None when it connected to us."""
        register_us = int(REGISTER_S * 1e6)
        self.number = next(_numbers)
        self.over: asyncio.Future[SessionEnd] = asyncio.get_running_loop().create_future()
        self.dialed = dialed
        self.connection = SealedConnection(
            local.cluster_key,
            local.name,
            self,
            connects_to=dialed,
            config=replace(PEER_STREAM, handshake_us=register_us),
        )
        self._local = local
        self._events = events
        self._session = PeerSession(
            gives=local.role.gives, vocabulary=local.vocabulary, now_us=monotonic_us(), register_us=register_us
        )
        self.peer = dialed or PeerId("")
        """The id of the other side; of one that connected to us, known once it has proved itself."""

    @property
    def stage(self) -> SessionStage:
        return self._session.stage

    # ── events of the connection ─────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, connection: SealedConnection) -> None:  # noqa: ARG002
        self._events.connected(self)
        self._arm()

    def opened(self, connection: SealedConnection) -> None:
        if self.dialed is None:
            self.peer = PeerId(connection.peer)
        connection.send([self._session.opened(self._local.registration(self._events.transfers_for(self)))])

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        step = self._session.receive(frame, lambda register: self._events.unfit(self, register))
        connection.send(step.frames)
        if step.unfit is not None:
            self.close(SessionFault.UNFIT, step.unfit)
        if step.opened:
            self._events.opened(self)
        if step.message is not None and not self._events.received(self, step.message):
            self.close(SessionFault.FLOODING, "it says more than the engine takes")

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:  # noqa: ARG002
        final = self._session.end(end.fault, end.reason)
        self._events.ended(self, final)
        self.over.set_result(final)

    # ── sending, closing and time ────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: PeerMessage) -> None:
        frame = self._session.frame_of(message)
        if frame is not None:
            self.connection.send([frame])

    def close(self, fault: str | None, reason: str) -> None:
        """Close the connection; after an Unfit, only once the other side has read it."""
        if fault is SessionFault.UNFIT:
            self.connection.close(reason, fault)
        else:
            self.connection.abort(fault, reason)

    def _arm(self) -> None:
        """The deadline does not move: it is when the connection must have become a session."""
        deadline_us = self._session.next_deadline()
        if deadline_us is not None:
            delay_s = max(0, deadline_us - monotonic_us()) / 1e6
            asyncio.get_running_loop().call_later(delay_s, self._on_deadline)

    def _on_deadline(self) -> None:
        late = self._session.late(monotonic_us())
        if late is not None:
            self.close(*late)
        else:
            self._arm()
