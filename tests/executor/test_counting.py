"""What the executor that only counts adds to the contract: answers of a given length, and plans it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.planner import Planner

from baton.core.engine.plan import Chunk, RowOutcome, Start, StepPlan, Stop
from baton.core.engine.request import Sampling, frozen_tokens
from baton.core.errors import InvariantViolated
from baton.executor.contract import ExecutorShape
from baton.executor.counting import FILLER_TOKEN, STOP_TOKEN, CountingExecutor

SHAPE = ExecutorShape(slots=4, blocks=32, block_size=4, context_tokens=64)


def make(*answer_tokens: int) -> CountingExecutor:
    return CountingExecutor(SHAPE, answer_tokens.__getitem__)


def answer(tokens: int) -> list[int]:
    return [FILLER_TOKEN] * (tokens - 1) + [STOP_TOKEN]


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def begin(slot: int, epoch: int, prompt: int, *, limit: int = 32, seed: int = 0, blocks: int = 2) -> Start:
    tokens, table = frozen_tokens(np.arange(prompt, dtype=np.int32)), np.arange(blocks, dtype=np.int32)
    return Start(slot, epoch, tokens, prompt, 0, limit, Sampling(seed=seed, temperature=0.0), table)


def decode(step: int, *slots: int, grow_at: int | None = None) -> StepPlan:
    """Slots of epoch 1; with `grow_at`, the first of them gets one more block there."""
    grown = () if grow_at is None else (grow_at,)
    return StepPlan(
        step,
        step - 1,
        grow_slots=ints(*slots[: len(grown)]),
        grow_at=ints(*grown),
        grow_blocks=ints(*(9 for _ in grown)),
        decode_slots=ints(*slots),
        decode_epochs=np.ones(len(slots), dtype=np.int64),
    )


def test_each_answer_is_as_long_as_its_request_was_promised() -> None:
    planner = Planner(make(1, 4, 7))
    lanes = [planner.add([3] * prompt, 7, sampling=Sampling(seed=seed)) for seed, prompt in enumerate((5, 1, 9))]
    planner.run()
    assert [lane.outputs[:length] for lane, length in zip(lanes, (1, 4, 7), strict=True)] == [
        answer(1),
        answer(4),
        answer(7),
    ]


def test_a_restart_counts_what_was_delivered_before() -> None:
    executor = make(4)
    tokens = frozen_tokens([3] * 5 + [FILLER_TOKEN] * 3)
    start = Start(0, 2, tokens, 5, 0, 32, Sampling(seed=0), ints(0, 1))
    executor.launch(StepPlan(1, 0, starts=(start,), chunks=(Chunk(0, 2, 0, 8, True),)))
    assert executor.collect().tokens.tolist() == [STOP_TOKEN]


def test_no_token_comes_after_the_limit() -> None:
    executor = make(9)
    executor.launch(StepPlan(1, 0, starts=(begin(0, 1, 3, limit=5),), chunks=(Chunk(0, 1, 0, 3, True),)))
    for step in (2, 3):
        executor.launch(decode(step, 0))
    results = [executor.collect() for _ in range(3)]
    assert [(result.counts.tolist(), result.known.tolist()) for result in results] == [([1], [4]), ([1], [5]), ([0], [5])]
    at_it = begin(1, 1, 3, limit=3)
    executor.launch(StepPlan(4, 3, starts=(at_it,), chunks=(Chunk(1, 1, 0, 3, True),)))
    assert executor.collect().counts.tolist() == [0]


def test_a_decode_needs_room_for_what_it_feeds_and_goes_on_when_it_has_some() -> None:
    executor = make(20, 20)
    starts = (begin(0, 1, 7), begin(1, 1, 2))
    executor.launch(StepPlan(1, 0, starts=starts, chunks=(Chunk(0, 1, 0, 7, True), Chunk(1, 1, 0, 2, True))))
    executor.launch(decode(2, 0, 1))
    executor.launch(decode(3, 0, 1))
    executor.launch(decode(4, 0, 1, grow_at=2))
    _, second, third, fourth = (executor.collect() for _ in range(4))
    assert second.known.tolist() == [9, 4]
    # Position 8 would be the first of a third block; the neighbour is not held up.
    assert third.outcomes.tolist() == [RowOutcome.NOTHING_OUT_OF_BLOCKS, RowOutcome.TOKENS]
    assert (third.counts.tolist(), third.known.tolist()) == ([0, 1], [9, 5])
    assert (fourth.counts.tolist(), fourth.known.tolist()) == ([1, 1], [10, 6])


def test_rows_come_as_stops_chunks_and_decodes_and_only_those_held_are_touched() -> None:
    executor = make(9)
    executor.launch(StepPlan(1, 0, starts=(begin(0, 1, 3), begin(1, 1, 5)), chunks=(Chunk(0, 1, 0, 3, True),)))
    executor.collect()
    executor.launch(
        StepPlan(
            2,
            1,
            stops=(Stop(1, 1), Stop(1, 1), Stop(0, 8)),
            starts=(begin(1, 2, 6),),
            chunks=(Chunk(1, 2, 0, 4, False), Chunk(1, 1, 0, 4, True)),
            decode_slots=ints(0, 3),
            decode_epochs=np.array([1, 1]),
        )
    )
    result = executor.collect()
    assert result.slots.tolist() == [1, 1, 0, 1, 1, 0, 3]
    assert result.epochs.tolist() == [1, 1, 8, 2, 1, 1, 1]
    empty = RowOutcome.NOTHING_EMPTY_SLOT
    assert result.outcomes.tolist() == [
        RowOutcome.PREEMPTED, empty, empty, RowOutcome.NOTHING_CHUNK_UNFINISHED, empty, RowOutcome.TOKENS, empty,
    ]  # fmt: skip
    assert result.counts.tolist() == [0, 0, 0, 0, 0, 1, 0]
    assert result.known.tolist() == [5, 0, 0, 6, 0, 5, 0]
    assert result.tokens.tolist() == [FILLER_TOKEN]


def test_plans_that_cannot_be_are_refused() -> None:
    executor = make(9)
    executor.launch(StepPlan(1, 0, starts=(begin(0, 1, 3),)))
    executor.collect()
    with pytest.raises(InvariantViolated, match="built on step 3 came after step 1"):
        executor.launch(StepPlan(4, 3))
    executor.launch(StepPlan(2, 1, starts=(begin(0, 2, 3),)))
    with pytest.raises(InvariantViolated, match="slot 0 was started while it was in use"):
        executor.collect()
    executor.launch(decode(3, 0, grow_at=3))
    with pytest.raises(InvariantViolated, match="step 3 grows a table beyond its end"):
        executor.collect()


def test_bursts_are_refused() -> None:
    with pytest.raises(InvariantViolated, match="one token, not up to 4"):
        CountingExecutor(ExecutorShape(slots=4, blocks=32, block_size=4, context_tokens=64, burst=4), lambda _seed: 1)
