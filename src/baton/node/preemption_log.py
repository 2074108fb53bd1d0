"""Logs preemptions with their cause and what it costs to bring the request back: the first of a cause at once, and at most
LINES of each in EVERY_S. `left_out` counts the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice

from baton.api.log_rate import LogRate
from baton.core.engine.preemption_record import Preemption, RecentPreemptions

log = logging.getLogger("baton.engine")

LINES = 10
EVERY_S = 10.0
_LINE = "preempted %s cause=%s preemptions=%d way=%s compute_tokens=%d restore_bytes=%d cost_ms=%.1f%s"


class PreemptionLog:
    def __init__(self, recent: RecentPreemptions, block_bytes: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._recent = recent
        self._block_bytes = block_bytes
        self._clock_s = clock_s
        self._rate = LogRate(LINES, EVERY_S)
        self._seen = recent.total

    def look(self) -> None:
        """Log those since the last call. Cheap when there are none."""
        recent = self._recent
        if recent.total == self._seen:
            return
        fresh = min(recent.total - self._seen, len(recent.latest))
        self._seen = recent.total
        if log.isEnabledFor(logging.INFO):
            for preemption in islice(recent.latest, len(recent.latest) - fresh, None):
                self._log(preemption)

    def _log(self, preemption: Preemption) -> None:
        left_out = self._rate.take(preemption.cause, self._clock_s())
        if left_out is not None:
            log.info(
                _LINE,
                shown_id(preemption.request_id),
                preemption.cause,
                preemption.preemptions,
                preemption.way,
                preemption.compute_tokens,
                preemption.restore_blocks * self._block_bytes,
                preemption.cost_us / 1000,
                f" left_out={left_out}" if left_out else "",
            )


def shown_id(request_id: str) -> str:
    """The client's id and the choice, without the tenant before them (`RequestOwner.choice_id`)."""
    owned, _, choice = request_id.rpartition(":")
    return f"id={owned.rpartition(':')[2]} choice={choice}" if owned else f"id={request_id}"
