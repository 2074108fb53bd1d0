"""Attention over blocks on a CUDA device, called through `executor.paged_attention` or by fused layers.

Owns the choice of tile sizes. A fused layer passes the whole row of queries, keys and values: rotation, norms of heads and
the write into blocks are then part of attention. A layer that stays as `transformers` wrote it passes rotated heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton

from baton.executor.cuda.batch import ChunkPart, DecodePart, DeviceBatch, target_items
from baton.executor.cuda.kernels_decode import attend_decode
from baton.executor.cuda.kernels_layer import rotate_and_write, write_rows
from baton.executor.cuda.kernels_prefill import attend_chunks
from baton.executor.cuda.products import NormedRows, ProductScratch
from baton.executor.cuda.streaming import StreamingLimits
from baton.executor.kv_pool import LayerKv, LayerSpec
from baton.executor.paged_attention import AttentionCall

LayerWritten = Callable[[int], None]
CHUNK_QUERIES = 128
INVARIANT_QUERIES = 64
EARLY_DIM = 128
"""Head size for which `attend_early` is available."""


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """The rotation and norms of a fused layer's heads."""

    cosines: torch.Tensor
    """[tokens, dim]"""
    sines: torch.Tensor
    norms: torch.Tensor | None
    """[2, dim] float32: for queries, for keys"""
    epsilon: float


@dataclass(frozen=True, slots=True)
class _Tiles:
    tokens: int
    stages: int
    warps: int
    more: dict[str, int] = field(default_factory=dict)


def chunk_queries(invariant: bool) -> int:
    """Queries of a chunk per program."""
    return INVARIANT_QUERIES if invariant else CHUNK_QUERIES


def _decode_tiles(sequences: int) -> _Tiles:
    """Tile sizes by measurement. With many sequences, registers limit how many programs a processor holds at once."""
    if sequences < 4:
        return _Tiles(32, 2, 2)
    return _Tiles(64, 3, 4) if 16 < sequences < 64 else _Tiles(32, 2, 2, {"maxnreg": 128})


class CudaAttention:
    """The attention of one forward."""

    def __init__(
        self, batch: DeviceBatch, kv: list[LayerKv], scratch: ProductScratch, written: LayerWritten | None = None
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._scratch = scratch
        self._written = written
        self._rows: NormedRows | None = None

    def hand_on(self, rows: NormedRows) -> None:
        """Keep a layer's normed output for the next layer; `transformers` passes only the plain rows between them."""
        self._rows = rows

    def handed(self, plain: torch.Tensor) -> NormedRows:
        """These rows with the norm that the layer before prepared, if that layer made them."""
        if self._rows is not None and self._rows.plain.data_ptr() == plain.data_ptr():
            return self._rows
        return NormedRows(plain)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[tokens, heads, value_dim], for a layer that has rotated its heads itself."""
        kv = self._kv[call.layer]
        kv_heads, tokens, key_dim = call.key.shape
        spec = LayerSpec(kv_heads, key_dim, call.value.shape[2], call.scaling, call.window, call.softcap)
        write_rows[(tokens, kv_heads)](
            call.key, call.value, kv.keys, kv.values, self._batch.write_blocks, self._batch.write_offsets,
            call.key.stride(0), call.key.stride(1), call.value.stride(0), call.value.stride(1),
            kv.keys.stride(0), kv.keys.stride(1), kv.values.stride(0), kv.values.stride(1),
            KEY_DIM=key_dim, KEY_PADDED=triton.next_power_of_2(key_dim), VALUE_DIM=spec.value_dim,
            VALUE_PADDED=triton.next_power_of_2(spec.value_dim), num_warps=1,
        )  # fmt: skip
        if self._written is not None:
            self._written(call.layer)
        query = call.query.transpose(0, 1).contiguous()
        out = torch.empty(tokens, query.shape[1], spec.value_dim, dtype=query.dtype, device=query.device)
        upto = self._batch.chunk_tokens
        if self._batch.chunks is not None:
            self._attend_chunks(kv, spec, query[:upto], out[:upto], call.sinks, self._batch.chunks)
        self._attend_decodes(kv, spec, query[upto:], out[upto:], call.sinks, None)
        return out

    def attend_fused(self, layer: int, spec: LayerSpec, heads: int, qkv: torch.Tensor, rotation: RotaryForm) -> torch.Tensor:
        """[tokens, heads · dim], from rows of queries, keys and values before norms and rotation."""
        kv, dim = self._kv[layer], spec.key_dim
        out = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
        upto = self._batch.chunk_tokens
        rotated = len(qkv) if self._turns_first else upto
        query = self._rotate(kv, spec, heads, qkv[:rotated], rotation)
        if self._batch.chunks is not None:
            self._attend_chunks(kv, spec, query[:upto], out[:upto], None, self._batch.chunks)
        if rotated > upto:
            self._attend_decodes(kv, spec, query[upto:], out[upto:], None, None)
        else:
            self._attend_decodes(kv, spec, qkv[upto:], out[upto:], None, _from(rotation, upto))
        if self._written is not None:
            self._written(layer)
        return out.view(qkv.shape[0], -1)

    @property
    def _turns_first(self) -> bool:
        """Whether rows are rotated before attention. Decodes without drafts rotate inside it."""
        decodes = self._batch.decodes
        return decodes is not None and (decodes.queries > 1 or decodes.share_slots or self._scratch.invariant)

    def _rotate(self, kv: LayerKv, spec: LayerSpec, heads: int, qkv: torch.Tensor, rotation: RotaryForm) -> torch.Tensor:
        tokens, dim = qkv.shape[0], spec.key_dim
        query = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
        if not tokens:
            return query
        each = _common_power(heads, spec.kv_heads)
        rotate_and_write[(tokens, (heads + 2 * spec.kv_heads) // each)](
            qkv, query, kv.keys, kv.values, rotation.cosines, rotation.sines,
            rotation.cosines if rotation.norms is None else rotation.norms,
            self._batch.write_blocks, self._batch.write_offsets, rotation.epsilon, qkv.stride(0), rotation.cosines.stride(0),
            kv.keys.stride(0), kv.keys.stride(1), HEADS=heads, KV_HEADS=spec.kv_heads, DIM=dim,
            HALF=triton.next_power_of_2(dim // 2), HEADS_EACH=each, HAS_NORMS=rotation.norms is not None, num_warps=4,
        )  # fmt: skip
        return query

    def _attend_chunks(
        self,
        kv: LayerKv,
        spec: LayerSpec,
        query: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        chunks: ChunkPart,
    ) -> None:
        heads = query.shape[1]
        queries = chunk_queries(self._scratch.invariant)
        wide = query.dtype.itemsize > 2 or spec.key_dim > 128
        attend_chunks[(heads, len(chunks.tile_sequences))](
            query, kv.keys, kv.values, out, self._batch.tables, chunks.slots, chunks.contexts, chunks.first_positions,
            chunks.query_starts, chunks.tile_sequences, chunks.tile_starts, query if sinks is None else sinks,
            query.stride(0), kv.keys.stride(0), kv.keys.stride(1), kv.values.stride(0), kv.values.stride(1),
            self._batch.tables.stride(0), spec.scaling, spec.softcap or 0.0, spec.window or 0,
            HEADS=heads, GROUP=heads // spec.kv_heads, KEY_DIM=spec.key_dim, KEY_PADDED=_padded(spec.key_dim),
            VALUE_DIM=spec.value_dim, VALUE_PADDED=_padded(spec.value_dim), BLOCK_SIZE=kv.keys.shape[2], QUERIES=queries,
            TOKENS=32 if wide else 64, HAS_SOFTCAP=spec.softcap is not None, HAS_WINDOW=spec.window is not None,
            HAS_SINKS=sinks is not None, ONE_WAY=self._scratch.invariant, PRECISION="ieee", STAGES=2 if wide else 3,
            num_warps=8 if wide else 4,
        )  # fmt: skip

    def _attend_decodes(
        self,
        kv: LayerKv,
        spec: LayerSpec,
        query: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        rotation: RotaryForm | None,
    ) -> None:
        """`query` has rows of queries, or with a rotation rows of queries, keys and values."""
        decodes = self._batch.decodes
        if decodes is None:
            return
        if self._scratch.invariant:
            self._attend_chunks(kv, spec, query, out, sinks, decodes.as_chunks)
            return
        streams = self._scratch.streams
        if rotation is not None and streams is not None and _suits_early(query.dtype, spec, out.shape[1]):
            self._attend_early(kv, spec, query, out, rotation, decodes, streams)
            return
        heads, work = out.shape[1], decodes.work
        group = heads // spec.kv_heads
        few = triton.next_power_of_2(group * decodes.queries)
        tiles = _decode_tiles(decodes.sequences)
        if query.dtype.itemsize > 2 or spec.key_dim > 128:
            tiles = _Tiles(32, 2, 4)
        elif few > 16:
            tiles = _Tiles(64, 2, 4)
        nowhere = work.arrived
        attend_decode[(spec.kv_heads, work.items)](
            query, kv.keys, kv.values, out, self._batch.tables, work.records, work.partials, work.partial_sums, work.arrived,
            nowhere if sinks is None else sinks, nowhere if rotation is None else rotation.cosines,
            nowhere if rotation is None else rotation.sines,
            nowhere if rotation is None or rotation.norms is None else rotation.norms, query.stride(0),
            kv.keys.stride(0), kv.keys.stride(1), kv.values.stride(0), kv.values.stride(1), self._batch.tables.stride(0),
            0 if rotation is None else rotation.cosines.stride(0), spec.scaling, spec.softcap or 0.0, spec.window or 0,
            0.0 if rotation is None else rotation.epsilon, QUERIES=decodes.queries, GROUP=group, KV_HEADS=spec.kv_heads,
            KEY_DIM=spec.key_dim, KEY_PADDED=_padded(spec.key_dim), VALUE_DIM=spec.value_dim,
            VALUE_PADDED=_padded(spec.value_dim), BLOCK_SIZE=kv.keys.shape[2], ROWS=max(16, few), FEW_ROWS=few,
            TOKENS=tiles.tokens, TOGETHER=16 if few <= 4 else 4, ROTATES=rotation is not None,
            HAS_NORMS=rotation is not None and rotation.norms is not None, HAS_SOFTCAP=spec.softcap is not None,
            HAS_WINDOW=spec.window is not None, HAS_SINKS=sinks is not None,
            PRECISION="ieee", STAGES=tiles.stages, LETS_BEGIN=self._scratch.streams is not None, num_warps=tiles.warps,
            **tiles.more,
        )  # fmt: skip

    def _attend_early(
        self,
        kv: LayerKv,
        spec: LayerSpec,
        qkv: torch.Tensor,
        out: torch.Tensor,
        rotation: RotaryForm,
        decodes: DecodePart,
        streams: StreamingLimits,
    ) -> None:
        from baton.executor.cuda.kernels_decode_early import attend_early  # only where there is Gluon

        work, group = decodes.work, out.shape[1] // spec.kv_heads
        tiles = _early_tiles(decodes.sequences, spec.kv_heads, streams.processors)
        few = triton.next_power_of_2(group)
        attend_early[(spec.kv_heads, work.items)](
            qkv, kv.keys, kv.values, out, self._batch.tables, work.records, work.partials, work.partial_sums, work.arrived,
            rotation.cosines, rotation.sines, work.partials if rotation.norms is None else rotation.norms, qkv.stride(0),
            kv.keys.stride(0), kv.keys.stride(1), self._batch.tables.stride(0), rotation.cosines.stride(0), spec.scaling,
            spec.window or 0, rotation.epsilon, GROUP=group, KV_HEADS=spec.kv_heads, DIM=spec.key_dim,
            BLOCK_SIZE=kv.keys.shape[2], FEW_ROWS=few, TOKENS=tiles.tokens, TOGETHER=16 if few <= 4 else 4,
            HAS_NORMS=rotation.norms is not None,
            HAS_WINDOW=spec.window is not None, STAGES=tiles.stages, num_warps=tiles.warps, launch_pdl=True,
        )  # fmt: skip


def _suits_early(dtype: torch.dtype, spec: LayerSpec, heads: int) -> bool:
    return dtype.itemsize == 2 and spec.key_dim == EARLY_DIM and spec.softcap is None and heads // spec.kv_heads <= 16


def _early_tiles(sequences: int, kv_heads: int, processors: int) -> _Tiles:
    """Tile sizes by measurement. With few programs all run at once, with several tiles in flight; with many, other programs
    work while one waits."""
    if sequences < 4:
        return _Tiles(64, 1, 4)
    programs = max(sequences, target_items(sequences)) * kv_heads
    if programs <= 2 * processors:
        return _Tiles(64, 3, 4)
    return _Tiles(32, 4, 4) if programs <= 3 * processors else _Tiles(32, 2, 4)


def _from(rotation: RotaryForm, row: int) -> RotaryForm:
    return RotaryForm(rotation.cosines[row:], rotation.sines[row:], rotation.norms, rotation.epsilon)


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _common_power(heads: int, kv_heads: int) -> int:
    """The largest power of two, up to eight, that divides both numbers of heads."""
    return next(power for power in (8, 4, 2, 1) if heads % power == 0 and kv_heads % power == 0)
