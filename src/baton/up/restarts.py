"""When a process that ended is started again. Decides only; the clock and the process are somebody else's.

    starting ──ready──▶ serving ──ended──▶ again, at once where it served for long, else later and later
        └─────ended──▶ again, or given up after `FAILED_STARTS_MAX` starts in a row that never got ready

How it ended makes no difference once it has served: one that was drained and left is replaced like one that was killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FAILED_STARTS_MAX = 5
HEALTHY_US = 60_000_000
"""One that served so long starts with a clean slate."""
FIRST_DELAY_US = 200_000
EXIT_USAGE = 2
"""The exit code of a command whose options are wrong: it will not do better the next time."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    at_us: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    starts: int
    """How many in a row came to nothing."""


@dataclass(slots=True)
class RestartPolicy:
    """The lives of one process."""

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
            if self._failed_starts >= FAILED_STARTS_MAX or code == EXIT_USAGE:
                return GiveUp(self._failed_starts)
        elif now_us - self._ready_us >= HEALTHY_US:
            self._short_lives = 0
        self._ready_us = None
        at_us = now_us + self._delay_us()
        self._short_lives += 1
        return RestartAfter(at_us)

    def _delay_us(self) -> int:
        """None before the first restart; from then on it doubles."""
        if self._short_lives == 0:
            return 0
        doublings = min(self._short_lives - 1, 32)  # a bound for the number, long past any longest delay
        return min(self.delay_us_max, FIRST_DELAY_US << doublings)
