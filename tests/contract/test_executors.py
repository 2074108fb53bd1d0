"""What every executor must do with a plan, whatever is behind it. A new executor joins by one entry in EXECUTORS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.core.engine.plan import Chunk, Copy, RowOutcome, Start, StepPlan, Stop
from baton.core.engine.request import frozen_tokens
from baton.core.errors import InvariantViolated
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.counting import CountingExecutor
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.drafts import DraftProposer, NaiveProposer, NgramProposer
from baton.executor.scripted import ScriptedExecutor
from tests.support.on_cuda import NEEDS_CUDA, blocks_as_bytes, on_cuda, put_block
from tests.support.planner import GREEDY, Planner, generate
from tests.support.tiny import make_model

SHAPE = ExecutorShape(slots=4, blocks=32, block_size=4, context_tokens=64)


def _scripted(_: Path) -> Executor:
    return ScriptedExecutor(SHAPE, vocabulary=97)


def _scripted_in_layers(_: Path) -> Executor:
    return ScriptedExecutor(SHAPE, vocabulary=97, layers=3)


def _torch_cpu(folder: Path) -> Executor:
    return TorchCpuExecutor.load(
        folder, dtype="float64", slots=SHAPE.slots, blocks=SHAPE.blocks, block_size=SHAPE.block_size, context_tokens=64
    )


def _scripted_in_bursts(_: Path) -> Executor:
    return ScriptedExecutor(replace(SHAPE, burst=3), vocabulary=97)


def _torch_cpu_drafting(folder: Path, proposer: DraftProposer) -> Executor:
    return TorchCpuExecutor.load(
        folder, dtype="float64", slots=SHAPE.slots, blocks=SHAPE.blocks, block_size=SHAPE.block_size, context_tokens=64,
        burst=4, proposer=proposer,
    )  # fmt: skip


def _torch_cpu_ngrams(folder: Path) -> Executor:
    return _torch_cpu_drafting(folder, NgramProposer(drafts=3, ngram_min=1, ngram_max=3))


def _torch_cpu_naive(folder: Path) -> Executor:
    return _torch_cpu_drafting(folder, NaiveProposer())


def _counting(_: Path) -> Executor:
    # Its tokens say only how far an answer is: the stop token in the middle moves if one is lost, repeated or forgotten.
    return CountingExecutor(SHAPE, lambda _seed: 5)


def _cuda(_: Path) -> Executor:
    return on_cuda("tiny-qwen3", SHAPE)


def _cuda_invariant(_: Path) -> Executor:
    return on_cuda("tiny-qwen3", SHAPE, "bfloat16", invariant=True)


def _cuda_drafts(_: Path) -> Executor:
    return on_cuda("tiny-qwen3", replace(SHAPE, burst=4), proposer=NgramProposer(drafts=3, ngram_min=1, ngram_max=3))


def _cuda_as_written(_: Path) -> Executor:
    """Layers that nothing fuses, and no graphs."""
    return on_cuda("tiny-gemma2", SHAPE, graphs=False)


EXECUTORS: dict[str, Callable[[Path], Executor]] = {
    "scripted": _scripted,
    "scripted_in_layers": _scripted_in_layers,
    "scripted_in_bursts": _scripted_in_bursts,
    "torch_cpu": _torch_cpu,
    "torch_cpu_ngrams": _torch_cpu_ngrams,
    "torch_cpu_naive": _torch_cpu_naive,
    "counting": _counting,
}
ON_CUDA: dict[str, Callable[[Path], Executor]] = {
    "cuda": _cuda,
    "cuda_invariant": _cuda_invariant,
    "cuda_drafts": _cuda_drafts,
    "cuda_as_written": _cuda_as_written,
}


def _torch_cpu_native(folder: Path) -> Executor:
    return TorchCpuExecutor.load(folder, dtype="float32", slots=4, blocks=32, block_size=16, attention="native")


KEEPING_KV = {
    "scripted": _scripted,
    "scripted_in_layers": _scripted_in_layers,
    "torch_cpu": _torch_cpu,
    "torch_cpu_native": _torch_cpu_native,
}
DEVICES_KEEPING_KV = {"cuda": _cuda, "cuda_as_written": _cuda_as_written}


def _params(
    anywhere: dict[str, Callable[[Path], Executor]], on_device: dict[str, Callable[[Path], Executor]]
) -> list[object]:
    return [
        *(pytest.param(load, id=name) for name, load in anywhere.items()),
        *(pytest.param(load, id=name, marks=NEEDS_CUDA) for name, load in on_device.items()),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model")).folder


@pytest.fixture(params=_params(EXECUTORS, ON_CUDA))
def make(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Executor]]:
    yield from _builder(request.param, folder)


@pytest.fixture(params=_params(KEEPING_KV, DEVICES_KEEPING_KV))
def make_with_kv(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Executor]]:
    yield from _builder(request.param, folder)


def _builder(load: Callable[[Path], Executor], folder: Path) -> Iterator[Callable[[], Executor]]:
    made: list[Executor] = []

    def build() -> Executor:
        made.append(load(folder))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], list(range(20, 33))]


@pytest.mark.parametrize(("chunk_tokens", "depth"), [(1 << 30, 1), (3, 1), (5, 3)])
def test_tokens_do_not_depend_on_batch_chunks_or_steps_in_flight(
    make: Callable[[], Executor], chunk_tokens: int, depth: int
) -> None:
    alone = [generate(make(), [prompt], 8)[0] for prompt in PROMPTS]
    assert generate(make(), PROMPTS, 8, chunk_tokens=chunk_tokens, depth=depth) == alone


def test_log_probabilities_that_were_asked_for_come_as_the_wire_takes_them(make_with_kv: Callable[[], Executor]) -> None:
    planner = Planner(make_with_kv())
    planner.add(PROMPTS[0], 3, sampling=msgspec.structs.replace(GREEDY, logprobs=2))
    planner.run()
    reported = [line for result in planner.results for line in result.logprobs]
    assert len(reported) == 3
    for line in reported:
        assert (line.chosen.dtype, line.top_ids.dtype, line.top.dtype) == (np.float32, np.int32, np.float32)
        assert line.top_ids.shape == line.top.shape == (1, 2)


@pytest.mark.parametrize("chunk_tokens", [1 << 30, 3])
def test_log_probabilities_of_a_prompt_come_with_its_chunks_as_the_wire_takes_them(
    make_with_kv: Callable[[], Executor], chunk_tokens: int
) -> None:
    planner = Planner(make_with_kv(), chunk_tokens)
    planner.add(PROMPTS[0], 2, sampling=msgspec.structs.replace(GREEDY, prompt_logprobs=2))
    planner.add(PROMPTS[2], 2)
    planner.run()
    parts = [part for result in planner.results for part in result.prompt_logprobs]
    assert [position for part in parts for position in range(part.begin, part.end)] == [1, 2, 3, 4, 5, 6]
    for result in planner.results:
        for part in result.prompt_logprobs:
            assert result.slots[part.row] == 0
            assert (part.chosen.dtype, part.ranks.dtype) == (np.float32, np.int32)
            assert (part.top_ids.dtype, part.top.dtype) == (np.int32, np.float32)
            assert part.top_ids.shape == part.top.shape == (len(part.chosen), 2)


def test_a_restart_from_delivered_tokens_goes_on_as_if_nothing_had_happened(make: Callable[[], Executor]) -> None:
    whole = generate(make(), [PROMPTS[0]], 10)[0]
    planner = Planner(make())
    lane = planner.add(PROMPTS[0], 4)
    planner.run()
    planner.stop(lane)
    tokens = [*PROMPTS[0], *lane.outputs]
    again = planner.add(tokens, 6, slot=1)
    planner.starts[-1] = Start(
        again.slot, again.epoch, frozen_tokens(tokens), len(PROMPTS[0]), 0, again.limit, GREEDY, planner.starts[-1].blocks
    )
    planner.run()
    assert lane.outputs + again.outputs == whole


def test_a_stop_is_acknowledged_with_the_number_of_known_tokens(make: Callable[[], Executor]) -> None:
    planner = Planner(make())
    lane = planner.add(PROMPTS[0], 5)
    planner.run()
    planner.stop(lane)
    result = planner.take_step()
    assert RowOutcome(result.outcomes[0]) is RowOutcome.PREEMPTED
    assert int(result.known[0]) == len(PROMPTS[0]) + 5


def test_a_slot_or_epoch_it_does_not_hold_is_an_empty_slot_and_touches_nothing(make: Callable[[], Executor]) -> None:
    planner = Planner(make())
    lane = planner.add(PROMPTS[0], 6)
    planner.take_step()
    planner.stops.append(Stop(lane.slot, lane.epoch + 1))
    planner.stops.append(Stop(3, 1))
    result = planner.take_step()
    assert [RowOutcome(outcome) for outcome in result.outcomes[:2]] == [RowOutcome.NOTHING_EMPTY_SLOT] * 2
    planner.run()
    assert lane.outputs == generate(make(), [PROMPTS[0]], 6)[0]


def test_an_unfinished_chunk_yields_nothing_and_says_so(make: Callable[[], Executor]) -> None:
    planner = Planner(make(), chunk_tokens=3)
    planner.add(PROMPTS[0], 2)
    result = planner.take_step()
    assert RowOutcome(result.outcomes[0]) is RowOutcome.NOTHING_CHUNK_UNFINISHED
    assert result.counts.tolist() == [0]
    assert result.known.tolist() == [len(PROMPTS[0])]


def test_without_a_block_nothing_is_computed_and_the_row_says_so(make: Callable[[], Executor]) -> None:
    executor = make()
    start = Start(0, 1, frozen_tokens(PROMPTS[0]), 7, 0, 20, GREEDY, np.array([0], dtype=np.int32))
    executor.launch(StepPlan(step=1, base_step=0, starts=(start,), chunks=(Chunk(0, 1, 0, 7, True),)))
    result = executor.collect()
    assert RowOutcome(result.outcomes[0]) is RowOutcome.NOTHING_OUT_OF_BLOCKS
    assert len(result.tokens) == 0


def test_a_copied_block_serves_as_well_as_the_original(make: Callable[[], Executor]) -> None:
    planner = Planner(make())
    first = planner.add(PROMPTS[2], 4)
    planner.run()
    (copied,) = planner.take_blocks(1)
    planner.copies.append(Copy(first.blocks[3], copied))
    # 12 of 13 prompt positions come from elsewhere: three whole blocks shared, none of the last token's own block needed
    second = planner.add(PROMPTS[2], 4, slot=1, computed=12, blocks=[*first.blocks[:3], copied])
    planner.run()
    assert second.outputs == first.outputs


def test_a_reused_slot_remembers_nothing_of_its_last_occupant(make: Callable[[], Executor]) -> None:
    planner = Planner(make())
    planner.add(PROMPTS[2], 6, slot=0)
    planner.run()
    planner.clear()
    lane = planner.add(PROMPTS[0], 6, slot=0)
    planner.run()
    assert lane.outputs == generate(make(), [PROMPTS[0]], 6)[0]


def test_a_gap_between_plans_is_refused(make: Callable[[], Executor]) -> None:
    executor = make()

    def run_a_plan_that_skips_steps() -> None:
        executor.launch(StepPlan(step=5, base_step=4, stops=(Stop(0, 1),)))
        executor.collect()

    with pytest.raises(InvariantViolated):
        run_a_plan_that_skips_steps()


def test_closing_twice_is_harmless(make: Callable[[], Executor]) -> None:
    executor = make()
    executor.close()
    executor.close()


def test_the_layers_of_a_block_lie_side_by_side_and_fill_it(make_with_kv: Callable[[], Executor]) -> None:
    executor = make_with_kv()
    layers = executor.kv.layers
    assert executor.kv.blocks == executor.shape.blocks
    assert [begin for begin, _ in layers] == [0, *(end for _, end in layers[:-1])]
    assert layers[-1][1] == executor.kv.block_bytes


def test_each_step_tells_of_its_layers_as_they_rise(make_with_kv: Callable[[], Executor]) -> None:
    executor, told = make_with_kv(), []
    executor.on_layer = lambda step, layer: told.append((step, layer))
    planner = Planner(executor, chunk_tokens=3)
    planner.add(PROMPTS[0], 3)
    planner.run()
    assert told == [(step, layer) for step in range(1, planner.step + 1) for layer in range(len(executor.kv.layers))]


def test_a_layer_is_told_of_when_its_kv_is_in_the_pool(make_with_kv: Callable[[], Executor]) -> None:
    executor, seen = make_with_kv(), []

    def copy_out(_step: int, layer: int) -> None:
        begin, end = executor.kv.layers[layer]
        seen.append(blocks_as_bytes(executor.kv, [0])[0, begin:end].copy())

    executor.on_layer = copy_out
    planner = Planner(executor)
    planner.add(PROMPTS[0], 1)
    planner.run()
    assert all(piece.any() for piece in seen)
    assert np.concatenate(seen).tobytes() == blocks_as_bytes(executor.kv, [0]).tobytes()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_kv_that_was_moved_as_bytes_goes_on_with_the_same_tokens(
    make_with_kv: Callable[[], Executor], prompt: list[int]
) -> None:
    whole = generate(make_with_kv(), [prompt], 8)[0]
    giver, taker = Planner(make_with_kv()), Planner(make_with_kv())
    assert giver.executor.fingerprint == taker.executor.fingerprint
    given = giver.add(prompt, 1)
    giver.run()
    taker.take_blocks(5)  # so that block ids differ on the two sides
    tokens = [*prompt, *given.outputs]
    taken = taker.add(tokens, 7, computed=len(tokens))
    for source, target in zip(given.blocks, taken.blocks, strict=False):
        put_block(taker.executor.kv, target, blocks_as_bytes(giver.executor.kv, [source])[0])
    taker.starts[-1] = replace(taker.starts[-1], prompt_tokens=len(prompt), computed=len(prompt))
    taker.run()
    assert given.outputs + taken.outputs == whole


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_wrong_byte_in_any_layer_of_the_scripted_executor_shows_in_its_tokens(layer: int) -> None:
    whole = generate(ScriptedExecutor(SHAPE, 97, layers=3), [PROMPTS[2]], 4)[0]
    planner = Planner(ScriptedExecutor(SHAPE, 97, layers=3))
    lane = planner.add(PROMPTS[2], 4)
    planner.take_step()
    planner.executor.kv.pool[lane.blocks[1], planner.executor.kv.layers[layer][0]] ^= 1
    planner.run()
    assert lane.outputs[0] == whole[0]
    assert lane.outputs != whole


def test_the_pool_lies_where_the_allocator_says(folder: Path) -> None:
    given: list[np.ndarray] = []

    def allocate(size: int) -> np.ndarray:
        given.append(np.zeros(size, dtype=np.uint8))
        return given[-1]

    executors = [
        ScriptedExecutor(SHAPE, 97, layers=2, allocate=allocate),
        TorchCpuExecutor.load(folder, dtype="float64", slots=4, blocks=32, block_size=4, allocate=allocate),
    ]
    for executor, memory in zip(executors, given, strict=True):
        assert np.shares_memory(executor.kv.pool, memory)
        assert executor.kv.pool.nbytes == memory.nbytes
        generate(executor, [PROMPTS[0]], 2)
        assert memory.any()
        executor.close()
