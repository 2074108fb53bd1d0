"""Random mixes with host memory and a store whose answers come late, wrong or never: the laws hold, and tokens are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.config import BringBack, OnPreempt, TierConfig, WorkerConfig
from baton.core.engine.request import FinishReason, Serial, Submission
from baton.executor.scripted import undisturbed
from tests.laws.test_worker_laws import Ask, _group, asks, configs
from tests.support.driver import VOCABULARY, submission
from tests.support.tiers import Shelf, TieredDriver

MIXES = 200
ACTIONS = st.sampled_from(
    ("submit", *("tick",) * 3, *("settle",) * 3, "cancel", "stop", "haul", "haul", "fail", "fence", "later")
)


@st.composite
def tiered(draw: st.DrawFn) -> WorkerConfig:
    return replace(
        draw(configs()),
        prefix_cache=True,
        on_preempt=draw(st.sampled_from([OnPreempt.RESUME, OnPreempt.RESUME, OnPreempt.RESCHEDULE])),
        tiers=TierConfig(
            host_rows=draw(st.integers(1, 24)),
            store=draw(st.booleans()),
            save_preempted=draw(st.sampled_from([True, True, False])),
            save_finished=draw(st.booleans()),
            cache_outputs=draw(st.sampled_from([True, True, False])),
            bring_back=draw(st.sampled_from([BringBack.ALWAYS, BringBack.ALWAYS, BringBack.CHEAPEST])),
            transfer_blocks=draw(st.integers(1, 4)),
            transfers_max=draw(st.integers(1, 3)),
            failures_max=draw(st.integers(1, 3)),
            copy_us=20_000,
            look_us=10_000,
            get_us=20_000,
            put_us=40_000,
            depart_us=30_000,
            retry_us=20_000,
        ),
    )


@pytest.mark.parametrize("mixes", [MIXES // 10, pytest.param(MIXES, marks=pytest.mark.slow)])
def test_any_mix_with_tiers_ends_with_exact_tokens(mixes: int) -> None:
    @settings(max_examples=mixes, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(config=tiered(), todo=st.lists(asks(), min_size=1, max_size=12), data=st.data())
    def mix(config: WorkerConfig, todo: list[Ask], data: st.DataObject) -> None:
        _run_to_the_end(config, todo, data)

    mix()


def _run_to_the_end(config: WorkerConfig, todo: list[Ask], data: st.DataObject) -> None:
    driver = TieredDriver(config)
    submitted: dict[Serial, Submission] = {}
    disturbed: list[Serial] = []
    while todo:
        action = data.draw(ACTIONS)
        open_now = [serial for serial in submitted if serial not in driver.ended]
        match action:
            case "submit":
                group = _group(todo.pop(), len(todo))
                submitted.update(zip(driver.submit(*group), group, strict=False))
            case "tick":
                driver.tick()
            case "settle":
                driver.settle_one()
            case "haul" | "fail" if driver.orders:
                at = data.draw(st.integers(0, len(driver.orders) - 1))
                driver.finish(at) if action == "haul" else driver.fail(at)
            case "fence" if driver.fences:
                driver.answer_fence(data.draw(st.integers(0, len(driver.fences) - 1)))
            case "later":
                driver.now_us += data.draw(st.sampled_from([1_000, 15_000, 60_000]))
            case "cancel" | "stop" if open_now:
                serial = data.draw(st.sampled_from(open_now))
                disturbed.append(serial)
                driver.cancel(serial) if action == "cancel" else driver.stop_found(serial, keep=1)
            case _:
                pass
    driver.shelf.fails = data.draw(st.booleans())
    driver.shelf.hangs = data.draw(st.booleans())
    driver.run()
    _held_nothing(driver)
    assert set(driver.ended) == set(submitted)
    for serial, item in submitted.items():
        _told_the_truth(driver, config, serial, item, serial in disturbed)


def _held_nothing(driver: TieredDriver) -> None:
    gauges = driver.worker.gauges()
    assert gauges.blocks.running == gauges.blocks.leaving == gauges.blocks.receiving == 0
    assert gauges.running == gauges.waiting == gauges.storage.transfers == 0


def _told_the_truth(driver: TieredDriver, config: WorkerConfig, serial: Serial, item: Submission, disturbed: bool) -> None:
    room = config.sequence_tokens_max - len(item.prompt)
    whole = undisturbed(item.prompt, item.sampling, min(room, item.max_tokens or room), VOCABULARY)
    delivered, reason = driver.outputs[serial], driver.ended[serial].reason
    assert delivered == whole[: len(delivered)]
    if reason is FinishReason.RESCHEDULE:
        assert config.on_preempt is OnPreempt.RESCHEDULE
    elif not disturbed:
        assert delivered == whole
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=tiered(), prompts=st.lists(st.integers(8, 40), min_size=1, max_size=6), data=st.data())
def test_another_worker_goes_on_from_the_store(config: WorkerConfig, prompts: list[int], data: st.DataObject) -> None:
    """What one worker stored, another with the same names finds, whole or in part, and its tokens are the same."""
    config = replace(config, tiers=replace(config.tiers, store=True))
    shelf = Shelf()
    first, second = TieredDriver(config, shelf), TieredDriver(config, shelf)
    made = [submission(range(tokens), 6, name=str(tokens)) for tokens in prompts]
    for driver in (first, second):
        for item in made:
            driver.submit(item)
        driver.run()
        for key in data.draw(st.lists(st.sampled_from(sorted(shelf.objects)), max_size=4)) if shelf.objects else []:
            shelf.objects.pop(key, None)
    for serial, item in enumerate(made):
        if second.ended[Serial(serial)].reason is not FinishReason.RESCHEDULE:
            assert second.outputs[Serial(serial)] == undisturbed(item.prompt, item.sampling, 6, VOCABULARY)
    _held_nothing(second)
