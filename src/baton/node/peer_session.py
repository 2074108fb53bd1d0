"""One connection with a peer: from the handshake to a session in which messages go both ways, and its end.

    TCP bytes ── wire.seal ── wire.link ── registration, then peer messages

Owns the order of messages in a connection. Promises that no message is passed on before the other side has proved that it
holds the cluster key and both have accepted each other's KV layout, that everything sent is bounded, and that invalid input
ends the connection with a reason, and nothing but the connection. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from baton.core.config import Role
from baton.core.handover.messages import Ask, Commit, PeerId, PeerMessage
from baton.kv.transfer_contract import KvLayout
from baton.node.clock import monotonic_us
from baton.node.sealed_connection import ConnectionEnd, ConnectionFault, SealedConnection
from baton.wire.engine_messages import WireError
from baton.wire.link import PACKET_BYTES_MAX, Acceptor, Initiator, LinkConfig, LinkFull, Lost, Opened, Replaced, Took
from baton.wire.peer_messages import (
    Register,
    Registered,
    Registration,
    Unfit,
    decode_registration,
    decode_to_decode_side,
    decode_to_prefill_side,
    encode_peer,
    encode_registration,
)

LINK = LinkConfig(
    heartbeat_us=500_000, silent_us=2_500_000, acceptor_silent_us=2_500_000, resend_us=1_000_000, resend_us_max=2_000_000
)
"""TCP retransmits losses; here only silence counts, and a peer on a busy machine may be late."""
TICK_S = 0.1
CONNECT_S = 5.0
REGISTER_S = 5.0
"""Seconds that a connection may take to become a session."""


class SessionFault(StrEnum):
    """Why a connection ended abnormally, besides the faults of the seal and the link."""

    UNFIT = "unfit"
    FLOODING = "flooding"
    """It sends more than the engine takes."""


class SessionStage(Enum):
    UNPROVED = "stranger"
    REGISTERING = "registering"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class LocalInstance:
    """The identity and layout that this instance registers with."""

    name: str
    incarnation: int
    role: Role
    layout: KvLayout
    vocabulary: int
    cluster_key: bytes


@dataclass(frozen=True, slots=True)
class SessionEnd:
    was: SessionStage
    fault: str | None
    """Set where the other side is at fault."""
    reason: str


class SessionEvents(Protocol):
    """Receives the events of sessions."""

    def connected(self, session: PeerSession) -> None:
        """The connection is made; nothing is proved yet."""

    def transfers_for(self, session: PeerSession) -> tuple[str, ...]:
        """The addresses to which this peer shall send KV."""

    def unfit(self, session: PeerSession, register: Register) -> str | None:
        """Why this peer and we cannot hand over to each other; None where we can."""

    def opened(self, session: PeerSession) -> None: ...

    def received(self, session: PeerSession, message: PeerMessage) -> bool:
        """Returns False when no more can be taken."""

    def ended(self, session: PeerSession, end: SessionEnd) -> None:
        """Called once for each session that `connected` was called for."""


class PeerSession:
    def __init__(self, local: LocalInstance, events: SessionEvents, dialed: PeerId | None) -> None:
        """`dialed` is the peer we connected to; None when it connected to us."""
        self.stage = SessionStage.UNPROVED
        self.over: asyncio.Future[SessionEnd] = asyncio.get_running_loop().create_future()
        self.dialed = dialed
        self.connection = SealedConnection(
            local.cluster_key, local.name, self, connects_to=dialed, handshake_s=REGISTER_S, frame_bytes_max=PACKET_BYTES_MAX
        )
        self._local = local
        self._events = events
        self._link = Initiator(monotonic_us(), LINK) if dialed is not None else Acceptor(local.incarnation, LINK)
        self.peer = dialed or PeerId("")
        """The id of the other side; of one that connected to us, known once it has proved itself."""
        self._fits = self._is_accepted = False
        """We have accepted them; they have accepted us."""

    # ── events of the connection ─────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, connection: SealedConnection) -> None:  # noqa: ARG002
        self._events.connected(self)
        loop = asyncio.get_running_loop()
        loop.call_later(REGISTER_S, self._on_register_timeout)
        loop.call_later(TICK_S, self._tick)

    def opened(self, connection: SealedConnection) -> None:
        self.stage = SessionStage.REGISTERING
        if self.dialed is None:
            self.peer = PeerId(connection.peer)
        if isinstance(self._link, Initiator):
            self._send_packets(self._link.open(monotonic_us()))
            self._register()

    def received(self, connection: SealedConnection, frame: bytes) -> None:
        try:
            self._handle(self._link.take(frame, monotonic_us()))
        except LinkFull as full:
            connection.abort(ConnectionFault.NOT_READING, str(full))

    def ended(self, connection: SealedConnection, end: ConnectionEnd) -> None:  # noqa: ARG002
        was, self.stage = self.stage, SessionStage.OVER
        final = SessionEnd(was, end.fault, end.reason)
        self._events.ended(self, final)
        self.over.set_result(final)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: PeerMessage) -> None:
        if self.stage is SessionStage.OPEN:
            try:
                self._send_frame(encode_peer(message))
            except LinkFull as full:
                self.close(ConnectionFault.NOT_READING, str(full))

    def close(self, fault: str | None, reason: str) -> None:
        """Close the connection; after an Unfit, only once the other side has read it."""
        if fault is SessionFault.UNFIT:
            self.connection.close(reason, fault)
        else:
            self.connection.abort(fault, reason)

    def _register(self) -> None:
        local, layout = self._local, self._local.layout
        self._send_registration(
            Register(
                name=local.name,
                incarnation=local.incarnation,
                role=local.role.name,
                fingerprint=layout.fingerprint,
                dtype=layout.dtype,
                block_size=layout.block_size,
                layer_bytes=layout.layer_bytes,
                transfers=self._events.transfers_for(self),
            )
        )

    def _send_registration(self, message: Registration) -> None:
        self._send_frame(encode_registration(message))

    def _send_frame(self, frame: bytes) -> None:
        self._send_packets(self._link.send(frame, monotonic_us()))

    def _send_packets(self, packets: list[bytes]) -> None:
        self.connection.send(packets)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, took: Took) -> None:
        for news in took.news:
            match news:
                case Opened():
                    if isinstance(self._link, Acceptor):
                        self._register()
                case Lost(_, reason):
                    self._send_packets(took.packets)
                    self.close(None, reason)
                case Replaced():
                    self.close(ConnectionFault.MALFORMED, "a second session in one connection")
        self._send_packets(took.packets)
        for frame in took.frames:
            if self.stage is SessionStage.REGISTERING:
                self._receive_registration(decode_registration(frame))
            elif self.stage is SessionStage.OPEN:
                self._receive(decode_to_prefill_side(frame) if self._local.role.gives else decode_to_decode_side(frame))

    def _receive_registration(self, message: Registration) -> None:
        match message:
            case Register():
                reason = self._events.unfit(self, message)
                if reason is None:
                    self._fits = True
                    self._send_registration(Registered())
                else:
                    self._send_registration(Unfit(reason))
                    self.close(SessionFault.UNFIT, reason)
            case Registered():
                self._is_accepted = True
            case Unfit(reason):
                self.close(SessionFault.UNFIT, f"the other side says: {reason}")
        if self._fits and self._is_accepted and self.stage is SessionStage.REGISTERING:
            self.stage = SessionStage.OPEN
            self._events.opened(self)

    def _receive(self, message: PeerMessage) -> None:
        _check_tokens(message, self._local.vocabulary)
        if not self._events.received(self, message):
            self.close(SessionFault.FLOODING, "it says more than the engine takes")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        if self.stage is SessionStage.OVER:
            return
        deadline = self._link.next_deadline()
        if deadline is not None and deadline <= monotonic_us():
            self._handle(self._link.tick(monotonic_us()))
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _on_register_timeout(self) -> None:
        if self.stage in (SessionStage.UNPROVED, SessionStage.REGISTERING):
            self.close(ConnectionFault.TOO_LATE, f"it did not register within {REGISTER_S:g} s")


def _check_tokens(message: PeerMessage, vocabulary: int) -> None:
    """A peer of the same model has the same vocabulary; an id beyond it would end the executor."""
    ids: list[int] = []
    match message:
        case Ask(_, _, submission):
            sampling = submission.sampling
            ids = [int(submission.known.max()), *sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)]
        case Commit():
            ids = [message.token]
            if message.logprobs is not None and message.logprobs.top_ids.size:
                ids.append(int(message.logprobs.top_ids.max()))
    if ids and max(ids) >= vocabulary:
        raise WireError(f"the token id {max(ids)} is not in the vocabulary of {vocabulary}")
