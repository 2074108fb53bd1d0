"""Attention of chunks over KV in blocks: tiles of queries of one sequence, over all its context so far.

    chunk of A    | tile | tile | til |      a tile is QUERIES tokens of one sequence, for one query head
    chunk of B    | tile | t |
    tiles           0      1      2     3  4

The chunk's own keys are in their blocks when this runs, so cached context and new tokens are read alike.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_chunks(
    query,
    keys,
    values,
    out,
    tables,
    slots,
    contexts,
    first_positions,
    query_starts,
    tile_sequences,
    tile_starts,
    sinks,
    query_stride,
    block_stride,
    head_stride,
    value_block_stride,
    value_head_stride,
    table_stride,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ONE_WAY: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """With ONE_WAY all context is gone through by the same instructions, wherever the chunk begins: a row's bits then do not
    depend on how its prompt was cut. (Where no position is compared, a product and a difference become one rounding.)"""
    # The last tiles of a chunk have most to do: they begin first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    kv_head = head // GROUP
    sequence = tl.load(tile_sequences + tile)
    start_row = tl.load(tile_starts + tile)
    first_row = tl.load(query_starts + sequence)
    rows = tl.load(query_starts + sequence + 1) - first_row
    context = tl.load(contexts + sequence)
    slot = tl.load(slots + sequence)

    lane = start_row + tl.arange(0, QUERIES)
    lane_in = lane < rows
    first_position = tl.load(first_positions + sequence) + start_row
    position = first_position + tl.arange(0, QUERIES)
    key_dim = tl.arange(0, KEY_PADDED)
    value_dim = tl.arange(0, VALUE_PADDED)
    row = (first_row + lane).to(tl.int64)
    q = tl.load(
        query + row[:, None] * query_stride + head * KEY_DIM + key_dim[None, :],
        mask=lane_in[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, VALUE_PADDED], tl.float32)
    table = tables + slot.to(tl.int64) * table_stride
    end = tl.minimum(first_position + QUERIES, context)
    # Tiles that every query sees whole need no comparison of positions.
    whole = (tl.minimum(first_position + 1, end) // TOKENS) * TOKENS
    low = 0
    if ONE_WAY:
        whole = 0
    if HAS_WINDOW:
        low = tl.maximum(0, ((first_position - window + 1) // TOKENS) * TOKENS)
        whole = low
    token_lane = tl.arange(0, TOKENS)
    for start in tl.range(low, whole, TOKENS, num_stages=STAGES):
        token = start + token_lane
        block = tl.maximum(tl.load(table + token // BLOCK_SIZE), 0).to(tl.int64)
        offset = token % BLOCK_SIZE
        key_at = block * block_stride + kv_head * head_stride + offset * KEY_DIM
        k = tl.load(keys + key_at[None, :] + key_dim[:, None], mask=(key_dim < KEY_DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = scores * LOG2_E
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        value_at = block * value_block_stride + kv_head * value_head_stride + offset * VALUE_DIM
        v = tl.load(values + value_at[:, None] + value_dim[None, :], mask=(value_dim < VALUE_DIM)[None, :], other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, acc=sums * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        top = higher
    for start in range(whole, end, TOKENS):
        token = start + token_lane
        inside = token < end
        block = tl.maximum(tl.load(table + token // BLOCK_SIZE, mask=inside, other=0), 0).to(tl.int64)
        offset = token % BLOCK_SIZE
        key_at = block * block_stride + kv_head * head_stride + offset * KEY_DIM
        k = tl.load(
            keys + key_at[None, :] + key_dim[:, None],
            mask=inside[None, :] & (key_dim < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = inside[None, :] & (token[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (position[:, None] - token[None, :] < window)
        scores = tl.where(seen, scores * LOG2_E, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(top - anchor)
        value_at = block * value_block_stride + kv_head * value_head_stride + offset * VALUE_DIM
        v = tl.load(
            values + value_at[:, None] + value_dim[None, :],
            mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        sums = tl.dot(weights.to(v.dtype), v, acc=sums * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        top = higher
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
    total = tl.where(total == 0.0, 1.0, total)
    out_at = row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM + value_dim[None, :]
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at, result, mask=lane_in[:, None] & (value_dim < VALUE_DIM)[None, :])
