"""A fleet whose pools are a small multiple of the largest request: whatever the policies, every request is finished."""

from __future__ import annotations

import random
from itertools import product

import pytest

from baton.core.config import OnPreempt, ReservePolicy, VictimPolicy, WorkerConfig
from baton.core.routing.config import RoutingPolicy
from baton.sim.cluster import PlannedRequest, PrefillDecodeSplit, RunSpec, simulate
from baton.sim.run_records import RequestOutcome
from baton.sim.scenario import FlatTimes
from baton.sim.timed_transfers import KvLinkModel
from tests.support.quick_sample import one_in

BLOCK_SIZE = 4
LARGEST_TOKENS = 240
REQUESTS, CLIENTS = 48, 32
POLICIES = list(product(ReservePolicy, VictimPolicy, OnPreempt))


def load(seed: int) -> list[PlannedRequest]:
    stream = random.Random(seed)
    sizes = [(stream.randint(8, 48), stream.randint(48, 192)) for _ in range(REQUESTS)]
    return [PlannedRequest(None, given, made, made) for given, made in sizes]


def fleet(pools: int, reserve: ReservePolicy, victims: VictimPolicy, on_preempt: OnPreempt, *, is_split: bool) -> RunSpec:
    config = WorkerConfig(
        slots=64,
        blocks=pools * LARGEST_TOKENS // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        context_tokens=LARGEST_TOKENS,
        step_tokens=512,
        reserve=reserve,
        victims=victims,
        on_preempt=on_preempt,
    )
    times = FlatTimes(6_000, 30)
    split = PrefillDecodeSplit(1, config, times, KvLinkModel(4, 64 << 10, 10e9, 50)) if is_split else None
    return RunSpec("pressure", 3 if is_split else 2, config, times, load(pools), CLIENTS, seed=pools, split=split,
                   route=RoutingPolicy.CACHE_AWARE)  # fmt: skip


@pytest.mark.parametrize(("reserve", "victims", "on_preempt"), one_in(5, POLICIES))
def test_nobody_is_lost_for_want_of_blocks(reserve: ReservePolicy, victims: VictimPolicy, on_preempt: OnPreempt) -> None:
    for pools in (2, 4):
        _all_finish(fleet(pools, reserve, victims, on_preempt, is_split=False))


@pytest.mark.parametrize("victims", VictimPolicy)
def test_nobody_is_lost_where_others_prefill(victims: VictimPolicy) -> None:
    _all_finish(fleet(2, ReservePolicy.NONE, victims, OnPreempt.RESCHEDULE, is_split=True))


def _all_finish(spec: RunSpec) -> None:
    lost = [each for each in simulate(spec).requests if each.outcome is not RequestOutcome.STOP]
    assert not lost, f"pools of {spec.config.blocks} blocks: {len(lost)} of {REQUESTS} lost, such as {lost[0]}"
