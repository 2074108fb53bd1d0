"""The time limits and bounds of the connections of one fuzzed world."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.sim.lines import LineConfig
from baton.wire.retry_pauses import RetryConfig
from baton.wire.sealed_stream import StreamConfig

EARLY_REJECTIONS = 10


@dataclass(frozen=True, slots=True)
class LineTimes:
    """Production's options on a shorter scale; limits are of bytes, as the network counts them."""

    handshake_us: int = 300_000
    heartbeat_us: int = 80_000
    silent_us: int = 300_000
    unacknowledged_us: int = 600_000
    connect_us: int = 200_000
    window_bytes: int = 1 << 16
    """An owner that can wait stops sending when the other end has not read so much."""
    unread_bytes_max: int = 1 << 20
    """A connection whose other end leaves more than so much unread is ended after `unread_us`."""
    unread_us: int = 50_000
    router_silent_us: int = 2_000_000
    """An instance ends a connection on which nothing of the router came for so long."""
    retry_us: int = 5_000
    retry_us_max: int = 40_000

    def with_heartbeat(self) -> LineConfig:
        """Between peers, and between a front end and its instances: each side shows that it lives."""
        stream = StreamConfig(
            handshake_us=self.handshake_us,
            heartbeat_us=self.heartbeat_us,
            silent_us=self.silent_us,
            unread_bytes_max=self.unread_bytes_max,
            unread_us=self.unread_us,
        )
        return LineConfig(stream, stream, self._retry())

    def of_router(self) -> LineConfig:
        """Between router and instances: instances send heartbeats as messages, and their silence is judged by the router,
        which alone gives signs of life, half as often as peers do. Where none comes, instances end the connection."""
        accepts = StreamConfig(
            handshake_us=self.handshake_us,
            heartbeat_us=2 * self.heartbeat_us,
            unread_bytes_max=self.unread_bytes_max,
            unread_us=self.unread_us,
        )
        dials = replace(accepts, heartbeat_us=None, silent_us=self.router_silent_us)
        return LineConfig(dials, accepts, self._retry())

    @property
    def noticed_us(self) -> int:
        """Time until both sides have noticed a lost connection, and have tried again."""
        limits_us = self.silent_us + self.unacknowledged_us + self.handshake_us + self.connect_us
        return limits_us + 2 * self.retry_us_max

    @property
    def joined_us(self) -> int:
        """Time until an instance that dials again and again has a session with a router that listens again: its handshake
        with nobody must end first."""
        return self.handshake_us + self.connect_us + 2 * self.retry_us_max

    def _retry(self) -> RetryConfig:
        return RetryConfig(
            first_us=self.retry_us,
            longest_us=self.retry_us_max,
            held_us=4 * self.retry_us_max,
            early_rejections=EARLY_REJECTIONS,
            early_rejected_us=2 * self.retry_us,
            rejected_us=4 * self.retry_us_max,
        )
