"""What the CPU executor answers to each kind of plan, and how it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.planner import GREEDY, Planner
from tests.support.tiny import family_config, save_random

from baton.core.config import BadConfig
from baton.core.engine.plan import Chunk, Int32s, Int64s, RowOutcome, Start, StepPlan, Stop
from baton.core.engine.request import Sampling, frozen_tokens
from baton.core.errors import InvariantViolated
from baton.executor import model_loading
from baton.executor.cpu.executor import NICENESS, TorchCpuExecutor
from baton.executor.drafts import DraftTokens
from baton.executor.fingerprint import fingerprint_model, model_mark
from baton.executor.safetensors_header import BadWeights

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_random(family_config("llama"), path)
    return path


@pytest.fixture
def executor(folder: Path) -> Iterator[TorchCpuExecutor]:
    made = TorchCpuExecutor.load(folder, dtype="float32", slots=4, blocks=40, block_size=BLOCK_SIZE)
    yield made
    made.close()


def start(slot: int, epoch: int, tokens: int, blocks: list[int], limit: int = 100, computed: int = 0) -> Start:
    ids = frozen_tokens(np.arange(tokens) % 90)
    return Start(slot, epoch, ids, tokens, computed, limit, GREEDY, np.array(blocks, dtype=np.int32))


def decodes(*pairs: tuple[int, int]) -> dict[str, object]:
    slots, epochs = zip(*pairs, strict=True)
    return {"decode_slots": np.array(slots, dtype=np.int32), "decode_epochs": np.array(epochs, dtype=np.int64)}


def grow(slot: int, at: int, block: int) -> dict[str, object]:
    one = lambda value: np.array([value], dtype=np.int32)  # noqa: E731
    return {"grow_slots": one(slot), "grow_at": one(at), "grow_blocks": one(block)}


def test_rows_come_in_the_order_stops_chunks_decodes(executor: TorchCpuExecutor) -> None:
    chunks = (Chunk(0, 1, 0, 5, samples=True), Chunk(1, 2, 0, 3, samples=False))
    executor.launch(StepPlan(1, 0, starts=(start(0, 1, 5, [0]), start(1, 2, 6, [1])), chunks=chunks))
    first = executor.collect()
    assert first.outcomes.tolist() == [RowOutcome.TOKENS, RowOutcome.NOTHING_CHUNK_UNFINISHED]
    assert first.counts.tolist() == [1, 0]
    assert first.known.tolist() == [6, 6]
    plan = StepPlan(
        2,
        1,
        stops=(Stop(0, 1),),
        starts=(start(2, 3, 4, [2]),),
        chunks=(Chunk(2, 3, 0, 4, samples=True), Chunk(1, 2, 3, 6, samples=True)),
    )
    executor.launch(plan)
    second = executor.collect()
    assert second.slots.tolist() == [0, 2, 1]
    assert second.outcomes.tolist() == [RowOutcome.PREEMPTED, RowOutcome.TOKENS, RowOutcome.TOKENS]
    assert second.known.tolist() == [6, 5, 7]
    executor.launch(StepPlan(3, 2, stops=(Stop(2, 3),), **decodes((1, 2))))
    third = executor.collect()
    assert third.epochs.tolist() == [3, 2]
    assert third.counts.tolist() == [0, 1]
    assert len(third.tokens) == 1


def test_a_step_tried_at_the_start_leaves_nothing_behind_and_grows_with_the_tokens_of_a_step(folder: Path) -> None:
    answers = []
    for tries in (False, True):
        with contextlib.closing(
            TorchCpuExecutor.load(folder, dtype="float32", slots=4, blocks=40, block_size=BLOCK_SIZE)
        ) as made:
            if tries:
                assert made.try_step(1) > 0
                assert made.try_step(64_000) > 1000
            chunk = (Chunk(0, 1, 0, 5, samples=True),)
            made.launch(StepPlan(1, 0, starts=(start(0, 1, 5, [0]),), chunks=chunk))
            first = made.collect()
            made.launch(StepPlan(2, 1, **decodes((0, 1))))
            answers.append((first.tokens.tolist(), first.known.tolist(), made.collect().tokens.tolist()))
    assert answers[0] == answers[1]


def test_a_slot_and_epoch_it_does_not_hold_is_an_empty_slot(executor: TorchCpuExecutor) -> None:
    executor.launch(StepPlan(1, 0, starts=(start(0, 5, 3, [0]),), chunks=(Chunk(0, 5, 0, 3, samples=True),)))
    executor.collect()
    plan = StepPlan(
        2, 1, stops=(Stop(1, 1), Stop(0, 4)), chunks=(Chunk(0, 4, 0, 3, samples=True),), **decodes((0, 4), (3, 1))
    )
    executor.launch(plan)
    result = executor.collect()
    assert set(result.outcomes.tolist()) == {RowOutcome.NOTHING_EMPTY_SLOT}
    assert result.known.tolist() == [0] * 5
    executor.launch(StepPlan(3, 2, **decodes((0, 5))))
    assert executor.collect().outcomes.tolist() == [RowOutcome.TOKENS]


def test_without_a_block_nothing_is_written_and_it_goes_on_once_there_is_one(
    executor: TorchCpuExecutor, folder: Path
) -> None:
    calm = Planner(executor)
    lane = calm.add(list(range(BLOCK_SIZE)), 4)
    wanted = calm.run()[0]
    calm.stop(lane)
    step = calm.step

    executor.launch(StepPlan(step + 1, step, stops=tuple(calm.stops), starts=(start(0, 9, BLOCK_SIZE, [20]),)))
    executor.launch(StepPlan(step + 2, step + 1, chunks=(Chunk(0, 9, 0, BLOCK_SIZE, samples=True),)))
    executor.launch(StepPlan(step + 3, step + 2, **decodes((0, 9))))
    executor.launch(StepPlan(step + 4, step + 3, **grow(0, 1, 21), **decodes((0, 9))))
    results = [executor.collect() for _ in range(4)]
    assert results[2].outcomes.tolist() == [RowOutcome.NOTHING_OUT_OF_BLOCKS]
    assert results[2].known.tolist() == [BLOCK_SIZE + 1]
    given = [*results[1].tokens.tolist(), *results[3].tokens.tolist()]
    assert given == wanted[:2]


def test_a_chunk_planned_behind_one_that_had_no_block_waits_with_it(executor: TorchCpuExecutor) -> None:
    plan = StepPlan(1, 0, starts=(start(0, 1, 20, [0]),), chunks=(Chunk(0, 1, 0, 8, samples=False),))
    executor.launch(plan)
    executor.launch(StepPlan(2, 1, chunks=(Chunk(0, 1, 8, 16, samples=False),)))
    executor.launch(StepPlan(3, 2, **grow(0, 2, 5), chunks=(Chunk(0, 1, 16, 20, samples=True),)))
    outcomes = [executor.collect().outcomes.tolist() for _ in range(3)]
    assert outcomes == [
        [RowOutcome.NOTHING_CHUNK_UNFINISHED],
        [RowOutcome.NOTHING_OUT_OF_BLOCKS],
        [RowOutcome.NOTHING_OUT_OF_BLOCKS],
    ]


def test_no_token_past_the_limit(executor: TorchCpuExecutor) -> None:
    executor.launch(StepPlan(1, 0, starts=(start(0, 1, 3, [0], limit=4),), chunks=(Chunk(0, 1, 0, 3, samples=True),)))
    executor.launch(StepPlan(2, 1, **decodes((0, 1))))
    assert executor.collect().counts.tolist() == [1]
    last = executor.collect()
    assert last.counts.tolist() == [0]
    assert last.known.tolist() == [4]


class Insistent:
    """Guesses the same token again and again."""

    def propose(self, tokens: Int32s, slots: Int32s, known: Int64s) -> DraftTokens:
        return DraftTokens(np.ones((len(slots), 9), dtype=np.int32), np.full(len(slots), 9, dtype=np.int32))

    def __str__(self) -> str:
        return "ones"


@pytest.mark.parametrize(
    ("blocks", "limit", "burst", "fed"),
    [([0, 1], 100, 5, 4), ([0], 100, 5, 1), ([0, 1], 9, 5, 1), ([0, 1], 8, 5, 0), ([0, 1, 2], 100, 12, 9)],
    ids=["all", "no block for more", "limit for one more", "limit here", "several blocks"],
)
def test_drafts_are_as_many_as_burst_limit_and_blocks_allow(
    folder: Path, blocks: list[int], limit: int, burst: int, fed: int
) -> None:
    executor = TorchCpuExecutor.load(
        folder, dtype="float32", slots=4, blocks=40, block_size=BLOCK_SIZE, burst=burst, proposer=Insistent()
    )
    chunks = (Chunk(1, 1, 0, 6, samples=True),)
    executor.launch(StepPlan(1, 0, starts=(start(1, 1, 6, blocks, limit=limit),), chunks=chunks))
    executor.launch(StepPlan(2, 1, stops=(Stop(3, 1),), **decodes((1, 1), (2, 7))))
    first, second = executor.collect(), executor.collect()
    executor.close()
    assert first.drafted.tolist() == [0]
    assert second.drafted.tolist() == [0, fed, 0]
    assert second.drafts == fed
    assert 1 <= second.counts[1] <= 1 + fed
    assert second.known[1] == 7 + second.counts[1] <= limit


def test_an_executor_that_yields_one_token_a_decode_says_nothing_of_drafts(executor: TorchCpuExecutor) -> None:
    executor.launch(StepPlan(1, 0, starts=(start(0, 1, 5, [0]),), chunks=(Chunk(0, 1, 0, 5, samples=True),)))
    executor.launch(StepPlan(2, 1, **decodes((0, 1))))
    assert [len(executor.collect().drafted) for _ in range(2)] == [0, 0]


def test_a_gap_in_the_steps_is_refused_at_collect(executor: TorchCpuExecutor) -> None:
    executor.launch(StepPlan(7, 6))
    with pytest.raises(InvariantViolated, match="step 7 builds on 6"):
        executor.collect()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(1, 0, starts=(start(0, 1, 9, [0, 1]),), chunks=(Chunk(0, 1, 4, 9, samples=True),)), "leaves a gap"),
        (StepPlan(1, 0, starts=(start(0, 1, 9, [0, 1]),), chunks=(Chunk(0, 1, 0, 12, samples=False),)), "does not fit"),
        (StepPlan(1, 0, starts=(start(0, 1, 9, [0, 1]),), **decodes((0, 1))), "prefill is not finished"),
        (StepPlan(1, 0, starts=(start(0, 1, 9, [0, 40]),)), "outside 0..39"),
        (StepPlan(1, 0, starts=(start(9, 1, 9, [0]),)), "names slot 9"),
        (StepPlan(1, 0, starts=(start(0, 1, 9, [0]), start(0, 2, 9, [1]))), "still holds epoch 1"),
        (StepPlan(1, 0, starts=(start(0, 1, 9, [0], computed=9),)), "impossible"),
    ],
)
def test_a_plan_that_breaks_a_law_raises_and_nothing_runs_after_it(
    executor: TorchCpuExecutor, plan: StepPlan, message: str
) -> None:
    executor.launch(plan)
    executor.launch(StepPlan(2, 1))
    with pytest.raises(InvariantViolated, match=message):
        executor.collect()
    with pytest.raises(InvariantViolated, match="follows one that failed"):
        executor.collect()


def test_collect_without_a_step_says_so_instead_of_waiting(executor: TorchCpuExecutor) -> None:
    with pytest.raises(InvariantViolated, match="wait for ever"):
        executor.collect()


def test_close_finishes_what_is_launched_and_may_be_called_twice(folder: Path) -> None:
    executor = TorchCpuExecutor.load(folder, dtype="float32", slots=1, blocks=4, block_size=BLOCK_SIZE)
    executor.launch(StepPlan(1, 0, starts=(start(0, 1, 3, [0]),), chunks=(Chunk(0, 1, 0, 3, samples=True),)))
    executor.close()
    executor.close()
    assert executor.collect().counts.tolist() == [1]


def test_logprobs_name_the_row_of_the_result(executor: TorchCpuExecutor) -> None:
    wishes = Sampling(seed=0, temperature=0.0, logprobs=2)
    told = Start(1, 2, frozen_tokens([1, 2, 3]), 3, 0, 50, wishes, np.array([1], dtype=np.int32))
    chunks = (Chunk(0, 1, 0, 3, samples=True), Chunk(1, 2, 0, 3, samples=True))
    executor.launch(StepPlan(1, 0, stops=(Stop(3, 9),), starts=(start(0, 1, 3, [0]), told), chunks=chunks))
    (line,) = executor.collect().logprobs
    assert line.row == 2
    assert line.top_ids.shape == (1, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own here")
def test_all_threads_that_compute_yield_to_those_that_answer(folder: Path) -> None:
    before = _niceness()
    made = TorchCpuExecutor.load(folder, dtype="float32", slots=4, blocks=40, block_size=BLOCK_SIZE)
    made.launch(StepPlan(1, 0, starts=(start(0, 1, 90, list(range(12))),), chunks=(Chunk(0, 1, 0, 90, samples=True),)))
    made.collect()
    after = _niceness()
    made.close()
    own = after.pop(threading.get_native_id())
    assert own == before.pop(threading.get_native_id()) == os.getpriority(os.PRIO_PROCESS, 0)
    assert {nice for thread, nice in after.items() if thread not in before} == {min(19, own + NICENESS)}
    assert all(after.get(thread, nice) == nice for thread, nice in before.items())


def _niceness() -> dict[int, int]:
    """Of each thread of this process."""
    found: dict[int, int] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that an earlier test has left may end just now
            found[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[16])
    return found


def test_a_system_that_does_not_allow_it_computes_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    TorchCpuExecutor.load(folder, dtype="float32", slots=4, blocks=40, block_size=BLOCK_SIZE).close()


def test_the_shape_defaults_to_the_models_context_and_the_memory_given(folder: Path) -> None:
    executor = TorchCpuExecutor.load(
        folder, dtype="float32", slots=2, block_size=16, kv_memory_bytes=10 * 3 * 2 * 2 * 32 * 16 * 4
    )
    executor.close()
    assert executor.shape.context_tokens == 256
    assert executor.kv_bytes_per_block == 3 * 2 * 2 * 32 * 16 * 4
    assert executor.shape.blocks == 10


def test_memory_without_room_for_a_block_is_refused_with_the_least_that_works(folder: Path) -> None:
    least = 3 * 2 * 2 * 32 * 16 * 4
    with pytest.raises(BadConfig, match=rf"--kv-memory {least - 1} has no room for one block .* give at least {least},"):
        TorchCpuExecutor.load(folder, dtype="float32", slots=2, block_size=16, kv_memory_bytes=least - 1)
    executor = TorchCpuExecutor.load(folder, dtype="float32", slots=2, block_size=16, kv_memory_bytes=least)
    executor.close()
    assert executor.shape.blocks == 1


def test_a_context_beyond_the_models_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    family_config("llama").save_pretrained(tmp_path)
    with pytest.raises(BadConfig, match="--max-model-len 257 is more than the 256 positions"):
        TorchCpuExecutor.load(tmp_path, dtype="float32", context_tokens=257)


def test_the_fingerprint_changes_with_weights_format_and_layout(folder: Path, tmp_path: Path) -> None:
    save_random(family_config("llama"), tmp_path, seed=1)
    prints = {
        fingerprint_model(folder, "float32", "a"),
        fingerprint_model(folder, "float32", "b"),
        fingerprint_model(folder, "bfloat16", "a"),
        fingerprint_model(tmp_path, "float32", "a"),
    }
    assert len(prints) == 4
    assert fingerprint_model(folder, "float32", "a") in prints
    assert sum(value.startswith(model_mark(folder)) for value in prints) == 3


@pytest.mark.parametrize(
    ("error", "is_of_the_files"),
    [
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shape '[4, 4]' is invalid"), True),
        (OSError("no file named model.safetensors"), True),
    ],
)
def test_what_may_pass_is_not_taken_for_a_broken_model(error: Exception, is_of_the_files: bool) -> None:
    with pytest.raises(BadWeights if is_of_the_files else type(error)), model_loading._named(Path("model")):
        raise error
