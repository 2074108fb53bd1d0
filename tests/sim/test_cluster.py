"""A workload on a cluster without faults: what calls mean, and what is left behind."""

from __future__ import annotations

from baton.core.config import WorkerConfig
from baton.sim.cluster import PREFIX_ID_TOKENS, Call, RunSpec, simulate
from baton.sim.records import Outcome, RunRecord
from baton.sim.scenario import FlatTimes

CONFIG = WorkerConfig(slots=8, blocks=1000, block_size=16, context_tokens=4096, step_tokens=2048)


def run(*calls: Call, concurrency: int | None = None, instances: int = 1) -> RunRecord:
    return simulate(RunSpec("made up", instances, CONFIG, FlatTimes(1_000, 10), calls, concurrency))


def test_equal_leading_prefix_ids_are_equal_text_whatever_numbers_they_are() -> None:
    first, other = -(1 << 70), 1 << 24
    calls = [
        Call(at_us=at * 1_000_000, input_tokens=1100, output_tokens=2, max_tokens=2, prefix_ids=ids)
        for at, ids in enumerate([(first, other), (first, other), (first, 5), (other, first), ()])
    ]
    cached = [journey.cached_tokens for journey in run(*calls).journeys]
    assert cached == [0, 2 * PREFIX_ID_TOKENS, PREFIX_ID_TOKENS, 0, 0]


def test_a_round_of_a_session_begins_with_the_former_prompt_and_answer() -> None:
    first, second = run(
        Call(at_us=0, input_tokens=100, output_tokens=20, max_tokens=20, session=1),
        Call(at_us=None, input_tokens=50, output_tokens=3, max_tokens=3, session=1, think_us=7_000),
    ).journeys
    assert second.input_tokens == 100 + 20 + 50
    assert second.arrived_us == (first.ended_us or 0) + 7_000
    assert second.cached_tokens >= 100


def test_a_closed_loop_has_no_more_open_than_clients() -> None:
    record = run(*[Call(at_us=None, input_tokens=10, output_tokens=5, max_tokens=5)] * 9, concurrency=3)
    assert all(journey.outcome is Outcome.STOP and journey.output_tokens == 5 for journey in record.journeys)
    for journey in record.journeys:
        open_then = [other for other in record.journeys if other.arrived_us <= journey.arrived_us < (other.ended_us or 0)]
        assert len(open_then) <= 3
    assert 0 < record.busy_us[0] <= record.end_us


def test_requests_are_spread_in_turn() -> None:
    record = run(*[Call(at_us=at, input_tokens=10, output_tokens=2, max_tokens=2) for at in range(6)], instances=3)
    assert [journey.instance for journey in record.journeys] == [0, 1, 2, 0, 1, 2]
