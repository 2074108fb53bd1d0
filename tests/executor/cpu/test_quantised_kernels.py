"""Products with quantised weights: those of gguf's own dequantisation, and the same bits on every CPU and in every batch."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import FORMATS, quantised_rows

from baton.executor.cpu.kernel_build import build
from baton.executor.cpu.native_kernels import NativeKernels, PackedWeights, WeightFormat, joined, load_kernels, packed

DIM = 768
KINDS = {"baseline": "x86-64", "AVX2": "x86-64-v3", "AVX2 and VNNI": "x86-64-v3 -mavxvnni", "AVX-512": "x86-64-v4"}
NEEDED = {"baseline": "sse2", "AVX2": "avx2", "AVX2 and VNNI": "avx_vnni", "AVX-512": "avx512vl"}


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    found = load_kernels(torch.float32)
    assert found is not None, "the tests expect a compiler"
    return found


def weights_of(kernels: NativeKernels, form: str, outputs: int) -> tuple[PackedWeights, np.ndarray]:
    """Packed, and as `gguf` reads them."""
    rows = quantised_rows(form, outputs, DIM, 0.1, seed=outputs)
    return kernels.pack(WeightFormat[form], rows, np.arange(outputs), DIM), dequantize(rows, GGMLQuantizationType[form])


def rounded(x: np.ndarray) -> np.ndarray:
    """What is left of activations that are quantised in groups of 32."""
    groups = x.reshape(len(x), -1, 32)
    peak = np.abs(groups).max(-1, keepdims=True)
    return (np.rint(groups * (np.float32(127) / peak)) * (peak.astype(np.float64) / 127)).reshape(x.shape)


@pytest.mark.parametrize("outputs", [16, 80, 99])
@pytest.mark.parametrize("form", FORMATS)
def test_weights_that_are_looked_up_are_those_of_gguf(kernels: NativeKernels, form: str, outputs: int) -> None:
    weights, wanted = weights_of(kernels, form, outputs)
    ids = torch.randperm(outputs)
    assert np.array_equal(kernels.lookup(weights, ids).numpy(), wanted[ids.numpy()])
    assert weights.bytes <= 1.03 * quantised_rows(form, -(-outputs // 16) * 16, DIM, 0.1, 0).nbytes


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("form", FORMATS)
def test_products_are_those_of_the_dequantised_weights(kernels: NativeKernels, form: str, rows: int) -> None:
    weights, wide = weights_of(kernels, form, 80)
    torch.manual_seed(rows)
    x = torch.randn(rows, DIM)
    given = kernels.linear(x, weights, None).double().numpy()
    exact = rounded(x.numpy()) @ wide.T.astype(np.float64)
    assert np.abs(given - exact).max() <= 1e-5 * np.abs(exact).max()
    step = np.abs(x.numpy()).reshape(rows, -1, 32).max(-1).repeat(32, axis=1) / 127
    assert (np.abs(given - x.double().numpy() @ wide.T) <= step / 2 @ np.abs(wide.T) + 1e-4).all()


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 210), form=st.sampled_from(FORMATS), data=st.data())
def test_a_row_is_the_same_in_any_batch(kernels: NativeKernels, rows: int, form: str, data: st.DataObject) -> None:
    weights, _ = weights_of(kernels, form, 112)
    torch.manual_seed(rows)
    x, bias, residual = torch.randn(rows, DIM), torch.randn(112), torch.randn(rows, 112)
    together = kernels.linear(x, weights, bias, residual)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    try:
        some = kernels.linear(x[begin:end].contiguous(), weights, bias, residual[begin:end].contiguous())
        heads = kernels.head(x[begin:end].contiguous(), weights)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(some, together[begin:end])
    assert torch.equal(heads, kernels.head(x, weights)[begin:end])
    assert torch.equal(heads, kernels.linear(x[begin:end].contiguous(), weights, None))


def test_a_map_of_several_formats_has_the_outputs_of_each(kernels: NativeKernels) -> None:
    one, other = weights_of(kernels, "Q4_K", 48)[0], weights_of(kernels, "Q6_K", 16)[0]
    floats = packed(torch.randn(80, DIM))
    x = torch.randn(7, DIM)
    together = kernels.linear(x, joined([one, floats, other]), None)
    assert torch.equal(together, torch.cat([kernels.linear(x, each, None) for each in (one, floats, other)], dim=1))


@pytest.mark.parametrize("form", ["Q8_0", "Q4_1"])
def test_floats_are_quantised_as_gguf_does(kernels: NativeKernels, form: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(80, DIM) * 0.05
    weight[3, 32:64] = 0.0
    kind = GGMLQuantizationType[form]
    wanted = dequantize(quantize(weight.numpy(), kind), kind)
    given = kernels.lookup(kernels.encode(WeightFormat[form], weight), torch.arange(80)).numpy()
    assert (given != wanted).mean() < 1e-3  # halves are rounded to even here
    assert np.abs(given - weight.numpy()).max() <= 1.01 * np.abs(wanted - weight.numpy()).max()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cpu_has_the_same_bits(kernels: NativeKernels, kind: str, tmp_path: Path) -> None:
    """A fleet of unlike machines goes on with each other's answers. -O0 compiles quickly and computes the same."""
    if NEEDED[kind] not in Path("/proc/cpuinfo").read_text(encoding="utf-8").split():
        pytest.skip(f"this CPU has no {kind}")
    made = tmp_path / "kernels.so"
    build("g++", ("-O0", "-w", *f"-march={KINDS[kind]}".split()), made)
    other = NativeKernels(ctypes.CDLL(str(made)), torch.float32)
    torch.manual_seed(5)
    x = torch.randn(9, DIM) * torch.rand(9, 1) * 10
    for form in FORMATS:
        weights, _ = weights_of(kernels, form, 48)
        theirs, _ = weights_of(other, form, 48)
        assert torch.equal(theirs.parts[0].panels, weights.parts[0].panels)
        assert torch.equal(other.linear(x, weights, None), kernels.linear(x, weights, None)), form
        ids = torch.arange(48)
        assert torch.equal(other.lookup(weights, ids), kernels.lookup(weights, ids)), form
    weight = torch.randn(48, DIM)
    for form in (WeightFormat.Q8_0, WeightFormat.Q4_1):
        assert torch.equal(other.encode(form, weight).parts[0].panels, kernels.encode(form, weight).parts[0].panels)
