"""Which records of idempotent requests are kept: bounded in bytes and in time, and shared fairly between tenants.

    OPEN ── keep ──▶ KEPT ── expired, or evicted for room ──▶ GONE        the bytes of a record that is GONE count until its
     │ └──── drop: an error, a broken stream ──────────────────▶┤         last follower has left
     └── no room ──▶ UNRECORDED ── drop ───────────────────────▶┘         its name is taken, and it has no bytes

Every call costs the same however many records and tenants there are. Expiry takes from the front of a queue in the order of
ends. Room is made by evicting the least recently used record of one of the largest tenants:

    level      bit length of the bytes of a tenant's evictable records; tenants of a level are in a queue of their own

The tenant at the front of the highest level has at least half the bytes of the largest one. So a tenant that has less than
half of its equal share loses no record to the records of others. What is being written or read cannot be evicted; one tenant
may use half of all bytes for that, and what is beyond is not recorded, or not read.

Pure: the time is given. Knows sizes and names, not what is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from baton.core.errors import InvariantViolated

BUSY_SHARE = 2
"""The open and followed records of one tenant may take all bytes divided by this."""
_LEVELS = 64

Name = tuple[str, str]
"""Tenant and key."""


class RecordPhase(Enum):
    OPEN = "being written"
    UNRECORDED = "being written, and kept for nobody"
    KEPT = "whole"
    GONE = "not to be found any more"


@dataclass(slots=True, eq=False)
class IdempotencyRecord:
    """What is accounted of a record. Only IdempotencyRecords writes these fields."""

    name: Name
    bytes: int = 0
    phase: RecordPhase = RecordPhase.OPEN
    followers: int = 0
    ended_us: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.phase is RecordPhase.KEPT and not self.followers

    @property
    def counts(self) -> bool:
        """Whether its bytes are in use."""
        return self.phase is not RecordPhase.GONE or self.followers > 0


R = TypeVar("R", bound=IdempotencyRecord)


@dataclass(slots=True, eq=False)
class _Tenant(Generic[R]):
    name: str
    busy_bytes: int = 0
    evictable_bytes: int = 0
    evictable: OrderedDict[R, None] = field(default_factory=OrderedDict)
    """Least recently used first."""


class IdempotencyRecords(Generic[R]):
    def __init__(self, bytes_max: int, kept_us: int) -> None:
        self._bytes_max = bytes_max
        self._busy_bytes_max = bytes_max // BUSY_SHARE
        self._kept_us = kept_us
        self._records: dict[Name, R] = {}
        self._by_end: OrderedDict[R, None] = OrderedDict()
        """Kept records, the first to end first."""
        self._tenants: dict[str, _Tenant[R]] = {}
        """Those with bytes in use."""
        self._levels: list[OrderedDict[str, _Tenant[R]]] = [OrderedDict() for _ in range(_LEVELS)]
        self._occupied = 0
        """Bit i: whether level i has a tenant."""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def find(self, name: Name) -> R | None:
        return self._records.get(name)

    def tenant_bytes(self, tenant: str) -> int:
        found = self._tenants.get(tenant)
        return 0 if found is None else found.busy_bytes + found.evictable_bytes

    # ── a record's life ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, record: R) -> None:
        """Enter a new record under a name that is free."""
        if record.name in self._records:
            raise InvariantViolated(f"{record.name} has a record")
        self._records[record.name] = record

    def resize(self, record: R, size: int) -> bool:
        """An open record takes this many bytes now. Makes room; False where there is none: it is UNRECORDED from now on."""
        if record.phase is not RecordPhase.OPEN:
            return False
        more, tenant = size - record.bytes, self._tenant(record)
        if not more:
            return True
        record.bytes += more
        tenant.busy_bytes += more
        self.bytes += more
        if tenant.busy_bytes <= self._busy_bytes_max and self._make_room():
            return True
        tenant = self._leaving(record)
        record.phase, record.bytes = RecordPhase.UNRECORDED, 0
        self._entering(record, tenant)
        return False

    def keep(self, record: R, now_us: int) -> None:
        """An open record is whole."""
        self._move(record, (RecordPhase.OPEN,), RecordPhase.KEPT, now_us)
        self._by_end[record] = None
        self._make_room()

    def drop(self, record: R) -> None:
        """A record that was being written is not to be kept: its name is free."""
        self._move(record, (RecordPhase.OPEN, RecordPhase.UNRECORDED), RecordPhase.GONE, 0)
        del self._records[record.name]

    def follow(self, record: R) -> bool:
        """The record is read and cannot be evicted; False where its tenant reads and writes too much already."""
        tenant = self._tenants.get(record.name[0])
        if record.is_evictable and tenant is not None and tenant.busy_bytes + record.bytes > self._busy_bytes_max:
            return False
        self._set_followers(record, record.followers + 1)
        return True

    def unfollow(self, record: R) -> None:
        if not record.followers:
            raise InvariantViolated(f"{record.name} has no follower")
        self._set_followers(record, record.followers - 1)

    def expire(self, now_us: int) -> None:
        """Forget the records that ended more than `kept_us` ago."""
        while self._by_end and next(iter(self._by_end)).ended_us < now_us - self._kept_us:
            self._forget(next(iter(self._by_end)))

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_room(self) -> bool:
        """Evict until the bytes are within the limit; False where too many are busy for that."""
        while self.bytes > self._bytes_max:
            if not self._occupied:
                return False
            tenant = next(iter(self._levels[self._occupied.bit_length() - 1].values()))
            self._forget(next(iter(tenant.evictable)))
        return True

    def _forget(self, record: R) -> None:
        self._move(record, (RecordPhase.KEPT,), RecordPhase.GONE, record.ended_us)
        del self._by_end[record]
        del self._records[record.name]

    # ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _move(self, record: R, of: tuple[RecordPhase, ...], to: RecordPhase, ended_us: int) -> None:
        if record.phase not in of:
            raise InvariantViolated(f"a record that is {record.phase.value} cannot be {to.value}")
        tenant = self._leaving(record)
        record.phase, record.ended_us = to, ended_us
        self._entering(record, tenant)

    def _set_followers(self, record: R, followers: int) -> None:
        tenant = self._leaving(record)
        record.followers = followers
        self._entering(record, tenant)

    def _tenant(self, record: R) -> _Tenant[R]:
        name = record.name[0]
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = _Tenant(name)
        return found

    def _leaving(self, record: R) -> _Tenant[R]:
        """Take the record out of its tenant's account, before it changes."""
        tenant = self._tenant(record)
        if record.is_evictable:
            del tenant.evictable[record]
            self._set_evictable_bytes(tenant, tenant.evictable_bytes - record.bytes)
            self.bytes -= record.bytes
        elif record.counts:
            tenant.busy_bytes -= record.bytes
            self.bytes -= record.bytes
        return tenant

    def _entering(self, record: R, tenant: _Tenant[R]) -> None:
        """Enter it again, as it is now: as the last one used, where it can be evicted."""
        if record.is_evictable:
            tenant.evictable[record] = None
            self._set_evictable_bytes(tenant, tenant.evictable_bytes + record.bytes)
            self.bytes += record.bytes
        elif record.counts:
            tenant.busy_bytes += record.bytes
            self.bytes += record.bytes
        if not tenant.busy_bytes and not tenant.evictable:
            del self._tenants[tenant.name]

    def _set_evictable_bytes(self, tenant: _Tenant[R], size: int) -> None:
        before, after = tenant.evictable_bytes.bit_length(), size.bit_length()
        tenant.evictable_bytes = size
        if before == after:
            return
        if before:
            level = self._levels[before]
            del level[tenant.name]
            if not level:
                self._occupied &= ~(1 << before)
        if after:
            self._levels[after][tenant.name] = tenant
            self._occupied |= 1 << after
