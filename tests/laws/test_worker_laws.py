"""Random request mixes against the laws: after every event the ledger sums to the pool, and at the end tokens are exact."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.config import WorkerConfig
from baton.core.engine.request import FinishReason, Sampling, Serial, Submission
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, Driver, submission

MIXES = 300


@dataclass(frozen=True)
class Ask:
    """A body: one prompt, so many choices."""

    prompt: tuple[int, ...]
    choices: int
    max_tokens: int | None
    sampling: Sampling
    salt: bytes


@st.composite
def configs(draw: st.DrawFn) -> WorkerConfig:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    burst = draw(st.integers(1, min(4, block_size)))
    slots = draw(st.integers(1, 6))
    return WorkerConfig(
        slots=slots,
        blocks=draw(st.integers(-(-48 // block_size), 160 // block_size)),
        block_size=block_size,
        context_tokens=64,
        step_tokens=draw(st.integers(slots * burst, slots * burst + 40)),
        burst=burst,
        depth=draw(st.integers(1, 3)),
        waiting_max=32,
        prefix_cache=draw(st.booleans()),
    )


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    # Few distinct prompts, cut from two long ones, so that prefixes meet in the cache.
    start = draw(st.sampled_from([0, 3]))
    return Ask(
        prompt=tuple(range(start, start + draw(st.integers(1, 40)))),
        choices=draw(st.sampled_from([1, 1, 1, 2, 3])),
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 40))),
        sampling=Sampling(
            seed=draw(st.integers(0, 3)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            stop_token_ids=draw(st.sampled_from([(), (0,), (5, 9, 17)])),
            min_tokens=draw(st.integers(0, 3)),
        ),
        salt=draw(st.sampled_from([b"", b"tenant"])),
    )


ACTIONS = st.sampled_from(["submit", "tick", "tick", "tick", "settle", "settle", "settle", "cancel", "stop"])


def _group(ask: Ask, number: int) -> list[Submission]:
    def choice(index: int) -> Submission:
        keyed = Sampling(
            seed=ask.sampling.seed, choice=index, temperature=ask.sampling.temperature,
            stop_token_ids=ask.sampling.stop_token_ids, min_tokens=ask.sampling.min_tokens,
        )  # fmt: skip
        leader = f"{number}/0" if index else None
        return submission(ask.prompt, ask.max_tokens, name=f"{number}/{index}", sampling=keyed, leader=leader, salt=ask.salt)

    return [choice(index) for index in range(ask.choices)]


@pytest.mark.parametrize("mixes", [MIXES // 10, pytest.param(MIXES, marks=pytest.mark.slow)])
def test_any_mix_ends_with_exact_tokens_and_a_ledger_that_sums_to_the_pool(mixes: int) -> None:
    @settings(max_examples=mixes, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(config=configs(), todo=st.lists(asks(), min_size=1, max_size=12), data=st.data())
    def mix(config: WorkerConfig, todo: list[Ask], data: st.DataObject) -> None:
        _run_to_the_end(config, todo, data)

    mix()


def _run_to_the_end(config: WorkerConfig, todo: list[Ask], data: st.DataObject) -> None:
    driver = Driver(config)
    submitted: dict[Serial, Submission] = {}
    disturbed: list[Serial] = []
    while todo:
        action = data.draw(ACTIONS)
        open_now = [serial for serial in submitted if serial not in driver.ended]
        if action == "submit":
            group = _group(todo.pop(), len(todo))
            submitted.update(zip(driver.submit(*group), group, strict=False))
        elif action == "tick":
            driver.tick()
        elif action == "settle":
            driver.settle_one()
        elif open_now:
            serial = data.draw(st.sampled_from(open_now))
            disturbed.append(serial)
            driver.cancel(serial) if action == "cancel" else driver.stop_found(serial, keep=1)
    driver.run()

    gauges = driver.worker.gauges()
    assert gauges.blocks.running == 0
    assert gauges.running == gauges.waiting == 0
    assert set(driver.ended) == set(submitted)
    for serial, item in submitted.items():
        room = config.sequence_tokens_max - len(item.prompt)
        whole = undisturbed(item.prompt, item.sampling, min(room, item.max_tokens or room), VOCABULARY)
        delivered = driver.outputs[serial]
        assert delivered == whole[: len(delivered)]
        if serial not in disturbed:
            assert delivered == whole
            assert driver.ended[serial].reason in (FinishReason.STOP, FinishReason.LENGTH)
