"""Frames between two endpoints, exactly once and in order, over a network that loses, repeats, reorders, delays or cuts.

Owns numbering, acknowledgement, repetition, checksums, and the question whether the other side still lives. Pure: it is
told packets and the time, and answers with packets to send and news. It does not know what a frame means, nor a socket;
whoever drives it puts its packets on the network, hands it what arrives, and calls `tick` when `next_deadline` has come.

The *initiator* (a front end) opens sessions with rising numbers; the *acceptor* (an instance) serves one initiator. Within
a session every frame arrives once and in the order of sending, or the session is lost on the initiator as a whole. Each
session has a conversation of its own, thrown away with it, so nothing of an old one can leak into the next.

    initiator   CLOSED ──open──▶ OPENING ──first answer──▶ OPEN          acceptor   CLOSED ──first packet──▶ OPEN ─┐ newer
                  ▲                 │                       │                         ▲                     │ ▲ │ session
                  └── silence, reset, other incarnation ────┘                         └────── silence ──────┘ └────┘

A packet, little-endian:

    0        4         5      6         14            22        30       38
    │ crc32  │ version │ kind │ session │ incarnation │ number  │ acked  │ payload …
             ├── what the checksum covers ─────────────────────────────────────────

`number` counts DATA packets of one direction from 1 and is 0 elsewhere; `acked` is the highest number up to which the sender
has delivered everything. `incarnation` names one life of the acceptor: its own packets always carry it, those of the
initiator once it has learnt it in this session, and 0 before.

Why a restarted acceptor is never taken for the one before it, even when an old duplicate wakes it:

    initiator                                        acceptor, life 1
      DATA session 7, incarnation 0, number 1  ────▶   adopts 7, delivers      (the network also keeps a copy)
      learns incarnation 1                     ◀────   acked 1
                                                     ✝ restarts as life 2, knows no session
                     the copy: incarnation 0, number 1 ────▶   adopts 7, delivers: a ghost, it cannot know better
      2 is not 1: session 7 is lost            ◀────   acked 1, or an answer to the ghost; carries incarnation 2
      open: session 8, incarnation 0           ────▶   8 replaces 7: the driver cancels the ghost's requests

Had the initiator spoken first, with incarnation 1, life 2 would have answered RESET and taken nothing. Were the initiator
gone, the ghost's session would end in silence. In no order do two lives share a conversation: the first packet that the
initiator takes in a session fixes the life, and a session whose packets carry a life is never begun anew.

Numbers of sessions must rise over restarts of the initiator, and no two lives of an acceptor may share an incarnation;
microseconds since 1970 at the start of the process serve for both. The checksum is against accidents, not against enemies.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from zlib import crc32

from baton.core.config import BadConfig
from baton.core.errors import BatonError, IllegalTransition
from baton.wire.engine_messages import FRAME_BYTES_MAX, WireError

LINK_VERSION = 1
DATA = 1
BARE = 2
"""Nothing but an acknowledgement and a sign of life."""
RESET = 3
"""The acceptor does not know this conversation."""

_HEADER = struct.Struct("<IBBQQQQ")
_CHECKED = struct.Struct("<BBQQQQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
PACKET_BYTES_MAX = HEADER_BYTES + FRAME_BYTES_MAX
U64_MAX = 2**64 - 1


class LinkFull(BatonError):
    """More frames than the backlog holds; the driver should have paused when `is_full` said so."""


class LinkClosed(BatonError):
    """A frame was given to a link that has no session."""


class LinkState(Enum):
    CLOSED = "closed"
    OPENING = "opening"
    OPEN = "open"


class LinkMove(Enum):
    BEGIN = "begin"
    ANSWERED = "answered"
    ADOPT = "adopt"
    LOSE = "lose"


TRANSITIONS: dict[tuple[LinkState, LinkMove], LinkState] = {
    (LinkState.CLOSED, LinkMove.BEGIN): LinkState.OPENING,
    (LinkState.OPENING, LinkMove.ANSWERED): LinkState.OPEN,
    (LinkState.OPENING, LinkMove.LOSE): LinkState.CLOSED,
    (LinkState.CLOSED, LinkMove.ADOPT): LinkState.OPEN,
    (LinkState.OPEN, LinkMove.ADOPT): LinkState.OPEN,
    (LinkState.OPEN, LinkMove.LOSE): LinkState.CLOSED,
}


def next_state(state: LinkState, move: LinkMove) -> LinkState:
    try:
        return TRANSITIONS[state, move]
    except KeyError:
        raise IllegalTransition(f"a link that is {state.name} cannot take the move {move.name}") from None


@dataclass(frozen=True, slots=True)
class LinkConfig:
    window: int = 64
    """Most unacknowledged frames on the network, and most that are kept out of order."""
    backlog_max: int = 1024
    """Most frames that wait for the window."""
    ack_delay_us: int = 2_000
    """How long an acknowledgement waits for a frame to ride on."""
    ack_every: int = 16
    """So many frames are acknowledged at once."""
    resend_us: int = 30_000
    resend_us_max: int = 240_000
    """Each repetition waits twice as long as the one before, up to this."""
    resend_burst: int = 8
    """Most frames that one repetition sends."""
    heartbeat_us: int = 200_000
    """A side that has sent nothing for so long gives a sign of life."""
    silent_us: int = 600_000
    """The initiator gives up a session in which it has heard nothing for so long."""
    acceptor_silent_us: int = 2_000_000
    """The same for the acceptor. Longer, since the initiator decides when to try again."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        for shorter, longer in (
            ("ack_delay_us", "resend_us"), ("resend_us", "resend_us_max"),
            ("heartbeat_us", "silent_us"), ("heartbeat_us", "acceptor_silent_us"),
        ):  # fmt: skip
            if getattr(self, shorter) > getattr(self, longer):
                raise BadConfig(
                    f"{shorter} ({getattr(self, shorter)}) must not be larger than {longer} ({getattr(self, longer)})"
                )


@dataclass(frozen=True, slots=True)
class Opened:
    """Initiator: the acceptor has answered. Acceptor: the session is served from here on."""

    session: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is over. What it had not delivered is dropped; what was asked in it must be given up."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """Acceptor: the initiator has given up this session and opened another; what was asked in it must be cancelled."""

    session: int


News = Opened | Lost | Replaced


class Took(NamedTuple):
    """What came of a packet or of time. News come before frames: the frames belong to the session that was opened last."""

    frames: list[bytes]
    packets: list[bytes]
    """To be put on the network now."""
    news: list[News]


@dataclass(slots=True)
class LinkCounters:
    """Over the life of the link, all its sessions together."""

    sent: int = 0
    resent: int = 0
    delivered: int = 0
    duplicates: int = 0
    out_of_order: int = 0
    corrupt: int = 0
    stale: int = 0
    """Packets of a session that is over, or that never was ours."""
    resets: int = 0
    """RESET packets sent (acceptor) or obeyed (initiator)."""


# ── packets ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Packet(NamedTuple):
    kind: int
    session: int
    incarnation: int
    number: int
    acked: int
    payload: bytes


def pack(kind: int, session: int, incarnation: int, number: int, acked: int, payload: bytes = b"") -> bytes:
    checked = _CHECKED.pack(LINK_VERSION, kind, session, incarnation, number, acked)
    return _CRC.pack(crc32(payload, crc32(checked))) + checked + payload


def unpack(data: bytes) -> Packet | None:
    """None for whatever no link of this version has sent."""
    if not HEADER_BYTES <= len(data) <= PACKET_BYTES_MAX:
        return None
    crc, version, kind, session, incarnation, number, acked = _HEADER.unpack_from(data)
    if crc != crc32(memoryview(data)[_CRC.size :]) or version != LINK_VERSION or not session:
        return None
    if kind == DATA:
        if not number:
            return None
    elif number or len(data) != HEADER_BYTES or kind not in (BARE, RESET):
        return None
    if acked and not incarnation:  # nobody acknowledges frames of an acceptor it has never heard
        return None
    return Packet(kind, session, incarnation, number, acked, data[HEADER_BYTES:])


def described(data: bytes) -> str:
    """A packet in words, for a log or a story."""
    packet = unpack(data)
    if packet is None:
        return "spoilt packet"
    kind = {DATA: f"frame {packet.number}", BARE: "sign of life", RESET: "reset"}[packet.kind]
    return f"{kind} of session {packet.session}, acknowledging {packet.acked}"


# ── one session ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Conversation:
    """Both directions of one session, as one side sees them.

    Frames of ours:     1 … acked │ acked+1 … acked+len(flying) │ backlog
                        forgotten │ on the network              │ not numbered yet

    Frames of theirs:   1 … delivered │ delivered+1 │ … delivered+window
                        handed on     │ missing     │ those that came early
    """

    __slots__ = (
        "_ack_due_us", "_ack_now", "_acked", "_backlog", "_config", "_counters", "_delivered", "_early", "_flying",
        "_resend_us", "_sent_us", "_silent_us", "_to_ack", "heard_us", "incarnation", "quiet_us", "session",
    )  # fmt: skip

    def __init__(
        self, session: int, incarnation: int, silent_us: int, config: LinkConfig, counters: LinkCounters, now_us: int
    ) -> None:
        self.session = session
        self.incarnation = incarnation
        """Of the acceptor; 0 on an initiator that has not heard it yet."""
        self.quiet_us = config.heartbeat_us
        """How long this side may send nothing."""
        self.heard_us = now_us
        self._silent_us = silent_us
        self._config = config
        self._counters = counters
        self._acked = 0
        self._flying: deque[tuple[bytes, int]] = deque()
        """(frame, when it was last sent), the oldest first."""
        self._backlog: deque[bytes] = deque()
        self._resend_us = config.resend_us
        self._sent_us = now_us
        self._delivered = 0
        self._early: dict[int, bytes] = {}
        self._to_ack = 0
        """Frames delivered since we last sent anything."""
        self._ack_due_us: int | None = None
        self._ack_now = False

    @property
    def is_full(self) -> bool:
        return len(self._backlog) >= self._config.backlog_max

    @property
    def numbered(self) -> int:
        """The last number given to a frame of ours."""
        return self._acked + len(self._flying)

    @property
    def undelivered(self) -> int:
        return len(self._flying) + len(self._backlog)

    def send(self, frame: bytes, now_us: int) -> list[bytes]:
        if len(self._flying) < self._config.window:
            return [self._launch(frame, now_us)]
        if self.is_full:
            raise LinkFull(f"{len(self._backlog)} frames wait already; the other side does not take them")
        self._backlog.append(frame)
        return []

    def take(self, packet: Packet, now_us: int, took: Took) -> None:
        self.heard_us = now_us
        if packet.number:
            self._receive(packet.number, packet.payload, took.frames, now_us)
        elif not packet.incarnation:  # it still waits to hear who we are
            self._owe_ack(now_us)
        if packet.acked > self._acked:
            self._forget(packet.acked)
            while self._backlog and len(self._flying) < self._config.window:
                took.packets.append(self._launch(self._backlog.popleft(), now_us))
        if self._ack_now:
            took.packets.append(self.bare(now_us))

    def owe_ack_now(self) -> None:
        self._ack_now = True

    def is_silent(self, now_us: int) -> bool:
        return now_us - self.heard_us >= self._silent_us

    def due(self, now_us: int) -> list[bytes]:
        if self._flying and now_us - self._flying[0][1] >= self._resend_us:
            return self._repeat(now_us)
        if (self._ack_due_us is not None and now_us >= self._ack_due_us) or now_us - self._sent_us >= self.quiet_us:
            return [self.bare(now_us)]
        return []

    def next_deadline(self) -> int:
        deadline = min(self.heard_us + self._silent_us, self._sent_us + self.quiet_us)
        if self._ack_due_us is not None and self._ack_due_us < deadline:
            deadline = self._ack_due_us
        if self._flying and self._flying[0][1] + self._resend_us < deadline:
            deadline = self._flying[0][1] + self._resend_us
        return deadline

    def bare(self, now_us: int) -> bytes:
        self._told(now_us)
        return pack(BARE, self.session, self.incarnation, 0, self._delivered)

    def _launch(self, frame: bytes, now_us: int) -> bytes:
        self._flying.append((frame, now_us))
        self._counters.sent += 1
        self._told(now_us)
        return pack(DATA, self.session, self.incarnation, self.numbered, self._delivered, frame)

    def _repeat(self, now_us: int) -> list[bytes]:
        """The oldest frames again, less those that have hardly had time to be acknowledged."""
        packets = []
        for at in range(min(len(self._flying), self._config.resend_burst)):
            frame, sent_us = self._flying[at]
            if now_us - sent_us >= self._config.resend_us:
                self._flying[at] = (frame, now_us)
                number = self._acked + 1 + at
                packets.append(pack(DATA, self.session, self.incarnation, number, self._delivered, frame))
        self._counters.resent += len(packets)
        self._resend_us = min(2 * self._resend_us, self._config.resend_us_max)
        self._told(now_us)
        return packets

    def _told(self, now_us: int) -> None:
        """Every packet carries what we have delivered, so none is owed after it."""
        self._sent_us = now_us
        self._to_ack = 0
        self._ack_due_us = None
        self._ack_now = False

    def _forget(self, acked: int) -> None:
        for _ in range(acked - self._acked):
            self._flying.popleft()
        self._acked = acked
        self._resend_us = self._config.resend_us

    def _receive(self, number: int, frame: bytes, frames: list[bytes], now_us: int) -> None:
        ahead = number - self._delivered
        if ahead == 1:
            self._deliver(frame, frames)
            self._owe_ack(now_us)
        elif ahead <= 0 or number in self._early:
            self._counters.duplicates += 1
            self._ack_now = True
        else:
            self._counters.out_of_order += 1
            self._ack_now = True
            if ahead <= self._config.window:
                self._early[number] = frame

    def _deliver(self, frame: bytes, frames: list[bytes]) -> None:
        before = len(frames)
        frames.append(frame)
        self._delivered += 1
        while self._early and (early := self._early.pop(self._delivered + 1, None)) is not None:
            frames.append(early)
            self._delivered += 1
        self._counters.delivered += len(frames) - before
        self._to_ack += len(frames) - before

    def _owe_ack(self, now_us: int) -> None:
        if self._to_ack >= self._config.ack_every:
            self._ack_now = True
        elif self._ack_due_us is None:
            self._ack_due_us = now_us + self._config.ack_delay_us


# ── the two ends ───────────────────────────────────────────────────────────────────────────────────────────────────


class Link(ABC):
    """What both ends have in common; see `Initiator` and `Acceptor`."""

    def __init__(self, config: LinkConfig) -> None:
        self.config = config
        self.counters = LinkCounters()
        self._state = LinkState.CLOSED
        self._moves = dict.fromkeys(TRANSITIONS, 0)
        self._talk: _Conversation | None = None
        """There unless CLOSED."""

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def session(self) -> int | None:
        """The one under way. With one, `send` may be called, also before the other side has answered."""
        return None if self._talk is None else self._talk.session

    @property
    def is_full(self) -> bool:
        """No frame more until an acknowledgement comes."""
        return self._talk is not None and self._talk.is_full

    @property
    def undelivered(self) -> int:
        """Frames of ours that the other side has not acknowledged; at 0 a driver may leave without losing any."""
        return 0 if self._talk is None else self._talk.undelivered

    def send(self, frame: bytes, now_us: int) -> list[bytes]:
        """The packets to put on the network now; none when the frame has to wait for its turn."""
        if self._talk is None:
            raise LinkClosed("there is no session to send a frame in")
        if len(frame) > FRAME_BYTES_MAX:
            raise WireError(f"a frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}")
        return self._talk.send(frame, now_us)

    def take(self, data: bytes, now_us: int) -> Took:
        """What a packet from the network brings. Whatever its bytes are, this does not raise."""
        took = Took([], [], [])
        packet = unpack(data)
        if packet is None:
            self.counters.corrupt += 1
            return took
        talk = self._talk_of(packet, now_us, took)
        if talk is None:
            return took
        if packet.acked > talk.numbered:
            self.counters.corrupt += 1
            return took
        talk.take(packet, now_us, took)
        return took

    def tick(self, now_us: int) -> Took:
        """What is due: acknowledgements, repetitions, signs of life, and the end of a silent session.

        Hand over packets that have arrived first: after a pause of this process they show that the other side lives.
        """
        took = Took([], [], [])
        if self._talk is not None:
            if self._talk.is_silent(now_us):
                self._lose(f"silent for {(now_us - self._talk.heard_us) // 1000} ms", took)
            else:
                took.packets.extend(self._talk.due(now_us))
        return took

    def close(self, reason: str) -> list[bytes]:
        """End the session under way from this side; whoever closes is not told again. Packets to put on the network."""
        took = Took([], [], [])
        self._lose(reason, took)
        return took.packets

    def next_deadline(self) -> int | None:
        return None if self._talk is None else self._talk.next_deadline()

    @abstractmethod
    def _talk_of(self, packet: Packet, now_us: int, took: Took) -> _Conversation | None:
        """The conversation that the packet belongs to; None where it belongs to none and has been dealt with."""

    @abstractmethod
    def _lose(self, reason: str, took: Took) -> None:
        """End the session under way, for good."""

    def moves(self) -> dict[tuple[LinkState, LinkMove], int]:
        """How often each transition was taken."""
        return dict(self._moves)

    def _move(self, move: LinkMove, talk: _Conversation | None) -> None:
        before, self._state = self._state, next_state(self._state, move)
        self._moves[before, move] += 1
        self._talk = talk


class Initiator(Link):
    """The end that opens sessions, each with a higher number than the one before."""

    def __init__(self, first_session: int, config: LinkConfig) -> None:
        if not 1 <= first_session <= U64_MAX:
            raise BadConfig(f"first_session must be within 1 … 2⁶⁴-1, not {first_session}")
        super().__init__(config)
        self._next_session = first_session

    def open(self, now_us: int) -> list[bytes]:
        """Begin the next session. Frames may follow at once; nothing is known of the other side until `Opened`."""
        talk = _Conversation(self._next_session, 0, self.config.silent_us, self.config, self.counters, now_us)
        talk.quiet_us = self.config.resend_us  # ask again soon, until there is an answer
        self._move(LinkMove.BEGIN, talk)
        self._next_session += 1
        return [talk.bare(now_us)]

    def _talk_of(self, packet: Packet, now_us: int, took: Took) -> _Conversation | None:
        del now_us
        talk = self._talk
        if talk is None or packet.session != talk.session:
            self.counters.stale += 1
        elif not packet.incarnation:  # an acceptor always says who it is
            self.counters.corrupt += 1
        elif talk.incarnation not in (0, packet.incarnation):
            self.counters.resets += packet.kind == RESET
            self._lose("the other side has restarted", took)
        elif packet.kind == RESET:
            self.counters.resets += 1
            self._lose("the other side has restarted or given up this session", took)
        else:
            if not talk.incarnation:
                self._answered(talk, packet.incarnation, took)
            return talk
        return None

    def _answered(self, talk: _Conversation, incarnation: int, took: Took) -> None:
        self._move(LinkMove.ANSWERED, talk)
        talk.incarnation = incarnation
        talk.quiet_us = self.config.heartbeat_us
        took.news.append(Opened(talk.session))

    def _lose(self, reason: str, took: Took) -> None:
        if self._talk is not None:
            took.news.append(Lost(self._talk.session, reason))
            self._move(LinkMove.LOSE, None)


class Acceptor(Link):
    """The end that serves one initiator, in the highest session it has seen of it."""

    def __init__(self, incarnation: int, config: LinkConfig) -> None:
        if not 1 <= incarnation <= U64_MAX:
            raise BadConfig(f"incarnation must be within 1 … 2⁶⁴-1, not {incarnation}")
        super().__init__(config)
        self.incarnation = incarnation
        self._highest_session = 0
        """Served, now or before. What is lower is over; this one too, once it is lost."""

    def _talk_of(self, packet: Packet, now_us: int, took: Took) -> _Conversation | None:
        if packet.session < self._highest_session or packet.kind == RESET:
            self.counters.stale += 1
        elif packet.incarnation not in (0, self.incarnation):
            took.packets.append(self._reset(packet.session))
        elif packet.session == self._highest_session:
            if self._talk is not None:
                return self._talk
            took.packets.append(self._reset(packet.session))
        elif packet.incarnation:
            # It has begun, and not with us as we are now: to number it from 1 again would lose what went before.
            took.packets.append(self._reset(packet.session))
        else:
            return self._adopt(packet.session, now_us, took)
        return None

    def _adopt(self, session: int, now_us: int, took: Took) -> _Conversation:
        if self._talk is not None:
            took.news.append(Replaced(self._talk.session))
        talk = _Conversation(session, self.incarnation, self.config.acceptor_silent_us, self.config, self.counters, now_us)
        self._move(LinkMove.ADOPT, talk)
        self._highest_session = session
        talk.owe_ack_now()  # the initiator waits to hear who we are
        took.news.append(Opened(session))
        return talk

    def _reset(self, session: int) -> bytes:
        self.counters.resets += 1
        return pack(RESET, session, self.incarnation, 0, 0)

    def _lose(self, reason: str, took: Took) -> None:
        if self._talk is not None:
            took.news.append(Lost(self._talk.session, reason))
            took.packets.append(self._reset(self._talk.session))  # where only one direction is cut, it should know
            self._move(LinkMove.LOSE, None)
