"""The fleet's latest events in words, for operators, and its counts for the metrics page.

Owns a bounded list of events and the router's part of `/metrics`. Everything else is read from the router on request.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.core.config import ROLES
from baton.core.routing.events import FleetChanged
from baton.router.fleet_engine import FleetEngine
from baton.router.instance_connections import InstanceConnections
from baton.router.move_log import MoveLog
from baton.wire.router_sessions import Act

EVENTS_MAX = 1024
STATES = ("ready", "draining")
CHANGES = ("joined", "draining", "left", "lost", "suspected", "stuck", "fenced", "refused")
"""Every `FleetChanged.what`."""


class FleetEventLog(Collector):
    def __init__(self, sessions: InstanceConnections, engine: FleetEngine) -> None:
        self._sessions = sessions
        self._engine = engine
        self._events: deque[dict[str, object]] = deque(maxlen=EVENTS_MAX)
        self._changes = Counter(dict.fromkeys(CHANGES, 0))  # a rate over a series that was missing misses its first event
        self._numbers = 0
        self._moves = MoveLog(engine.request_id, sessions.router_sessions.router.known_tokens)
        sessions.watch(self._take)
        sessions.watch(self._moves.take)

    def events(self) -> list[dict[str, object]]:
        """The latest events, oldest first."""
        return list(self._events)

    def _take(self, act: Act, now_us: int) -> None:  # noqa: ARG002
        if isinstance(act, FleetChanged):
            self._changes[act.what] += 1
            self._numbers += 1
            self._events.append(
                {
                    "number": self._numbers,
                    "name": act.name,
                    "incarnation": act.incarnation,
                    "what": act.what,
                    "why": act.why,
                    "at_s": time.time(),
                }
            )

    # ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def collect(self) -> Iterable[Metric]:
        router, views = self._sessions.router_sessions.router, self._engine.views()
        counts = router.counts
        instances = GaugeMetricFamily("baton_instances", "Instances of this router", labels=["role", "state"])
        for role in ROLES:
            for state in STATES:
                number = sum(view.facts.role == role and view.state == state for view in views)
                instances.add_metric([role, state], number)
        yield instances
        open_there = GaugeMetricFamily("baton_instance_open", "Choices that are at an instance", labels=["instance"])
        for view in views:
            open_there.add_metric([view.facts.name], view.open)
        yield open_there
        yield GaugeMetricFamily("baton_router_waiting", "Choices that wait for a place", value=router.waiting)
        yield GaugeMetricFamily("baton_router_open", "Requests of clients that are open", value=self._engine.open_requests)
        yield GaugeMetricFamily("baton_orphans", "Requests that wait to be resumed", value=self._engine.unclaimed)
        yield CounterMetricFamily("baton_orphans_found", "Requests of a lost router that were found", value=counts.orphans)
        yield CounterMetricFamily(
            "baton_orphans_dropped", "Of those, requests that nobody came for", value=counts.orphans_dropped
        )
        yield _by("instance_events", "Changes of the fleet", "what", self._changes)
        yield _by("suspicions", "Instances taken out without a word from them", "what", counts.suspicions)
        yield _by("retries", "Choices that went on elsewhere", "cause", counts.retries)
        yield from self._moves.metrics()
        yield CounterMetricFamily(
            "baton_moved_tokens", "Generated tokens that travelled with a choice", value=counts.moved_tokens
        )
        yield _by("declined", "Requests that were declined", "code", counts.declined)
        yield _by("refused_connections", "Connections, frames and instances not let in", "reason", self._sessions.refused())


def _by(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"baton_{name}", help_text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
