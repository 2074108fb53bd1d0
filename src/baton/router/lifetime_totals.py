"""Sums of counters over all instances that ever joined, including those that have left.

Keeps the last counts of each incarnation, so that the sums never decrease, as scrapers expect. Counts made after an
incarnation was last looked at are lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.engine.gauges import SchedulerGauges
from baton.core.routing.fleet_members import InstanceView

COUNTS = ("prefix_queries", "prefix_hits", "steps", "preemptions", "handovers")
INCARNATIONS_MAX = 1024
"""Incarnations counted separately because they may return; the counts of older ones are kept as one sum."""

IncarnationKey = tuple[str, int]


class LifetimeTotals:
    def __init__(self) -> None:
        self._incarnations: dict[IncarnationKey, dict[str, int]] = {}
        """The most recently seen one is last."""
        self._past = dict.fromkeys(COUNTS, 0)

    def update(self, views: Iterable[InstanceView]) -> None:
        for view in views:
            key = (str(view.facts.name), view.facts.incarnation)
            known = self._incarnations.pop(key, dict.fromkeys(COUNTS, 0))
            self._incarnations[key] = {name: max(count, _count(view.ledger, name)) for name, count in known.items()}
        while len(self._incarnations) > INCARNATIONS_MAX:
            oldest = self._incarnations.pop(next(iter(self._incarnations)))
            self._past = {name: count + oldest[name] for name, count in self._past.items()}

    def of(self, name: str) -> int:
        return self._past[name] + sum(counts[name] for counts in self._incarnations.values())


def _count(gauges: SchedulerGauges, name: str) -> int:
    if name == "handovers":
        return gauges.handovers.made
    value: int = getattr(gauges, name)
    return value
