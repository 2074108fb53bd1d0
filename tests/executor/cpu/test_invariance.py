"""On a CPU the bits of KV and tokens are the same in every batch and however a prompt is cut, wherever the native kernels
have the whole model; where they have not, `batch_invariant` is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.invariance import SHAPE, Machine, Run, assert_same
from tests.support.on_cuda import on_cpu
from tests.support.tiny import family_config, save_random

from baton.core.config import BadConfig
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.cpu.native_attention import NativeAttention
from baton.executor.cpu.native_kernels import NativeKernels, load_kernels, packed
from baton.executor.kv_pool import KvPool, LayerSpec
from baton.executor.packing import PackedBatch
from baton.executor.paged_attention import AttentionCall

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = ["tiny-qwen3", "tiny-llama", "tiny-mistral"]
WINDOWS = [None, 1, 40, 200]


@pytest.fixture(scope="module", params=DTYPES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    found = load_kernels(DTYPES[request.param])
    assert found is not None, "the tests expect a compiler"
    return found


@pytest.fixture(scope="module", params=[(name, dtype) for name in NAMES for dtype in DTYPES], ids="-".join)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    name, dtype = request.param
    executor = on_cpu(name, SHAPE, tmp_path_factory.mktemp(name), dtype, invariant=True)
    yield Machine(executor)
    executor.close()


@pytest.fixture(scope="module")
def alone(machine: Machine) -> Run:
    return machine.run()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 37, 100])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(machine: Machine, alone: Run, chunk_tokens: int) -> None:
    assert_same(machine, machine.run(chunk_tokens), alone)


@pytest.mark.parametrize("company", [1, 5, 23])
@pytest.mark.parametrize("first", [False, True], ids=["behind it", "before it"])
def test_bits_do_not_depend_on_the_company(machine: Machine, alone: Run, company: int, first: bool) -> None:
    assert_same(machine, machine.run(company=company, company_first=first), alone)
    assert_same(machine, machine.run(chunk_tokens=29, company=company, company_first=first), alone)


def test_layers_whose_kv_is_announced_have_the_bits_of_those_in_one_call(machine: Machine, alone: Run) -> None:
    """An instance that prefills for others must compute what one that decodes would have computed."""
    told: list[int] = []
    machine.executor.on_layer = lambda _, layer: told.append(layer)
    try:
        assert_same(machine, machine.run(chunk_tokens=37, company=5), alone)
    finally:
        machine.executor.on_layer = None
    assert set(told) == set(range(len(machine.executor.kv.layers)))


@settings(deadline=None)
@given(rows=st.integers(1, 210), dim=st.sampled_from([16, 48, 96]), outputs=st.sampled_from([16, 48, 112]), data=st.data())
def test_a_row_of_a_linear_map_is_the_same_in_any_batch(
    kernels: NativeKernels, rows: int, dim: int, outputs: int, data: st.DataObject
) -> None:
    torch.manual_seed(rows)
    weights = packed(torch.randn(outputs, dim).to(kernels.dtype))
    x, residual = torch.randn(rows, dim).to(kernels.dtype), torch.randn(rows, outputs).to(kernels.dtype)
    bias = data.draw(st.sampled_from([None, torch.randn(outputs)]))
    together = kernels.linear(x, weights, bias, residual)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    try:
        some = kernels.linear(x[begin:end].contiguous(), weights, bias, residual[begin:end].contiguous())
    finally:
        torch.set_num_threads(1)
    assert torch.equal(some, together[begin:end])


@pytest.mark.parametrize("rows", [1, 5, 100, 193])
def test_linear_maps_agree_with_torch(kernels: NativeKernels, rows: int) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(80, 48).to(kernels.dtype), torch.randn(80)
    x, residual = torch.randn(rows, 48).to(kernels.dtype), torch.randn(rows, 80).to(kernels.dtype)
    near = {"rtol": 1e-2 if kernels.dtype is torch.bfloat16 else 1e-5, "atol": 3e-5}
    plain = x.float() @ weight.float().T
    torch.testing.assert_close(kernels.linear(x, packed(weight), None).float(), plain, **near)
    added = kernels.linear(x, packed(weight), bias, residual).float()
    torch.testing.assert_close(added, plain + bias + residual.float(), **near)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sinks", [False, True], ids=["without sinks", "with sinks"])
def test_attention_gives_a_token_the_same_bits_in_chunks_of_any_length(
    kernels: NativeKernels, window: int | None, sinks: bool
) -> None:
    torch.manual_seed(1)
    spec = LayerSpec(kv_heads=2, key_dim=32, value_dim=32, scaling=0.2, window=window, softcap=None)
    tokens, heads, block_size = 300, 6, 16
    query, key, value = (torch.randn(tokens, count, 32).to(kernels.dtype) for count in (heads, 2, 2))
    call = AttentionCall(0, query, key, value, None, spec.scaling, window, None, torch.randn(heads) if sinks else None)
    whole, *pieces = (attend_in_chunks(kernels, spec, call, length, block_size) for length in (tokens, 1, 13, 150))
    for piece in pieces:
        assert torch.equal(piece, whole)


def attend_in_chunks(
    kernels: NativeKernels, spec: LayerSpec, call: AttentionCall, length: int, block_size: int
) -> torch.Tensor:
    tokens = len(call.query)
    pool = KvPool([spec], -(-tokens // block_size), block_size, kernels.dtype)
    pool.pool.fill_(float("nan"))
    outputs = []
    for begin in range(0, tokens, length):
        end = min(begin + length, tokens)
        query, key, value = (x[begin:end].transpose(0, 1) for x in (call.query, call.key, call.value))
        here = replace(call, query=query, key=key, value=value)
        outputs.append(NativeAttention(kernels, one_sequence(begin, end, block_size), pool.layers).attend(here))
    return torch.cat(outputs)


def one_sequence(begin: int, end: int, block_size: int) -> PackedBatch:
    positions = torch.arange(begin, end)
    return PackedBatch(
        ids=torch.zeros(1, end - begin, dtype=torch.int64),
        positions=positions[None],
        query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
        contexts=torch.tensor([end], dtype=torch.int32),
        tables=torch.arange(-(-end // block_size), dtype=torch.int32)[None],
        write_blocks=(positions // block_size).int(),
        write_offsets=(positions % block_size).int(),
        logit_rows=torch.empty(0, dtype=torch.int64),
        chunk_sequences=1,
    )


@pytest.mark.parametrize(
    ("family", "options"),
    [("gemma2", {}), ("llama", {"attention": "gather"}), ("llama", {"dtype": "float16"})],
    ids=["layers of another kind", "gathered attention", "float16"],
)
def test_what_is_left_to_torch_is_not_called_batch_invariant(family: str, options: dict[str, str], tmp_path: Path) -> None:
    save_random(family_config(family), tmp_path)
    given = {"dtype": "bfloat16", **options}
    with pytest.raises(BadConfig, match="--batch-invariant cannot be had here"):
        TorchCpuExecutor.load(tmp_path, slots=1, blocks=4, block_size=16, batch_invariant=True, **given)


def test_it_is_so_without_being_asked_for_and_says_so(tmp_path: Path) -> None:
    save_random(family_config("llama"), tmp_path)
    executor = TorchCpuExecutor.load(tmp_path, dtype="bfloat16", slots=1, blocks=4, block_size=16)
    executor.close()
    assert executor.details == "CPU, batch-invariant"
