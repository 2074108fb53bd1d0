"""Which records of idempotent requests are kept: against a plain model, whatever happens in whichever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.errors import InvariantViolated
from baton.router.idempotency_records import BUSY_SHARE, IdempotencyRecord, IdempotencyRecords, RecordPhase

BYTES_MAX = 1000
KEPT_US = 100
TENANTS = ("a", "b", "c")
WRITTEN = (RecordPhase.OPEN, RecordPhase.UNRECORDED)


class Checked(IdempotencyRecords[IdempotencyRecord]):
    """Checks each record that it forgets, before it does."""

    def __init__(self) -> None:
        super().__init__(BYTES_MAX, KEPT_US)
        self.all: list[IdempotencyRecord] = []
        self.used: dict[IdempotencyRecord, int] = {}
        """When each became evictable, in calls."""
        self.expiring_us: int | None = None

    def evictable_bytes(self, tenant: str) -> int:
        return sum(record.bytes for record in self.all if record.name[0] == tenant and record.is_evictable)

    def _forget(self, record: IdempotencyRecord) -> None:
        if self.expiring_us is not None:
            assert record.ended_us < self.expiring_us - KEPT_US, "too early"
        else:
            assert self.bytes > BYTES_MAX, "there was room"
            mine = [one for one in self.all if one.name[0] == record.name[0] and one.is_evictable and one.bytes]
            assert record is min(mine, key=self.used.__getitem__), "not the least recently used"
            largest = max(map(self.evictable_bytes, TENANTS))
            assert 2 * self.evictable_bytes(record.name[0]) > largest, "of a small tenant"
        super()._forget(record)


class Records(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.records = Checked()
        self.now_us = 0
        self.calls = 0

    def _live(self, *phases: RecordPhase) -> list[IdempotencyRecord]:
        return [record for record in self.records.all if record.phase in phases]

    def _used(self) -> None:
        self.calls += 1
        for record in self.records.all:
            if record.is_evictable:
                self.records.used.setdefault(record, self.calls)
            else:
                self.records.used.pop(record, None)

    @rule(tenant=st.sampled_from(TENANTS), key=st.integers(0, 5), size=st.integers(1, 300))
    def begin(self, tenant: str, key: int, size: int) -> None:
        name = (tenant, str(key))
        if self.records.find(name) is not None:
            with pytest.raises(InvariantViolated):
                self.records.begin(IdempotencyRecord(name))
            return
        record = IdempotencyRecord(name)
        self.records.all.append(record)
        self.records.begin(record)
        self.records.resize(record, size)
        assert self.records.find(name) is record

    @precondition(lambda self: self._live(RecordPhase.OPEN))
    @rule(data=st.data(), more=st.integers(-50, 400))
    def grow(self, data: st.DataObject, more: int) -> None:
        record = data.draw(st.sampled_from(self._live(RecordPhase.OPEN)))
        busy = [one for one in self.records.all if one.counts and not one.is_evictable and one is not record]
        mine = sum(one.bytes for one in busy if one.name[0] == record.name[0])
        size = max(1, record.bytes + more)
        has_room = mine + size <= BYTES_MAX // BUSY_SHARE and sum(one.bytes for one in busy) + size <= BYTES_MAX
        assert self.records.resize(record, size) == has_room
        assert record.phase is (RecordPhase.OPEN if has_room else RecordPhase.UNRECORDED)
        assert record.bytes == (size if has_room else 0)

    @precondition(lambda self: self._live(*WRITTEN))
    @rule(data=st.data(), is_whole=st.booleans())
    def end(self, data: st.DataObject, is_whole: bool) -> None:
        record = data.draw(st.sampled_from(self._live(*WRITTEN)))
        if not is_whole or record.phase is RecordPhase.UNRECORDED:
            self.records.drop(record)
        else:
            self.records.used[record] = self.calls + 1
            self.records.keep(record, self.now_us)

    @precondition(lambda self: self._live(RecordPhase.OPEN, RecordPhase.KEPT))
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self._live(RecordPhase.OPEN, RecordPhase.KEPT)))
        if not self.records.follow(record):
            assert record.is_evictable

    @precondition(lambda self: any(record.followers for record in self.records.all))
    @rule(data=st.data())
    def unfollow(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from([one for one in self.records.all if one.followers]))
        self.records.unfollow(record)

    @rule(passes_us=st.integers(0, 80))
    def expire(self, passes_us: int) -> None:
        self.now_us += passes_us
        self.records.expiring_us = self.now_us
        self.records.expire(self.now_us)
        self.records.expiring_us = None
        assert all(record.ended_us >= self.now_us - KEPT_US for record in self._live(RecordPhase.KEPT))

    @invariant()
    def adds_up(self) -> None:
        self._used()
        records = self.records
        assert records.bytes == sum(record.bytes for record in records.all if record.counts)
        for tenant in TENANTS:
            mine = [record for record in records.all if record.name[0] == tenant and record.counts]
            assert records.tenant_bytes(tenant) == sum(record.bytes for record in mine)
        found = {record.name: record for record in self._live(*WRITTEN, RecordPhase.KEPT)}
        assert len(records) == len(found)
        assert all(records.find(name) is record for name, record in found.items())
        assert records.bytes <= BYTES_MAX


TestRecords = Records.TestCase
TestRecords.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(
    quiet=st.lists(st.integers(1, 60), max_size=2),
    loud=st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 120)), max_size=80),
)
def test_who_has_less_than_half_of_an_equal_share_loses_nothing_to_others(
    quiet: list[int], loud: list[tuple[str, int]]
) -> None:
    """An equal share of four tenants is 250; the quiet one has at most 120 bytes."""
    records: IdempotencyRecords[IdempotencyRecord] = IdempotencyRecords(BYTES_MAX, KEPT_US)
    for number, (tenant, size) in enumerate([("quiet", size) for size in quiet] + loud):
        record = IdempotencyRecord((tenant, str(number)))
        records.begin(record)
        records.resize(record, size)
        records.keep(record, number)
    assert records.tenant_bytes("quiet") == sum(quiet)
    assert records.bytes <= BYTES_MAX


def test_what_one_tenant_writes_at_once_takes_half_of_all_bytes_at_most() -> None:
    records: IdempotencyRecords[IdempotencyRecord] = IdempotencyRecords(BYTES_MAX, KEPT_US)
    kept = IdempotencyRecord(("other", "k"))
    records.begin(kept)
    records.resize(kept, 400)
    records.keep(kept, 0)
    rooms = []
    for number in range(8):
        record = IdempotencyRecord(("one", str(number)))
        records.begin(record)
        rooms.append(records.resize(record, 100))
        if not rooms[-1]:
            records.drop(record)
    assert rooms == [True] * 5 + [False] * 3
    assert records.find(kept.name) is kept


def test_who_reads_too_much_again_at_once_is_refused_and_harms_nobody() -> None:
    records: IdempotencyRecords[IdempotencyRecord] = IdempotencyRecords(BYTES_MAX, KEPT_US)
    made = [IdempotencyRecord(("one", str(number))) for number in range(9)]
    for record in made:
        records.begin(record)
        records.resize(record, 100)
        records.keep(record, 0)
    assert [records.follow(record) for record in made] == [True] * 5 + [False] * 4
    other = IdempotencyRecord(("other", "k"))
    records.begin(other)
    assert records.resize(other, 300), "room is made of what is not read"
