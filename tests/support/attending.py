"""Attention over KV in blocks as a textbook has it, and small pools to try kernels on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from baton.executor.kv_pool import LayerKv, LayerSpec, layer_views

BLOCK_SIZE = 16
NOTHING = torch.zeros(1, dtype=torch.int32)
"""In place of what a kernel is told not to read."""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Paged:
    """KV of some slots, and tables that lead to it in no order."""

    spec: LayerSpec
    kv: LayerKv
    tables: torch.Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        """As the attention kernels take them."""
        keys, values = self.kv
        return keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), self.tables.stride(0)

    def gathered(self, slot: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first tokens of a slot, [kv_heads, tokens, dim]."""
        table = self.tables[slot].long()
        keys, values = (part[table].transpose(0, 1).flatten(1, 2)[:, :context] for part in self.kv)
        return keys, values

    def attended(self, query: torch.Tensor, slot: int, first: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """What rows [tokens, heads, dim] at positions from `first` on see, in float64."""
        positions = torch.arange(first, first + len(query))
        context = int(positions[-1]) + 1
        group = query.shape[1] // self.spec.kv_heads
        keys, values = (part.double().repeat_interleave(group, 0) for part in self.gathered(slot, context))
        scores = query.double().transpose(0, 1) @ keys.transpose(1, 2) * self.spec.scaling
        if self.spec.softcap is not None:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        back = positions[:, None] - torch.arange(context)
        seen = (back >= 0) & (back < (self.spec.window or context))
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(query), 1)], -1)
        return (torch.softmax(scores, -1)[..., :context] @ values).transpose(0, 1).float()


def paged(spec: LayerSpec, slots: int, blocks_each: int, seed: int) -> Paged:
    """Blocks of two layers of which this is the second: a stride that is not the length of a layer."""
    stream = torch.Generator().manual_seed(seed)
    count = slots * blocks_each + 3
    pool = torch.randn(count, 2 * spec.elements(BLOCK_SIZE), generator=stream)
    _, kv = layer_views(pool, [spec, spec], BLOCK_SIZE)
    order = torch.randperm(count, generator=stream)[: slots * blocks_each]
    return Paged(spec, kv, order.view(slots, blocks_each).int())


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim]"""
    half = x.shape[-1] // 2
    partner = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cosines[:, None] + partner * sines[:, None]


class HostPool:
    """A KV pool as `CudaPool` has it, in memory that the interpreter's kernels reach."""

    def __init__(
        self, layers: list[LayerSpec], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pool = torch.zeros(blocks, sum(layer.elements(block_size) for layer in layers), dtype=dtype, device=device)
        self.layers = layer_views(self.pool, layers, block_size)
