from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.api.fair_queue import FairQueue, QueueEntry, ShareLimits

QUIET = settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
LIMITS = ShareLimits(total=10, tenant=6)
ASKED = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 14)), max_size=40)


class Bench:
    """A queue, what is in use, and the laws after every step."""

    def __init__(self, limits: ShareLimits) -> None:
        self.queue: FairQueue[int] = FairQueue()
        self.limits = limits
        self.running: list[QueueEntry[int]] = []
        self.waiting: list[QueueEntry[int]] = []
        self.started: list[QueueEntry[int]] = []

    def put(self, tenant: str, weight: int) -> QueueEntry[int]:
        entry = QueueEntry(tenant, weight, len(self.waiting))
        self.queue.put(entry)
        self.waiting.append(entry)
        self.start()
        return entry

    def end(self, index: int) -> None:
        self.queue.end(self.running.pop(index))
        self.start()

    def start(self) -> None:
        for entry in self.queue.start(self.limits):
            self.waiting.remove(entry)
            self.running.append(entry)
            self.started.append(entry)
        self.check()

    def held(self, tenant: str) -> list[int]:
        return [entry.weight for entry in self.running if entry.tenant == tenant]

    def check(self) -> None:
        weights = [entry.weight for entry in self.running]
        assert self.queue.in_use == sum(weights)
        assert self.queue.waiting_weight == sum(entry.weight for entry in self.waiting)
        assert sum(weights) <= self.limits.total or len(weights) == 1
        for tenant in "abc":
            assert sum(self.held(tenant)) == self.queue.in_use_of(tenant)
            assert sum(self.held(tenant)) <= self.limits.tenant or len(self.held(tenant)) == 1
        assert self.running or not self.waiting, "nothing runs, so something may start"


@QUIET
@given(asked=ASKED, ends=st.lists(st.integers(0, 39)))
def test_shares_are_kept_and_everything_has_its_turn(asked: Sequence[tuple[str, int]], ends: Sequence[int]) -> None:
    bench, order = Bench(LIMITS), {tenant: [] for tenant in "abc"}
    finishing = iter(ends)
    for tenant, weight in asked:
        order[tenant].append(bench.put(tenant, weight))
        if bench.running and (index := next(finishing, 40)) < len(bench.running):
            bench.end(index)
    while bench.running:
        bench.end(0)
    assert not bench.waiting
    for tenant, entries in order.items():
        assert [entry for entry in bench.started if entry.tenant == tenant] == entries, "in order of arrival"
    assert not bench.queue._lines, "whoever has nothing is forgotten"


@QUIET
@given(greedy=st.lists(st.integers(1, 6), min_size=1, max_size=60))
def test_whoever_comes_beside_a_greedy_one_finds_room(greedy: Sequence[int]) -> None:
    bench = Bench(LIMITS)
    for weight in greedy:
        bench.put("a", weight)
    bench.put("b", 4)
    assert bench.held("b") == [4]


@QUIET
@given(
    greedy=st.lists(st.tuples(st.sampled_from("ac"), st.integers(1, 6)), min_size=8, max_size=20),
    later=st.lists(st.tuples(st.sampled_from("ac"), st.integers(1, 6)), max_size=20),
)
def test_whoever_holds_nothing_waits_for_one_turn_of_each_other(
    greedy: Sequence[tuple[str, int]], later: Sequence[tuple[str, int]]
) -> None:
    """However large the request is, and however many small ones come meanwhile."""
    bench, coming = Bench(LIMITS), iter(later)
    for tenant, weight in greedy:
        bench.put(tenant, weight)
    last = bench.put("b", 10)
    before = len(bench.started)
    while last in bench.waiting:
        bench.end(0)
        if (comes := next(coming, None)) is not None:
            bench.put(*comes)
    overtook = [entry.tenant for entry in bench.started[before : bench.started.index(last)]]
    assert len(overtook) == len(set(overtook))


def test_an_entry_may_give_back_its_weight_in_parts_and_leave_the_queue() -> None:
    bench = Bench(LIMITS)
    first, second, third = (bench.put("a", weight) for weight in (6, 4, 1))
    assert bench.running == [first]
    assert bench.queue.drop(second)
    assert not bench.queue.drop(second)
    assert not bench.queue.drop(first), "it does not wait"
    bench.queue.end(first, 1)
    assert bench.queue.start(LIMITS) == [third]
    bench.queue.end(first)
    assert bench.queue.in_use == 1
    assert bench.queue.entries_in_use == 1


def test_entries_are_bounded_too() -> None:
    bench = Bench(ShareLimits(100, 100, entries=2))
    for _ in range(5):
        bench.put("a", 1)
    assert len(bench.running) == 2
