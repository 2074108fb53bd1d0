"""Preemption, case by case: what yields, what waits, what comes back, and that nothing stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.config import ReservePolicy, VictimPolicy, WorkerConfig
from baton.core.engine.preemption_record import RECENT_MAX, Preemption, RecentPreemptions
from baton.core.engine.request import FinishReason, Phase, RequestId, Sampling, Serial
from baton.core.engine.worker import StepDone
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, Driver, submission

GREEDY = Sampling(seed=0, temperature=0.0)


def config(**changes: object) -> WorkerConfig:
    settings: dict[str, object] = {
        "slots": 4, "blocks": 16, "block_size": 4, "context_tokens": 64, "step_tokens": 32, "depth": 2,
        "prefix_cache": False, "reserve": ReservePolicy.NONE,
    }  # fmt: skip
    return WorkerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return undisturbed(prompt, GREEDY, max_tokens, VOCABULARY)


def start(driver: Driver, *asks: tuple[list[int], int], priority: int = 0) -> list[Serial]:
    return [driver.submit(submission(prompt, tokens, priority=priority))[0] for prompt, tokens in asks]


def until_preempted(driver: Driver) -> Serial:
    """Drive until somebody was ordered to yield and has not acknowledged yet."""
    for _ in range(1000):
        for request in driver.worker.scheduler.requests():
            if request.phase is Phase.PREEMPTING:
                return request.serial
        driver.tick() if driver.is_due else driver.settle_one()
    raise AssertionError("nobody was preempted")


def preemptions(driver: Driver) -> int:
    gauges = driver.worker.gauges()
    return gauges.preemptions_for_others + gauges.preemptions_of_self


A, B, C = list(range(10)), list(range(20, 30)), list(range(40, 50))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("burst", [1, 3])
def test_a_preempted_request_yields_the_same_tokens(depth: int, burst: int) -> None:
    driver = Driver(config(depth=depth, burst=burst))
    serials = start(driver, (A, 40), (B, 40))
    driver.run()
    assert preemptions(driver) > 0
    assert [driver.outputs[serial] for serial in serials] == [expected(A, 40), expected(B, 40)]


def test_a_victim_goes_back_only_when_the_executor_has_acknowledged() -> None:
    driver = Driver(config())
    start(driver, (A, 40), (B, 40))
    victim = until_preempted(driver)
    request = driver.worker.scheduler.request(victim)
    assert request is not None
    held = driver.worker.gauges().blocks.running
    assert request.slot is not None
    while request.phase is Phase.PREEMPTING:
        assert driver.worker.gauges().waiting == 0
        assert driver.worker.gauges().blocks.running >= held
        driver.settle_one()
    assert request.phase is Phase.WAITING
    assert driver.worker.gauges().waiting == 1
    assert driver.worker.gauges().blocks.running < held
    driver.run()


def test_tokens_in_flight_when_the_order_comes_are_delivered_and_counted() -> None:
    driver = Driver(config(depth=3))
    serials = start(driver, (A, 40), (B, 40))
    victim = until_preempted(driver)
    before = len(driver.outputs[victim])
    request = driver.worker.scheduler.request(victim)
    assert request is not None
    while request.phase is Phase.PREEMPTING:
        driver.settle_one()
    assert len(driver.outputs[victim]) > before
    assert request.outputs.tolist() == driver.outputs[victim]
    driver.run()
    assert driver.outputs[serials[1]] == expected(B, 40)


def test_the_resumed_request_prefills_prompt_and_delivered_outputs_exactly() -> None:
    driver = Driver(config())
    start(driver, (A, 40), (B, 40))
    victim = until_preempted(driver)
    request = driver.worker.scheduler.request(victim)
    assert request is not None
    driver.run()
    (again,) = [s for launch in driver.plans for s in launch.plan.starts if s.epoch == 2 and s.prompt_tokens == 10][:1]
    assert again.tokens[:10].tolist() == (A if victim == 0 else B)
    assert again.tokens[10:].tolist() == driver.outputs[victim][: len(again.tokens) - 10]


def test_an_executor_that_lost_a_token_ends_the_request_with_an_error_instead_of_hanging_it() -> None:
    driver = Driver(config(depth=1))
    serials = start(driver, (A, 40), (B, 40))
    victim = until_preempted(driver)
    result = driver.executor.collect()
    driver.in_flight.popleft()
    known = result.known.copy()
    known[0] -= 1
    driver.send(
        StepDone(
            type(result)(result.step, result.slots, result.epochs, result.outcomes, result.counts, result.tokens, known)
        )
    )
    driver.run()
    assert driver.ended[victim].reason is FinishReason.ERROR
    other = serials[0] if victim == serials[1] else serials[1]
    assert len(driver.outputs[other]) == 40


def test_a_victim_that_finishes_in_flight_ends_and_is_not_resumed() -> None:
    for stop_at in range(1, 36):
        stop = expected(B, 40)[stop_at]
        sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=(stop,))
        driver = Driver(config(depth=3))
        start(driver, (A, 40))
        (second,) = driver.submit(submission(B, 40, sampling=sampling))
        driver.run()
        assert driver.outputs[second] == undisturbed(B, sampling, 40, VOCABULARY)
        assert driver.ended[second].reason is FinishReason.STOP


def test_an_abort_during_a_preemption_ends_the_request_at_the_same_acknowledgement() -> None:
    driver = Driver(config(depth=3))
    start(driver, (A, 40), (B, 40))
    victim = until_preempted(driver)
    delivered = list(driver.outputs[victim])
    driver.cancel(victim)
    driver.run()
    assert driver.ended[victim].reason is FinishReason.ABORT
    assert driver.outputs[victim] == delivered
    assert sum(stop.epoch == 2 for launch in driver.plans for stop in launch.plan.stops) == 0


def test_a_waiting_preempted_request_can_be_aborted_and_its_outputs_count() -> None:
    driver = Driver(config())
    start(driver, (A, 40), (B, 40))
    victim = until_preempted(driver)
    request = driver.worker.scheduler.request(victim)
    assert request is not None
    while request.phase is not Phase.WAITING:
        driver.settle_one()
    driver.cancel(victim)
    assert driver.ended[victim].generated_tokens == len(driver.outputs[victim]) > 0
    driver.run()


def test_nobody_new_is_admitted_in_a_pass_that_preempts() -> None:
    driver = Driver(config(slots=3, blocks=18))
    start(driver, (A, 50), (B, 50))
    preempting_passes = 0
    for _ in range(500):
        if not driver.worker.gauges().waiting:
            driver.submit(submission([1], 1))  # somebody small always waits who would fit
        before, plans = preemptions(driver), len(driver.plans)
        driver.tick() if driver.is_due else driver.settle_one()
        if preemptions(driver) > before:
            preempting_passes += 1
            assert not driver.plans[plans].plan.starts
    assert preempting_passes > 0
    driver.run()


def test_a_lone_long_request_near_capacity_is_never_preempted() -> None:
    driver = Driver(config(reserve=ReservePolicy.NEW_TOKEN_RATIO))
    (serial,) = start(driver, (A, 54))
    driver.run()
    assert driver.outputs[serial] == expected(A, 54)
    assert preemptions(driver) == 0


def test_a_request_that_finds_no_block_waits_for_those_on_their_way_rather_than_have_somebody_yield() -> None:
    waited = 0
    for tokens in range(2, 30):
        driver = Driver(config(slots=4, blocks=14, depth=3))
        long, short = start(driver, (A, 44), (B, tokens))
        while not driver.worker.is_idle:
            plans, yielded = len(driver.plans), preemptions(driver)
            coming = short in driver.ended and driver.worker.scheduler.request(short) is not None
            driver.tick() if driver.is_due else driver.settle_one()
            request = driver.worker.scheduler.request(long)
            if coming and len(driver.plans) > plans and request is not None and request.phase is Phase.RUNNING_DECODE:
                waited += request.slot not in driver.plans[-1].plan.decode_slots
                assert preemptions(driver) == yielded
        assert driver.ended[long].bill.preemptions == 0
        assert driver.outputs[long] == expected(A, 44)
    assert waited > 0


def test_two_requests_past_their_preemption_limit_do_not_starve_each_other() -> None:
    driver = Driver(config(max_preemptions=1))
    serials = start(driver, (A, 54), (B, 54), (C, 54))
    driver.run()
    assert [driver.outputs[s] for s in serials] == [expected(p, 54) for p in (A, B, C)]
    assert max(driver.ended[s].bill.preemptions for s in serials) == 1


def test_with_no_preemptions_allowed_everyone_is_admitted_with_the_whole_need() -> None:
    driver = Driver(config(max_preemptions=0, blocks=20))
    serials = start(driver, (A, 30), (B, 30), (C, 30))
    driver.tick()
    assert driver.worker.gauges().running == 2
    driver.run()
    assert preemptions(driver) == 0
    assert [driver.outputs[s] for s in serials] == [expected(p, 30) for p in (A, B, C)]


def test_an_unsatisfied_chunk_keeps_newcomers_out_and_is_counted() -> None:
    driver = Driver(config(step_tokens=6, blocks=19, slots=6, reserve=ReservePolicy.NONE, depth=1))
    decoding = start(driver, (A, 44))[0]
    for _ in range(30):
        driver.tick() if driver.is_due else driver.settle_one()
    long = list(range(50))
    late = start(driver, (long, 4))[0]
    newcomer = start(driver, ([1], 2))[0]
    seen_unsatisfied = False
    while not driver.worker.is_idle:
        before = driver.worker.gauges().chunk_prefill_unsatisfied
        starts = sum(len(launch.plan.starts) for launch in driver.plans)
        driver.tick() if driver.is_due else driver.settle_one()
        if driver.worker.gauges().chunk_prefill_unsatisfied > before:
            seen_unsatisfied = True
            assert sum(len(launch.plan.starts) for launch in driver.plans) == starts
    assert seen_unsatisfied
    assert driver.outputs[decoding] == expected(A, 44)
    assert driver.outputs[late] == expected(long, 4)
    assert driver.outputs[newcomer] == expected([1], 2)


def test_prefills_that_started_together_always_finish() -> None:
    driver = Driver(config(step_tokens=8, slots=4, blocks=16, reserve=ReservePolicy.NONE))
    prompts = [list(range(i, i + 25)) for i in range(4)]
    serials = start(driver, *[(prompt, 30) for prompt in prompts])
    driver.run()
    assert preemptions(driver) > 0
    assert [driver.outputs[s] for s in serials] == [expected(p, 30) for p in prompts]


@pytest.mark.parametrize("policy", VictimPolicy)
def test_preempting_and_prefilling_again_does_not_go_on_for_ever(policy: VictimPolicy) -> None:
    driver = Driver(config(slots=8, victims=policy))
    prompts = [list(range(i, i + 6)) for i in range(8)]
    serials = start(driver, *[(prompt, 50) for prompt in prompts])
    driver.run()
    assert [driver.outputs[s] for s in serials] == [expected(p, 50) for p in prompts]
    assert max(driver.ended[s].bill.preemptions for s in serials) <= 8


def test_a_pass_is_always_due_while_requests_wait_and_lowers_the_ratio() -> None:
    driver = Driver(config(reserve=ReservePolicy.NEW_TOKEN_RATIO, slots=1))
    start(driver, (A, 20), (B, 20))
    while not driver.worker.is_idle:
        assert driver.worker.next_deadline() is not None
        ratio = driver.worker.gauges().reserve_ratio
        if driver.is_due:
            driver.tick()
            assert driver.worker.gauges().reserve_ratio < ratio
        else:
            driver.settle_one()
    ratio = driver.worker.gauges().reserve_ratio
    assert driver.worker.next_deadline() is None
    driver.tick()
    assert driver.worker.gauges().reserve_ratio == ratio


def test_a_pass_that_schedules_nothing_lowers_the_ratio_too() -> None:
    driver = Driver(config(reserve=ReservePolicy.NEW_TOKEN_RATIO, ratio_decay=0.01))
    start(driver, (A, 5))
    scheduler = driver.worker.scheduler
    assert scheduler.plan(0) is not None
    for _ in range(20):
        before = scheduler.gauges().reserve_ratio
        if scheduler.plan(0) is None:
            assert scheduler.gauges().reserve_ratio < before
            return
    raise AssertionError("every pass scheduled something")


def test_a_more_important_request_runs_first_and_never_yields_to_a_less_important_one() -> None:
    driver = Driver(config(slots=2))
    (low,) = start(driver, (A, 40), priority=5)
    (high,) = start(driver, (B, 40), priority=0)
    driver.run()
    assert driver.ended[high].bill.preemptions == 0
    assert driver.ended[low].bill.preemptions > 0
    assert driver.outputs[low] == expected(A, 40)


def test_waiting_requests_are_admitted_by_priority_and_then_by_arrival() -> None:
    driver = Driver(config(slots=1))
    for prompt, priority in ((A, 0), (B, 3), (C, 1), ([7], 1)):
        driver.submit(submission(prompt, 2, priority=priority))
    driver.run()
    order = [start.tokens.tolist() for launch in driver.plans for start in launch.plan.starts]
    assert order == [A, C, [7], B]


def test_the_bill_adds_up() -> None:
    driver = Driver(config(prefix_cache=True))
    serials = start(driver, (A, 40), (B, 40))
    while not driver.worker.is_idle:
        driver.now_us += 10
        driver.tick() if driver.is_due else driver.settle_one()
    bills = [driver.ended[s].bill for s in serials]
    assert sum(bill.preemptions for bill in bills) == preemptions(driver) > 0
    assert sum(bill.recomputed_tokens for bill in bills) == driver.worker.gauges().recomputed_tokens > 0
    for bill in bills:
        assert bill.cached_tokens + bill.computed_tokens == 49  # all but the last sampled token
        assert bill.queue_us + bill.prefill_us + bill.decode_us <= driver.now_us
        assert bill.decode_us > 0


def test_a_resumed_request_finds_its_own_blocks_when_they_are_still_cached() -> None:
    driver = Driver(config(prefix_cache=True))
    serials = start(driver, (A, 40), (B, 40))
    driver.run()
    again = [start for launch in driver.plans for start in launch.plan.starts if start.epoch > 1]
    assert any(start.computed > 0 for start in again)
    assert [driver.outputs[serial] for serial in serials] == [expected(A, 40), expected(B, 40)]


def test_sixty_four_requests_on_a_pool_hardly_larger_than_the_largest_all_finish_exactly() -> None:
    block_size, longest = 4, 60
    blocks = int(1.05 * -(-longest // block_size)) + 1
    made = WorkerConfig(
        slots=64, blocks=blocks, block_size=block_size, context_tokens=64, step_tokens=96, depth=2, prefix_cache=True
    )
    for reserve in ReservePolicy:
        driver = Driver(replace(made, reserve=reserve), audited=False)
        asks = [(list(range(i % 50, i % 50 + 1 + i % 20)), longest - (1 + i % 20)) for i in range(64)]
        serials = start(driver, *asks)
        driver.run(200_000)
        for serial, (prompt, tokens) in zip(serials, asks, strict=True):
            assert driver.outputs[serial] == expected(prompt, tokens)
            assert driver.ended[serial].bill.preemptions <= 8


@pytest.mark.parametrize("policy", list(VictimPolicy))
def test_each_preemption_is_recorded_with_its_cause_and_what_it_costs(policy: VictimPolicy) -> None:
    driver = Driver(config(victims=policy))
    for name, prompt in (("a", A), ("b", B)):
        driver.submit(submission(prompt, 40, name=name))
    driver.run()
    recent, gauges = driver.worker.scheduler.running.preempted, driver.worker.gauges()
    assert recent.total == len(recent.latest) == preemptions(driver) > 0
    causes = [one.cause for one in recent.latest]
    assert causes.count("growth") == gauges.preemptions_for_others
    assert causes.count("self") == gauges.preemptions_of_self
    for one in recent.latest:
        assert one.request_id in ("a", "b")
        assert (one.way, one.restore_blocks) == ("compute", 0), "there is no host memory"
        assert 10 < one.compute_tokens <= 50
        assert one.cost_us == one.compute_tokens * 100, "at the rate that nothing has measured yet"
        assert one.preemptions >= 1


def test_the_record_of_preemptions_is_bounded() -> None:
    recent = RecentPreemptions()
    for number in range(RECENT_MAX + 5):
        recent.add(Preemption(RequestId(f"r:{number}"), "self", 1, "compute", 1, 0, 1))
    assert (recent.total, len(recent.latest)) == (RECENT_MAX + 5, RECENT_MAX)
    assert recent.latest[0].request_id == "r:5"
