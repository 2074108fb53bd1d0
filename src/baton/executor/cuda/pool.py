"""The KV pool on the device, in the layout of `executor.kv_pool`: block outermost."""

from __future__ import annotations

import torch

from baton.executor.contract import NO_KV, KvView, spans
from baton.executor.cuda.blocks import CudaBlocks
from baton.executor.kv_pool import LayerKv, LayerSpec, layer_views


class CudaPool:
    def __init__(
        self, layers: list[LayerSpec], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = [layer.elements(block_size) for layer in layers]
        # zeroed, so that a fresh block never holds NaNs
        self.pool = torch.zeros(blocks, sum(sizes), dtype=dtype, device=device)
        self._blocks = CudaBlocks(self.pool)
        layout = spans([size * dtype.itemsize for size in sizes])
        self.view = KvView.on_device(self._blocks, layout, str(dtype).removeprefix("torch."))
        self.layers: list[LayerKv] = layer_views(self.pool, layers, block_size)

    def copy(self, source: int, target: int) -> None:
        self.pool[target].copy_(self.pool[source])

    def release(self) -> None:
        """Free the memory; the pool cannot be used afterwards."""
        self._blocks.close()
        self.view = NO_KV
        self.pool, self.layers = self.pool.new_empty(0), []
