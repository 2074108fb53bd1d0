"""The number of KV blocks that fit on a device, beside the memory of the largest step."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from baton.core.errors import BatonError
from baton.executor.contract import ExecutorShape
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import ProductScratch
from baton.executor.cuda.rehearsal import rehearse
from baton.executor.kv_pool import blocks_for_memory, kv_bytes_per_block
from baton.executor.model_loading import LoadedModel

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.92
"""Share of the device's memory that is used. The rest is for graphs, other libraries and fragmentation."""


class NoRoomForKv(BatonError):
    """The model leaves no memory for KV."""


def blocks_that_fit(
    loaded: LoadedModel, shape: ExecutorShape, scratch: ProductScratch, step_tokens: int, kv_memory_bytes: int | None
) -> ExecutorShape:
    """The same shape with as many blocks as fit into the given memory, or into all that the largest step leaves."""
    each = kv_bytes_per_block(loaded.layers, shape.block_size, loaded.dtype)
    if kv_memory_bytes is not None:
        return replace(shape, blocks=blocks_for_memory(kv_memory_bytes, each, shape.block_size))
    torch.cuda.reset_peak_memory_stats()
    _rehearse(loaded, shape, scratch, step_tokens)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    others = whole - free - torch.cuda.memory_reserved()
    room = int(whole * MEMORY_SHARE) - others - peak
    log.info("device memory: %.1f GiB in all, %.1f for the model and its largest step", whole / 2**30, peak / 2**30)
    if room < each:
        raise NoRoomForKv(
            f"the model and a step of {step_tokens} tokens leave no device memory for KV; lower --max-num-batched-tokens"
        )
    return replace(shape, blocks=room // each)


def _rehearse(loaded: LoadedModel, shape: ExecutorShape, scratch: ProductScratch, step_tokens: int) -> None:
    blocks = -(-step_tokens // shape.block_size) + 1
    pool = CudaPool(loaded.layers, blocks, shape.block_size, loaded.dtype, loaded.model.device)
    rehearse(loaded, pool, scratch, step_tokens, shape.block_size)
