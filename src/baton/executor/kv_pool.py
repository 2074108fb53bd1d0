"""The KV pool: one allocation, block outermost, so that a block of all layers is one contiguous run of bytes.

    block b:  | layer 0: K [kv_heads, block_size, head_dim]  V [...] | layer 1: K ... V ... | ...

Layers may differ in heads and head sizes. The allocator decides where the memory is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.core.setting import BadConfig
from baton.executor.contract import NO_KV, Allocate, KvView, spans, zeroed


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The parameters of one attention layer, as discovered at load."""

    kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    """Sliding window in positions, the token included; None attends to all."""
    softcap: float | None = None
    has_sinks: bool = False

    def elements(self, block_size: int) -> int:
        """Numbers in one block of this layer."""
        return self.kv_heads * block_size * (self.key_dim + self.value_dim)


class LayerKv(NamedTuple):
    """Views into the pool, [blocks, kv_heads, block_size, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class KvPool:
    def __init__(
        self, layers: list[LayerSpec], blocks: int, block_size: int, dtype: torch.dtype, allocate: Allocate = zeroed
    ) -> None:
        sizes = [layer.elements(block_size) for layer in layers]
        self.elements_per_block = sum(sizes)
        # zeroed, so that a fresh block never holds NaNs
        raw = allocate(blocks * self.elements_per_block * dtype.itemsize)
        self.pool = torch.from_numpy(raw).view(dtype).view(blocks, self.elements_per_block)
        self.layers = layer_views(self.pool, layers, block_size)
        self.view = KvView(
            raw.reshape(blocks, -1), spans([size * dtype.itemsize for size in sizes]), str(dtype).removeprefix("torch.")
        )

    def release(self) -> None:
        """Free the memory; the pool cannot be used afterwards."""
        self.pool, self.layers = self.pool.new_empty(0), []
        self.view = NO_KV

    def copy(self, source: int, target: int) -> None:
        self.pool[target].copy_(self.pool[source])


def layer_views(pool: torch.Tensor, layers: list[LayerSpec], block_size: int) -> list[LayerKv]:
    """The views of each layer in a pool [blocks, elements a block]."""
    blocks, elements = pool.shape
    views, offset = [], 0
    for layer in layers:
        pair = []
        for dim in (layer.key_dim, layer.value_dim):
            strides = (elements, block_size * dim, dim, 1)
            pair.append(pool.as_strided((blocks, layer.kv_heads, block_size, dim), strides, offset))
            offset += layer.kv_heads * block_size * dim
        views.append(LayerKv(*pair))
    return views


def kv_bytes_per_block(layers: list[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    return sum(layer.elements(block_size) for layer in layers) * dtype.itemsize


def blocks_for_memory(memory_bytes: int, bytes_per_block: int, block_size: int) -> int:
    """How many blocks fit into a memory budget. Raises BadConfig where none does."""
    if memory_bytes < bytes_per_block:
        raise BadConfig(
            f"--kv-memory {memory_bytes} has no room for one block of KV, which holds {block_size} tokens in "
            f"{bytes_per_block} bytes; give at least {bytes_per_block}, or a smaller --block-size"
        )
    return memory_bytes // bytes_per_block
