"""KV outside the pool, case by case: what leaves, what comes back, and what happens when copies and stores do not answer."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from baton.core.config import (
    PREFILL,
    BadConfig,
    BringBack,
    HandoverConfig,
    OnPreempt,
    ReservePolicy,
    TierConfig,
    WorkerConfig,
)
from baton.core.engine.plan import Int64s
from baton.core.engine.prefix import Key
from baton.core.engine.recovery_cost import ABSENT_US, RecoveryCost, WayBack
from baton.core.engine.request import FinishReason, Phase, Serial
from baton.core.engine.worker import Effect
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import (
    Adopted,
    Ask,
    AttemptFailed,
    Commit,
    Fence,
    Fenced,
    Grant,
    Handover,
    Heard,
    OpenShip,
    PeerId,
    PeerMessage,
    PeerOpened,
    Release,
    Ship,
    Shipped,
    Tell,
)
from baton.core.tiers.circuit_breaker import CircuitBreaker
from baton.core.tiers.host_rows import HostRows
from baton.core.tiers.offload import NoTiers, Tiers
from baton.core.tiers.open_transfers import TransferKind
from baton.core.tiers.stored_keys import BELIEVED_US
from baton.core.tiers.transfers import CopyIn, CopyOut, Get, Look, Put, TransferFailed
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
        tiers=tiers or TierConfig(host_rows=64, bring_back=BringBack.ALWAYS, transfer_blocks=4),
    )


def stored(**changes: object) -> TierConfig:
    return TierConfig(host_rows=64, store=True, bring_back=BringBack.ALWAYS, transfer_blocks=4, **changes)  # type: ignore[arg-type]


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
    assert [fence.transfer for fence in driver.fences] == [order.transfer for order in driver.orders]
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
        scheduler.slots.known[slot], scheduler.slots.computed[slot] = known, known - 1
    scheduler.rates.copy_us_per_block = 1.0
    one, other = scheduler._pass._pressure.cost.bring_back_us(rows).tolist()  # type: ignore[attr-defined]
    assert one == 104, "four blocks and a token"
    assert other == 403, "three blocks: the last token's KV is not computed yet"


def decoding_with_a_store(*, in_place: bool) -> tuple[TieredDriver, RecoveryCost, Int64s]:
    """A request that decodes under `reschedule`, with a store; `in_place`: this is its last move."""
    stored = TierConfig(host_rows=64, store=True, bring_back=BringBack.ALWAYS, failures_max=1)
    driver = TieredDriver(config(tiers=stored, on_preempt=OnPreempt.RESCHEDULE))
    request = submission(range(20), 40)
    driver.submit(msgspec.structs.replace(request, resumes_in_place=in_place, move_us_per_token=7.0))
    while not len(rows := driver.worker.scheduler.slots.decoding()):
        if driver.orders:
            driver.finish()
        driver.go_on()
    return driver, driver.worker.scheduler._pass._pressure.cost, rows  # type: ignore[attr-defined]


def ways_back(cost: RecoveryCost, rows: Int64s) -> set[WayBack]:
    return {way for way in WayBack if cost.costs_us(rows)[way, 0] != ABSENT_US}


def test_a_victim_is_not_brought_back_from_a_store_that_failed_nor_from_host_memory_once_it_moves() -> None:
    driver, cost, rows = decoding_with_a_store(in_place=False)
    scheduler = driver.worker.scheduler
    assert ways_back(cost, rows) == {WayBack.COMPUTE, WayBack.STORE, WayBack.MOVE}
    scheduler.tiers._transfers.breakers[TransferKind.PUT].failed(0)  # type: ignore[union-attr]
    assert ways_back(cost, rows) == {WayBack.COMPUTE, WayBack.MOVE}
    assert cost.bring_back_us(rows).tolist() == [7 * scheduler.slots.known[rows[0]]]


def test_a_victim_on_its_last_move_comes_back_from_host_memory_and_does_not_move() -> None:
    _, cost, rows = decoding_with_a_store(in_place=True)
    assert ways_back(cost, rows) == {WayBack.COMPUTE, WayBack.HOST, WayBack.STORE}


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


def test_what_is_crowded_out_of_host_memory_while_a_request_waits_is_sought_when_it_could_be_let_in() -> None:
    tiers = TierConfig(host_rows=8, store=True, bring_back=BringBack.ALWAYS, transfer_blocks=4)
    driver = TieredDriver(config(blocks=10, tiers=tiers))
    driver.submit(submission(range(20), 1))
    driver.run()
    driver.submit(submission(range(40, 76), 4, name="long"))
    while not driver.outputs[Serial(1)]:
        driver.go_on()
    (waits,) = driver.submit(submission(range(20), 4, name="waits"))
    driver.run()
    assert driver.worker.gauges().storage.fetched == 4
    assert driver.ended[waits].bill.restored_tokens == 16


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
    departing = driver.worker.scheduler._departing._departing
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
            driver.send(TransferFailed(driver.orders.pop(put).transfer, "gone"))
    assert driver.ended[serial].reason is FinishReason.RESCHEDULE


def test_a_client_that_leaves_meanwhile_is_answered_at_once() -> None:
    driver, serial = leaving_for_elsewhere()
    driver.cancel(serial)
    assert driver.ended[serial].reason is FinishReason.ABORT
    driver.run()


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_breaker_opens_after_failures_in_a_row_and_doubles_its_patience() -> None:
    breaker = CircuitBreaker(2, 100, 350)
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
    with pytest.raises(BadConfig, match="transfer_blocks"):
        TierConfig(transfer_blocks=0)


# ── what a store that is half broken may cost ────────────────────────────────────────────────────────────────────────


def served_without_gets(driver: TieredDriver, prompt: list[int]) -> int:
    """How long a request takes, in microseconds, of a store that answers everything but gets."""
    began_us = driver.now_us
    (serial,) = driver.submit(submission(prompt, 4, name=str(prompt[0])))
    while serial not in driver.ended:
        at = next((at for at, order in enumerate(driver.orders) if not isinstance(order, Get)), None)
        if driver.is_due:
            driver.tick()
        elif driver.fences:
            driver.answer_fence()
        elif at is not None:
            driver.finish(at)
        elif driver.in_flight:
            driver.settle_one()
        else:
            driver.now_us = max(driver.now_us + 1, driver.worker.next_deadline() or 0)
    return driver.now_us - began_us


def test_a_store_that_looks_and_does_not_get_is_left_alone_too() -> None:
    shelf, prompts = Shelf(), [[number] * 20 for number in range(8)]
    one = TieredDriver(config(tiers=stored()), shelf)
    for prompt in prompts:
        one.submit(submission(prompt, 4, name=str(prompt[0])))
    one.run()
    other = TieredDriver(config(tiers=stored(get_us=50_000, failures_max=3)), shelf)
    waits = [served_without_gets(other, prompt) for prompt in prompts]
    assert sum(wait >= 50_000 for wait in waits) == 3
    assert other.worker.gauges().storage.breaker_open


def test_saving_the_end_of_a_chain_does_not_crowd_out_its_beginning() -> None:
    driver = TieredDriver(config(tiers=TierConfig(host_rows=8, bring_back=BringBack.ALWAYS)))
    whole = [*range(16), *[7] * 16]
    for prompt in (whole[:16], [50] * 16, whole):
        driver.submit(submission(prompt, 1, name=str(prompt[-1])))
        driver.run()
    names = driver.worker.scheduler.keys_of(submission(whole), submission(whole).prompt)[1:]
    tiers = driver.worker.scheduler.tiers
    assert len(tiers.host.run(names)) == 8


def test_a_store_that_comes_back_empty_is_filled_again() -> None:
    driver = TieredDriver(config(tiers=stored(failures_max=1, retry_us=1_000)))
    driver.submit(submission(range(20), 4))
    driver.run()
    assert driver.shelf.objects
    driver.shelf.objects.clear()
    driver.shelf.fails = True
    driver.submit(submission(range(30, 50), 4, name="meanwhile"))
    driver.run()
    driver.shelf.fails = False
    driver.now_us += 2_000
    driver.submit(submission(range(20), 4, name="again"))
    driver.run()
    assert len(driver.shelf.objects) >= 4


def test_what_the_store_was_known_to_have_long_ago_is_put_again() -> None:
    driver = TieredDriver(config(tiers=stored()))
    for _ in range(2):
        driver.submit(submission(range(20), 4))
        driver.run()
        driver.shelf.objects.clear()
        driver.now_us += BELIEVED_US
    driver.submit(submission(range(20), 4))
    driver.run()
    assert len(driver.shelf.objects) == 4


def test_who_could_not_be_sought_is_sought_when_that_is_possible() -> None:
    shelf = Shelf()
    one = TieredDriver(config(tiers=stored()), shelf)
    one.submit(submission(range(20), 4))
    one.run()
    other = TieredDriver(replace(config(tiers=stored(transfers_max=1)), slots=1), shelf)
    other.submit(submission([60] * 3, 20, name="runs"))
    other.go_on()
    other.submit(submission(range(30, 50), 4, name="first"), submission(range(20), 4, name="second"))
    other.run()
    assert other.worker.gauges().storage.fetched == 4


def test_the_end_waits_for_nothing_that_the_store_turns_out_to_have() -> None:
    driver, serial = leaving_for_elsewhere()
    while any(isinstance(order, CopyOut) for order in driver.orders):
        driver.finish()
    tiers = driver.worker.scheduler.tiers
    (departure,) = tiers._departures._departures.values()
    wanted = tuple(departure.keys)
    assert wanted
    assert serial not in driver.ended
    for key in wanted:
        tiers._saving.note_stored(key)
    driver.now_us += 1
    driver.cancel(Serial(999))
    assert driver.ended[serial].reason is FinishReason.RESCHEDULE


def test_a_stop_string_found_while_the_end_waits_cuts_the_answer() -> None:
    driver, serial = leaving_for_elsewhere()
    driver.stop_found(serial, keep=2)
    assert (driver.ended[serial].reason, driver.ended[serial].generated_tokens) == (FinishReason.STOP, 2)


def test_one_that_is_cancelled_while_it_is_restored_has_computed_nothing() -> None:
    driver = TieredDriver(config())
    driver.submit(submission(range(32), 2))
    driver.run()
    driver.submit(submission([60] * 16, 60, name="crowd"))
    driver.run()
    (serial,) = driver.submit(submission(range(32), 2, name="again"))
    driver.tick()
    assert any(isinstance(order, CopyIn) for order in driver.orders)
    driver.cancel(serial)
    driver.answer_fence()
    assert driver.ended[serial].bill.computed_tokens == 0


# ── an instance that prefills for others ─────────────────────────────────────────────────────────────────────────────


class Giver(TieredDriver):
    """Whose taker says what the test lets it say."""

    TAKER = PeerId("d")

    def __init__(self, slots: int = 1) -> None:
        super().__init__(replace(config(), slots=slots, role=PREFILL, handover=HandoverConfig(vocabulary=VOCABULARY)))
        self.said: list[PeerMessage] = []
        self.asked = 0
        self.send(PeerOpened(self.TAKER))

    def _take(self, effect: Effect) -> None:
        match effect:
            case Tell(_, message):
                self.said.append(message)
            case Fence(handover):
                self.send(Fenced(handover))
            case OpenShip() | Ship() | AttemptFailed():
                pass
            case _:
                super()._take(effect)

    def ask(self, prompt: list[int]) -> int:
        self.asked += 1
        self.send(Heard(self.TAKER, Ask(self.asked, 1, submission(prompt, 4, name=str(self.asked)))))
        return self.asked

    def grant(self, request: int) -> None:
        self.send(Heard(self.TAKER, Grant(request, 1, 0, 1 << 30, b"token")))

    def adopt(self, request: int) -> None:
        for _ in range(3):
            self.go_on()
        self.send(Shipped(Handover(self.TAKER, request, 1), b"checks"))
        self.send(Heard(self.TAKER, Adopted(request, 1)))
        for _ in range(3):
            self.go_on()
        self.settle_all()

    def prefill(self, prompt: list[int]) -> None:
        request = self.ask(prompt)
        self.settle_all()
        self.grant(request)
        self.adopt(request)


def test_what_prefills_for_others_restores_before_it_computes() -> None:
    driver = Giver()
    driver.prefill([*range(20)])
    driver.prefill([*range(30, 62), *range(40)])
    driver.prefill([*range(62, 2, -1), *range(20)])
    request = driver.ask([*range(20)])
    driver.grant(request)
    assert [type(order) for order in driver.orders] == [CopyIn]
    before = len(driver.plans)
    driver.go_on()
    assert len(driver.plans) == before, "nothing is computed before the copy has ended"
    driver.finish()
    driver.adopt(request)
    commit = next(message for message in reversed(driver.said) if isinstance(message, Commit))
    assert (commit.cached_tokens, commit.restored_tokens) == (16, 16)


def test_a_grant_for_one_that_is_gone_is_not_taken_for_another_in_its_slot() -> None:
    driver = Giver()
    driver.prefill([*range(20)])
    driver.prefill([*range(30, 62), *range(40)])
    driver.prefill([*range(62, 2, -1), *range(20)])
    gone = driver.ask([*range(20)])
    driver.grant(gone)
    driver.send(Heard(driver.TAKER, Release(gone, 1, "its client left")))
    driver.settle_all()
    request = driver.ask([*range(30, 62)])
    driver.settle_all()
    before = len(driver.plans)
    driver.go_on()
    assert len(driver.plans) == before, "nobody has granted it room"
    driver.grant(request)
    driver.adopt(request)
    assert driver.worker.is_idle


def test_no_tiers_have_everything_that_tiers_have() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(Tiers) <= public(NoTiers)
