"""The executor for CUDA, all of it but the device: its kernels in Triton's interpreter, its streams one after the other.

What a real device adds (graphs, copies beside computing, speed) is for `tests/gpu`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from tests.support.interpreted_products import products_row_by_row
from tests.support.no_device import pretend_a_device

from baton.core.engine.plan import Chunk, RowOutcome, Start, StepPlan, StepResult
from baton.core.engine.request import Constraint, Sampling, frozen_tokens
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.cuda.chunks import MixedSize
from baton.executor.cuda.executor import TorchCudaExecutor
from baton.executor.cuda.runner import LogitRows, ModelRunner
from baton.executor.drafts import NgramProposer
from baton.executor.model_loading import load_shape

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device; tests/gpu runs the executor on it"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
]

MODEL = "tiny-llama"
SHAPE = ExecutorShape(slots=4, blocks=12, block_size=16, context_tokens=64, burst=3)
PROPOSER = NgramProposer(drafts=2, ngram_min=1, ngram_max=3)
STEPS = 6
SIZES = [MixedSize(32, 0), MixedSize(32, 2), MixedSize(32, 4)]
"""That steps with chunks are filled up to."""

GREEDY = Sampling(seed=1, temperature=0.0, logit_bias={102: 100.0})
"""Says one thing again and again, which is guessed."""
FEW = {5: 60.0, 6: 60.0, 7: 60.0}
PENALISED = Sampling(seed=2, temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=FEW)
"""Has few words, so that a guess is sometimes right."""
REPORTED = Sampling(seed=3, temperature=0.8, top_p=0.9, logprobs=2, prompt_logprobs=2)
UNSCORED = Sampling(seed=3, temperature=0.8, top_p=0.9, logprobs=2)
"""A step that reports on prompts is never a captured one."""

REQUESTS = (
    ([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 22, 2, GREEDY),
    ([5, 6, 5, 6, 5, 6, 5], 60, 4, PENALISED),
    ([9] * 13, 60, 1, REPORTED),
)
"""Prompt, limit, blocks, wishes. The first comes to its limit, the last runs out of blocks, both in the middle of drafts."""


@pytest.fixture
def _without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_device(monkeypatch, SIZES)


def on_cpu() -> Executor:
    thread = ThreadPoolExecutor(max_workers=1)
    return TorchCpuExecutor(load_shape(MODEL, "float32"), SHAPE, b"", None, thread, proposer=PROPOSER)


def results_of(executor: Executor) -> list[StepResult]:
    """All are prefilled in one step, then all decode, two steps in flight."""
    blocks: npt.NDArray[np.int32] = np.arange(SHAPE.blocks, dtype=np.int32)
    starts, chunks = [], []
    for slot, (prompt, limit, count, wishes) in enumerate(REQUESTS):
        table, blocks = blocks[:count], blocks[count:]
        starts.append(Start(slot, 1, frozen_tokens(prompt), len(prompt), 0, limit, wishes, table))
        chunks.append(Chunk(slot, 1, 0, len(prompt), True))
    slots, epochs = np.arange(len(REQUESTS), dtype=np.int32), np.ones(len(REQUESTS), dtype=np.int64)
    executor.launch(StepPlan(1, 0, starts=tuple(starts), chunks=tuple(chunks)))
    results = []
    for step in range(2, STEPS + 2):
        executor.launch(StepPlan(step, step - 1, decode_slots=slots, decode_epochs=epochs))
        results.append(executor.collect())
    return [*results, executor.collect()]


def told_of(result: StepResult) -> dict[str, object]:
    return {
        "outcomes": [RowOutcome(outcome).name for outcome in result.outcomes.tolist()],
        "counts": result.counts.tolist(),
        "tokens": result.tokens.tolist(),
        "known": result.known.tolist(),
        "drafted": result.drafted.tolist(),
        "logprobs": [(line.row, line.top_ids.tolist()) for line in result.logprobs],
        "prompts": [(part.row, part.begin, part.ranks.tolist(), part.top_ids.tolist()) for part in result.prompt_logprobs],
    }


def prompt_logprobs_of(results: list[StepResult]) -> list[float]:
    return [value for result in results for part in result.prompt_logprobs for value in part.chosen.tolist()]


@pytest.mark.usefixtures("_without_a_device")
@pytest.mark.parametrize("batch_invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_with_drafts_yield_what_the_cpu_executor_yields(batch_invariant: bool) -> None:
    reference = on_cpu()
    expected = results_of(reference)
    wanted = [told_of(result) for result in expected]
    reference.close()
    executor = TorchCudaExecutor.of(
        load_shape(MODEL, "float32"), SHAPE, step_tokens=64, proposer=PROPOSER, batch_invariant=batch_invariant, graphs=True
    )  # who asks of layers is told of each, whatever could have been captured
    layers: list[tuple[int, int]] = []
    executor.on_layer = lambda step, layer: layers.append((step, layer))
    results = results_of(executor)
    executor.close()
    assert [told_of(result) for result in results] == wanted
    assert prompt_logprobs_of(results) == pytest.approx(prompt_logprobs_of(expected), abs=1e-3)
    assert len(prompt_logprobs_of(expected)) == 12
    assert layers == [(step, layer) for step in range(1, STEPS + 2) for layer in range(2)]
    everything = [name for told in wanted for name in told["outcomes"]]
    assert {"TOKENS", "NOTHING_OUT_OF_BLOCKS"} == set(everything), "some decode had no block"
    assert any(2 in told["counts"] for told in wanted), "some drafts stood"
    assert any(told["counts"][1] < 1 + told["drafted"][1] for told in wanted), "some did not"
    assert wanted[-1]["known"][0] == REQUESTS[0][1], "one came to its limit"


def restricted_wishes(vocabulary: int) -> tuple[Sampling, ...]:
    """A constraint that forces and forbids, one that does not compile, and a list of allowed tokens with a bad word."""
    source = ScriptedSource(3, vocabulary, (1,)).text()
    allowed = Sampling(seed=6, temperature=0.9, allowed_token_ids=(4, 5, 6), bad_words=((4, 5), (6, 6)))
    return (
        Sampling(seed=5, temperature=0.7, constraint=Constraint("scripted", "1", source)),
        Sampling(seed=5, constraint=Constraint("scripted", "1", "no source")),
        allowed,
    )


def outputs_of(results: list[StepResult]) -> list[list[int]]:
    """The tokens of each slot."""
    outputs: list[list[int]] = [[] for _ in REQUESTS]
    for result in results:
        at = 0
        for slot, count in zip(result.slots.tolist(), result.counts.tolist(), strict=True):
            outputs[slot] += result.tokens[at : at + count].tolist()
            at += count
    return outputs


@pytest.mark.usefixtures("_without_a_device")
def test_restricted_rows_yield_the_tokens_of_the_cpu_executor_behind_drafts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, constraints = load_shape(MODEL, "float32"), CompiledConstraints([ScriptedBackend()])
    wishes = restricted_wishes(loaded.vocabulary)
    asked = tuple((prompt, 60, 4, wish) for (prompt, *_), wish in zip(REQUESTS, wishes, strict=True))
    monkeypatch.setitem(globals(), "REQUESTS", asked)
    thread = ThreadPoolExecutor(max_workers=1)
    plain = replace(SHAPE, burst=1)
    reference = TorchCpuExecutor(loaded, plain, b"", None, thread, constraints=constraints)
    wanted = outputs_of(results_of(reference))
    reference.close()
    executor = TorchCudaExecutor.of(
        load_shape(MODEL, "float32"), SHAPE, step_tokens=64, proposer=PROPOSER, batch_invariant=True,
        backends=lambda _: [ScriptedBackend()],
    )  # fmt: skip
    results = results_of(executor)
    executor.close()
    for one, other in zip(outputs_of(results), wanted, strict=True):
        assert one[: len(other)] == other
    assert len(wanted[0]) > STEPS
    assert wanted[1] == []
    assert {result.outcomes[1] for result in results} == {RowOutcome.CONSTRAINT_FAILED}
    assert any(result.drafts for result in results)


def cut_plans(wishes: tuple[Sampling, ...]) -> list[StepPlan]:
    """Chunks that end a prompt beside one that does not; then its rest beside decodes; then a new one beside all of them."""
    starts = [
        Start(slot, 1, frozen_tokens(prompt), len(prompt), 0, 40, wish, np.arange(3 * slot, 3 * slot + 3, dtype=np.int32))
        for slot, ((prompt, *_), wish) in enumerate(zip((*REQUESTS, REQUESTS[0]), wishes, strict=True))
    ]
    whole = [Chunk(slot, 1, 0, len(start.tokens), True) for slot, start in enumerate(starts)]
    two, three, four = (np.arange(count, dtype=np.int32) for count in (2, 3, 4))
    steps: list[tuple[list[Start], list[Chunk], npt.NDArray[np.int32]]] = [
        (starts[:3], [whole[1], Chunk(2, 1, 0, 6, False), whole[0]], two[:0]),
        ([], [Chunk(2, 1, 6, 11, False)], two),
        ([], [Chunk(2, 1, 11, 13, True)], two),
        (starts[3:], [whole[3]], three),
        ([], [], four),
    ]
    epochs = np.ones(4, dtype=np.int64)
    return [
        StepPlan(step, step - 1, starts=tuple(new), chunks=tuple(chunks), decode_slots=slots, decode_epochs=epochs[slots])
        for step, (new, chunks, slots) in enumerate(steps, start=1)
    ]


def told_and_left(
    wishes: tuple[Sampling, ...], invariant: bool, graphs: bool
) -> tuple[list[dict[str, object]], torch.Tensor]:
    executor = TorchCudaExecutor.of(
        load_shape(MODEL, "float32"), SHAPE, step_tokens=64, proposer=PROPOSER, batch_invariant=invariant, graphs=graphs
    )
    told = []
    for plan in cut_plans(wishes):
        executor.launch(plan)
        told.append(told_of(executor.collect()))
    assert executor._stepper is not None
    left = executor._stepper._pool.pool.clone()
    executor.close()
    return told, left


@pytest.mark.slow
@pytest.mark.usefixtures("_without_a_device")
@pytest.mark.parametrize(
    ("wishes", "invariant"),
    [
        pytest.param((GREEDY, PENALISED, UNSCORED, GREEDY), False, id="drawn by the host"),
        pytest.param(
            tuple(Sampling(seed=4, temperature=heat) for heat in (0.0, 1.0, 0.0, 0.7)),
            True,
            id="drawn on the device",
        ),
    ],
)
def test_a_step_that_is_filled_up_yields_and_leaves_what_the_plain_one_does(
    monkeypatch: pytest.MonkeyPatch, wishes: tuple[Sampling, ...], invariant: bool
) -> None:
    taken = []

    def noted(runner: ModelRunner, size: MixedSize, chunks: torch.Tensor) -> LogitRows:
        taken.append(size)
        return filled(runner, size, chunks)

    filled = ModelRunner.mixed_filled
    monkeypatch.setattr(ModelRunner, "mixed_filled", noted)
    with products_row_by_row():
        wanted, wanted_kv = told_and_left(wishes, invariant, graphs=False)
        assert not taken
        given, given_kv = told_and_left(wishes, invariant, graphs=True)
    assert given == wanted
    assert torch.allclose(given_kv, wanted_kv, rtol=0, atol=0 if invariant else 1e-5)
    assert taken == [SIZES[0], SIZES[1], SIZES[1], SIZES[2]], "all that have chunks"
    assert any(told["drafted"] and max(told["drafted"]) for told in wanted), "decodes beside chunks had drafts"


@pytest.mark.usefixtures("_without_a_device")
def test_what_the_one_told_of_layers_raises_is_raised_with_the_step() -> None:
    executor = TorchCudaExecutor.of(load_shape(MODEL, "float32"), SHAPE, step_tokens=64, graphs=False)
    assert executor.details == "interpreter (CUDA), triton attention, no CUDA graphs"

    def fails(step: int, layer: int) -> None:
        raise RuntimeError(f"layer {layer} of step {step}")

    executor.on_layer = fails
    start = Start(0, 1, frozen_tokens([1, 2]), 2, 0, 8, GREEDY, np.arange(1, dtype=np.int32))
    executor.launch(StepPlan(1, 0, starts=(start,), chunks=(Chunk(0, 1, 0, 2, True),)))
    with pytest.raises(RuntimeError, match="layer 0 of step 1"):
        executor.collect()
    executor.close()
