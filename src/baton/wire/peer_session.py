"""A session with a peer, as a machine: both sides register, each accepts the other's KV layout, then messages go both ways.

    UNPROVED ──the stream is open──▶ REGISTERING ──both have accepted──▶ OPEN ──▶ OVER
                                          └────────── unfit, too late ───────────▶┘

Owns the order of messages in one connection. Pure: frames in, frames and messages out. It runs on the frames of a
`SealedStream`, so the other side has proved that it holds the cluster key; `node.peer_connection` and the simulator drive
it. Promises that no message is passed on before both sides have accepted each other. Invalid input raises WireError, and
then the driver ends the connection.

`KnownSessions` keeps apart what the worker says in one session from the next one with the same peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from baton.core.config import ROLES
from baton.core.engine.request import named_tokens
from baton.core.handover.messages import Ask, Commit, PeerEvent, PeerId, PeerLost, PeerMessage, PeerOpened
from baton.wire.engine_messages import WireError
from baton.wire.peer_messages import (
    Register,
    Registered,
    Unfit,
    decode_registration,
    decode_to_decode_side,
    decode_to_prefill_side,
    encode_peer,
    encode_registration,
)
from baton.wire.sealed_stream import ConnectionFault

REGISTER_US = 5_000_000
"""Time that a connection may take to become a session."""


class SessionFault(StrEnum):
    """Why a session ended abnormally, besides the faults of the connection."""

    UNFIT = "unfit"
    FLOODING = "flooding"
    """It sends more than the engine takes."""


class SessionStage(Enum):
    UNPROVED = "stranger"
    REGISTERING = "registering"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class SessionEnd:
    was: SessionStage
    fault: str | None
    """Set where the other side is at fault."""
    reason: str


class SessionStep(NamedTuple):
    """What came of a frame, in this order."""

    frames: tuple[bytes, ...] = ()
    """To be sent now."""
    opened: bool = False
    message: PeerMessage | None = None
    unfit: str | None = None
    """The connection must be closed for this reason, once the other side has read the frames."""


class PeerSession:
    def __init__(self, *, gives: bool, vocabulary: int, now_us: int, register_us: int = REGISTER_US) -> None:
        """`gives`: this side prefills."""
        self.stage = SessionStage.UNPROVED
        self._decode: Callable[[bytes], PeerMessage] = decode_to_prefill_side if gives else decode_to_decode_side
        self._vocabulary = vocabulary
        self._register_us = register_us
        self._due_us = now_us + register_us
        self._fits = self._is_accepted = False
        """We have accepted them; they have accepted us."""

    def opened(self, register: Register) -> bytes:
        """The stream is open. Returns the frame of our registration."""
        self.stage = SessionStage.REGISTERING
        return encode_registration(register)

    def receive(self, frame: bytes, unfit: Callable[[Register], str | None]) -> SessionStep:
        """`unfit` says why this peer and we cannot hand over to each other; None where we can."""
        match self.stage:
            case SessionStage.REGISTERING:
                return self._receive_registration(frame, unfit)
            case SessionStage.OPEN:
                message = self._decode(frame)
                _check_tokens(message, self._vocabulary)
                return SessionStep(message=message)
            case SessionStage.UNPROVED | SessionStage.OVER:
                return SessionStep()

    def frame_of(self, message: PeerMessage) -> bytes | None:
        """The frame of a message to the peer; None where the session is not open."""
        return encode_peer(message) if self.stage is SessionStage.OPEN else None

    def next_deadline(self) -> int | None:
        return self._due_us if self.stage in (SessionStage.UNPROVED, SessionStage.REGISTERING) else None

    def late(self, now_us: int) -> tuple[ConnectionFault, str] | None:
        """Why the connection must be ended now: it has not become a session in time."""
        due_us = self.next_deadline()
        if due_us is None or now_us < due_us:
            return None
        return ConnectionFault.TOO_LATE, f"it did not register within {self._register_us / 1e6:g} s"

    def end(self, fault: str | None, reason: str) -> SessionEnd:
        """The connection is over."""
        was, self.stage = self.stage, SessionStage.OVER
        return SessionEnd(was, fault, reason)

    def _receive_registration(self, frame: bytes, unfit: Callable[[Register], str | None]) -> SessionStep:
        answer: tuple[bytes, ...] = ()
        match decode_registration(frame):
            case Register() as register:
                reason = unfit(register)
                if reason is not None:
                    return SessionStep((encode_registration(Unfit(reason)),), unfit=reason)
                self._fits, answer = True, (encode_registration(Registered()),)
            case Registered():
                self._is_accepted = True
            case Unfit(reason):
                return SessionStep(unfit=f"the other side says: {reason}")
        if not (self._fits and self._is_accepted):
            return SessionStep(answer)
        self.stage = SessionStage.OPEN
        return SessionStep(answer, opened=True)


def unfit_reason(ours: Register, theirs: Register) -> str | None:
    """Why these two cannot hand over to each other: roles, or each field of the layout that differs, ours first."""
    here, there = ROLES[ours.role], ROLES.get(theirs.role)
    if there is None or not ((here.takes and there.gives) or (here.gives and there.takes)):
        return f"role: {ours.role} here, {theirs.role} there; one must prefill and the other decode"
    found = []
    if ours.fingerprint != theirs.fingerprint:
        found.append(f"fingerprint: {ours.fingerprint.hex()} here, {theirs.fingerprint.hex()} there")
    if ours.dtype != theirs.dtype:
        found.append(f"dtype: {ours.dtype} here, {theirs.dtype} there")
    if ours.block_size != theirs.block_size:
        found.append(f"block_size: {ours.block_size} here, {theirs.block_size} there")
    return "; ".join(found + _layer_differences(ours.layer_bytes, theirs.layer_bytes)) or None


def _layer_differences(ours: tuple[int, ...], theirs: tuple[int, ...]) -> list[str]:
    if len(ours) != len(theirs):
        return [f"layers: {len(ours)} here, {len(theirs)} there"]
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [f"bytes of layer {layer}: {our} here, {their} there" for layer, (our, their) in pairs if our != their][:1]


def _check_tokens(message: PeerMessage, vocabulary: int) -> None:
    """A peer of the same model has the same vocabulary; an id beyond it would end the executor."""
    ids: list[int] = []
    match message:
        case Ask(_, _, submission):
            sampling = submission.sampling
            ids = [int(submission.known.max()), *named_tokens(sampling)]
        case Commit():
            ids = [message.token]
            if message.logprobs is not None and message.logprobs.top_ids.size:
                ids.append(int(message.logprobs.top_ids.max()))
    if ids and max(ids) >= vocabulary:
        raise WireError(f"the token id {max(ids)} is not in the vocabulary of {vocabulary}")


@dataclass(slots=True)
class KnownSessions:
    """Which session with each peer the worker knows: the one whose PeerOpened it handled last, and no PeerLost since.

    Sessions begin and end on another thread, and the worker learns of it later. What it says until then was meant for the
    session before, so it must not be sent in the next one: the other side would take it for an answer to something else.
    """

    _unhandled: deque[int | None] = field(default_factory=deque)
    """Sessions that began, or None for one that ended, of all peers in order, and whose events were not handled yet."""
    _known: dict[PeerId, int] = field(default_factory=dict)

    def began(self, session: int) -> None:
        """Call before PeerOpened is put into the worker's queue, which keeps the order of events."""
        self._unhandled.append(session)

    def ended(self) -> None:
        """Call before PeerLost is put into the worker's queue."""
        self._unhandled.append(None)

    def handles(self, event: PeerEvent) -> None:
        """The worker is about to handle this event."""
        match event:
            case PeerOpened(peer) | PeerLost(peer):
                session = self._unhandled.popleft()
                if session is None:
                    self._known.pop(peer, None)
                else:
                    self._known[peer] = session

    def of(self, peer: PeerId) -> int | None:
        """The session that what the worker says to this peer now belongs to."""
        return self._known.get(peer)
