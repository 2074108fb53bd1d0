"""Stops orders to a store that has failed several times in a row, and tries it again with one order after a while.

closed ──failures──▶ open ──time──▶ trying (one order only) ──success──▶ closed
                      ▲──────────── failure, twice the time ──┘
"""

from __future__ import annotations


class CircuitBreaker:
    def __init__(self, failures_max: int, retry_us: int, retry_us_max: int) -> None:
        self._failures_max = failures_max
        self._retry_us_min, self._retry_us_max = retry_us, retry_us_max
        self._retry_us = retry_us
        self._failures = 0
        self._until_us: int | None = None
        """Open until this time; None: closed."""
        self._trying = False
        self.opened = 0
        """Number of times it opened."""

    @property
    def is_open(self) -> bool:
        return self._until_us is not None

    def allows(self, now_us: int) -> bool:
        """Whether the store may be asked now. Changes nothing."""
        return self._until_us is None or (now_us >= self._until_us and not self._trying)

    def asked(self) -> None:
        """An order went to the store."""
        if self.is_open:
            self._trying = True

    def succeeded(self) -> None:
        self._failures = 0
        self._until_us, self._trying = None, False
        self._retry_us = self._retry_us_min

    def failed(self, now_us: int) -> None:
        self._failures += 1
        if self.is_open and self._trying:
            self._retry_us = min(2 * self._retry_us, self._retry_us_max)
        elif self.is_open or self._failures < self._failures_max:
            return  # one of those in progress when it opened, or not enough failures yet
        else:
            self.opened += 1
        self._until_us, self._trying = now_us + self._retry_us, False
