"""The CUDA executor under a real worker: the tokens of `transformers`, and those of an undisturbed run whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.core.config import ReservePolicy, WorkerConfig
from baton.core.request import Sampling, Submission
from baton.executor.contract import ExecutorShape
from baton.executor.dummy import draw_weights
from baton.executor.loading import load_shape, shape_config
from baton.executor.shapes import SHAPES
from tests.support.driver import Driver, submission

pytestmark = pytest.mark.cuda

FAMILIES = ("tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-gemma2", "tiny-qwen3-moe")
BLOCK_SIZE, SLOTS, CONTEXT, NEW_TOKENS = 16, 6, 512, 24
ROOMY, TIGHT = 400, 30
"""Blocks: for all requests at once, and for a good part of them."""
LOGITS_TOLERANCE = 2e-2
"""Of bfloat16 logits, relative to their norm: each of some tens of roundings is a part in 500."""

Make = Callable[..., Driver]


@pytest.fixture
def make() -> Iterator[Make]:
    from baton.executor.cuda.executor import TorchCudaExecutor

    made: list[TorchCudaExecutor] = []

    def build(name: str, dtype: str, *, blocks: int = ROOMY, invariant: bool = False, step_tokens: int = 64) -> Driver:
        shape = ExecutorShape(SLOTS, blocks, BLOCK_SIZE, CONTEXT)
        loaded = load_shape(name, dtype, "cuda")
        executor = TorchCudaExecutor.of(loaded, shape, step_tokens=step_tokens, batch_invariant=invariant)
        made.append(executor)
        # Without a reserve, so that a small pool makes somebody yield.
        config = WorkerConfig(
            slots=SLOTS, blocks=blocks, block_size=BLOCK_SIZE, context_tokens=CONTEXT, step_tokens=step_tokens, depth=2,
            reserve=ReservePolicy.NONE,
        )  # fmt: skip
        return Driver(config, executor)

    yield build
    for executor in made:
        executor.close()


def prompts(vocabulary: int = 320) -> list[list[int]]:
    draws = random.Random(5)
    shared = [draws.randrange(vocabulary) for _ in range(70)]
    fresh = [[draws.randrange(vocabulary) for _ in range(draws.randrange(1, 150))] for _ in range(6)]
    return [*fresh, [*shared, 1, 2, 3], [*shared, 4], shared, shared[:32]]


def outputs(driver: Driver, asks: list[Submission]) -> list[list[int]]:
    serials = [driver.submit(ask)[0] for ask in asks]
    driver.run()
    return [driver.outputs[serial] for serial in serials]


def of_transformers(name: str) -> list[list[int]]:
    """Greedy tokens with the attention that transformers itself has."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.float32, attn_implementation="eager")
    draw_weights(model, 0)
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device="cuda")
        whole = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append([int(token) for token in whole[0, len(prompt) :]])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_tokens_are_those_of_transformers_cold_and_with_a_warm_cache(make: Make, name: str) -> None:
    expected = of_transformers(name)
    driver = make(name, "float32")
    for _ in range(2):
        assert outputs(driver, [submission(prompt, NEW_TOKENS) for prompt in prompts()]) == expected


MIXED = (
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2),
    Sampling(seed=3, temperature=0.7, top_k=20),
    Sampling(seed=4, temperature=1.2, top_p=0.8),
    Sampling(seed=5, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(seed=6, repetition_penalty=1.3, logit_bias=((7, 2.0),)),
)


def asks() -> list[Submission]:
    chosen = zip(prompts(), MIXED * 2, strict=False)
    return [submission(prompt, NEW_TOKENS, sampling=sampling) for prompt, sampling in chosen]


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gemma2"])
def test_batch_invariant_bfloat16_tokens_do_not_depend_on_batch_chunks_cache_or_preemption(make: Make, name: str) -> None:
    alone = [outputs(make(name, "bfloat16", invariant=True, step_tokens=256), [ask])[0] for ask in asks()]
    roomy = make(name, "bfloat16", invariant=True, step_tokens=33)
    assert outputs(roomy, asks()) == alone
    assert outputs(roomy, asks()) == alone, "with a warm cache"
    tight = make(name, "bfloat16", invariant=True, blocks=TIGHT, step_tokens=48)
    assert outputs(tight, asks()) == alone
    gauges = tight.worker.gauges()
    assert gauges.preemptions_for_others + gauges.preemptions_of_self > 0, "the pool was too large to show anything"


def test_float32_tokens_survive_preemption(make: Make) -> None:
    expected = outputs(make("tiny-qwen3", "float32"), asks())
    tight = make("tiny-qwen3", "float32", blocks=TIGHT)
    assert outputs(tight, asks()) == expected


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", ["qwen3-8b", "llama3-8b", "mistral-7b", "gemma2-9b"])
def test_bfloat16_logits_of_a_large_shape_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, name: str, invariant: bool
) -> None:
    from baton.executor.cuda.fuse import fuse_for_cuda
    from baton.executor.cuda.pool import CudaPool
    from baton.executor.cuda.products import Workbench
    from baton.executor.cuda.rehearsal import one_chunk
    from baton.executor.loading import forward

    monkeypatch.setitem(SHAPES, "slice", {**SHAPES[name], "num_hidden_layers": 4})
    loaded = load_shape("slice", "bfloat16", "cuda")
    with torch.device("cuda"):
        reference = AutoModelForCausalLM.from_config(shape_config("slice"), dtype=torch.float32, attn_implementation="eager")
    reference.load_state_dict(loaded.model.state_dict())
    places = torch.arange(300, device="cuda")[None]
    ids = (places * 7919 + 11) % loaded.vocabulary
    bench = Workbench(ids.device, invariant)
    with torch.inference_mode():
        expected = reference.eval()(input_ids=ids).logits[0]
        fuse_for_cuda(loaded, bench)
        pool = CudaPool(loaded.layers, 20, BLOCK_SIZE, loaded.dtype, ids.device)
        given = forward(loaded.model, ids, places, 0, one_chunk(pool, bench, 300, BLOCK_SIZE)).float()
    error = float((given - expected).norm() / expected.norm())
    assert error < LOGITS_TOLERANCE, f"{error:.3g} of the logits' norm"
