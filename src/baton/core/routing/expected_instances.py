"""The instances that a router was told to expect, and until when it waits for them.

Counts names that have served since the router began; one that served and is lost is not expected a second time. Whoever
starts the instances knows their number: `baton up` gives it.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.routing.config import RouterConfig
from baton.core.routing.events import Instance
from baton.core.routing.fleet_members import FleetMember


class ExpectedInstances:
    def __init__(self, config: RouterConfig) -> None:
        self.number = config.expected_instances
        self._start_us = config.start_us
        self._until_us: int | None = None
        self._served: set[Instance] = set()

    def watch(self, servers: Iterable[FleetMember], now_us: int) -> None:
        """The router has begun, or its fleet has changed: these instances serve now."""
        if self._until_us is None:
            self._until_us = now_us + self._start_us
        if self.missing:
            self._served.update(member.name for member in servers)

    @property
    def missing(self) -> int:
        """How many have not served yet, whether they are still waited for or not."""
        return max(0, self.number - len(self._served))

    @property
    def awaited_until_us(self) -> int:
        """Until this time the absence of instances ends no request; 0 where nobody is missing."""
        return self._until_us if self.missing and self._until_us is not None else 0
