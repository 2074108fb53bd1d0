"""Steps with chunks yield the same tokens and leave the same KV, be they filled up and captured or run as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from baton.core.engine.request import Sampling
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.drafts import NaiveProposer, NgramProposer
from tests.support.on_cuda import assert_alike, blocks_as_bytes, closing, on_cuda
from tests.support.planner import GREEDY, Lane, Planner

pytestmark = pytest.mark.cuda

SLOTS = 18
NEW_TOKENS = 20
DRAFTS = 2
WARM = Sampling(seed=7, temperature=1.0, top_p=0.9)
REPORTED = Sampling(seed=8, temperature=0.0, logprobs=1)
"""Drawn by the host."""
TOLERANCE = 1e-4
"""Of KV in float32 where products add up in another order with another number of rows."""


@dataclass
class Taken:
    """Of the steps with chunks of a run: sizes that were replayed, and how many had none."""

    replayed: list[tuple[int, int]] = field(default_factory=list)
    plain: int = 0


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    drafted: int
    blocks: np.ndarray


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    from baton.executor.cuda.chunks import MixedSize
    from baton.executor.cuda.runner import DeviceChunks, LogitRows, ModelRunner

    noted, filled, mixed = Taken(), ModelRunner.mixed_filled, ModelRunner.mixed

    def note_filled(runner: ModelRunner, size: MixedSize, chunks: torch.Tensor) -> LogitRows:
        assert size in runner._graphs
        noted.replayed.append(tuple(size))
        return filled(runner, size, chunks)

    def note_plain(runner: ModelRunner, chunks: DeviceChunks, sequences: int, written: object) -> LogitRows:
        noted.plain += 1
        return mixed(runner, chunks, sequences, written)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "mixed_filled", note_filled)
    monkeypatch.setattr(ModelRunner, "mixed", note_plain)
    return noted


def prompt_of(length: int) -> list[int]:
    """Says some things again, which is guessed."""
    return np.tile(np.random.default_rng(length).integers(0, 320, 12), -(-length // 12))[:length].tolist()


def run_mixed(executor: Executor) -> Run:
    """Several chunks at once, of which some end their prompts; then others beside decodes; then a crowd of short ones."""
    planner = Planner(executor, chunk_tokens=61)
    lanes: list[Lane] = [planner.add(prompt_of(length), NEW_TOKENS) for length in (150, 17, 1)]
    planner.take_step()
    planner.take_step()
    lanes += [planner.add(prompt_of(90), NEW_TOKENS, sampling=WARM), planner.add(prompt_of(40), NEW_TOKENS)]
    planner.take_step()
    planner.chunk_tokens = 290
    lanes += [planner.add(prompt_of(300), NEW_TOKENS), planner.add(prompt_of(64), NEW_TOKENS, sampling=REPORTED)]
    planner.depth = 2
    for _ in range(2):
        planner.take_step()
    lanes += [planner.add(prompt_of(3 + length), NEW_TOKENS, sampling=GREEDY) for length in range(SLOTS - len(lanes))]
    planner.run()
    whole = [block for lane in lanes for block in lane.blocks[: (lane.limit - 1) // executor.shape.block_size]]
    drafted = sum(int(result.drafted.sum()) for result in planner.results)
    return Run([lane.outputs for lane in lanes], drafted, blocks_as_bytes(executor.kv, whole))


@pytest.mark.parametrize("burst", [1, 1 + DRAFTS], ids=["without drafts", "with drafts"])
@pytest.mark.parametrize(
    ("name", "dtype", "invariant"),
    [
        ("tiny-qwen3", "float32", False),
        ("tiny-gemma2", "float32", False),
        ("tiny-qwen3", "bfloat16", True),
        ("tiny-llama", "bfloat16", True),
    ],
)
def test_captured_steps_with_chunks_are_those_kernel_by_kernel(
    taken: Taken, name: str, dtype: str, invariant: bool, burst: int
) -> None:
    shape = ExecutorShape(slots=SLOTS, blocks=160, block_size=16, context_tokens=512, burst=burst)
    proposer = NgramProposer(drafts=DRAFTS, ngram_min=1, ngram_max=3) if burst > 1 else NaiveProposer()
    with closing(on_cuda(name, shape, dtype, invariant=invariant, proposer=proposer, graphs=False)) as eager:
        wanted = run_mixed(eager)
    assert not taken.replayed
    with closing(on_cuda(name, shape, dtype, invariant=invariant, proposer=proposer)) as captured:
        taken.replayed.clear()  # those of its warming
        taken.plain = 0
        given = run_mixed(captured)
    assert_alike(given.tokens, wanted.tokens, name)
    assert len({tokens for tokens, _ in taken.replayed}) >= 3, "chunks of several sizes"
    assert {0, SLOTS} == {sequences for _, sequences in taken.replayed}, "with and without decodes beside them"
    assert taken.plain == 0, "all fit into some graph"
    assert (wanted.drafted > 0) == (burst > 1)
    if invariant:
        assert (given.blocks == wanted.blocks).all(), "the same bits"
    else:
        ours, theirs = (torch.from_numpy(run.blocks.view(np.float32)) for run in (given, wanted))
        assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE), f"KV differs by {float((ours - theirs).abs().max())}"


def test_more_chunks_than_any_graph_has_run_kernel_by_kernel(taken: Taken) -> None:
    shape = ExecutorShape(slots=SLOTS, blocks=64, block_size=16, context_tokens=64)
    prompts = [prompt_of(2 + length) for length in range(SLOTS)]
    outputs = []
    for graphs in (False, True):
        with closing(on_cuda("tiny-qwen3", shape, graphs=graphs)) as executor:
            taken.replayed.clear()
            planner = Planner(executor)
            for prompt in prompts:
                planner.add(prompt, 4)
            outputs.append(planner.run())
    assert not taken.replayed
    assert_alike(outputs[1], outputs[0])
