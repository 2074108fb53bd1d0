"""A forward of one chunk of made-up tokens: to see what a model answers, or how much memory its largest step takes."""

from __future__ import annotations

import torch

from baton.executor.cuda.attention import CudaAttention, chunk_queries
from baton.executor.cuda.batch import ChunkPart, DeviceBatch
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import ProductScratch
from baton.executor.model_loading import LoadedModel, forward


def one_chunk(pool: CudaPool, scratch: ProductScratch, tokens: int, block_size: int) -> CudaAttention:
    """Of a sequence that lies in the first blocks of the pool."""
    device = pool.pool.device

    def ints(values: range | list[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    place = torch.arange(tokens, dtype=torch.int32, device=device)
    starts = range(0, tokens, chunk_queries(scratch.invariant))
    tiles, blocks = ints([0] * len(starts)), -(-tokens // block_size)
    chunk = ChunkPart(tokens, ints([0]), ints([tokens]), ints([0]), ints([0, tokens]), tiles, ints(starts))
    batch = DeviceBatch(ints(range(blocks))[None], place // block_size, place % block_size, chunk, None)
    return CudaAttention(batch, pool.layers, scratch)


def rehearse(loaded: LoadedModel, pool: CudaPool, scratch: ProductScratch, tokens: int, block_size: int) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.int32, device=loaded.model.device)
    places = torch.arange(tokens, dtype=torch.int32, device=ids.device)[None]
    last = torch.tensor([tokens - 1], device=ids.device)
    forward(loaded.model, ids, places, last, one_chunk(pool, scratch, tokens, block_size))
