"""One connection with a peer: from strangers to a session in which messages go both ways, and its end.

    TCP bytes ── wire.seal ── wire.link ── registration, then peer messages

Owns the connection and what may be said in it when. Promises that nothing is heard before the other side has proved that it
holds the cluster key and both have found that their KV fits, that everything said is bounded, and that whatever else arrives
ends the connection with a reason, and nothing but the connection. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from baton.core.config import Role
from baton.core.peers import Ask, Commit, PeerId, PeerMessage
from baton.kv.contract import KvLayout
from baton.wire.link import Acceptor, Initiator, LinkConfig, LinkFull, Lost, Opened, Replaced, Took
from baton.wire.messages import WireError
from baton.wire.peering import (
    Register,
    Registered,
    Registration,
    Unfit,
    decode_registration,
    decode_to_giver,
    decode_to_taker,
    encode_peer,
    encode_registration,
)
from baton.wire.seal import NONCE_BYTES, Seal, SealBroken

LINK = LinkConfig(
    heartbeat_us=500_000, silent_us=2_500_000, acceptor_silent_us=2_500_000, resend_us=1_000_000, resend_us_max=2_000_000
)
"""TCP repeats what is lost; here only silence counts, and a peer on a busy machine may be late."""
TICK_S = 0.1
CONNECT_S = 5.0
REGISTER_S = 5.0
"""How long a connection may take to become a session."""
UNREAD_BYTES_MAX = 128 << 20
"""Bytes that a peer has not read; more than any one frame."""


class Refused(StrEnum):
    """Why a connection ended that should not have, beside the faults of a seal."""

    UNFIT = "unfit"
    MALFORMED = "malformed_message"
    TOO_LATE = "too_late"
    """It did not register in time."""
    NOT_READING = "not_reading"
    TOO_MANY = "too_many"
    FLOODING = "flooding"
    """It says more than the engine takes."""


class Stage(Enum):
    STRANGER = "stranger"
    REGISTERING = "registering"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Self:
    """What this instance is to its peers."""

    name: str
    incarnation: int
    role: Role
    layout: KvLayout
    vocabulary: int
    cluster_key: bytes


@dataclass(frozen=True, slots=True)
class End:
    was: Stage
    fault: str | None
    """Set where the other side is to blame."""
    reason: str


class House(Protocol):
    """Where sessions live: told what becomes of each."""

    def arrived(self, session: Session) -> None:
        """Its connection is there."""

    def transfers_for(self, session: Session) -> tuple[str, ...]:
        """Where this peer shall send KV."""

    def unfit(self, session: Session, register: Register) -> str | None:
        """Why this peer and we cannot hand over to each other."""

    def opened(self, session: Session) -> None: ...

    def heard(self, session: Session, message: PeerMessage) -> bool:
        """False when no more can be taken."""

    def ended(self, session: Session, end: End) -> None:
        """Once, for each session that arrived."""


def now_us() -> int:
    return time.monotonic_ns() // 1000


class Session(asyncio.Protocol):
    def __init__(self, me: Self, house: House, called: PeerId | None) -> None:
        """`called` is whom we called; None when we were called."""
        self.stage = Stage.STRANGER
        self.same_host = False
        self.over: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.called = called
        self.where = "" if called is None else str(called)
        """For the log: from where, or whom we called."""
        self._me = me
        self._house = house
        nonce = secrets.token_bytes(NONCE_BYTES)
        if called is None:
            self._seal = Seal.accept(me.cluster_key, me.name, nonce)
        else:
            self._seal = Seal.connect(me.cluster_key, me.name, nonce)
        self._link = Initiator(now_us(), LINK) if called is not None else Acceptor(me.incarnation, LINK)
        self._transport: asyncio.Transport | None = None
        self.peer = called or PeerId("")
        """What this instance calls the other side; of one that called us, once it has proved itself."""
        self._fits = self._is_accepted = False
        """We have accepted them; they have accepted us."""

    # ── the event loop calls ─────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"a stream was expected, not {transport}")
        self._transport = transport
        ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self.same_host = bool(ours and theirs and ours[0] == theirs[0])
        if self.called is None and theirs:
            self.where = f"{theirs[0]}:{theirs[1]}"
        self._house.arrived(self)
        loop = asyncio.get_running_loop()
        loop.call_later(REGISTER_S, self._demand_registration)
        loop.call_later(TICK_S, self._tick)
        self._write(self._seal.outgoing())

    def data_received(self, data: bytes) -> None:
        if self.stage is Stage.OVER:
            return
        try:
            frames = self._seal.take(data)
            self._write(self._seal.outgoing())
            if self.stage is Stage.STRANGER and self._seal.is_open:
                self._begin()
            for frame in frames:
                self._act(self._link.take(frame, now_us()))
        except SealBroken as broken:
            self.end(broken.fault, str(broken))
        except WireError as error:
            self.end(Refused.MALFORMED, str(error))
        except LinkFull as full:
            self.end(Refused.NOT_READING, str(full))

    def connection_lost(self, error: Exception | None) -> None:
        reason = "the connection was closed" if error is None else f"the connection broke: {error}"
        if self.stage is Stage.STRANGER:
            reason += " before the handshake was over (is it a peer, and is the cluster key the same on both sides?)"
        self.end(None, reason)

    # ── what we say ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: PeerMessage) -> None:
        if self.stage is Stage.OPEN:
            try:
                self._push(encode_peer(message))
            except LinkFull as full:
                self.end(Refused.NOT_READING, str(full))

    def end(self, fault: str | None, reason: str) -> None:
        """Close the connection. What was written is waited for only where it says why."""
        if self.stage is Stage.OVER:
            return
        was, self.stage = self.stage, Stage.OVER
        if self._transport is not None:
            if fault is Refused.UNFIT:
                self._transport.close()
            else:
                self._transport.abort()
        end = End(was, fault, reason)
        self._house.ended(self, end)
        self.over.set_result(end)

    def _begin(self) -> None:
        self.stage = Stage.REGISTERING
        if self.called is None:
            self.peer = PeerId(self._seal.peer_name)
        if isinstance(self._link, Initiator):
            self._post(self._link.open(now_us()))
            self._register()

    def _register(self) -> None:
        me, layout = self._me, self._me.layout
        self._say(
            Register(
                name=me.name,
                incarnation=me.incarnation,
                role=me.role.name,
                fingerprint=layout.fingerprint,
                dtype=layout.dtype,
                block_size=layout.block_size,
                layer_bytes=layout.layer_bytes,
                transfers=self._house.transfers_for(self),
            )
        )

    def _say(self, message: Registration) -> None:
        self._push(encode_registration(message))

    def _push(self, frame: bytes) -> None:
        self._post(self._link.send(frame, now_us()))

    def _post(self, packets: list[bytes]) -> None:
        for packet in packets:
            self._write(self._seal.seal(packet))

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and self.stage is not Stage.OVER:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
                self.end(Refused.NOT_READING, f"it has not read {UNREAD_BYTES_MAX >> 20} MiB")

    # ── what we hear ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _act(self, took: Took) -> None:
        for news in took.news:
            match news:
                case Opened():
                    if isinstance(self._link, Acceptor):
                        self._register()
                case Lost(_, reason):
                    self._post(took.packets)
                    self.end(None, reason)
                case Replaced():
                    self.end(Refused.MALFORMED, "a second session in one connection")
        self._post(took.packets)
        for frame in took.frames:
            if self.stage is Stage.REGISTERING:
                self._hear_registration(decode_registration(frame))
            elif self.stage is Stage.OPEN:
                self._hear(decode_to_giver(frame) if self._me.role.gives else decode_to_taker(frame))

    def _hear_registration(self, message: Registration) -> None:
        match message:
            case Register():
                reason = self._house.unfit(self, message)
                if reason is None:
                    self._fits = True
                    self._say(Registered())
                else:
                    self._say(Unfit(reason))
                    self.end(Refused.UNFIT, reason)
            case Registered():
                self._is_accepted = True
            case Unfit(reason):
                self.end(Refused.UNFIT, f"the other side says: {reason}")
        if self._fits and self._is_accepted and self.stage is Stage.REGISTERING:
            self.stage = Stage.OPEN
            self._house.opened(self)

    def _hear(self, message: PeerMessage) -> None:
        _check_tokens(message, self._me.vocabulary)
        if not self._house.heard(self, message):
            self.end(Refused.FLOODING, "it says more than the engine takes")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        if self.stage is Stage.OVER:
            return
        deadline = self._link.next_deadline()
        if deadline is not None and deadline <= now_us():
            self._act(self._link.tick(now_us()))
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _demand_registration(self) -> None:
        if self.stage in (Stage.STRANGER, Stage.REGISTERING):
            self.end(Refused.TOO_LATE, f"it did not register within {REGISTER_S:g} s")


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
