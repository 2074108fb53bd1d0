"""Models with fused parts answer as `transformers` wrote them, and in batch-invariant mode nothing is left that may not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from tests.support.attending import HostPool

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from tests.support.attending import NOTHING, normed
from transformers import AutoModelForCausalLM

from baton.executor.cuda import fuse
from baton.executor.cuda.layers import FusedLayer, PlainLinear, TabledRotary
from baton.executor.cuda.products import DeviceLinear, ProductScratch, RmsNorm
from baton.executor.cuda.rehearsal import one_chunk
from baton.executor.dummy_weights import draw_weights
from baton.executor.model_loading import LoadedModel, forward, load_shape, shape_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # by the interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # a GPU says nothing then
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a device the executor's tests run the same kernels"),
]

CPU = torch.device("cpu")
TOKENS = [7, 3, 250, 3, 99, 120, 7, 8, 9]


@pytest.fixture(autouse=True)
def _in_host_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fuse, "CudaPool", HostPool)
    with torch.inference_mode():
        yield


def fused(name: str, invariant: bool) -> tuple[LoadedModel, ProductScratch]:
    loaded, bench = load_shape(name, "float32"), ProductScratch(CPU, invariant)
    fuse.fuse_for_cuda(loaded, bench, 64)
    return loaded, bench


def logits_of(loaded: LoadedModel, bench: ProductScratch, tokens: list[int]) -> torch.Tensor:
    pool = HostPool(loaded.layers, 2, 16, loaded.dtype, CPU)
    places = torch.arange(len(tokens))[None]
    return forward(loaded.model, torch.tensor([tokens]), places, 0, one_chunk(pool, bench, len(tokens), 16))  # type: ignore[arg-type]


def of_transformers(name: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.float32, attn_implementation="eager")
    draw_weights(model, 0)
    return model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("name", "layers", "invariant"),
    [
        ("tiny-llama", 2, False),
        ("tiny-qwen3", 2, True),
        pytest.param("tiny-gemma2", 0, False, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3-moe", 2, False, marks=pytest.mark.slow),
    ],
)
def test_a_fused_model_answers_as_transformers_does(name: str, layers: int, invariant: bool) -> None:
    loaded, bench = fused(name, invariant)
    assert sum(isinstance(module, FusedLayer) for module in loaded.model.modules()) == layers
    assert float((logits_of(loaded, bench, TOKENS) - of_transformers(name)).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["tiny-qwen3", pytest.param("tiny-gemma2", marks=pytest.mark.slow)])
def test_invariant_logits_do_not_depend_on_what_follows(name: str) -> None:
    loaded, bench = fused(name, invariant=True)
    whole = logits_of(loaded, bench, TOKENS)
    assert torch.equal(logits_of(loaded, bench, TOKENS[:4]), whole[:4])
    assert not any(isinstance(module, torch.nn.Linear) for module in loaded.model.modules())


def test_what_may_depend_on_the_batch_in_invariant_mode_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fused("tiny-llama", invariant=True)
        assert not caplog.messages
        fused("tiny-qwen3-moe", invariant=True)
    (message,) = caplog.messages
    assert "not batch-invariant" in message
    assert "mlp" in message


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("invariant", [False, True], ids=["quick", "invariant"])
@pytest.mark.parametrize("gate", [None, 0], ids=["plain", "gated"])
def test_a_product_is_the_same_by_whichever_kernel(rows: int, invariant: bool, gate: int | None) -> None:
    stream = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 128, generator=stream), torch.randn(96, 128, generator=stream) / 11
    norm, residual = (
        RmsNorm(torch.rand(128, generator=stream), 1e-6),
        torch.randn(rows, 48 if gate == 0 else 96, generator=stream),
    )
    wanted = normed(x, norm.weight, norm.epsilon) @ weight.T
    if gate is not None:
        wanted = torch.nn.functional.silu(wanted[:, :48]) * wanted[:, 48:]
    linear = DeviceLinear(weight, None, ProductScratch(CPU, invariant), gate=gate)
    given = linear(x, norm=norm, residual=residual.clone())
    assert float((given - wanted - residual).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-gemma2"])
def test_angles_that_are_looked_up_are_those_of_the_model(name: str) -> None:
    model = load_shape(name, "bfloat16").model
    (place,) = [path for path, module in model.named_modules() if path.endswith("rotary_emb")]
    rotary, places = model.get_submodule(place), torch.tensor([[0, 63, 5, 5, 17]])
    fuse._replace_rotations(model, 64)
    assert isinstance(model.get_submodule(place), TabledRotary)
    wanted = rotary(torch.empty(0, dtype=model.dtype), places)
    assert all(map(torch.equal, model.get_submodule(place)(NOTHING, places), wanted))


class OneTable(torch.nn.Module):
    """As some families have it: a complex number for each angle."""

    rope_type = "default"

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        angles = position_ids[..., None].float() * torch.ones(4)
        return torch.polar(torch.ones_like(angles), angles)


def test_angles_of_another_kind_stay_as_they_are() -> None:
    model = load_shape("tiny-qwen3", "float32").model
    (place,) = [path for path, module in model.named_modules() if path.endswith("rotary_emb")]
    model.set_submodule(place, OneTable())
    fuse._replace_rotations(model, 64)
    assert isinstance(model.get_submodule(place), OneTable)


def test_angles_that_depend_on_the_length_stay_as_they_are() -> None:
    model = load_shape("tiny-qwen3", "float32").model
    (place,) = [path for path, module in model.named_modules() if path.endswith("rotary_emb")]
    rotary = model.get_submodule(place)
    rotary.rope_type = "dynamic"  # type: ignore[assignment]
    fuse._replace_rotations(model, 64)
    assert model.get_submodule(place) is rotary


def test_a_linear_of_its_own_keeps_its_shape_and_bias() -> None:
    inner = torch.nn.Linear(64, 40)
    plain = PlainLinear(inner, ProductScratch(CPU, True))
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    assert float((plain(x) - inner(x)).abs().max()) < 1e-5
