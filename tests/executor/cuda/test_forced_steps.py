"""Tokens that grammars force are drafts on the device: fewer steps, the same tokens, whatever is beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from tests.support.forced_runs import BLOCKS, Answer, RunsBackend, StepsByHand, runs, undisturbed
from tests.support.no_device import pretend_a_device

from baton.core.engine.plan import Int32s, RowOutcome
from baton.core.engine.request import Sampling
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.slot_matchers import Bools, SlotMatchers
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.cuda.chunks import MixedSize
from baton.executor.cuda.drafted_runner import DraftedRunner, mixed_row_sizes, row_sizes, rows_most
from baton.executor.cuda.executor import TorchCudaExecutor
from baton.executor.cuda.forced_tokens import ForcedPlan, ForcedTokens
from baton.executor.cuda.kernels_forced import propose_forced
from baton.executor.cuda.runner import LogitRows, ModelRunner
from baton.executor.drafts import NgramProposer
from baton.executor.model_loading import load_shape
from baton.executor.model_shapes import SHAPES

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device; tests/gpu runs the executor on it"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
]

MODEL = "tiny-llama"
SHAPE = ExecutorShape(slots=4, blocks=4 * BLOCKS, block_size=16, context_tokens=64, constrained_burst=8)
PROPOSER = NgramProposer(drafts=2, ngram_min=1, ngram_max=3)
VOCABULARY = int(str(SHAPES[MODEL]["vocab_size"]))
CPU = torch.device("cpu")
PROMPT = [1, 2, 3, 1, 2, 3, 1]
DRAWN = Sampling(seed=5, temperature=0.7, top_p=0.9, constraint=runs(3, VOCABULARY, 6))
GREEDY = Sampling(seed=6, temperature=0.0, constraint=runs(4, VOCABULARY, 11))
FREE = Sampling(seed=7, temperature=0.9, top_p=0.9)
HOT = Sampling(seed=8, temperature=1.3, top_k=30)


@pytest.fixture
def _without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_device(monkeypatch, [MixedSize(32, 0), MixedSize(32, 4), MixedSize(32, 16)])


def asked() -> list[Answer]:
    return [
        Answer(0, PROMPT, len(PROMPT) + 40, DRAWN),
        Answer(1, [5, 6, 5, 6, 5], 60, FREE),
        Answer(3, [9, 8, 7], 3 + 20, GREEDY),
        Answer(0, PROMPT, 60, HOT),
    ]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """One token a step, on the CPU."""
    thread, constraints = ThreadPoolExecutor(max_workers=1), CompiledConstraints([RunsBackend()])
    shape = replace(SHAPE, constrained_burst=0)
    executor = TorchCpuExecutor(load_shape(MODEL, "float32"), shape, b"", None, thread, constraints=constraints)
    found = undisturbed(executor, asked())
    executor.close()
    return found


def on_device(shape: ExecutorShape = SHAPE) -> Executor:
    return TorchCudaExecutor.of(
        load_shape(MODEL, "float32"), shape, step_tokens=64, proposer=PROPOSER, batch_invariant=True,
        backends=lambda _: [RunsBackend()],
    )  # fmt: skip


def assert_begins(answers: list[Answer], wanted: list[list[int]]) -> None:
    for nth, (answer, tokens) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.outputs == tokens[: len(answer.outputs)], f"the {nth}. request"


@pytest.mark.usefixtures("_without_a_device")
@pytest.mark.parametrize("burst", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["without n-grams", "with n-grams"])
def test_forced_tokens_take_fewer_steps_and_are_the_same(wanted: list[list[int]], burst: int) -> None:
    executor = on_device(replace(SHAPE, burst=burst))
    by_hand = StepsByHand(executor)
    drawn, free, greedy, next_one = asked()
    by_hand.begin(drawn, free, greedy)
    by_hand.decode(4)
    assert by_hand.preempt(0) is drawn
    before = len(drawn.bursts)
    assert len(drawn.outputs) > 2 * before, "of seven tokens six are forced"
    drawn.slot = 2
    by_hand.begin(drawn, next_one)
    by_hand.decode(4)
    by_hand.drain()
    executor.close()
    assert_begins([drawn, free, greedy, next_one], wanted)
    assert len(greedy.outputs) == 20, "it came to its limit, in the middle of drafts"
    assert len(drawn.outputs) - sum(drawn.bursts[:before]) > 2 * (len(drawn.bursts) - before), "after its restart too"
    for answer in (free, next_one):
        assert max(answer.bursts) <= burst, "nothing is forced without a constraint, also in a slot that had one"
    assert max(drawn.bursts) == 7, "five that are forced behind the first, and one that is free" 
