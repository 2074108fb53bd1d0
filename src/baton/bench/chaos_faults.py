"""What is done to instances under chaos, to whom, and which suspicions that explains.

A fault is open from the moment it is done until its victim is in the router's books again: as another life where the fault
ends a life, as itself where it only stops it for a while. What the router holds against an instance is explained by a fault
of it that was open at that moment, and false otherwise. Deciding and judging is here; looking at the fleet is
`bench.chaos_fleet`, doing it `bench.chaos_hands`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

READY = "ready"
SETTLE_S = 1.0
"""A stop shorter than the router's patience leaves no trace; so long after its end it counts as over."""
PAUSE_S = (0.2, 3.0)


class FaultKind(StrEnum):
    KILL = "kill -9"
    KILL_ENGINE = "kill -9, engine only"
    STOP = "SIGSTOP"
    STOP_ENGINE = "SIGSTOP, engine only"
    DRAIN = "drain"
    RESTART = "SIGTERM"
    CUT = "connection cut"


PASSING = (FaultKind.STOP, FaultKind.STOP_ENGINE, FaultKind.CUT)
"""Those that an instance survives."""
HELD_AGAINST = ("suspected", "stuck", "lost", "fenced")
"""What the router says of an instance that it no longer trusts."""


@dataclass(frozen=True, slots=True)
class SeenInstance:
    """An instance in the router's books."""

    name: str
    role: str
    state: str
    pid: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SeenSuspicion:
    """Something that happened to an instance, as the router tells it."""

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
    """Number of the last event before it."""
    over_s: float | None = None
    """When what was done was undone: at once for most, at the end of the pause for a stop."""
    until: int | None = None
    """Number of the last event before the victim was back."""

    def covers(self, number: int) -> bool:
        return self.after < number and (self.until is None or number <= self.until)


@dataclass(slots=True)
class FaultChooser:
    """All that was done, and what it explains."""

    draws: random.Random
    kinds: tuple[FaultKind, ...]
    planned: Mapping[str, int]
    """Instances by role."""
    done: list[InjectedFault] = field(default_factory=list)
    _deck: list[FaultKind] = field(default_factory=list)
    """Kinds still to come in this round: each comes once, so that few faults are of many kinds."""

    def draw(self, fleet: Sequence[SeenInstance], last_event: int) -> InjectedFault | None:
        """The next fault; None while a role has no spare."""
        hurt = [fault.victim.name for fault in self.done if fault.until is None]
        well = [seen for seen in fleet if seen.state == READY and seen.name not in hurt]
        at_hand = {role: sum(seen.role == role for seen in well) for role in self.planned}
        spared = [role for role, count in self.planned.items() if count > 1]
        if not spared or any(at_hand[role] < 2 for role in spared):
            return None
        role = self.draws.choice(spared)
        victim = self.draws.choice([seen for seen in well if seen.role == role])
        if not self._deck:
            self._deck = self.draws.sample(self.kinds, len(self.kinds))
        return InjectedFault(self._deck.pop(), victim, self.draws.uniform(*PAUSE_S), after=last_event)

    def heal(self, fleet: Sequence[SeenInstance], last_event: int, now_s: float) -> None:
        """Close the faults whose victims are back."""
        ready = {seen.name: seen for seen in fleet if seen.state == READY}
        for fault in self.done:
            if fault.until is None and (back := ready.get(fault.victim.name)) is not None and _is_over(fault, back, now_s):
                fault.until = last_event

    def explain(self, said: SeenSuspicion) -> bool:
        """Whether a fault of that instance was open when the router said so."""
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
