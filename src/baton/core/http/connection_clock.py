"""Decides when a client has had time enough: to send a header, to send a body, to say anything at all, to read its answer.

    IDLE ──bytes──▶ HEADER ──whole header──▶ BODY ──whole body──▶ ANSWER ──answered──▶ IDLE
                                              └──answered before the body was whole──▶ REST

Under TLS a connection begins in HANDSHAKE, which may take as long as a header.

A body has a least rate, so a slow line is no offence and a silent one is. An answer may be read as slowly as its reader
likes: only a reader that has taken nothing at all for `unread_s`, while the server could not write on, is given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class ConnectionPhase(Enum):
    HANDSHAKE = "TLS is not established"
    IDLE = "no request"
    HEADER = "part of a header has come"
    BODY = "part of a body has come"
    ANSWER = "a request is answered"
    REST = "answered before the body was whole; what comes is discarded"
    CLOSING = "refused; what comes is discarded"


class Overdue(StrEnum):
    """The limit that a client has passed."""

    HANDSHAKE = "tls_handshake_timeout"
    IDLE = "idle"
    HEADER = "header_timeout"
    BODY = "body_timeout"
    REST = "rest"
    CLOSING = "closing"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """In seconds."""

    idle_s: float = 75.0
    """Longer than clients commonly keep idle connections, so that none sends a request into a connection being closed."""
    header_s: float = 20.0
    """Of a TLS handshake too."""
    body_s: float = 30.0
    """A body may take this long, and a second more for every `body_bytes_a_s`."""
    body_bytes_a_s: int = 64 << 10
    rest_s: float = 5.0
    closing_s: float = 2.0
    unread_s: float = 600.0


_OVERDUE = {
    ConnectionPhase.HANDSHAKE: Overdue.HANDSHAKE,
    ConnectionPhase.IDLE: Overdue.IDLE,
    ConnectionPhase.HEADER: Overdue.HEADER,
    ConnectionPhase.BODY: Overdue.BODY,
    ConnectionPhase.REST: Overdue.REST,
    ConnectionPhase.CLOSING: Overdue.CLOSING,
}
"""An answer may take any time."""


class ConnectionClock:
    """The phase of one connection, and since when."""

    def __init__(self, limits: TimeLimits, now_s: float) -> None:
        self._limits = limits
        self.phase = ConnectionPhase.IDLE
        self._since_s = now_s
        self._body_bytes = 0
        self._unsent_bytes = 0
        self.read_s = now_s
        """When the client was last seen to read, or had nothing to read."""

    def enter(self, phase: ConnectionPhase, now_s: float) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._since_s = now_s
            self._body_bytes = 0

    def count_body(self, count: int) -> None:
        self._body_bytes += count

    def overdue(self, now_s: float, unsent_bytes: int, is_blocked: bool) -> Overdue | None:
        """Ask now and then. `unsent_bytes` wait in the process to be written; `is_blocked`: nothing may be added to them."""
        if self._has_stopped_reading(now_s, unsent_bytes, is_blocked):
            return Overdue.UNREAD
        if unsent_bytes and self.phase is ConnectionPhase.IDLE:
            self._since_s = now_s  # it is still reading the last answer
            return None
        return None if now_s - self._since_s < self._limit_s() else _OVERDUE.get(self.phase)

    def _has_stopped_reading(self, now_s: float, unsent_bytes: int, is_blocked: bool) -> bool:
        adds = self.phase is ConnectionPhase.ANSWER and not is_blocked
        if adds or not unsent_bytes or unsent_bytes < self._unsent_bytes:
            self.read_s = now_s
        self._unsent_bytes = unsent_bytes
        return now_s - self.read_s >= self._limits.unread_s

    def _limit_s(self) -> float:
        limits = self._limits
        match self.phase:
            case ConnectionPhase.IDLE:
                return limits.idle_s
            case ConnectionPhase.HEADER | ConnectionPhase.HANDSHAKE:
                return limits.header_s
            case ConnectionPhase.BODY:
                return limits.body_s + self._body_bytes / limits.body_bytes_a_s
            case ConnectionPhase.ANSWER:
                return float("inf")
            case ConnectionPhase.REST:
                return limits.rest_s
            case ConnectionPhase.CLOSING:
                return limits.closing_s
