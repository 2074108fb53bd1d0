"""Whose turn it is when tenants share something scarce: bytes being tokenised, slots of the engine.

The tenant that holds least goes first; among equals the one whose turn is longest ago. One tenant never holds more than its
share, so that something is left for whoever comes next, and nobody is overtaken once it is his turn: what is large waits for
room and gets it. Pure: starts nothing itself and has no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShareLimits:
    total: int
    """Most weight in use at once."""
    tenant: int
    """Most of it in use by one tenant. What is heavier alone is started when its tenant has nothing else in use."""
    entries: int | None = None
    """Most entries in use at once."""


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    tenant: str
    weight: int
    """At least 1."""
    item: T
    held: int = 0
    """Of its weight, what it has in use."""


@dataclass(slots=True)
class _TenantLine(Generic[T]):
    waiting: deque[QueueEntry[T]] = field(default_factory=deque)
    waiting_weight: int = 0
    in_use: int = 0
    turn: int = 0
    """Number of the last turn that it had; of one that has just come, the last but one of anybody."""


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._lines: dict[str, _TenantLine[T]] = {}
        self._turn = 0
        self.waiting_weight = 0
        self.in_use = 0
        self.entries_in_use = 0

    def waiting_weight_of(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return 0 if line is None else line.waiting_weight

    def in_use_of(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return 0 if line is None else line.in_use

    def put(self, entry: QueueEntry[T]) -> None:
        # Whoever comes, or comes again, goes before the one that had the last turn and behind all others: a tenant with many
        # short requests would starve them.
        line = self._lines.setdefault(entry.tenant, _TenantLine(turn=self._turn - 1))
        line.waiting.append(entry)
        line.waiting_weight += entry.weight
        self.waiting_weight += entry.weight

    def drop(self, entry: QueueEntry[T]) -> bool:
        """Take out an entry that waits; False where it does not."""
        line = self._lines.get(entry.tenant)
        if line is None or entry not in line.waiting:
            return False
        line.waiting.remove(entry)
        self._unwait(line, entry)
        self._forget_idle(entry.tenant)
        return True

    def start(self, limits: ShareLimits) -> list[QueueEntry[T]]:
        """The entries that start now, in order. Call after every change; tell `end` when one is over."""
        started = []
        while (tenant := self._next_tenant(limits)) is not None:
            line = self._lines[tenant]
            entry = line.waiting[0]
            full = limits.entries is not None and self.entries_in_use >= limits.entries
            if full or (self.in_use and self.in_use + entry.weight > limits.total):
                break
            line.waiting.popleft()
            self._unwait(line, entry)
            self._turn += 1
            line.turn = self._turn
            entry.held = entry.weight
            line.in_use += entry.weight
            self.in_use += entry.weight
            self.entries_in_use += 1
            started.append(entry)
        return started

    def end(self, entry: QueueEntry[T], weight: int | None = None) -> None:
        """A started entry gives back some of its weight; by default all that it holds."""
        given, line = entry.held if weight is None else weight, self._lines[entry.tenant]
        entry.held -= given
        line.in_use -= given
        self.in_use -= given
        self.entries_in_use -= not entry.held
        self._forget_idle(entry.tenant)

    def _next_tenant(self, limits: ShareLimits) -> str | None:
        fitting = [
            (line.in_use, line.turn, place, tenant)
            for place, (tenant, line) in enumerate(self._lines.items())
            if line.waiting and (not line.in_use or line.in_use + line.waiting[0].weight <= limits.tenant)
        ]
        return min(fitting)[3] if fitting else None

    def _unwait(self, line: _TenantLine[T], entry: QueueEntry[T]) -> None:
        line.waiting_weight -= entry.weight
        self.waiting_weight -= entry.weight

    def _forget_idle(self, tenant: str) -> None:
        line = self._lines[tenant]
        if not line.waiting and not line.in_use:
            del self._lines[tenant]
