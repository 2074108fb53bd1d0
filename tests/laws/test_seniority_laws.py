"""Requests that come from elsewhere, old, preempted or to stay: the order everywhere, and everyone who stays finishes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.config import OnPreempt, VictimPolicy, WorkerConfig
from baton.core.engine.records import Request
from baton.core.engine.request import FinishReason, Phase, Serial, Submission
from baton.core.engine.slots import Slots
from baton.core.engine.victims import choose_victim
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.handover.messages import Handover, PeerId
from baton.core.handover.prefill_handovers import PrefillHandover, PrefillHandoverMove, PrefillHandovers
from baton.core.tiers.offload import NoTiers
from tests.laws.test_preemption_laws import CROWDED, MORE_MAX, Machine, shapes
from tests.support.driver import submission

LOADS = 60
QUIET = settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
PLACES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=8)
"""(priority, arrival) of requests, in the order in which an instance accepts them."""
DISTINCT = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=8, unique=True)


class MovedMachine(Machine):
    """A load of requests that other instances have had before, on an instance that ends what does not stay."""

    def arriving(self, item: Submission) -> Submission:
        most = self.driver.config.max_preemptions
        return msgspec.structs.replace(
            item,
            arrived_us=self.draws.randrange(20),
            preemptions=self.draws.choice([0, max(0, most - 1), most, most + 3]),
            resumes_in_place=self.draws.random() < 0.7,
        )

    def check(self) -> None:
        config, ended = self.driver.config, self.driver.ended
        assert set(ended) == set(self.submitted)
        for serial, item in self.submitted.items():
            reason, bill = ended[serial].reason, ended[serial].bill
            assert not bill.preemptions or item.preemptions + bill.preemptions <= config.max_preemptions
            assert reason is not FinishReason.RESCHEDULE or not item.resumes_in_place
            self.seen[reason.value] += 1
        for serial in [one for one in self.submitted if ended[one].reason is FinishReason.RESCHEDULE]:
            self.disturbed.append(serial)
        super().check()


@pytest.mark.parametrize("loads", [LOADS // 4, pytest.param(LOADS, marks=pytest.mark.slow)])
def test_who_is_to_stay_finishes_however_often_it_was_preempted_elsewhere(loads: int) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=loads, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(config=shapes(), seed=st.integers(0, 2**32))
    def machine(config: WorkerConfig, seed: int) -> None:
        MovedMachine(replace(config, on_preempt=OnPreempt.RESCHEDULE), seed, seen).run()

    machine()
    for seed in range(MORE_MAX):  # which loads are found depends on much; that they are enough must not
        if seen["preemptions"] > 50 and seen["pd_reschedule"] > 5:
            break
        MovedMachine(replace(CROWDED, on_preempt=OnPreempt.RESCHEDULE), seed, seen).run()
    assert seen["preemptions"] > 50
    assert seen["pd_reschedule"] > 5


def _table(places: list[tuple[int, int]], order: list[int]) -> tuple[Slots, list[int]]:
    """Decoding rows of these requests, accepted in this order. The row of each request."""
    slots, rows = Slots(8, 10, 16), [0] * len(places)
    for serial, which in enumerate(order):
        slot = rows[which] = slots.claim(serial)
        slots.phase[slot] = Phase.RUNNING_DECODE
        slots.priority[slot], slots.arrived[slot] = places[which]
    return slots, rows


@QUIET
@given(
    places=PLACES.filter(lambda places: len(set(places)) == len(places)),
    data=st.data(),
    policy=st.sampled_from(VictimPolicy),
)
def test_the_victim_is_the_same_in_whatever_order_an_instance_got_its_requests(
    places: list[tuple[int, int]], data: st.DataObject, policy: VictimPolicy
) -> None:
    asker = data.draw(st.integers(0, len(places) - 1))
    slots, rows = _table(places, data.draw(st.permutations(range(len(places)))))
    victim = choose_victim(policy, slots, rows[asker], lambda at: np.zeros(len(at), dtype=np.int64))
    assert victim == rows[places.index(max(place for place in places if place[0] >= places[asker][0]))]


def _asked(place: tuple[int, int], name: int) -> Submission:
    priority, arrived_us = place
    return msgspec.structs.replace(submission([1, 2, 3], 4, name=str(name), priority=priority), arrived_us=arrived_us)


@QUIET
@given(places=PLACES, back=st.integers(0, 7))
def test_requests_wait_in_the_order_of_priority_and_arrival_anywhere(places: list[tuple[int, int]], back: int) -> None:
    queue = WaitingQueue()
    requests = [Request(Serial(n), _asked(place, n), 7, [], since_us=0) for n, place in enumerate(places)]
    for request in requests:
        queue.push(request)
    again = requests[back % len(requests)]
    queue.remove(again)
    queue.push(again)
    order = [(*request.submission.seniority, request.serial) for request in queue.first(len(requests))]
    assert order == sorted(order)


@QUIET
@given(places=PLACES, gone=st.integers(0, 7))
def test_prefills_are_offered_in_the_order_of_priority_and_arrival_anywhere(
    places: list[tuple[int, int]], gone: int
) -> None:
    handovers = PrefillHandovers(NoTiers())
    entries = [PrefillHandover(Handover(PeerId("d"), n, 1), _asked(place, n), n) for n, place in enumerate(places)]
    for entry in entries:
        handovers.add(entry)
    dropped = entries[gone % len(entries)]
    handovers.move(dropped, PrefillHandoverMove.DROP)
    left = [entry for entry in entries if entry is not dropped]
    expected = sorted(left, key=lambda entry: (*entry.submission.seniority, entry.arrived_us))
    assert handovers.next_to_offer(len(entries)) == expected
    assert [entry.arrived_us for entry in handovers.queue.values()] == [entry.arrived_us for entry in left]
