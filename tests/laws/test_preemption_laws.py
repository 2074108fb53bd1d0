"""Random loads on pools far too small, with late results and aborts in flight: the laws hold after every event.

Hypothesis draws the shape and a seed; the seed draws the events, which is fast enough for a hundred thousand steps
(`make test-long`; a fortieth of them in `make test`).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.config import ReservePolicy, VictimPolicy, WorkerConfig
from baton.core.engine.request import FinishReason, Phase, Sampling, Serial, Submission
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, Driver, submission

WANTED = {"steps": 100_000, "preemptions": 1000, "late acks": 100, "aborts in flight": 100, "unsatisfied chunks": 1}
MORE_MAX = 200
CROWDED = WorkerConfig(
    slots=8, blocks=18, block_size=4, context_tokens=48, step_tokens=32, burst=2, depth=3, prefix_cache=True,
    reserve=ReservePolicy.NONE, ratio_decay=0.001, fixed_blocks=0, victims=VictimPolicy.NEWEST, max_preemptions=8,
)  # fmt: skip
"""Many that yield to each other."""
PASSES_TO_FINISH_MAX = 60_000


@st.composite
def shapes(draw: st.DrawFn) -> WorkerConfig:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    burst = draw(st.integers(1, min(4, block_size)))
    slots = draw(st.integers(2, 8))
    context = 48
    return WorkerConfig(
        slots=slots,
        blocks=draw(st.integers(-(-context // block_size), 3 * -(-context // block_size))),
        block_size=block_size,
        context_tokens=context,
        step_tokens=slots * burst + draw(st.integers(0, 40)),
        burst=burst,
        depth=draw(st.integers(1, 3)),
        prefix_cache=draw(st.booleans()),
        reserve=draw(st.sampled_from(ReservePolicy)),
        ratio_decay=draw(st.sampled_from([0.001, 0.05])),
        fixed_blocks=draw(st.integers(0, 4)),
        victims=draw(st.sampled_from(VictimPolicy)),
        max_preemptions=draw(st.sampled_from([0, 1, 8])),
    )


class Machine:
    """One load on one worker, all choices from one seed."""

    def __init__(self, config: WorkerConfig, seed: int, seen: Counter[str]) -> None:
        self.driver = Driver(config)
        self.draws = random.Random(seed)
        self.seen = seen
        self.submitted: dict[Serial, Submission] = {}
        self.disturbed: list[Serial] = []
        self.bodies = 0

    def run(self) -> None:
        bodies = self.draws.randrange(4, 24)
        while self.bodies < bodies:
            self.event(self.draws.random())
        self.driver.run(PASSES_TO_FINISH_MAX)
        self.check()

    def event(self, chance: float) -> None:
        driver = self.driver
        if chance < 0.12:
            self.submit()
        elif chance < 0.60:
            driver.tick()
        elif chance < 0.97:
            self.note_late_acks()
            driver.settle_one()
        else:
            self.end_one()

    def note_late_acks(self) -> None:
        """A preemption is late when other steps are launched between the order and its acknowledgement."""
        if len(self.driver.in_flight) > 1:
            yielding = [r for r in self.driver.worker.scheduler.requests() if r.phase is Phase.PREEMPTING]
            self.seen["late acks"] += len(yielding)

    def submit(self) -> None:
        draws = self.draws
        start, length = draws.choice([0, 3]), draws.randrange(1, 30)
        choices = draws.choice([1, 1, 1, 2, 4])
        base = {
            "seed": draws.randrange(3), "temperature": draws.choice([0.0, 1.0]),
            "stop_token_ids": draws.choice([(), (0,), (5, 9)]), "min_tokens": draws.randrange(3),
        }  # fmt: skip
        limit = draws.choice([None, draws.randrange(1, 48 - length)])
        group = [
            submission(
                range(start, start + length), limit, name=f"{self.bodies}/{choice}",
                sampling=Sampling(choice=choice, **base),
                leader=f"{self.bodies}/0" if choice else None, priority=draws.choice([0, 0, 1]) if choices == 1 else 0,
            )
            for choice in range(choices)
        ]  # fmt: skip
        self.bodies += 1
        group = [self.arriving(item) for item in group]
        self.submitted.update(zip(self.driver.submit(*group), group, strict=True))

    def arriving(self, item: Submission) -> Submission:
        """What has happened to it before it came here: nothing."""
        return item

    def end_one(self) -> None:
        alive = [serial for serial in self.submitted if serial not in self.driver.ended]
        if not alive:
            return
        serial = self.draws.choice(alive)
        request = self.driver.worker.scheduler.request(serial)
        if request is not None and request.slot is not None and self.driver.in_flight:
            self.seen["aborts in flight"] += 1
        self.disturbed.append(serial)
        if self.draws.random() < 0.8:
            self.driver.cancel(serial)
        else:
            self.driver.stop_found(serial, keep=1)

    def check(self) -> None:
        driver, config = self.driver, self.driver.config
        gauges = driver.worker.gauges()
        assert (gauges.running, gauges.waiting, gauges.blocks.running) == (0, 0, 0)
        assert set(driver.ended) == set(self.submitted)
        for serial, item in self.submitted.items():
            room = config.sequence_tokens_max - len(item.prompt)
            whole = undisturbed(item.prompt, item.sampling, min(room, item.max_tokens or room), VOCABULARY)
            delivered = driver.outputs[serial]
            assert delivered == whole[: len(delivered)]
            if serial not in self.disturbed:
                assert delivered == whole
            assert driver.ended[serial].reason is not FinishReason.ERROR
            bill = driver.ended[serial].bill
            assert min(bill.cached_tokens, bill.computed_tokens, bill.recomputed_tokens) >= 0
            assert driver.ended[serial].bill.preemptions <= config.max_preemptions
        self.seen["steps"] += gauges.steps
        self.seen["preemptions"] += gauges.preemptions_for_others + gauges.preemptions_of_self
        self.seen["unsatisfied chunks"] += gauges.chunk_prefill_unsatisfied
        self.seen["requests"] += len(self.submitted)


@pytest.mark.parametrize(("loads", "share"), [(10, 40), pytest.param(240, 1, marks=pytest.mark.slow)])
def test_no_load_on_a_small_pool_loses_repeats_or_stalls_anything(loads: int, share: int) -> None:
    wanted = {what: max(1, least // share) for what, least in WANTED.items()}
    seen: Counter[str] = Counter()

    @settings(max_examples=loads, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(config=shapes(), seed=st.integers(0, 2**32))
    def machine(config: WorkerConfig, seed: int) -> None:
        Machine(config, seed, seen).run()

    machine()
    for seed in range(MORE_MAX):  # which loads are found depends on much; that they are enough must not
        if all(seen[what] >= least for what, least in wanted.items()):
            break
        Machine(CROWDED, seed, seen).run()
    print(f"\n{dict(seen)}")
    assert {what: seen[what] for what, least in wanted.items() if seen[what] < least} == {}
