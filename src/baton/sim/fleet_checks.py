"""Checks of a fleet behind a router in a fuzzed world: whether it serves, whether it is idle, and that nothing is held then.

Owns no state beyond references to the router's host, the instances' hosts and the router's faults.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.sim.instance_host import InstanceHost
from baton.sim.law_checker import LawChecker
from baton.sim.law_names import FORGOTTEN, LIVENESS, TRUE_NAMES, LawBroken
from baton.sim.router_faults import RouterFaults
from baton.sim.router_host import RouterHost

RESUMED_WITHIN_US = 5_000_000
CLAIMED_WITHIN_US = 500_000
"""Time a client may need to notice a lost router and to come back."""


class FleetChecks:
    def __init__(self, gate: RouterHost, upheaval: RouterFaults, seats: Sequence[InstanceHost]) -> None:
        self.gate = gate
        self._upheaval = upheaval
        self._seats = seats

    def boot(self) -> None:
        self._upheaval.boot()
        self._upheaval.unleash()

    @property
    def noticed_us(self) -> int:
        """Time until the router has noticed every lost instance, and every lost instance has learned it."""
        return self.gate.config.suspect_us + 2 * self.gate.config.beat_us + 200_000

    def heal(self) -> None:
        self._upheaval.heal()

    def serves(self, seat: InstanceHost) -> bool:
        """Whether both ends are in the same session, the router has welcomed it there, and it does not drain or leave."""
        member, door = seat.member, self.gate.doors[seat.number]
        if seat.instance is None or seat.instance.is_leaving or seat.instance.is_behind or member is None or member.drains:
            return False
        same = member.line.session == door.line.session
        return same and member.serves and door.session is not None and self.gate.knows(seat.name)

    @property
    def is_quiet(self) -> bool:
        """Whether no request is open at the router, and no instance holds a choice for it."""
        if self.gate.switch.router.open_requests:
            return False
        return all(seat.member is None or not seat.member.relay.held_choices for seat in self._seats)

    def nothing_held(self, judge: LawChecker) -> None:
        router = self.gate.switch.router
        if router.open_requests or router.waiting:
            raise LawBroken(LIVENESS, f"the router still has {router.open_requests} bodies, {router.waiting} choices wait")
        for seat in self._seats:
            if seat.member is not None and seat.member.relay.held_choices:
                raise LawBroken(
                    FORGOTTEN, f"{seat.name} keeps {seat.member.relay.held_choices} choices of bodies that are over"
                )
        said = self.gate.book.members()
        for seat in self._seats:
            if seat.instance is not None:
                self._names_are_true(seat, said[seat.number], judge.cached_names(seat.instance))

    def _names_are_true(self, seat: InstanceHost, said: set[bytes], cached: set[bytes]) -> None:
        if said != cached:
            raise LawBroken(TRUE_NAMES, f"{seat.name} has {len(cached)} prefixes cached and says so of {len(said)}")
        session = self.gate.doors[seat.number].session
        for key in sorted(said):
            if session not in self.gate.holders(key):
                raise LawBroken(TRUE_NAMES, f"{seat.name} has said {key.hex()}, and the router does not know it")

    def may_be_forgotten(self, origin: bytes, lost_us: int) -> bool:
        """Whether the request was at no instance when the router crashed, or a fault hit such an instance or a router.

        The fault may have happened since then, or so shortly before that the router had not noticed it.
        """
        kept = self.gate.kept.get((origin, lost_us))
        config = self.gate.config
        short = config.deadline_us < RESUMED_WITHIN_US or config.orphan_grace_us < CLAIMED_WITHIN_US
        if not kept or short or self.gate.disturbed_us > lost_us:
            return True
        return any(self._seats[number].hurt_until_us() >= lost_us - self.noticed_us for number in kept)

    def gather_moves(self, judge: LawChecker) -> None:
        for line in self.gate.lines:
            judge.took_moves("link", line.moves())
        for switch in (*self.gate.former, self.gate.switch):
            judge.took_moves("carrying", switch.router.moves())
            judge.took_moves("member", switch.router.fleet.moves())
        for relay in (*self._upheaval.relays(), *(relay for seat in self._seats for relay in seat.relays)):
            judge.took_moves("relay", relay.moves())
            judge.took_moves("standing", relay.turns())
