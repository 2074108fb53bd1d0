"""Attention that begins early gives what attention that does not gives, and leaves the same keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from baton.executor.cuda.attention import CudaAttention, RotaryForm
from baton.executor.cuda.batch import ChunkPart, DecodePart, DecodeWork, DeviceBatch
from baton.executor.cuda.kernels_decode import ITEM_WORDS
from baton.executor.cuda.products import ProductScratch
from baton.executor.cuda.streaming import streaming_limits
from baton.executor.kv_pool import LayerKv, LayerSpec

pytestmark = [pytest.mark.cuda]

DIM, BLOCK_SIZE, KV_HEADS = 128, 16, 2
IDLE_ITEMS = 3


@dataclass(frozen=True)
class Case:
    contexts: tuple[int, ...]
    piece: int
    group: int = 4
    window: int | None = None


CASES = [
    Case((1,), 64),
    Case((1024,), 64),
    Case((1, 63, 64, 65, 129), 64),
    Case((2000, 17, 300), 512),
    Case((700, 1, 1500, 64), 2048),
    Case(tuple(range(1, 400, 9)), 128),
    Case((5000,), 64),
    Case((2000, 17, 300), 512, group=3),
    Case((600, 33), 128, group=8),
    Case((2000, 17, 300), 256, window=100),
    Case((700, 90), 1024, window=64),
]


def records_of(case: Case) -> list[list[int]]:
    found = []
    for sequence, context in enumerate(case.contexts):
        count = -(-context // case.piece)
        for nth in range(count):
            end = min(context, (nth + 1) * case.piece)
            found.append([sequence, sequence, nth * case.piece, end, context, context - 1, count, nth])
    return [*found, *[[-1] * ITEM_WORDS] * IDLE_ITEMS]


def batch_of(case: Case, device: str) -> DeviceBatch:
    sequences, records = len(case.contexts), records_of(case)
    rows = len(records) * KV_HEADS * 16

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.int32, device=device)

    nan = float("nan")
    work = DecodeWork(
        items=len(records), first_items=ints(sequences), item_counts=ints(sequences), piece_tokens=ints(1),
        records=torch.tensor(records, dtype=torch.int32, device=device),
        partials=torch.full((rows * DIM,), nan, device=device),
        partial_sums=torch.full((rows * 2,), nan, device=device), arrived=ints(sequences * KV_HEADS),
    )  # fmt: skip
    some = ints(sequences)
    decodes = DecodePart(sequences, 1, some, some, some, work, ChunkPart(sequences, some, some, some, some, some, some))
    width = max(case.contexts) // BLOCK_SIZE + 2
    order = torch.randperm(sequences * width, generator=torch.Generator().manual_seed(1))
    return DeviceBatch(order.to(torch.int32).view(sequences, width).to(device), some, some, None, decodes)


def attended(case: Case, bench: ProductScratch, device: str) -> tuple[torch.Tensor, LayerKv]:
    def randoms(*size: int, seed: int) -> torch.Tensor:
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)

    batch, heads = batch_of(case, device), KV_HEADS * case.group
    kv = LayerKv(*(randoms(batch.tables.numel(), KV_HEADS, BLOCK_SIZE, DIM, seed=seed) for seed in (2, 3)))
    sequences = len(case.contexts)
    angles = torch.randn(sequences, DIM // 2, generator=torch.Generator().manual_seed(4)).repeat(1, 2).to(device)
    norms = torch.rand(2, DIM, generator=torch.Generator().manual_seed(5)).to(device)
    rotation = RotaryForm(angles.cos().bfloat16(), angles.sin().bfloat16(), norms, 1e-6)
    spec = LayerSpec(KV_HEADS, DIM, DIM, DIM**-0.5, case.window, None)
    qkv = randoms(sequences, (heads + 2 * KV_HEADS) * DIM, seed=6)
    out = CudaAttention(batch, [kv], bench).attend_fused(0, spec, heads, qkv, rotation)
    assert batch.decodes is not None
    assert not batch.decodes.work.arrived.any(), "the next step would wait for pieces that are not there"
    return out, kv


@pytest.mark.parametrize("case", CASES, ids=str)
def test_early_attention_is_attention(case: Case) -> None:
    device = torch.device("cuda")
    if streaming_limits(device) is None:
        pytest.skip("this device has no copy engine")
    early, usual = ProductScratch(device, invariant=False), ProductScratch(device, invariant=False)
    assert early.streams is not None
    usual.streams = None
    given, kept = attended(case, early, "cuda")
    wanted, kept_usually = attended(case, usual, "cuda")
    assert float((given - wanted).abs().max()) < 1e-2
    assert float((kept.keys - kept_usually.keys).abs().max()) < 3e-2
    assert torch.equal(kept.values, kept_usually.values)
