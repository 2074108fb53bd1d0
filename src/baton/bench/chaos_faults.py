"""Chooses faults and their targets, and decides which suspicions of the router they explain.

A fault is open from its injection until the router lists the instance again: as a new process if the fault ends it, as the
same one if it only pauses it. A suspicion of the router is explained by a fault of that instance that was open at that
moment, and false otherwise. `bench.chaos_fleet` observes the fleet, `bench.chaos_signals` injects the faults.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

READY = "ready"
SETTLE_S = 1.0
"""A pause shorter than the router's timeout leaves no event; it counts as over this long after its end."""
PAUSE_S = (0.2, 3.0)


class FaultKind(StrEnum):
    KILL = "kill -9"
    KILL_ENGINE = "kill -9, engine only"
    STOP = "SIGSTOP"
    STOP_ENGINE = "SIGSTOP, engine only"
    HANG_ENGINE = "SIGSTOP for good, engine only"
    DRAIN = "drain"
    RESTART = "SIGTERM"
    CUT = "connection cut"


PASSING = (FaultKind.STOP, FaultKind.STOP_ENGINE, FaultKind.CUT)
"""Faults that an instance survives."""
HELD_AGAINST = ("suspected", "stuck", "lost", "fenced")
"""Events by which the router reports that it suspects an instance."""


@dataclass(frozen=True, slots=True)
class SeenInstance:
    """An instance as listed by the router."""

    name: str
    role: str
    state: str
    pid: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SeenSuspicion:
    """A router event about an instance."""

    number: int
    name: str
    what: str
    why: str


@dataclass(slots=True)
class InjectedFault:
    kind: FaultKind
    victim: SeenInstance
    pause_s: float
    after: int
    """Number of the last router event before the fault."""
    over_s: float | None = None
    """When the fault ended: at once for most, at the end of the pause for a stop."""
    until: int | None = None
    """Number of the last router event before the instance was back."""

    def covers(self, number: int) -> bool:
        return self.after < number and (self.until is None or number <= self.until)


@dataclass(slots=True)
class FaultChooser:
    """All injected faults, and which suspicions they explain."""

    draws: random.Random
    kinds: tuple[FaultKind, ...]
    planned: Mapping[str, int]
    """Number of instances by role."""
    done: list[InjectedFault] = field(default_factory=list)
    _kinds_left: list[FaultKind] = field(default_factory=list)
    """Kinds left in this round. Each round has every kind once."""

    def draw(self, fleet: Sequence[SeenInstance], last_event: int) -> InjectedFault | None:
        """The next fault; None while a role has no spare instance."""
        faulty = [fault.victim.name for fault in self.done if fault.until is None]
        healthy = [seen for seen in fleet if seen.state == READY and seen.name not in faulty]
        at_hand = {role: sum(seen.role == role for seen in healthy) for role in self.planned}
        spared = [role for role, count in self.planned.items() if count > 1]
        if not spared or any(at_hand[role] < 2 for role in spared):
            return None
        role = self.draws.choice(spared)
        victim = self.draws.choice([seen for seen in healthy if seen.role == role])
        if not self._kinds_left:
            self._kinds_left = self.draws.sample(self.kinds, len(self.kinds))
        return InjectedFault(self._kinds_left.pop(), victim, self.draws.uniform(*PAUSE_S), after=last_event)

    def close_recovered(self, fleet: Sequence[SeenInstance], last_event: int, now_s: float) -> None:
        """Close the faults whose instances are back."""
        ready = {seen.name: seen for seen in fleet if seen.state == READY}
        for fault in self.done:
            if fault.until is None and (back := ready.get(fault.victim.name)) is not None and _is_over(fault, back, now_s):
                fault.until = last_event

    def explain(self, said: SeenSuspicion) -> bool:
        """Whether a fault of that instance was open at the time of the event."""
        return any(fault.victim.name == said.name and fault.covers(said.number) for fault in self.done)

    @property
    def open(self) -> list[InjectedFault]:
        return [fault for fault in self.done if fault.until is None]


def _is_over(fault: InjectedFault, back: SeenInstance, now_s: float) -> bool:
    if fault.over_s is None:
        return False
    if fault.kind in PASSING:
        return now_s >= fault.over_s + SETTLE_S
    return back.incarnation != fault.victim.incarnation
