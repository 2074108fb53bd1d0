"""Models whose weights stay quantised: tokens of the dequantised weights, and the same bits however they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.core.config import BadConfig
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.cpu.native_kernels import WeightFormat, load_kernels
from baton.executor.cpu.packed_modules import FastHead, KeptEmbedding, PackedLinear
from baton.executor.drafts import NaiveProposer, NgramProposer
from baton.executor.fingerprint import model_mark
from baton.executor.gguf_conversion import take_floats
from baton.executor.gguf_weights import read_gguf_model
from baton.executor.model_shapes import ModelShape, note_shape
from baton.executor.paged_attention import register_attention
from tests.support.driver import submission
from tests.support.gguf_files import CONTEXT, FORMATS, LAYERS, MIXED, VOCABULARY, GgufModel, write_gguf_model
from tests.support.guessing import drafting
from tests.support.invariance import Machine, Run, assert_same
from tests.support.on_cuda import blocks_as_bytes, put_block
from tests.support.planner import Planner

FILES = [(form, "llama") for form in (*FORMATS, MIXED)] + [(MIXED, "qwen3")]
PROMPTS = [np.random.default_rng(seed).integers(0, VOCABULARY, 20 + 9 * seed).tolist() for seed in range(3)]
NEW_TOKENS = 12
UNDECIDED = 0.15
"""Of the standard deviation of the logits: between two that are nearer the rounding of activations may decide."""


@pytest.fixture(scope="module", params=FILES, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufModel:
    form, family = request.param
    return write_gguf_model(tmp_path_factory.mktemp(form), form, family, is_tied=form == "Q5_1")


def loaded(folder: Path, **options: object) -> TorchCpuExecutor:
    given: dict[str, object] = {"dtype": "bfloat16", "slots": 24, "blocks": 256, "block_size": 16, "context_tokens": CONTEXT}
    return TorchCpuExecutor.load(folder, **{**given, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def machine(model: GgufModel) -> Iterator[Machine]:
    executor = loaded(model.folder, batch_invariant=True)
    yield Machine(executor)
    executor.close()


@pytest.fixture(scope="module")
def alone(machine: Machine) -> Run:
    return machine.run()


def reference(model: GgufModel) -> PreTrainedModel:
    """As `transformers` dequantises the file, in float64."""
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
    take_floats(model.file, made, torch.float64)
    made.save_pretrained(model.folder / "float64")
    return AutoModelForCausalLM.from_pretrained(model.folder / "float64", dtype=torch.float64)


def test_weights_and_tokens_are_those_of_the_dequantised_file(model: GgufModel) -> None:
    register_attention()
    wanted, kernels = reference(model), load_kernels(torch.float32)
    assert kernels is not None
    kept = read_gguf_model(model.file, model.config, torch.float32, kernels)
    assert_same_weights(kept, wanted, kernels)
    executor = loaded(model.folder, dtype="float32")
    planner = Planner(executor, chunk_tokens=19)
    for prompt in PROMPTS:
        planner.add(prompt, NEW_TOKENS)
    outputs = planner.run()
    executor.close()
    decided = sum(agreeing(wanted, prompt, given) for prompt, given in zip(PROMPTS, outputs, strict=True))
    assert decided >= len(PROMPTS) * NEW_TOKENS // 2  # most are decided


def assert_same_weights(kept: PreTrainedModel, wanted: PreTrainedModel, kernels: object) -> None:
    quantised = 0
    for name, module in kept.named_modules():
        if isinstance(module, PackedLinear | FastHead | KeptEmbedding):
            weights = module.weights
            ids = torch.arange(weights.outputs)
            assert torch.equal(kernels.lookup(weights, ids).double(), wanted.get_parameter(f"{name}.weight")), name
            quantised += all(part.format is not WeightFormat.FLOATS for part in weights.parts)
    assert quantised >= 6 * LAYERS + 2


def agreeing(wanted: PreTrainedModel, prompt: list[int], given: list[int]) -> int:
    """How many tokens are the best ones after those before them; the others must be nearly so."""
    with torch.inference_mode():
        logits = wanted(torch.tensor([[*prompt, *given]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(given)[:, None])[:, 0]
    gaps = logits.max(-1).values - chosen
    assert (gaps <= UNDECIDED * logits.std(-1)).all(), (gaps / logits.std(-1)).tolist()
    return int((gaps == 0).sum())


@pytest.mark.parametrize("chunk_tokens", [7, 37])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(machine: Machine, alone: Run, chunk_tokens: int) -> None:
    assert_same(machine, machine.run(chunk_tokens, company=5), alone)


def test_layers_whose_kv_is_announced_have_the_bits_of_those_in_one_call(machine: Machine, alone: Run) -> None:
    machine.executor.on_layer = lambda _step, _layer: None
    try:
        assert_same(machine, machine.run(chunk_tokens=37), alone)
    finally:
        machine.executor.on_layer = None


def test_an_answer_cut_at_any_token_goes_on_elsewhere_with_its_kv_or_without(model: GgufModel) -> None:
    """As after a preemption, a hand-over, or KV coming back from a tier."""
    one, other = Planner(loaded(model.folder)), Planner(loaded(model.folder))
    assert one.executor.fingerprint == other.executor.fingerprint
    whole = generated(one, PROMPTS[1], NEW_TOKENS)
    for cut in (1, 5):
        assert generated(other, [*PROMPTS[1], *whole[:cut]], NEW_TOKENS - cut) == whole[cut:]
    given = one.add(PROMPTS[1], 1)
    one.run()
    taken = other.add([*PROMPTS[1], *given.outputs], NEW_TOKENS - 1, computed=len(PROMPTS[1]))
    for source, target in zip(given.blocks, taken.blocks, strict=False):
        put_block(other.executor.kv, target, blocks_as_bytes(one.executor.kv, [source])[0])
    other.run()
    assert [*given.outputs, *taken.outputs] == whole
    one.executor.close(), other.executor.close()


def generated(planner: Planner, prompt: list[int], new_tokens: int) -> list[int]:
    lane = planner.add(prompt, new_tokens)
    planner.run()
    planner.stop(lane)
    return lane.outputs


def test_drafts_change_no_token(model: GgufModel) -> None:
    asked = [submission(prompt[:8] * 3, NEW_TOKENS) for prompt in PROMPTS]
    answers = []
    for proposer in (NaiveProposer(), NgramProposer(drafts=4, ngram_min=1, ngram_max=3)):
        driver = drafting(model.folder, proposer, dtype="bfloat16", block_size=16)
        serials = [driver.submit(each)[0] for each in asked]
        driver.run()
        answers.append([driver.outputs[serial] for serial in serials])
        driver.executor.close()
    assert answers[0] == answers[1]


def test_kv_of_different_formats_never_meets(tmp_path: Path) -> None:
    prints = set()
    for form in ("Q4_1", "Q5_1"):
        folder = tmp_path / form
        folder.mkdir()
        model = write_gguf_model(folder, form)
        for quantization in ("auto", "none"):
            executor = loaded(folder, quantization=quantization)
            executor.close()
            assert executor.fingerprint.startswith(model_mark(folder))
            assert ("weights in" in executor.details) is (quantization == "auto")
            prints.add(executor.fingerprint)
        with pytest.raises(BadConfig, match="int8 is for safetensors"):
            loaded(model.folder, quantization="int8")
    assert len(prints) == 4


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_safetensors_are_quantised_when_they_are_loaded(tmp_path: Path, quantization: str) -> None:
    note_shape(tmp_path, ModelShape("tiny-llama"))
    plain, small = loaded(tmp_path), loaded(tmp_path, quantization=quantization, batch_invariant=True)
    assert plain.fingerprint != small.fingerprint
    assert "Q8_0" in small.details
    machine = Machine(small)
    assert_same(machine, machine.run(chunk_tokens=37, company=5), machine.run())
    plain.close(), small.close()


def test_what_the_kernels_cannot_have_becomes_floats_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf_model(tmp_path, "Q4_1")
    with caplog.at_level("INFO"):
        executor = loaded(tmp_path, dtype="float16")
    executor.close()
    assert "weights: all of Q4_1.gguf as float16: there are no kernels for them" in caplog.text
    with caplog.at_level("INFO"):
        executor = loaded(tmp_path, attention="gather")
    tokens = generated(Planner(executor), PROMPTS[0], 4)
    executor.close()
    assert "weights: as in the file: 16 Q4_1" in caplog.text
    assert len(tokens) == 4
