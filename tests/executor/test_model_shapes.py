"""Shapes: what they are, that their weights depend on the seed alone, and that what they compute stays in bounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.planner import generate
from transformers import AutoModelForCausalLM

from baton.executor import dummy_weights as dummy
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.dummy_weights import draw_weights
from baton.executor.fingerprint import fingerprint_of, model_mark
from baton.executor.layer_probe import take_probe
from baton.executor.model_loading import load_model, load_shape, shape_config
from baton.executor.model_shapes import SHAPES, ModelShape, UnknownShape, note_shape, parse_shape, shape_in, shape_mark
from baton.executor.model_support import UnsupportedModel

TINY = [name for name in SHAPES if name.startswith("tiny-")]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-8b", 8.191), ("llama3-8b", 8.030), ("mistral-7b", 7.242), ("gemma2-9b", 9.242), ("qwen3-30b-a3b", 30.532)],
)
def test_a_shape_has_as_many_parameters_as_the_model_it_is_named_after(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)


@pytest.mark.parametrize("name", TINY)
def test_what_a_tiny_shape_computes_stays_in_bounds(name: str) -> None:
    loaded = load_shape(name, "float32")
    assert len(loaded.layers) == 3
    with torch.inference_mode():
        seen = take_probe(loaded.model, loaded.layers, torch.float32).seen
    assert 0.3 < float(seen["lm_head"].output.std()) < 3
    for layer in range(3):
        assert 0.1 < float(seen[f"model.layers.{layer}"].output.std()) < 10


@pytest.mark.parametrize("name", TINY)
def test_a_folder_of_a_shape_is_served_and_its_tokens_differ_with_the_seed(name: str, tmp_path: Path) -> None:
    answers = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(answers))
        folder.mkdir()
        note_shape(folder, ModelShape(name, seed))
        executor = TorchCpuExecutor.load(folder, dtype="float64", slots=2, block_size=16, blocks=32)
        try:
            answers.append(generate(executor, [[1, 2, 3, 4], [300, 7]], 12))
        finally:
            executor.close()
    assert answers[0] == answers[1] != answers[2]
    assert len({token for answer in answers[0] for token in answer}) > 3


def test_in_another_number_format_they_are_the_same_numbers_rounded() -> None:
    whole = load_shape("tiny-qwen3", "float32", seed=3).model.state_dict()
    for dtype in ("bfloat16", "float64"):
        other = load_shape("tiny-qwen3", dtype, seed=3).model.state_dict()
        assert all(torch.equal(other[name], tensor.to(other[name].dtype)) for name, tensor in whole.items())


def test_weights_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = torch.nn.Linear(37, 19), torch.nn.Linear(37, 19)
    draw_weights(whole, 5)
    monkeypatch.setattr(dummy, "CHUNK", 10)
    draw_weights(parts, 5)
    assert torch.equal(whole.weight, parts.weight)


def test_two_tensors_have_nothing_to_do_with_each_other() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(512, 512), "other": torch.nn.Linear(512, 512)})
    draw_weights(model, 0)
    one, other = (module.weight.detach().flatten().double() for module in model.values())
    for shift in range(4):
        assert abs(float(torch.corrcoef(torch.stack([one, other.roll(shift)]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([one, one.roll(1)]))[0, 1])) < 0.01
    assert float(one.std()) == pytest.approx(1 / math.sqrt(512), rel=0.01)
    assert abs(float(one.mean())) < 1e-3 / math.sqrt(512) * 10


def test_the_numbers_are_fixed_for_good() -> None:
    """The fingerprint says so, and KV in a store outlives the version that computed it."""
    layer = torch.nn.Linear(3, 2)
    draw_weights(layer, 0)
    known = ["0x1.34571ep-1", "-0x1.a926aep-1", "0x1.4e340ep-1", "-0x1.caf4c8p-3", "0x1.b044bep-1", "0x1.325ae8p-3"]
    assert layer.weight.flatten().tolist() == [float.fromhex(number) for number in known]


def test_another_seed_draws_other_numbers() -> None:
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    draw_weights(one, 0)
    draw_weights(other, 1)
    assert not bool((one.weight == other.weight).any())


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, (1 << 63) - 1))
def test_a_shape_is_named_with_or_without_its_seed(name: str, seed: int) -> None:
    assert parse_shape(f"shape:{name}@{seed}") == ModelShape(name, seed)
    assert parse_shape(f"shape:{name}") == ModelShape(name, 0)
    assert parse_shape(name) is None


@pytest.mark.parametrize(
    "model", ["shape:qwen3-80b", "shape:", "shape:tiny-llama@", "shape:tiny-llama@x", "shape:tiny-llama@-1"]
)
def test_what_names_no_shape_is_refused(model: str) -> None:
    with pytest.raises(UnknownShape, match=r"known: qwen3-8b|a whole number"):
        parse_shape(model)


def test_a_mark_tells_shapes_and_seeds_apart_and_is_the_folders(tmp_path: Path) -> None:
    marks = {shape_mark(ModelShape(name, seed)) for name in SHAPES for seed in (0, 1)}
    assert len(marks) == 2 * len(SHAPES)
    note_shape(tmp_path, ModelShape("tiny-llama", 9))
    assert shape_in(tmp_path) == ModelShape("tiny-llama", 9)
    assert model_mark(tmp_path) == load_model(tmp_path, "float32").mark == shape_mark(ModelShape("tiny-llama", 9))
    mark = model_mark(tmp_path)
    assert fingerprint_of(mark, "float32", "a").startswith(mark)
    assert len({fingerprint_of(mark, dtype, layout) for dtype in ("float32", "bfloat16") for layout in "ab"}) == 4


def test_an_unknown_number_format_is_refused_for_a_shape_too() -> None:
    with pytest.raises(UnsupportedModel, match="int4"):
        load_shape("tiny-llama", "int4")
