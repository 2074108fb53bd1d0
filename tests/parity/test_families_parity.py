"""Greedy tokens in float64 equal those of `transformers.generate`, token for token, however a request is scheduled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from baton.core.engine.plan import Copy
from baton.executor.cpu.executor import TorchCpuExecutor
from tests.support.planner import Planner
from tests.support.tiny import FAMILIES, VOCABULARY, TinyModel, make_model

BLOCK_SIZE = 8
NEW_TOKENS = 14
LENGTHS = (5, 23, 1, 40)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: TinyModel, prompts: list[list[int]]) -> list[list[int]]:
    return [model.continuation(prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def shared_planner(model: TinyModel) -> Iterator[Planner]:
    executor = TorchCpuExecutor.load(model.folder, dtype="float64", slots=6, blocks=80, block_size=BLOCK_SIZE)
    yield Planner(executor)
    executor.close()


@pytest.fixture
def driver(shared_planner: Planner) -> Iterator[Planner]:
    shared_planner.chunk_tokens, shared_planner.depth = 1 << 30, 1
    yield shared_planner
    shared_planner.clear()


def test_alone_and_in_reused_slots(driver: Planner, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for prompt, wanted in zip(prompts, expected, strict=True):
        lane = driver.add(prompt, NEW_TOKENS, slot=3)
        assert driver.run() == [wanted]
        driver.stop(lane)


def test_batched_together(driver: Planner, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for prompt in prompts:
        driver.add(prompt, NEW_TOKENS)
    assert driver.run() == expected


@pytest.mark.parametrize("chunk_tokens", [3, 7])
def test_prefilled_in_odd_chunks_beside_decodes_and_two_steps_in_flight(
    driver: Planner, prompts: list[list[int]], expected: list[list[int]], chunk_tokens: int
) -> None:
    driver.chunk_tokens, driver.depth = chunk_tokens, 2
    for prompt in prompts:
        driver.add(prompt, NEW_TOKENS)
    assert driver.run() == expected


def test_on_a_prefix_that_another_slot_computed(driver: Planner, model: TinyModel) -> None:
    rng = np.random.default_rng(1)
    shared = rng.integers(0, VOCABULARY, 3 * BLOCK_SIZE).tolist()
    first, second = [shared + rng.integers(0, VOCABULARY, extra).tolist() for extra in (4, 9)]
    owner = driver.add(first, NEW_TOKENS)
    assert driver.run() == [model.continuation(first, NEW_TOKENS)]
    driver.stop(owner)
    driver.add(second, NEW_TOKENS, computed=len(shared), blocks=owner.blocks[:3], slot=1)
    assert driver.run() == [model.continuation(second, NEW_TOKENS)]


def test_on_a_forked_block(driver: Planner, model: TinyModel) -> None:
    """Two continuations of one prompt whose last block is half full: the second gets a copy of it."""
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, VOCABULARY, BLOCK_SIZE + 5).tolist()
    leader = driver.add(prompt, NEW_TOKENS)
    driver.take_step()
    twin_block = driver.take_blocks(1)[0]
    driver.copies.append(Copy(leader.blocks[1], twin_block))
    driver.add(prompt, NEW_TOKENS, computed=len(prompt) - 1, blocks=[leader.blocks[0], twin_block], slot=1)
    wanted = model.continuation(prompt, NEW_TOKENS)
    assert driver.run() == [wanted, wanted]


def test_restarted_with_its_outputs_after_a_stop(
    driver: Planner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    driver.chunk_tokens = 6
    lane = driver.add(prompts[1], NEW_TOKENS)
    while len(lane.outputs) < 7:
        driver.take_step()
    driver.stop(lane)
    again = driver.add(prompts[1] + lane.outputs, NEW_TOKENS - len(lane.outputs), slot=lane.slot)
    driver.run()
    assert lane.outputs + again.outputs == expected[1]


def test_native_kernels_in_float32_draw_the_same_tokens(model: TinyModel, prompts: list[list[int]]) -> None:
    """Not bit-equal, but the same mathematics: logits differ by rounding only, so nearly all tokens agree."""
    executor = TorchCpuExecutor.load(model.folder, dtype="float32", slots=6, blocks=80, block_size=16, attention="native")
    driver = Planner(executor, chunk_tokens=7)
    for prompt in prompts:
        driver.add(prompt, NEW_TOKENS)
    given = driver.run()
    executor.close()
    wanted = [model.continuation(prompt, NEW_TOKENS) for prompt in prompts]
    agreed = sum(a == b for row, other in zip(given, wanted, strict=True) for a, b in zip(row, other, strict=True))
    assert agreed >= 0.9 * len(prompts) * NEW_TOKENS
