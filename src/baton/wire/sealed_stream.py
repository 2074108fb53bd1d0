"""One side of a connection between two holders of the cluster key, as a machine: bytes in, frames and bytes out, deadlines.

    bytes of the stream ── Seal (handshake, tags, numbers) ── SealedStream (stages, time, back-pressure) ── frames

Owns the stage of the connection, its deadlines and what is to be written. Pure: no socket, clock or random source, so that
asyncio (`node.sealed_connection`) and the simulated network (`sim.lines`) drive the same object. A driver passes received
bytes to `receive`, writes `output()` after each call, calls `tick` when `next_deadline` has come, and says with `unread`,
after each write and tick, how many written bytes the other side has not read. The network keeps bytes in order and repeats
what it lost (TCP); nothing is numbered for that here. One connection is one session: what one had not
delivered is lost with it, and nothing of it can reach the next, because both nonces are part of every key.

    UNPROVED ──both have proved that they hold the key──▶ OPEN ──▶ OVER
        └──────── too late, invalid bytes, end of stream ──────────▶┘

An empty frame is a sign of life: a side with a heartbeat sends one when it has sent nothing for so long, and a side with a
silence limit ends a connection on which nothing came for so long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from baton.core.config import BadConfig
from baton.core.errors import IllegalTransition
from baton.core.state_machine import FastEnum
from baton.wire.engine_messages import FRAME_BYTES_MAX, WireError
from baton.wire.seal import OVERHEAD_BYTES, Seal, SealBroken, SealSide

UNREAD_BYTES_MAX = FRAME_BYTES_MAX + (64 << 20)
"""Bytes written and not read by the other side; more than any one frame."""
UNREAD_SHARE = 64
"""Who has more than the limit unread reads at least this part of the limit in every `unread_us`."""
UNPROVED_MAX = 64
"""Accepted connections that have proved nothing yet; beyond it the oldest is closed."""
CONNECTIONS_MAX = 256


class ConnectionFault(StrEnum):
    """Why a connection ended abnormally, besides the faults of the seal."""

    MALFORMED = "malformed_message"
    TOO_LATE = "too_late"
    """It did not prove itself in time."""
    NOT_READING = "not_reading"
    TOO_MANY = "too_many"


class ConnectionStage(FastEnum):
    UNPROVED = "stranger"
    OPEN = "open"
    OVER = "over"


class StreamMove(FastEnum):
    PROVE = "prove"
    REFUSE = "refuse"
    """End it through the other side's fault."""
    END = "end"


STREAM_TRANSITIONS: dict[tuple[ConnectionStage, StreamMove], ConnectionStage] = {
    (ConnectionStage.UNPROVED, StreamMove.PROVE): ConnectionStage.OPEN,
    (ConnectionStage.UNPROVED, StreamMove.REFUSE): ConnectionStage.OVER,
    (ConnectionStage.UNPROVED, StreamMove.END): ConnectionStage.OVER,
    (ConnectionStage.OPEN, StreamMove.REFUSE): ConnectionStage.OVER,
    (ConnectionStage.OPEN, StreamMove.END): ConnectionStage.OVER,
}


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    was: ConnectionStage
    fault: str | None
    """A SealFault or ConnectionFault, where the other side is at fault."""
    reason: str


@dataclass(frozen=True, slots=True)
class StreamConfig:
    handshake_us: int = 5_000_000
    """Time within which the other side must prove itself."""
    heartbeat_us: int | None = None
    """A side that has sent nothing for so long gives a sign of life; None: never."""
    silent_us: int | None = None
    """An open connection on which nothing came for so long is ended; None: never."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    unread_bytes_max: int = UNREAD_BYTES_MAX
    unread_us: int = 1_000_000
    """A connection with more written bytes than `unread_bytes_max` that the other side does not read is ended after so long.
    One burst may be larger (many long prompts for an instance that joined) and takes its time to be read."""

    def __post_init__(self) -> None:
        for name in ("handshake_us", "heartbeat_us", "silent_us", "frame_bytes_max", "unread_bytes_max", "unread_us"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadConfig(f"{name} must be at least 1, not {value}")
        if self.heartbeat_us is not None and self.silent_us is not None and self.heartbeat_us > self.silent_us:
            raise BadConfig(f"heartbeat_us ({self.heartbeat_us}) must not be larger than silent_us ({self.silent_us})")


class Received(NamedTuple):
    """What came of received bytes, in this order."""

    opened: bool
    """Both sides have proved themselves just now."""
    frames: list[bytes]
    end: ConnectionEnd | None
    """The connection ended by these bytes; the frames before remain valid."""


NOTHING_RECEIVED = Received(False, [], None)


class SealedStream:
    def __init__(self, side: SealSide, key: bytes, name: str, nonce: bytes, config: StreamConfig) -> None:
        """`nonce` is drawn by the driver for this connection alone."""
        self._seal = Seal(side, key, name, nonce, config.frame_bytes_max)
        self._config = config
        self._stage = ConnectionStage.UNPROVED
        self._moves = dict.fromkeys(STREAM_TRANSITIONS, 0)
        self._began_us: int | None = None
        self._heard_us = self._sent_us = 0
        self._written_bytes = 0
        self._read_bytes = 0
        """What the other side had read at `_crowded_us`."""
        self._crowded_us: int | None = None
        """Since when more than the limit is unread and the other side reads too little; None: there is no more."""
        self._output = [self._seal.outgoing()]

    def begin(self, now_us: int) -> None:
        """The connection is made: the time of the handshake runs from now on."""
        self._began_us = self._heard_us = self._sent_us = now_us

    @property
    def stage(self) -> ConnectionStage:
        return self._stage

    @property
    def peer(self) -> str:
        """The name of the other side, once it has proved that it holds the key."""
        return self._seal.peer_name

    def silent_us(self, now_us: int) -> int:
        """Time since bytes of the other side last came."""
        return max(0, now_us - self._heard_us)

    def moves(self) -> dict[tuple[ConnectionStage, StreamMove], int]:
        """How often each transition was taken."""
        return dict(self._moves)

    # ── bytes and frames ─────────────────────────────────────────────────────────────────────────────────────────────────

    def output(self) -> bytes:
        """Bytes to write now, after all earlier ones."""
        if not self._output:
            return b""
        output = b"".join(self._output)
        self._output.clear()
        self._written_bytes += len(output)
        return output

    def receive(self, data: bytes, now_us: int) -> Received:
        if self._stage is ConnectionStage.OVER:
            return NOTHING_RECEIVED
        frames: list[bytes] = []
        broken: SealBroken | None = None
        self._heard_us = now_us
        try:
            self._seal.take_into(data, frames)
        except SealBroken as error:
            broken = error
        if handshake := self._seal.outgoing():
            self._put(handshake, now_us)
        opened = self._stage is ConnectionStage.UNPROVED and self._seal.is_proved
        if opened:
            self._move(StreamMove.PROVE)
        end = None if broken is None else self.end(broken.fault, str(broken))
        if b"" in frames:  # signs of life
            frames = [frame for frame in frames if frame]
        return Received(opened, frames, end)

    def send(self, frames: Sequence[bytes], now_us: int) -> None:
        """Write these frames, after all earlier ones; does nothing on a connection that is not open.

        Raises WireError where one of them is too large or empty; none is sent then.
        """
        if self._stage is not ConnectionStage.OPEN:
            return
        for frame in frames:
            if not 0 < len(frame) <= self._config.frame_bytes_max:  # before any is sealed: a numbered frame must be sent
                limit = self._config.frame_bytes_max
                raise WireError(f"a frame of {len(frame)} bytes is not within 1 … the limit of {limit}")
        for frame in frames:
            self._put(self._seal.seal(frame), now_us)

    def unread(self, waiting_bytes: int, now_us: int) -> ConnectionEnd | None:
        """The other side has not read so many of the written bytes. Ends the connection where that is more than the limit
        and does not become less in time."""
        limit = self._config.unread_bytes_max
        if waiting_bytes <= limit + OVERHEAD_BYTES:
            self._crowded_us = None
            return None
        read_bytes = self._written_bytes - waiting_bytes
        if self._crowded_us is None or read_bytes - self._read_bytes > limit // UNREAD_SHARE:
            self._crowded_us, self._read_bytes = now_us, read_bytes
        if now_us - self._crowded_us < self._config.unread_us:
            return None
        return self.end(ConnectionFault.NOT_READING, f"it does not read {waiting_bytes} bytes; the limit is {limit}")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> int | None:
        match self._stage:
            case ConnectionStage.UNPROVED:
                return None if self._began_us is None else self._began_us + self._config.handshake_us
            case ConnectionStage.OPEN:
                silent_us, heartbeat_us = self._config.silent_us, self._config.heartbeat_us
                silent_at = None if silent_us is None else self._heard_us + silent_us
                beat_at = None if heartbeat_us is None else self._sent_us + heartbeat_us
                if self._crowded_us is not None:
                    crowded_at = self._crowded_us + self._config.unread_us
                    return min(at for at in (silent_at, beat_at, crowded_at) if at is not None)
                if silent_at is None or beat_at is None:
                    return silent_at if beat_at is None else beat_at
                return min(silent_at, beat_at)
            case ConnectionStage.OVER:
                return None

    def tick(self, now_us: int) -> ConnectionEnd | None:
        """Do what is due: a sign of life, or the end of a connection that is silent or unproved for too long.

        Pass on received bytes first: after a pause of this process they show that the other side lives. Call `unread`
        afterwards, which has a deadline too.
        """
        config = self._config
        if self._stage is ConnectionStage.UNPROVED:
            if self._began_us is not None and now_us - self._began_us >= config.handshake_us:
                waited = config.handshake_us / 1e6
                return self.end(ConnectionFault.TOO_LATE, f"it did not prove itself within {waited:g} s")
        elif self._stage is ConnectionStage.OPEN:
            if config.silent_us is not None and now_us - self._heard_us >= config.silent_us:
                return self.end(None, f"silent for {(now_us - self._heard_us) // 1000} ms")
            if config.heartbeat_us is not None and now_us - self._sent_us >= config.heartbeat_us:
                self._put(self._seal.seal(b""), now_us)
        return None

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def end_of_stream(self, error: str | None = None) -> ConnectionEnd | None:
        """The network ended the connection: closed by the other side, or broken by this error."""
        reason = "the connection was closed" if error is None else f"the connection broke: {error}"
        if self._stage is ConnectionStage.UNPROVED:
            reason += " before the handshake was over (is that the right port, and the cluster key the same on both sides?)"
        return self.end(None, reason)

    def end(self, fault: str | None, reason: str) -> ConnectionEnd | None:
        """End the connection; None where it is over already. Output that is not written yet remains to be written."""
        if self._stage is ConnectionStage.OVER:
            return None
        end = ConnectionEnd(self._stage, fault, reason)
        self._move(StreamMove.END if fault is None else StreamMove.REFUSE)
        return end

    def _put(self, data: bytes, now_us: int) -> None:
        self._output.append(data)
        self._sent_us = now_us

    def _move(self, move: StreamMove) -> None:
        before = self._stage
        after = STREAM_TRANSITIONS.get((before, move))
        if after is None:
            raise IllegalTransition(f"a stream that is {before.name} cannot take the move {move.name}")
        self._stage = after
        self._moves[before, move] += 1


C = TypeVar("C")


class AcceptedStreams(Generic[C]):
    """The accepted connections of one listener, and how many there may be."""

    def __init__(self, unproved_max: int = UNPROVED_MAX, connections_max: int = CONNECTIONS_MAX) -> None:
        self.connections_max = connections_max
        self._unproved_max = unproved_max
        self._unproved: dict[C, None] = {}
        """Oldest first."""
        self._open: dict[C, None] = {}

    def __iter__(self) -> Iterator[C]:
        return iter((*self._unproved, *self._open))

    def accept(self, connection: C) -> C | None:
        """A connection that has proved nothing yet. Returns the one that must be closed for it."""
        # Unproved connections must not keep out one that holds the key: a handshake takes milliseconds.
        oldest = next(iter(self._unproved)) if len(self._unproved) >= self._unproved_max else None
        self._unproved[connection] = None
        return oldest

    def opened(self, connection: C) -> bool:
        """It has proved itself. False where too many are open: it must be closed."""
        if len(self._open) >= self.connections_max:
            return False
        self._unproved.pop(connection, None)
        self._open[connection] = None
        return True

    def ended(self, connection: C) -> bool:
        """It has ended. Returns whether it had been opened."""
        self._unproved.pop(connection, None)
        was_open = connection in self._open
        self._open.pop(connection, None)
        return was_open
