"""Paged attention by the native kernels: reads blocks where they lie, for chunks and decodes alike; and whole decoder layers
around it, where nobody waits for the KV of each.

K and V of a block are stored in an order of their own (see kernels.cpp), so a pool works with one kind of attention only,
which the fingerprint of an executor names.
"""

from __future__ import annotations

import ctypes

import torch

from baton.executor.cpu.native_kernels import (
    LANES,
    TILE_KEYS,
    AttentionArguments,
    LayerArguments,
    NativeKernels,
    StepArguments,
    WriteArguments,
)
from baton.executor.kv_pool import LayerKv, LayerSpec
from baton.executor.packing import PackedBatch
from baton.executor.paged_attention import AttentionCall, LayerWritten


def can_serve(layers: list[LayerSpec], block_size: int) -> bool:
    """Whether the kernels support all these layers: sizes must be multiples of a vector."""
    dims = [dim for layer in layers for dim in (layer.key_dim, layer.value_dim)]
    return TILE_KEYS % block_size == 0 and block_size % LANES == 0 and all(dim % LANES == 0 for dim in dims)


class NativeAttention:
    """The attention of one step. Keeps the batch's memory alive."""

    def __init__(
        self, kernels: NativeKernels, batch: PackedBatch, kv: list[LayerKv], written: LayerWritten | None = None
    ) -> None:
        self._kernels = kernels
        self._batch = batch
        self._kv = kv
        self._written = written
        threads = torch.get_num_threads()
        self._read = AttentionArguments(
            query_starts=batch.query_starts.data_ptr(),
            contexts=batch.contexts.data_ptr(),
            tables=batch.tables.data_ptr(),
            table_stride=batch.tables.stride(0),
            sequences=len(batch.contexts),
            threads=threads,
        )
        self._write = WriteArguments(
            blocks=batch.write_blocks.data_ptr(),
            offsets=batch.write_offsets.data_ptr(),
            tokens=batch.tokens,
            threads=threads,
        )
        self._step = StepArguments(
            write_blocks=self._write.blocks,
            write_offsets=self._write.offsets,
            query_starts=self._read.query_starts,
            contexts=self._read.contexts,
            tables=self._read.tables,
            table_stride=self._read.table_stride,
            tokens=batch.tokens,
            sequences=len(batch.contexts),
            threads=threads,
        )
        self._scratch: torch.Tensor | None = None

    @property
    def takes_whole_layers(self) -> bool:
        """Otherwise the KV of a layer is announced before its attention is computed, so that it can leave meanwhile."""
        return self._written is None

    def whole_layer(
        self, index: int, layer: LayerArguments, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> torch.Tensor:
        kv, step = self._kv[index], self._step
        layer.keys, layer.key_head_stride, layer.block_stride = kv.keys.data_ptr(), kv.keys.stride(1), kv.keys.stride(0)
        layer.values, layer.value_head_stride = kv.values.data_ptr(), kv.values.stride(1)
        layer.block_size = kv.keys.shape[2]
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        step.scratch = self._room(x, len(x) * layer.scratch_width).data_ptr()
        return self._kernels.layer(layer, step, x)

    def _room(self, x: torch.Tensor, numbers: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < numbers:
            self._scratch = x.new_empty(numbers)
        return self._scratch

    def attend(self, call: AttentionCall) -> torch.Tensor:
        kv = self._kv[call.layer]
        self._store(kv, _rows(call.key), _rows(call.value))
        if self._written is not None:
            self._written(call.layer)
        query, sinks = _rows(call.query), None if call.sinks is None else call.sinks.float().contiguous()
        heads, tokens, key_dim = query.shape
        _, kv_heads, block_size, value_dim = kv.values.shape
        out = query.new_empty(tokens, heads, value_dim)
        a = self._read
        a.query, a.query_head_stride, a.query_token_stride = query.data_ptr(), query.stride(0), query.stride(1)
        a.out = out.data_ptr()
        a.keys, a.key_head_stride, a.block_stride = kv.keys.data_ptr(), kv.keys.stride(1), kv.keys.stride(0)
        a.values, a.value_head_stride = kv.values.data_ptr(), kv.values.stride(1)
        a.heads, a.kv_heads, a.key_dim, a.value_dim, a.block_size = heads, kv_heads, key_dim, value_dim, block_size
        a.window, a.scaling, a.softcap = call.window or 0, call.scaling, call.softcap or 0.0
        a.sinks = None if sinks is None else sinks.data_ptr()
        self._kernels.attend(ctypes.addressof(a))
        return out

    def _store(self, kv: LayerKv, key: torch.Tensor, value: torch.Tensor) -> None:
        w = self._write
        w.key, w.key_head_stride, w.key_token_stride = key.data_ptr(), key.stride(0), key.stride(1)
        w.value, w.value_head_stride, w.value_token_stride = value.data_ptr(), value.stride(0), value.stride(1)
        w.keys, w.key_pool_head_stride, w.block_stride = kv.keys.data_ptr(), kv.keys.stride(1), kv.keys.stride(0)
        w.values, w.value_pool_head_stride = kv.values.data_ptr(), kv.values.stride(1)
        _, w.kv_heads, w.block_size, w.key_dim = kv.keys.shape
        w.value_dim = kv.values.shape[3]
        self._kernels.write(ctypes.addressof(w))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, dim] with contiguous rows, as the kernels require."""
    return x if x.stride(2) == 1 else x.contiguous()
