"""The native kernels against plain torch, over many shapes; blocks start full of NaN, as unwritten memory may."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch
from tests.support.tiny import family_config, save_random

from baton.core.config import BadConfig
from baton.executor.cpu import kernel_build
from baton.executor.cpu import native_kernels as native
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.cpu.native_attention import NativeAttention, can_serve
from baton.executor.cpu.native_kernels import NativeKernels, RotateArguments, load_kernels, packed
from baton.executor.kv_pool import KvPool, LayerSpec
from baton.executor.layer_probe import fuse_model, take_probe
from baton.executor.model_loading import load_model
from baton.executor.packing import PackedBatch
from baton.executor.paged_attention import AttentionCall, GatherAttention

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    found = load_kernels(request.param)
    assert found is not None, "the tests expect a compiler"
    return found


def batch_of(sequences: list[tuple[int, int]], tables: torch.Tensor, block_size: int) -> PackedBatch:
    """Sequences of (new tokens, tokens in all)."""
    positions = torch.cat([torch.arange(context - new, context) for new, context in sequences])
    rows = torch.cat([torch.full((new,), row) for row, (new, _) in enumerate(sequences)])
    lengths = torch.tensor([0, *(new for new, _ in sequences)])
    return PackedBatch(
        ids=torch.zeros(1, len(positions), dtype=torch.int64),
        positions=positions[None],
        query_starts=lengths.cumsum(0).int(),
        contexts=torch.tensor([context for _, context in sequences], dtype=torch.int32),
        tables=tables,
        write_blocks=tables[rows, positions // block_size].int(),
        write_offsets=(positions % block_size).int(),
        logit_rows=torch.empty(0, dtype=torch.int64),
        chunk_sequences=max((row + 1 for row, (new, _) in enumerate(sequences) if new > 1), default=0),
    )


def scattered_tables(sequences: list[tuple[int, int]], block_size: int) -> tuple[torch.Tensor, int]:
    needed = [-(-context // block_size) for _, context in sequences]
    blocks = torch.randperm(sum(needed) + 3).int()
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    return tables, sum(needed) + 3


def pools_full_of_nan(spec: LayerSpec, blocks: int, block_size: int, dtype: torch.dtype) -> list[KvPool]:
    pools = [KvPool([spec], blocks, block_size, dtype) for _ in range(2)]
    for pool in pools:
        pool.pool.fill_(float("nan"))
    return pools


@pytest.mark.parametrize("seed", range(25))
def test_native_and_gathered_attention_agree(kernels: NativeKernels, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dim, block_size, group = draw.choice([16, 32, 64, 80]), draw.choice([16, 32, 64]), draw.choice([1, 2, 3, 7])
    spec = LayerSpec(
        kv_heads=draw.choice([1, 2, 3]),
        key_dim=dim,
        value_dim=draw.choice([dim, 48]),
        scaling=draw.choice([dim**-0.5, 0.3]),
        window=draw.choice([None, 1, 7, 40]),
        softcap=draw.choice([None, 5.0]),
    )
    heads = spec.kv_heads * group
    chunks = [draw.randint(2, 70) for _ in range(draw.randint(0, 2))]
    news = chunks + [1] * draw.randint(0 if chunks else 1, 4)
    sequences = [(new, new + draw.choice([1, 6, 33, 150])) for new in news]
    tables, blocks = scattered_tables(sequences, block_size)
    gathered, native_pool = pools_full_of_nan(spec, blocks, block_size, kernels.dtype)
    sinks = torch.randn(heads) if draw.random() < 0.3 else None
    history = [(context - new, context - new) for new, context in sequences]
    for step in (history, sequences):
        batch = batch_of(step, tables, block_size)
        query, key, value = (
            torch.randn(batch.tokens, count, width).to(kernels.dtype).transpose(0, 1)
            for count, width in ((heads, dim), (spec.kv_heads, dim), (spec.kv_heads, spec.value_dim))
        )
        call = AttentionCall(0, query, key, value, None, spec.scaling, spec.window, spec.softcap, sinks)
        wanted = GatherAttention(batch, gathered.layers).attend(call).float()
        given = NativeAttention(kernels, batch, native_pool.layers).attend(call).float()
        assert torch.isfinite(wanted).all()
        torch.testing.assert_close(given, wanted, rtol=0.01, atol=TOLERANCE[kernels.dtype])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_norm_gate_rotation_and_head_agree_with_torch(kernels: NativeKernels, rows: int) -> None:
    torch.manual_seed(rows)
    near = {"rtol": 1e-2 if kernels.dtype is torch.bfloat16 else 1e-5, "atol": TOLERANCE[kernels.dtype]}
    x, weight = torch.randn(rows, 64).to(kernels.dtype), torch.randn(64)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(kernels.norm(x, weight, 1e-5).float(), normed, **near)
    silu = torch.nn.functional.silu(wide[:, :32]) * wide[:, 32:]
    gelu = torch.nn.functional.gelu(wide[:, :32], approximate="tanh") * wide[:, 32:]
    torch.testing.assert_close(kernels.gate(x, 0).float(), silu, **near)
    torch.testing.assert_close(kernels.gate(x, 1).float(), gelu, **near)
    outputs = torch.randn(70, 64).to(kernels.dtype)
    logits = kernels.head(x, packed(outputs))
    torch.testing.assert_close(logits, wide @ outputs.float().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_with_norms_of_queries_and_keys_agrees_with_torch(kernels: NativeKernels, normed: bool) -> None:
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 11, 4, 2, 32
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(kernels.dtype)
    cosines, sines = (torch.randn(tokens, dim).to(kernels.dtype) for _ in range(2))
    weight = torch.rand(dim) + 0.5
    x = qkv[:, : heads + kv_heads].float()
    if normed:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
    wanted = x * cosines.float()[:, None] + half * sines.float()[:, None]
    given = qkv.clone()
    pointer = weight.data_ptr() if normed else None
    arguments = RotateArguments(
        given.data_ptr(), given.stride(0), cosines.data_ptr(), sines.data_ptr(), pointer, pointer,
        1e-6, tokens, heads, kv_heads, dim, 2,
    )  # fmt: skip
    kernels.rotate(ctypes.addressof(arguments))
    torch.testing.assert_close(given[:, : heads + kv_heads].float(), wanted, rtol=1e-2, atol=TOLERANCE[kernels.dtype])
    assert torch.equal(given[:, heads + kv_heads :], qkv[:, heads + kv_heads :])


def test_kernels_and_torch_share_one_pool_of_threads(kernels: NativeKernels) -> None:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1


def test_without_a_compiler_there_are_no_kernels_and_a_warning_says_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    with caplog.at_level("WARNING"):
        assert load_kernels(torch.float32) is None
    assert "no g++" in caplog.text
    assert "three times the CPU time" in caplog.text


def test_native_attention_that_cannot_be_had_is_refused_by_its_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    save_random(family_config("llama"), tmp_path)
    with pytest.raises(BadConfig, match="--attention native cannot be had"):
        TorchCpuExecutor.load(tmp_path, dtype="float32", slots=1, blocks=4, block_size=16, attention="native")


def test_a_failing_compiler_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_build, "NATIVE", ("--no-such-flag",))
    assert load_kernels(torch.float32) is None
    assert "the compiler failed" in caplog.text
    assert list((tmp_path / "kernels").iterdir()) == []


def test_odd_sizes_are_left_to_the_gathered_path() -> None:
    assert can_serve([LayerSpec(1, 64, 64, 1.0)], 32)
    assert not can_serve([LayerSpec(1, 20, 20, 1.0)], 32)
    assert not can_serve([LayerSpec(1, 64, 64, 1.0)], 8)


@pytest.mark.parametrize(("family", "fused"), [("llama", 3), ("qwen3", 3), ("mistral", 3), ("gemma2", 0), ("gemma3", 0)])
def test_fused_models_answer_as_they_did_before(
    family: str, fused: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random(family_config(family), tmp_path)
    loaded = load_model(tmp_path, "float32")
    kernels = load_kernels(torch.float32)
    assert kernels is not None
    with torch.inference_mode():
        before = take_probe(loaded.model, loaded.layers, torch.float32)
        with caplog.at_level("INFO"):
            fuse_model(loaded.model, loaded.layers, kernels)
        after = take_probe(loaded.model, loaded.layers, torch.float32)
    assert f"{fused} of 3 layers fused" in caplog.text
    last = max(name for name in before.seen if name.endswith("norm") and name.count(".") == 1)
    torch.testing.assert_close(after.seen[last].output, before.seen[last].output, rtol=1e-4, atol=1e-4)


def test_a_layer_that_only_looks_common_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Granite has the same parts as Llama but scales its residuals: the probe tells them apart."""
    from tests.support.tiny import SIZES
    from transformers import GraniteConfig

    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    save_random(GraniteConfig(**{**sizes, "hidden_size": 128}, residual_multiplier=0.4), tmp_path)
    loaded = load_model(tmp_path, "float32")
    kernels = load_kernels(torch.float32)
    assert kernels is not None
    with caplog.at_level("INFO"):
        fuse_model(loaded.model, loaded.layers, kernels)
    assert "0 of 3 layers fused" in caplog.text
