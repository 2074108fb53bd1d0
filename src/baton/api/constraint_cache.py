"""Compiled constraints, by tenant and digest of their source: bounded in entries and bytes, for each tenant and in all.

What was used longest ago goes first; where all tenants together have too much, the tenant with most gives. One tenant cannot
tell from the time that a request takes what another has sent.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, field

from baton.core.engine.request import Constraint

ENTRIES_A_TENANT_MAX = 256
BYTES_A_TENANT_MAX = 8 << 20
BYTES_MAX = 64 << 20
ENTRY_BYTES = 512
"""Counted for each entry beside its source."""


@dataclass(frozen=True, slots=True)
class ConstraintRefusal:
    """Why a constraint cannot be had; always the same for the same source."""

    field: str | None
    message: str


Outcome = Constraint | ConstraintRefusal


def size_of(outcome: Outcome) -> int:
    """In bytes of memory: a text with one rare character takes four for each."""
    text = outcome.source if isinstance(outcome, Constraint) else outcome.message
    return ENTRY_BYTES + sys.getsizeof(text)


@dataclass(slots=True)
class _TenantEntries:
    outcomes: OrderedDict[bytes, Outcome] = field(default_factory=OrderedDict)
    size_bytes: int = 0

    def drop_oldest(self) -> int:
        """Returns the size of what was dropped."""
        _, outcome = self.outcomes.popitem(last=False)
        size = size_of(outcome)
        self.size_bytes -= size
        return size


class ConstraintCache:
    def __init__(self, tenant_bytes_max: int = BYTES_A_TENANT_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._tenant_bytes_max = tenant_bytes_max
        self._bytes_max = bytes_max
        self._tenants: dict[str, _TenantEntries] = {}
        self.size_bytes = 0

    def get(self, tenant: str, key: bytes) -> Outcome | None:
        entries = self._tenants.get(tenant)
        if entries is None or key not in entries.outcomes:
            return None
        entries.outcomes.move_to_end(key)
        return entries.outcomes[key]

    def put(self, tenant: str, key: bytes, outcome: Outcome) -> None:
        entries = self._tenants.setdefault(tenant, _TenantEntries())
        if key in entries.outcomes:
            return
        size = size_of(outcome)
        entries.outcomes[key] = outcome
        entries.size_bytes += size
        self.size_bytes += size
        while entries.size_bytes > self._tenant_bytes_max or len(entries.outcomes) > ENTRIES_A_TENANT_MAX:
            self._shrink(tenant)
        while self.size_bytes > self._bytes_max:
            self._shrink(max(self._tenants, key=lambda name: self._tenants[name].size_bytes))

    def _shrink(self, tenant: str) -> None:
        entries = self._tenants[tenant]
        self.size_bytes -= entries.drop_oldest()
        if not entries.outcomes:
            del self._tenants[tenant]
