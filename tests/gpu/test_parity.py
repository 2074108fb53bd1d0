"""The executor on a device says what `transformers` itself says, with its own plain attention and without a cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.core.engine.request import Sampling
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.dummy_weights import draw_weights
from baton.executor.model_loading import DTYPES, load_shape, shape_config
from baton.executor.model_shapes import SHAPES
from tests.support.on_cuda import TINY, closing, first_difference, on_cuda
from tests.support.planner import GREEDY, Planner, generate

pytestmark = pytest.mark.cuda

SHAPE = ExecutorShape(slots=4, blocks=64, block_size=16, context_tokens=256)
NEW_TOKENS = 24
SLICE_LAYERS = 3
LOGITS_TOLERANCE = 0.04
"""Of bfloat16 logits: the largest difference, relative to the largest logit of `transformers` in float32."""
LOGPROB_TOLERANCE = 0.15
"""The same of log-probabilities that come with tokens, absolute."""


def reference(name: str, dtype: str) -> PreTrainedModel:
    """The same weights, and nothing of ours in between."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=DTYPES[dtype], attn_implementation="eager")
    draw_weights(model, 0)
    return model.eval()


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens], device="cuda"), use_cache=False).logits[0].float()


def continuation(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """What it goes on with, greedily, and by how much each token is ahead of the next best."""
    tokens, leads = list(prompt), []
    for _ in range(NEW_TOKENS):
        logits = logits_of(model, tokens)[-1]
        first, second = logits.topk(2).values.tolist()
        leads.append(first - second)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], leads


def prompts_of(vocabulary: int) -> list[list[int]]:
    """One token, some, and more than any window of the tiny models."""
    draw = np.random.default_rng(1)
    return [draw.integers(0, vocabulary, size).tolist() for size in (1, 17, 100, 33)]


@pytest.mark.parametrize("name", TINY)
def test_float32_tokens_are_those_of_transformers(name: str) -> None:
    prompts = prompts_of(SHAPES[name]["vocab_size"])  # type: ignore[arg-type]
    model = reference(name, "float32")
    wanted = [continuation(model, prompt) for prompt in prompts]
    for way in ({}, {"chunk_tokens": 19, "depth": 3}):
        with closing(on_cuda(name, SHAPE)) as executor:
            given = generate(executor, prompts, NEW_TOKENS, **way)  # type: ignore[arg-type]
        for tokens, (right, leads) in zip(given, wanted, strict=True):
            assert tokens == right, f"{name}, {way}: {first_difference(tokens, right)}; leads of the right ones: {leads}"


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gemma2"])
def test_tokens_do_not_depend_on_graphs(name: str) -> None:
    prompts = prompts_of(SHAPES[name]["vocab_size"])  # type: ignore[arg-type]
    with closing(on_cuda(name, SHAPE)) as captured, closing(on_cuda(name, SHAPE, graphs=False)) as eager:
        assert generate(captured, prompts, NEW_TOKENS, depth=2) == generate(eager, prompts, NEW_TOKENS, depth=2)


@pytest.fixture(scope="module", params=["qwen3-8b", "llama3-8b", "mistral-7b", "gemma2-9b"])
def slice_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The first layers of a large shape, as a shape of its own."""
    name = f"{request.param}-slice"
    changed = {"num_hidden_layers": SLICE_LAYERS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, name, {**SHAPES[request.param], **changed})
        yield name
    torch.cuda.empty_cache()


def chunk_logits(name: str, tokens: list[int]) -> torch.Tensor:
    """Ours of every position, by one chunk through fused layers."""
    from baton.executor.cuda.fuse import fuse_for_cuda
    from baton.executor.cuda.pool import CudaPool
    from baton.executor.cuda.products import ProductScratch
    from baton.executor.cuda.rehearsal import one_chunk
    from baton.executor.model_loading import forward

    loaded = load_shape(name, "bfloat16", "cuda")
    with torch.inference_mode():
        bench = ProductScratch(loaded.model.device, invariant=False)
        fuse_for_cuda(loaded, bench, len(tokens))
        pool = CudaPool(loaded.layers, 32, 16, loaded.dtype, loaded.model.device)
        ids = torch.tensor([tokens], device="cuda")
        places = torch.arange(len(tokens), device="cuda")[None]
        return forward(loaded.model, ids, places, 0, one_chunk(pool, bench, len(tokens), 16)).float()


def test_bfloat16_logits_of_a_slice_of_a_large_shape_are_within_tolerance(slice_name: str) -> None:
    tokens = np.random.default_rng(2).integers(0, 30_000, 300).tolist()
    exact = logits_of(reference(slice_name, "float32"), tokens)
    theirs = logits_of(reference(slice_name, "bfloat16"), tokens)
    ours = chunk_logits(slice_name, tokens)
    scale = float(exact.abs().max())
    off, their_off = (float((logits - exact).abs().max()) / scale for logits in (ours, theirs))
    print(f"{slice_name}: ours is off by {off:.4f} of the largest logit, transformers in bfloat16 by {their_off:.4f}")
    assert off < LOGITS_TOLERANCE
    assert off < 2 * their_off, "further from the truth than rounding explains"


def test_bfloat16_decodes_of_a_slice_of_a_large_shape_are_within_tolerance(slice_name: str) -> None:
    prompts = [np.random.default_rng(seed).integers(0, 30_000, 40 + 60 * seed).tolist() for seed in range(3)]
    with closing(on_cuda(slice_name, SHAPE, "bfloat16")) as executor:
        given = reported(executor, prompts)
    model = reference(slice_name, "float32")
    for prompt, (tokens, logprobs) in zip(prompts, given, strict=True):
        rows = logits_of(model, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        right = rows.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu()
        off = (torch.tensor(logprobs) - right).abs()
        assert float(off.max()) < LOGPROB_TOLERANCE, f"token {int(off.argmax())}: {logprobs} are not {right.tolist()}"


def reported(executor: Executor, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens of each, and the log-probabilities that came with them."""
    planner = Planner(executor)
    wish: Sampling = replace(GREEDY, logprobs=0)
    lanes = [planner.add(prompt, NEW_TOKENS, sampling=wish) for prompt in prompts]
    planner.run()
    told: dict[int, list[float]] = {lane.epoch: [] for lane in lanes}
    for result in planner.results:
        for line in result.logprobs:
            told[int(result.epochs[line.row])] += line.chosen.tolist()
    return [(lane.outputs, told[lane.epoch]) for lane in lanes]
