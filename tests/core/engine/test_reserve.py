"""Each formula of the reserve policies against values computed by hand, and their edges."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.config import ReservePolicy, WorkerConfig
from baton.core.engine.request import Phase
from baton.core.engine.reserve import BlockPromises, FixedBlocks, NewTokenRatio, NoReserve, reserve_for
from baton.core.engine.slots import Slots


def config(**changes: object) -> WorkerConfig:
    settings: dict[str, object] = {"slots": 4, "blocks": 1000, "block_size": 16, "context_tokens": 16000}
    return WorkerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def table(*rows: tuple[Phase, int, int, int]) -> Slots:
    """Rows of (phase, prompt, generated, limit of outputs); no blocks held."""
    slots = Slots(max(4, len(rows)), 1000, 16)
    for serial, (phase, prompt, generated, limit) in enumerate(rows):
        slot = slots.claim(serial)
        slots.phase[slot] = phase
        slots.prompt[slot] = prompt
        slots.known[slot] = prompt + generated
        slots.limit[slot] = prompt + limit
    return slots


DECODE, PREFILL = Phase.RUNNING_DECODE, Phase.RUNNING_PREFILL


@pytest.mark.parametrize(
    ("generated", "limit", "blocks"),
    [
        (0, 100, 5),  # int(100 × 0.7) = 70 tokens → 5 blocks of 16
        (0, 1, 0),  # int(0.7) = 0
        (0, 2, 1),  # int(1.4) = 1
        (99, 100, 0),  # int(0.7) = 0
        (100, 100, 0),
        (120, 100, 0),  # remaining is negative: nothing is kept, never less than nothing
        (0, 10_000, 180),  # clipped: int(4096 × 0.7) = 2867 → 180 blocks
    ],
)
def test_the_ratio_keeps_a_share_of_what_remains(generated: int, limit: int, blocks: int) -> None:
    slots = table((DECODE, 10, generated, limit))
    assert NewTokenRatio(config()).blocks(slots, slots.running()).tolist() == [blocks]


def test_the_ratio_falls_a_little_each_pass_to_its_floor() -> None:
    policy = NewTokenRatio(config())
    policy.after_pass()
    assert policy.ratio == pytest.approx(0.699)
    for _ in range(1000):
        policy.after_pass()
    assert policy.ratio == pytest.approx(0.1)


def test_after_a_preemption_the_ratio_is_what_the_running_ones_have_used_and_will_soon_use() -> None:
    policy = NewTokenRatio(config())
    # used 100 + 300, soon 16 × 16 × 2, of limits 1000 + 3000
    slots = table((DECODE, 10, 100, 1000), (DECODE, 20, 300, 3000))
    policy.after_preemption(slots)
    assert policy.ratio == pytest.approx((400 + 512) / 4001)


def test_a_prefilling_request_counts_its_limit_but_is_not_expected_to_decode_soon() -> None:
    policy = NewTokenRatio(config())
    policy.after_preemption(table((DECODE, 10, 100, 1000), (PREFILL, 20, 0, 3000)))
    assert policy.ratio == pytest.approx((100 + 256) / 4001)


def test_the_ratio_never_rises_above_its_start_and_is_reset_when_nothing_runs() -> None:
    policy = NewTokenRatio(config())
    policy.after_preemption(table((DECODE, 10, 99, 100)))
    assert policy.ratio == 0.7
    policy.ratio = 0.2
    policy.after_preemption(table())
    assert policy.ratio == 0.7
    policy.ratio = 0.2
    policy.after_preemption(table((Phase.PREEMPTING, 10, 50, 100)))
    assert policy.ratio == 0.7


def test_a_prefilling_request_keeps_a_reserve_too_since_it_will_decode() -> None:
    slots = table((PREFILL, 64, 0, 100))
    assert BlockPromises(config()).kept(slots) == 4 + 5  # its prompt's blocks and its share of outputs


def test_the_asker_is_not_in_its_own_reserve() -> None:
    slots = table((PREFILL, 64, 0, 100), (DECODE, 16, 0, 100))
    slots.held[:2] = 1
    first, second = slots.running().tolist()
    promises = BlockPromises(config())
    both = promises.kept(slots)
    assert promises.kept(slots, asker=first) + promises.kept(slots, asker=second) == both


def test_every_constant_of_the_ratio_is_a_setting() -> None:
    made = config(ratio_initial=0.5, ratio_decay=0.2, ratio_floor=0.25, ratio_clip_tokens=32)
    policy = NewTokenRatio(made)
    slots = table((DECODE, 10, 0, 1000))
    assert policy.blocks(slots, slots.running()).tolist() == [1]
    policy.after_pass()
    policy.after_pass()
    assert policy.ratio == 0.25


def test_fixed_blocks_start_relaxed_and_keep_so_many_blocks_only_after_a_preemption() -> None:
    policy = FixedBlocks(config())
    slots = table((DECODE, 10, 0, 100), (PREFILL, 10, 0, 100))
    assert policy.blocks(slots, slots.running()).tolist() == [0, 0]
    policy.after_preemption(slots)
    assert policy.blocks(slots, slots.running()).tolist() == [16, 16]
    policy.after_pass()
    assert policy.blocks(slots, slots.running()).tolist() == [15, 15]
    for _ in range(640):
        policy.after_pass()
    assert policy.blocks(slots, slots.running()).tolist() == [0, 0]
    policy.after_pass()
    assert policy.ratio == 0.0


def test_a_protected_request_keeps_its_whole_need_whatever_the_ratio() -> None:
    slots = table((DECODE, 10, 0, 1000))
    slots.protected[slots.running()] = True
    promises = BlockPromises(config(reserve=ReservePolicy.NONE))
    assert promises.kept(slots) == promises.promised(slots) == 64  # ⌈1010 / 16⌉


def test_requests_that_are_leaving_keep_nothing() -> None:
    slots = table((Phase.PREEMPTING, 10, 5, 100), (Phase.FINISHED, 10, 5, 100))
    assert BlockPromises(config()).kept(slots) == 0


def test_each_policy_is_chosen_by_its_name() -> None:
    assert isinstance(reserve_for(config()), NewTokenRatio)
    assert isinstance(reserve_for(config(reserve=ReservePolicy.FIXED_BLOCKS)), FixedBlocks)
    assert isinstance(reserve_for(config(reserve=ReservePolicy.NONE)), NoReserve)
    slots = table((DECODE, 10, 0, 100))
    assert np.all(NoReserve().blocks(slots, slots.running()) == 0)
