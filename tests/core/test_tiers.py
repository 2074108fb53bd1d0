"""KV outside the pool, case by case: what leaves, what comes back, and what happens when copies and stores do not answer."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.breaker import Breaker
from baton.core.config import BadConfig, BringBack, OnPreempt, ReservePolicy, TierConfig, VictimPolicy, WorkerConfig
from baton.core.errors import InvariantViolated
from baton.core.host import HostRows
from baton.core.prefix import Key
from baton.core.request import FinishReason, Phase, Serial
from baton.core.storage import CopyIn, CopyOut, Get, HaulFailed, Look, Put
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, submission
from tests.support.tiers import Shelf, TieredDriver

SIZE = 4


def config(blocks: int = 24, tiers: TierConfig | None = None, on_preempt: OnPreempt = OnPreempt.RESUME) -> WorkerConfig:
    return WorkerConfig(
        slots=4,
        blocks=blocks,
        block_size=SIZE,
        context_tokens=128,
        step_tokens=64,
        reserve=ReservePolicy.NONE,
        on_preempt=on_preempt,
        tiers=tiers or TierConfig(host_rows=64, bring_back=BringBack.ALWAYS, haul_blocks=4),
    )


def stored(**changes: object) -> TierConfig:
    return TierConfig(host_rows=64, store=True, bring_back=BringBack.ALWAYS, haul_blocks=4, **changes)  # type: ignore[arg-type]


def keys(*names: str) -> list[Key]:
    return [Key(name.encode()) for name in names]


def crowd_out(driver: TieredDriver) -> None:
    """Fill the pool with something else, so that nothing older is in the device's cache."""
    driver.submit(submission(range(40, 40 + 16), driver.config.pool_tokens - 16, name="crowd"))
    driver.run()


# ── what a finished request leaves behind ────────────────────────────────────────────────────────────────────────────


def test_what_is_gone_from_the_pool_comes_back_from_host_memory() -> None:
    driver = TieredDriver(config())
    (first,) = driver.submit(submission(range(20), 4))
    driver.run()
    crowd_out(driver)
    (again,) = driver.submit(submission(range(20), 4))
    driver.run()
    bill = driver.ended[again].bill
    assert (bill.cached_tokens, bill.restored_tokens, bill.computed_tokens) == (16, 16, 7)
    assert driver.outputs[again] == driver.outputs[first]
    assert any(isinstance(order, CopyIn) for order in driver.seen)


def test_only_prompts_are_saved_where_outputs_are_not_to_be() -> None:
    driver = TieredDriver(config(tiers=TierConfig(host_rows=64, cache_outputs=False)))
    driver.submit(submission(range(9), 12))
    driver.run()
    (order,) = [order for order in driver.seen if isinstance(order, CopyOut)]
    assert len(order.blocks) == 2


@pytest.mark.parametrize("save_finished", [True, False])
def test_finished_requests_are_saved_if_that_is_wanted(save_finished: bool) -> None:
    driver = TieredDriver(config(tiers=TierConfig(host_rows=64, save_finished=save_finished)))
    driver.submit(submission(range(9), 12))
    driver.run()
    assert (driver.worker.gauges().storage.saved > 0) is save_finished


def test_what_is_in_host_memory_already_is_not_copied_again() -> None:
    driver = TieredDriver(config())
    for _ in range(2):
        driver.submit(submission(range(16), 1))
        driver.run()
    assert sum(len(order.blocks) for order in driver.seen if isinstance(order, CopyOut)) == 4


def test_with_no_room_in_host_memory_the_beginning_is_saved() -> None:
    driver = TieredDriver(config(tiers=TierConfig(host_rows=2)))
    driver.submit(submission(range(20), 2))
    driver.run()
    gauges = driver.worker.gauges().storage
    assert (gauges.saved, gauges.unsaved, gauges.host_used) == (2, 3, 2)
    crowd_out(driver)


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_that_are_being_copied_are_used_by_nobody_until_the_copy_has_let_go() -> None:
    driver = TieredDriver(config(blocks=6))
    driver.submit(submission(range(12), 4))
    while not driver.orders:
        driver.go_on()
    gauges = driver.worker.gauges().blocks
    assert gauges.leaving == 3
    driver.submit(submission(range(30, 50), 2, name="next"))
    for _ in range(5):
        driver.tick()
    assert not driver.in_flight, "its five blocks are not to be had"
    driver.finish()
    assert driver.worker.gauges().blocks.leaving == 0
    driver.tick()
    assert driver.in_flight


def test_a_late_copy_is_fenced_and_only_then_are_its_blocks_free() -> None:
    driver = TieredDriver(config(tiers=TierConfig(host_rows=64, copy_us=50_000)))
    driver.submit(submission(range(12), 1))
    while not driver.orders:
        driver.go_on()
    driver.now_us += 50_000
    driver.tick()
    assert [fence.haul for fence in driver.fences] == [order.haul for order in driver.orders]
    assert driver.worker.gauges().blocks.leaving == 3
    driver.answer_fence()
    gauges = driver.worker.gauges()
    assert (gauges.blocks.leaving, gauges.storage.late, gauges.storage.saved, gauges.storage.host_used) == (0, 1, 0, 0)


def test_a_shared_block_is_running_and_not_leaving() -> None:
    driver = TieredDriver(config())
    driver.submit(submission(range(12), 6, name="a"))
    driver.go_on()
    driver.go_on()
    (second,) = driver.submit(submission(range(12), 30, name="b"))
    while not driver.orders:
        driver.go_on()
    (order,) = driver.orders
    assert isinstance(order, CopyOut)
    assert len(order.blocks) == 4
    assert driver.worker.gauges().blocks.leaving == 2, "the first two are the other's, too"
    driver.cancel(second)
    driver.go_on()
    driver.go_on()
    assert driver.worker.gauges().blocks.leaving >= 4
    driver.run()


# ── preemption ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pressed(tiers: TierConfig) -> TieredDriver:
    """Two requests that grow until one must yield, and a third that then takes all that is free."""
    driver = TieredDriver(config(blocks=12, tiers=tiers))
    for name in ("a", "b"):
        driver.submit(submission(range(16) if name == "a" else range(20, 36), 28, name=name))
    driver.run()
    return driver


def test_a_preempted_request_recomputes_no_more_than_a_block() -> None:
    without, with_host = pressed(TierConfig()), pressed(TierConfig(host_rows=64, bring_back=BringBack.ALWAYS))
    assert with_host.worker.gauges().preemptions_for_others + with_host.worker.gauges().preemptions_of_self
    assert with_host.worker.gauges().recomputed_tokens <= SIZE * sum(
        ended.bill.preemptions for ended in with_host.ended.values()
    )
    assert without.outputs == with_host.outputs


def test_while_blocks_are_leaving_nobody_else_is_asked_to_yield() -> None:
    driver = TieredDriver(config(blocks=12))
    for first in (0, 20, 40):
        driver.submit(submission(range(first, first + 9), 30, name=str(first)))
    while not driver.worker.gauges().blocks.leaving:
        driver.go_on()
    before = sum(request.bill.preemptions for request in driver.worker.scheduler.requests())
    for _ in range(10):
        driver.go_on()
    assert sum(request.bill.preemptions for request in driver.worker.scheduler.requests()) == before
    driver.run()


def test_cheapest_computes_again_what_a_copy_would_take_longer_for() -> None:
    tiers = TierConfig(host_rows=64, bring_back=BringBack.CHEAPEST)
    driver = TieredDriver(config(tiers=tiers))
    driver.worker.scheduler.rates.copy_us_per_block = 1e9
    driver.submit(submission(range(20), 4))
    driver.run()
    gauges = driver.worker.gauges().storage
    assert (gauges.saved, gauges.recompute_cheaper) == (0, 5)
    driver.worker.scheduler.rates.copy_us_per_block = 1.0
    driver.submit(submission(range(20), 4))
    driver.run()
    assert driver.worker.gauges().storage.saved == 4, "the fifth is cached in another block, of the first request"


def test_the_cheapest_victim_is_the_one_whose_copy_is_quickest() -> None:
    driver = TieredDriver(config())
    scheduler = driver.worker.scheduler
    rows = np.array([0, 1], dtype=np.int64)
    for slot, known in ((0, 17), (1, 16)):
        scheduler.slots.known[slot] = known
    scheduler.rates.copy_us_per_block = 1.0
    one, other = scheduler._bring_back_us(rows).tolist()  # type: ignore[attr-defined]
    assert one == 104
    assert other == 4
    assert VictimPolicy.CHEAPEST


# ── coming back ──────────────────────────────────────────────────────────────────────────────────────────────────────


def restoring() -> tuple[TieredDriver, Serial]:
    """A request whose KV is on its way from host memory."""
    driver = TieredDriver(config(tiers=TierConfig(host_rows=64, bring_back=BringBack.ALWAYS, copy_us=50_000)))
    driver.submit(submission(range(20), 4))
    driver.run()
    crowd_out(driver)
    (serial,) = driver.submit(submission(range(20), 4, name="again"))
    driver.tick()
    request = driver.worker.scheduler.request(serial)
    assert request is not None
    assert request.phase is Phase.RESTORING
    return driver, serial


def test_a_cancelled_request_keeps_its_blocks_until_the_copy_into_them_has_ended() -> None:
    driver, serial = restoring()
    held = driver.worker.gauges().blocks.receiving
    driver.cancel(serial)
    assert serial not in driver.ended
    assert driver.worker.gauges().blocks.receiving == held == 4
    driver.answer_fence()
    assert driver.ended[serial].reason is FinishReason.ABORT
    assert driver.worker.gauges().blocks.receiving == 0


@pytest.mark.parametrize("how", ["fails", "is late"])
def test_what_does_not_come_back_is_computed(how: str) -> None:
    driver, serial = restoring()
    if how == "fails":
        driver.fail()
    else:
        driver.now_us += 50_000
        driver.tick()
        driver.answer_fence()
    driver.run()
    assert driver.outputs[serial] == undisturbed(submission(range(20)).prompt, submission(range(20)).sampling, 4, VOCABULARY)
    assert driver.ended[serial].bill.restored_tokens == 0


def test_a_request_that_ends_after_its_copy_and_before_its_plan_is_simply_gone() -> None:
    driver, serial = restoring()
    driver.finish()
    driver.cancel(serial)
    assert driver.ended[serial].reason is FinishReason.ABORT
    driver.run()
    assert driver.worker.gauges().blocks.running == 0


def test_looking_up_evicts_nothing_from_host_memory() -> None:
    rows = HostRows(2)
    rows.take(keys("a", "b"))
    rows.filled(keys("a", "b"))
    before = rows.run(keys("a", "b")).tolist()
    assert rows.run(keys("c", "a")).tolist() == []
    assert rows.run(keys("a", "b", "c")).tolist() == before
    assert rows.used == 2


def test_of_rows_the_deepest_goes_first_and_none_that_is_read() -> None:
    rows = HostRows(3)
    rows.take(keys("a", "b", "c"))
    rows.filled(keys("a", "b", "c"))
    rows.read(keys("c"))
    rows.take(keys("d"))
    assert [key in rows for key in keys("a", "b", "c", "d")] == [True, False, True, True]
    rows.let_go(keys("c"))
    with pytest.raises(InvariantViolated):
        rows.let_go(keys("c"))


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_instance_resumes_from_the_store() -> None:
    shelf = Shelf()
    one, other = TieredDriver(config(tiers=stored()), shelf), TieredDriver(config(tiers=stored()), shelf)
    one.submit(submission(range(20), 8))
    one.run()
    (serial,) = other.submit(submission(range(20), 12, generated=one.outputs[Serial(0)][:6]))
    other.run()
    bill = other.ended[serial].bill
    assert bill.restored_tokens == 24
    assert one.outputs[Serial(0)][:6] + other.outputs[serial] == undisturbed(
        submission(range(20)).prompt, submission(range(20)).sampling, 12, VOCABULARY
    )


@pytest.mark.parametrize(("one_salt", "other_salt", "shares"), [(b"a", b"b", False), (b"group", b"group", True)])
def test_tenants_share_by_salt_alone(one_salt: bytes, other_salt: bytes, shares: bool) -> None:
    shelf = Shelf()
    one, other = TieredDriver(config(tiers=stored()), shelf), TieredDriver(config(tiers=stored()), shelf)
    one.submit(submission(range(20), 2, salt=one_salt))
    one.run()
    (serial,) = other.submit(submission(range(20), 2, salt=other_salt))
    other.run()
    assert (other.ended[serial].bill.restored_tokens > 0) is shares


def test_one_that_waits_for_the_store_lets_others_pass_and_not_for_ever() -> None:
    driver = TieredDriver(config(tiers=stored(look_us=30_000, get_us=30_000)))
    (slow,) = driver.submit(submission(range(20), 4))
    driver.tick()
    assert isinstance(driver.orders[0], Look)
    (quick,) = driver.submit(submission(range(3), 4, name="quick"))
    while quick not in driver.ended:
        driver.go_on()
    assert not driver.outputs[slow]
    driver.shelf.hangs = True
    driver.run()
    assert len(driver.outputs[slow]) == 4
    assert driver.worker.gauges().storage.late


def test_a_store_that_fails_is_left_alone_and_tried_again_later() -> None:
    driver = TieredDriver(config(tiers=stored(failures_max=2, retry_us=1_000_000)))
    driver.shelf.fails = True
    for number in range(6):
        driver.submit(submission(range(number, number + 8), 2, name=str(number)))
        driver.run()
    of_store = [order for order in driver.seen if isinstance(order, Look | Put | Get)]
    assert len(of_store) <= 4
    assert driver.worker.gauges().storage.breaker_open
    driver.shelf.fails = False
    driver.now_us += 1_000_000
    driver.submit(submission(range(30, 40), 2, name="later"))
    driver.run()
    gauges = driver.worker.gauges().storage
    assert not gauges.breaker_open
    assert gauges.stored


def test_a_full_store_is_a_miss_and_no_failure() -> None:
    driver = TieredDriver(config(tiers=stored()))
    driver.shelf.full = True
    driver.submit(submission(range(20), 4))
    driver.run()
    gauges = driver.worker.gauges().storage
    assert (gauges.stored, gauges.unstored, gauges.breaker_open, gauges.failed) == (0, 5, 0, 0)


def test_a_gap_in_the_store_ends_what_is_fetched() -> None:
    shelf = Shelf()
    one, other = TieredDriver(config(tiers=stored()), shelf), TieredDriver(config(tiers=stored()), shelf)
    one.submit(submission(range(36), 2))
    one.run()
    gone = one.worker.scheduler.keys_of(submission(range(36)), submission(range(36)).prompt)[3]
    del shelf.objects[gone]
    (serial,) = other.submit(submission(range(36), 2))
    other.run()
    assert other.ended[serial].bill.restored_tokens == 2 * SIZE
    assert sum(len(order.keys) for order in other.seen if isinstance(order, Get)) == 2


# ── going elsewhere ──────────────────────────────────────────────────────────────────────────────────────────────────


def leaving_for_elsewhere(**changes: object) -> tuple[TieredDriver, Serial]:
    driver = TieredDriver(config(blocks=12, tiers=stored(**changes), on_preempt=OnPreempt.RESCHEDULE))
    for name in ("a", "b"):
        driver.submit(submission(range(16) if name == "a" else range(20, 36), 28, name=name))
    departing = driver.worker.scheduler._departing
    while not departing:
        driver.go_on()
        for at in reversed(range(len(driver.orders))):
            if isinstance(driver.orders[at], Look):
                driver.finish(at)
    return driver, next(iter(departing))


def test_the_end_of_one_that_goes_elsewhere_waits_for_the_store() -> None:
    driver, serial = leaving_for_elsewhere()
    assert serial not in driver.ended
    driver.settle_all()
    ended = driver.ended[serial]
    assert ended.reason is FinishReason.RESCHEDULE
    assert ended.fault is not None
    assert len(driver.shelf.objects) >= 4


def test_it_does_not_wait_longer_than_it_may() -> None:
    driver, serial = leaving_for_elsewhere(depart_us=70_000)
    driver.now_us += 70_000
    driver.tick()
    assert driver.ended[serial].reason is FinishReason.RESCHEDULE


def test_nor_for_a_store_that_is_given_up() -> None:
    driver, serial = leaving_for_elsewhere(failures_max=1)
    while serial not in driver.ended:
        put = next((at for at, order in enumerate(driver.orders) if isinstance(order, Put)), None)
        if put is None:
            driver.finish()
        else:
            driver.send(HaulFailed(driver.orders.pop(put).haul, "gone"))
    assert driver.ended[serial].reason is FinishReason.RESCHEDULE


def test_a_client_that_leaves_meanwhile_is_answered_at_once() -> None:
    driver, serial = leaving_for_elsewhere()
    driver.cancel(serial)
    assert driver.ended[serial].reason is FinishReason.ABORT
    driver.run()


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_breaker_opens_after_failures_in_a_row_and_doubles_its_patience() -> None:
    breaker = Breaker(2, 100, 350)
    breaker.failed(0)
    breaker.succeeded()
    breaker.failed(0)
    assert breaker.allows(0)
    breaker.failed(0)
    assert not breaker.allows(99)
    waits, now = [], 0
    for _ in range(3):
        began = now
        while not breaker.allows(now):
            now += 1
        waits.append(now - began)
        breaker.asked()
        assert not breaker.allows(now), "one at a time"
        breaker.failed(now)
    assert waits == [100, 200, 350]
    breaker.succeeded()
    assert breaker.allows(now)
    assert not breaker.is_open


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(BadConfig, match="host memory"):
        TierConfig(store=True)
    with pytest.raises(BadConfig, match="prefix cache"):
        WorkerConfig(slots=1, blocks=1, prefix_cache=False, tiers=TierConfig(host_rows=1))
    with pytest.raises(BadConfig, match="haul_blocks"):
        TierConfig(haul_blocks=0)
