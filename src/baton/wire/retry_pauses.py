"""How long a side that connects waits between two attempts.

Owns the pause of one connection that is kept up: it doubles with every attempt that fails or is short-lived, and begins anew
after a connection that held. After a rejection by the other side the pause is another one: short for some attempts, because
what rejects us may hold an earlier incarnation of ours until it notices its silence, and long after that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryConfig:
    first_us: int
    longest_us: int
    held_us: int
    """After a connection that lasted so long, the pause begins anew."""
    early_rejections: int = 0
    """So many attempts after a rejection come after `early_rejected_us`, the others after `rejected_us`."""
    early_rejected_us: int = 0
    rejected_us: int = 0


class RetryPauses:
    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._pause_us = config.first_us
        self._rejections = 0

    def after(self, lasted_us: int, share: float, *, rejected: bool = False) -> int:
        """The pause after an attempt that ended `lasted_us` after it began. `share` is drawn from 0.5 … 1 by the driver, so
        that the processes of a fleet do not reconnect all at once."""
        config = self._config
        held = lasted_us > config.held_us
        self._pause_us = config.first_us if held else min(2 * self._pause_us, config.longest_us)
        self._rejections = self._rejections + 1 if rejected else 0
        if not rejected:
            return int(self._pause_us * share)
        early = self._rejections <= config.early_rejections
        return int((config.early_rejected_us if early else config.rejected_us) * share)
