"""Paged attention in plain torch: always available, and the reference for the native kernel.

The query heads that share a KV head are folded into the query length, so that one product serves a whole group.
Decodes are padded to the longest and done as one batch; chunks one sequence at a time.
"""

from __future__ import annotations

import torch

from baton.executor.kv_pool import LayerKv, LayerSpec
from baton.executor.packing import PackedBatch


def write_gathered(kv: LayerKv, batch: PackedBatch, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write the new tokens' KV, [kv_heads, tokens, dim], into their blocks."""
    kv.keys[batch.write_blocks, :, batch.write_offsets] = key.transpose(0, 1)
    kv.values[batch.write_blocks, :, batch.write_offsets] = value.transpose(0, 1)


def attend_gathered(
    spec: LayerSpec, kv: LayerKv, batch: PackedBatch, query: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[heads, tokens, dim] queries to [tokens, heads, value_dim] outputs."""
    heads, tokens, _ = query.shape
    out = query.new_empty(tokens, heads, spec.value_dim)
    starts, contexts = batch.query_starts.tolist(), batch.contexts.tolist()
    for sequence in range(batch.chunk_sequences):
        begin, end, context = starts[sequence], starts[sequence + 1], contexts[sequence]
        positions = torch.arange(context - (end - begin), context)[None]
        piece = query[:, begin:end].unsqueeze(0)
        out[begin:end] = _attend(spec, kv, batch.tables[sequence : sequence + 1], positions, piece, sinks)[0]
    if batch.chunk_sequences < len(contexts):
        out[starts[batch.chunk_sequences] :] = _attend_decodes(spec, kv, batch, query, sinks)
    return out


def _attend_decodes(
    spec: LayerSpec, kv: LayerKv, batch: PackedBatch, query: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Outputs of all decodes, [tokens, heads, value_dim]. Decodes with fewer drafts are padded with their last token."""
    starts, contexts = batch.query_starts[batch.chunk_sequences :], batch.contexts[batch.chunk_sequences :]
    lengths = starts.diff()[:, None]
    nth = torch.arange(int(lengths.max()))
    own = nth < lengths
    nth = torch.minimum(nth, lengths - 1)
    positions = contexts[:, None] - lengths + nth
    rows = query[:, starts[:-1, None] + nth].transpose(0, 1)
    return _attend(spec, kv, batch.tables[batch.chunk_sequences :], positions, rows, sinks)[own]


def _attend(
    spec: LayerSpec,
    kv: LayerKv,
    tables: torch.Tensor,
    positions: torch.Tensor,
    query: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [sequences, heads, length, dim] at `positions` [sequences, length]; out [sequences, length, heads, dim]."""
    sequences, heads, length, dim = query.shape
    block_size = kv.keys.shape[2]
    longest = int(positions.max()) + 1
    tables = tables[:, : -(-longest // block_size)]
    keys = kv.keys[tables].transpose(1, 2).flatten(2, 3)[:, :, :longest]
    values = kv.values[tables].transpose(1, 2).flatten(2, 3)[:, :, :longest]
    seen = _seen(positions, longest, spec.window)
    # a block's tail may hold anything, also NaN, which a mask over scores or weights would not remove
    unseen = ~seen.any(dim=1)[:, None, :, None]
    keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
    group = heads // spec.kv_heads
    folded = query.reshape(sequences, spec.kv_heads, group * length, dim)
    mask = seen[:, None].repeat(1, 1, group, 1)
    if spec.softcap is None and sinks is None:
        attended = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=spec.scaling)
    else:
        attended = _attend_plainly(spec, folded, keys, values, mask, sinks)
    return attended.reshape(sequences, heads, length, spec.value_dim).transpose(1, 2)


def _seen(positions: torch.Tensor, longest: int, window: int | None) -> torch.Tensor:
    """[sequences, length, longest]: which keys each query sees."""
    distance = positions[:, :, None] - torch.arange(longest)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attend_plainly(
    spec: LayerSpec,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Soft-capping and sinks change the scores before or within the softmax, which the fused operation cannot do."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = torch.matmul(query, keys.transpose(2, 3)).to(wide) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        group = sinks.shape[0] // spec.kv_heads
        per_row = (
            sinks.view(spec.kv_heads, group, 1).expand(-1, -1, query.shape[2] // group).reshape(1, spec.kv_heads, -1, 1)
        )
        scores = torch.cat([scores, per_row.to(wide).expand(query.shape[0], -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
