"""Decides when a process that ended is started again. Has no clock and no process.

    starting ──ready──▶ serving ──ended──▶ again, at once if it served for HEALTHY_US, else after a growing delay
        └─────ended──▶ again, or given up after `FAILED_STARTS_MAX` starts in a row that never got ready, and at once if
                       the exit code says that starting again does not help

How a process ended makes no difference once it has served: a drained one is replaced like one that was killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.errors import EXIT_SETUP

FAILED_STARTS_MAX = 5
HEALTHY_US = 60_000_000
"""After serving this long, earlier short runs no longer count."""
FIRST_DELAY_US = 200_000


@dataclass(frozen=True, slots=True)
class RestartAfter:
    at_us: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    starts: int
    """Consecutive failed starts."""


@dataclass(slots=True)
class RestartPolicy:
    """The restart state of one process."""

    delay_us_max: int = 10_000_000
    lives: int = 0
    _ready_us: int | None = field(default=None, init=False)
    """Since when it serves; None before."""
    _failed_starts: int = field(default=0, init=False)
    _short_lives: int = field(default=0, init=False)

    @property
    def is_ready(self) -> bool:
        return self._ready_us is not None

    def started(self) -> None:
        self.lives += 1
        self._ready_us = None

    def ready(self, now_us: int) -> None:
        self._ready_us = now_us
        self._failed_starts = 0

    def ended(self, code: int, now_us: int) -> RestartAfter | GiveUp:
        if self._ready_us is None:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS_MAX or code == EXIT_SETUP:
                return GiveUp(self._failed_starts)
        elif now_us - self._ready_us >= HEALTHY_US:
            self._short_lives = 0
        self._ready_us = None
        at_us = now_us + self._delay_us()
        self._short_lives += 1
        return RestartAfter(at_us)

    def _delay_us(self) -> int:
        """0 for the first restart; FIRST_DELAY_US for the second, then doubling."""
        if self._short_lives == 0:
            return 0
        doublings = min(self._short_lives - 1, 32)  # bounds the exponent, far beyond any longest delay
        return min(self.delay_us_max, FIRST_DELAY_US << doublings)
