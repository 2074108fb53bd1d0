"""Checks of a fleet behind a router in a fuzzed world: whether it serves, whether it is idle, and that nothing is held then.

Owns no state beyond references to the router's host, the instances' hosts and the router's faults.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.sim.instance_host import InstanceHost
from baton.sim.law_checker import LawChecker
from baton.sim.law_names import FORGOTTEN, LIVENESS, TRUE_NAMES, LawBroken
from baton.sim.line_times import LineTimes
from baton.sim.router_faults import RouterFaults
from baton.sim.router_host import RouterHost

RESUMED_WITHIN_US = 5_000_000
CLAIMED_WITHIN_US = 500_000
"""Time a client may need to notice a lost router and to come back."""


class FleetChecks:
    def __init__(
        self, router_host: RouterHost, router_faults: RouterFaults, nodes: Sequence[InstanceHost], line_times: LineTimes
    ) -> None:
        self.router_host = router_host
        self._router_faults = router_faults
        self._nodes = nodes
        self._line_times = line_times

    def boot(self) -> None:
        self._router_faults.boot()
        self._router_faults.unleash()

    @property
    def noticed_us(self) -> int:
        """Time until the router has noticed every lost instance, and every lost instance has learned it."""
        return self.router_host.config.suspect_us + 2 * self.router_host.config.beat_us + 200_000

    def heal(self) -> None:
        self._router_faults.heal()

    def serves(self, node: InstanceHost) -> bool:
        """Whether it is a member in the session that it was welcomed in, and does not drain or leave."""
        front_end, connection = node.front_end, self.router_host.connection_of(node.name)
        if (
            connection is None
            or node.instance is None
            or node.instance.is_leaving
            or node.instance.is_behind
            or node.hangs
            or node.stopped_for_good
            or front_end is None
            or front_end.drains
        ):
            return False
        return front_end.serves and front_end.line.session == connection.line.session

    @property
    def is_quiet(self) -> bool:
        """Whether no request is open at the router, and no instance holds a choice for it."""
        if self.router_host.sessions.router.open_requests:
            return False
        return all(node.front_end is None or not node.front_end.sessions.held_choices for node in self._nodes)

    def nothing_held(self, checker: LawChecker) -> None:
        router = self.router_host.sessions.router
        if router.open_requests or router.waiting:
            raise LawBroken(LIVENESS, f"the router still has {router.open_requests} bodies, {router.waiting} choices wait")
        for node in self._nodes:
            if node.front_end is not None and node.front_end.sessions.held_choices:
                raise LawBroken(
                    FORGOTTEN, f"{node.name} keeps {node.front_end.sessions.held_choices} choices of bodies that are over"
                )
        said = self.router_host.watcher.members()
        for node in self._nodes:
            if node.instance is not None:
                self._names_are_true(node, said[node.number], checker.cached_names(node.instance))

    def _names_are_true(self, node: InstanceHost, said: set[bytes], cached: set[bytes]) -> None:
        if said != cached:
            raise LawBroken(TRUE_NAMES, f"{node.name} has {len(cached)} prefixes cached and says so of {len(said)}")
        connection = self.router_host.connection_of(node.name)
        session = None if connection is None else connection.session
        for key in sorted(said):
            if session not in self.router_host.holders(key):
                raise LawBroken(TRUE_NAMES, f"{node.name} has said {key.hex()}, and the router does not know it")

    def may_be_forgotten(self, origin: bytes, lost_us: int) -> bool:
        """Whether the request was at no instance when the router crashed, or a fault hit such an instance or a router.

        The fault may have happened since then, or so shortly before that the router had not noticed it. Where the router was
        down for so long that its instances have it again after the grace period, they have rightly kept nothing.
        """
        kept = self.router_host.kept.get((origin, lost_us))
        config = self.router_host.config
        joined_us = self.router_host.began_us - lost_us + self._line_times.joined_us
        short = config.deadline_us < RESUMED_WITHIN_US or config.orphan_grace_us < max(CLAIMED_WITHIN_US, joined_us)
        if not kept or short or self.router_host.disturbed_us > lost_us:
            return True
        return any(self._nodes[number].hurt_until_us() >= lost_us - self.noticed_us for number in kept)

    def gather_moves(self, checker: LawChecker) -> None:
        for sessions in (*self.router_host.former_sessions, self.router_host.sessions):
            checker.took_moves("carrying", sessions.router.moves())
            checker.took_moves("member", sessions.router.fleet.moves())
        of_nodes = [sessions for node in self._nodes for sessions in node.instance_sessions]
        for instance_sessions in (*self._router_faults.instance_sessions(), *of_nodes):
            checker.took_moves("relay", instance_sessions.moves())
            checker.took_moves("standing", instance_sessions.session_moves())
