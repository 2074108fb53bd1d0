"""The KV pool on the device, in the layout of `executor.kv`: block outermost."""

from __future__ import annotations

import torch

from baton.executor.kv import LayerKv, LayerSpec, layer_views


class CudaPool:
    def __init__(
        self, layers: list[LayerSpec], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        elements = sum(layer.elements(block_size) for layer in layers)
        # a fresh block is zeros and never stray NaNs
        self.pool = torch.zeros(blocks, elements, dtype=dtype, device=device)
        self.layers: list[LayerKv] = layer_views(self.pool, layers, block_size)

    def copy(self, source: int, target: int) -> None:
        self.pool[target].copy_(self.pool[source])

    def release(self) -> None:
        """Give the memory back; the pool is of no use afterwards."""
        self.pool, self.layers = self.pool.new_empty(0), []
