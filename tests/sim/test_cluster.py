"""A workload on a cluster without faults: what calls mean, and what is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.config import PrefillPath, WorkerConfig
from baton.core.routing.config import RoutingPolicy
from baton.sim.cluster import PREFIX_ID_TOKENS, PlannedRequest, PrefillDecodeSplit, RunFailed, RunSpec, simulate
from baton.sim.run_records import RequestOutcome, RunRecord
from baton.sim.scenario import FlatTimes
from baton.sim.timed_transfers import KvLinkModel

CONFIG = WorkerConfig(slots=8, blocks=1000, block_size=16, context_tokens=4096, step_tokens=2048)


def run(*calls: PlannedRequest, concurrency: int | None = None, instances: int = 1) -> RunRecord:
    return simulate(RunSpec("made up", instances, CONFIG, FlatTimes(1_000, 10), calls, concurrency))


def test_equal_leading_prefix_ids_are_equal_text_whatever_numbers_they_are() -> None:
    first, other = -(1 << 70), 1 << 24
    calls = [
        PlannedRequest(at_us=at * 1_000_000, input_tokens=1100, output_tokens=2, max_tokens=2, prefix_ids=ids)
        for at, ids in enumerate([(first, other), (first, other), (first, 5), (other, first), ()])
    ]
    cached = [request_record.cached_tokens for request_record in run(*calls).requests]
    assert cached == [0, 2 * PREFIX_ID_TOKENS, PREFIX_ID_TOKENS, 0, 0]


def test_a_round_of_a_session_begins_with_the_former_prompt_and_answer() -> None:
    first, second = run(
        PlannedRequest(at_us=0, input_tokens=100, output_tokens=20, max_tokens=20, session=1),
        PlannedRequest(at_us=None, input_tokens=50, output_tokens=3, max_tokens=3, session=1, think_us=7_000),
    ).requests
    assert second.input_tokens == 100 + 20 + 50
    assert second.arrived_us == (first.ended_us or 0) + 7_000
    assert second.cached_tokens >= 100


def test_a_closed_loop_has_no_more_open_than_clients() -> None:
    record = run(*[PlannedRequest(at_us=None, input_tokens=10, output_tokens=5, max_tokens=5)] * 9, concurrency=3)
    assert all(
        request_record.outcome is RequestOutcome.STOP and request_record.output_tokens == 5
        for request_record in record.requests
    )
    for request_record in record.requests:
        open_then = [
            other for other in record.requests if other.arrived_us <= request_record.arrived_us < (other.ended_us or 0)
        ]
        assert len(open_then) <= 3
    assert 0 < record.busy_us[0] <= record.end_us


def test_requests_are_spread_in_turn() -> None:
    record = run(*[PlannedRequest(at_us=at, input_tokens=10, output_tokens=2, max_tokens=2) for at in range(6)], instances=3)
    assert [request_record.instance for request_record in record.requests] == [0, 1, 2, 0, 1, 2]


def talked(route: RoutingPolicy) -> RunRecord:
    """Conversations whose users think for a moment, on instances that hold a part of them each."""
    config = replace(CONFIG, blocks=400)
    calls = [
        PlannedRequest(
            at_us=None if turn else talk * 20_000, input_tokens=160, output_tokens=16, max_tokens=16, session=talk,
             think_us=300_000)
        for talk in range(24)
        for turn in range(4)
    ]  # fmt: skip
    return simulate(RunSpec("talks", 3, config, FlatTimes(2_000, 50), calls, route=route))


@pytest.mark.parametrize("route", RoutingPolicy)
def test_a_router_may_stand_in_front_of_a_run(route: RoutingPolicy) -> None:
    record = talked(route)
    assert all(
        request_record.outcome is RequestOutcome.STOP and request_record.output_tokens == 16
        for request_record in record.requests
    )
    assert {request_record.instance for request_record in record.requests} == {0, 1, 2}


def test_the_router_sends_a_conversation_where_it_is_cached() -> None:
    aware, in_turn = (
        sum(j.cached_tokens for j in talked(route).requests)
        for route in (RoutingPolicy.CACHE_AWARE, RoutingPolicy.ROUND_ROBIN)
    )
    assert aware > 1.3 * in_turn


def test_a_split_cluster_may_have_a_router_too() -> None:
    kv_link = KvLinkModel(layers=2, block_bytes=100_000, card_bytes_per_s=1e10, delay_us=100)
    split = PrefillDecodeSplit(1, CONFIG, FlatTimes(1_000, 10), kv_link)
    calls = [PlannedRequest(at_us=at * 3_000, input_tokens=200, output_tokens=4, max_tokens=4) for at in range(12)]
    spec = RunSpec("split", 3, CONFIG, FlatTimes(1_000, 10), calls, split=split, route=RoutingPolicy.CACHE_AWARE)
    record = simulate(spec)
    assert sum(handed.made for handed in record.handed) >= 12
    assert {request_record.instance for request_record in record.requests} == {0, 1}


def test_whoever_starts_a_run_may_choose_by_what_waits_where() -> None:
    seen: list[list[int]] = []

    def last(queued_tokens: Sequence[int]) -> int:
        seen.append(list(queued_tokens))
        return 2

    calls = [PlannedRequest(at_us=at, input_tokens=10 + at, output_tokens=2, max_tokens=2) for at in range(3)]
    calls.append(PlannedRequest(at_us=1_000_000, input_tokens=10, output_tokens=2, max_tokens=2))
    record = simulate(RunSpec("chosen", 3, CONFIG, FlatTimes(1_000, 10), calls, chosen=last))
    assert [request_record.instance for request_record in record.requests] == [2, 2, 2, 2]
    assert seen == [[0, 0, 0], [0, 0, 10], [0, 0, 21], [0, 0, 0]]


def split_run(*calls: PlannedRequest, givers: int = 1, instances: int = 2, card: float = 1e12, **more: object) -> RunRecord:
    kv_link = KvLinkModel(layers=10, block_bytes=1_000_000, card_bytes_per_s=card, delay_us=100)
    split = PrefillDecodeSplit(givers, replace(CONFIG, **more), FlatTimes(1_000, 10), kv_link)  # type: ignore[arg-type]
    return simulate(RunSpec("split", instances, CONFIG, FlatTimes(1_000, 10), calls, split=split))


@pytest.mark.parametrize("path", PrefillPath)
def test_in_a_split_cluster_givers_prefill_and_takers_decode(path: PrefillPath) -> None:
    calls = [PlannedRequest(at_us=at * 10_000, input_tokens=500, output_tokens=20, max_tokens=20) for at in range(12)]
    record = split_run(*calls, givers=2, instances=5, prefill_path=path)
    assert record.roles == ["decode"] * 3 + ["prefill"] * 2
    assert all(
        request_record.outcome is RequestOutcome.STOP and request_record.attempts == 1 for request_record in record.requests
    )
    assert {request_record.instance for request_record in record.requests} == {0, 1, 2}
    assert sum(one.made for one in record.handed[:3]) == sum(one.made for one in record.handed[3:]) == 12
    assert all(one.made == 6 for one in record.handed[3:]), "one giver had more to do than the other"
    blocks = -(-500 // CONFIG.block_size)
    assert sum(one.bytes for one in record.handed[:3]) == 12 * blocks * 1_000_000
    assert all(span.decodes == 0 for span in record.spans if span.instance >= 3)
    assert all(span.prefill_tokens == 0 for span in record.spans if span.instance < 3)
    assert len(record.took_us) == 12


def test_a_hand_over_takes_the_prefill_and_little_more_where_lanes_are_quick() -> None:
    call = PlannedRequest(at_us=0, input_tokens=1000, output_tokens=3, max_tokens=3)
    (alone,) = run(call).requests
    (split,) = split_run(call).requests
    (slow,) = split_run(call, card=1e9).requests
    assert alone.ttft_us is not None
    assert split.ttft_us is not None
    assert slow.ttft_us is not None
    assert 0 < split.ttft_us - alone.ttft_us < 1_000, "more than its messages was added"
    step_us = 11_000
    left_us = 63 * 1_000 - step_us * 9 // 10  # 63 blocks of 1 MB at 1 GB/s, from the first of ten layers on
    assert slow.ttft_us - split.ttft_us == pytest.approx(left_us, rel=0.01)
    assert slow.transfer_us > 10 * split.transfer_us


def test_metering_passes_changes_nothing_in_a_run() -> None:
    calls = [PlannedRequest(at_us=at * 1_000, input_tokens=300, output_tokens=9, max_tokens=9) for at in range(5)]
    spec = RunSpec("metered", 2, CONFIG, FlatTimes(1_000, 10), calls)
    plain, metered = simulate(spec), simulate(replace(spec, metered=True))
    assert plain.requests == metered.requests
    assert plain.meters == []
    assert [meter.passes for meter in metered.meters] == metered.steps_each
    assert all(meter.plan_ns > 0 and meter.settle_ns > 0 for meter in metered.meters)


def test_a_cluster_without_takers_is_refused() -> None:
    with pytest.raises(RunFailed, match="none is left to decode"):
        split_run(givers=2, instances=2)
