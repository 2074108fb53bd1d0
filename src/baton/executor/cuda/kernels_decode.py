"""Attention of decoding rows over KV in blocks: sequences are split into pieces, computed in parallel and then combined.

    sequence A  |--piece--|--piece--|-pc-|       all pieces are `piece_tokens` long, except the last of a sequence
    sequence B  |--piece--|-|                    so long sequences beside short ones leave no processor idle
    items        0         1         2    3 4    one program for each item and KV head

`kernels_steps` decides the length of pieces from the lengths of all sequences, on the device, once a step: a captured graph
serves any mixture.

The query heads that share a KV head, and the rows that drafts add, are rows of one small product. A partial result is
softmax numerator, maximum and sum; the last program of a sequence to end adds them up, always in the same order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


ITEM_WORDS = 8
"""Words of an item's record: sequence, slot, first and last token of the piece, context, position of its first row, number
of pieces of the sequence, index of this one. One cache line, so that a program knows its work after one read."""


@triton.jit
def turned(x, y, cosine, sine, norm, other_norm, dim, epsilon, DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Rows of heads x [rows, DIM], normed and rotated; y is x with each number's partner, half a head away, in its place."""
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]
        x = x * scale * norm[None, :]
        y = y * scale * other_norm[None, :]
    return x * cosine[None, :] + tl.where(dim < DIM // 2, -1.0, 1.0)[None, :] * y * sine[None, :]


@triton.jit
def attend_decode(
    query,
    keys,
    values,
    out,
    tables,
    items,
    partials,
    partial_sums,
    arrived,
    sinks,
    cosines,
    sines,
    norms,
    query_stride,
    block_stride,
    head_stride,
    value_block_stride,
    value_head_stride,
    table_stride,
    rotary_stride,
    scale,
    softcap,
    window,
    epsilon,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    LETS_BEGIN: tl.constexpr,
):
    """With ROTATES, `query` is a row of queries, keys and values as they come out of their product: queries are normed and
    rotated here; whoever has the end of the sequence does the same to its new key, attends to it without a detour through
    memory, and leaves key and value in their block for later steps. With LETS_BEGIN the product that follows may begin
    to read its weights."""
    if LETS_BEGIN:
        gdc_launch_dependents()
    head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * 8
    sequence = tl.load(record)
    slot = tl.load(record + 1)
    begin = tl.load(record + 2)
    end = tl.load(record + 3)
    context = tl.load(record + 4)
    first_position = tl.load(record + 5)
    count = tl.load(record + 6)
    nth = tl.load(record + 7)
    if sequence < 0:
        return
    table = tables + slot.to(tl.int64) * table_stride
    row = tl.arange(0, ROWS)
    row_in = row < GROUP * QUERIES
    query_row = sequence * QUERIES + row // GROUP
    query_head = head * GROUP + row % GROUP
    key_dim = tl.arange(0, KEY_PADDED)
    value_dim = tl.arange(0, VALUE_PADDED)
    query_at = query + (query_row.to(tl.int64) * query_stride + query_head * KEY_DIM)[:, None]
    has_new = False
    if ROTATES:
        has_new = end == context
        end = tl.where(has_new, end - 1, end)
    low = begin
    if HAS_WINDOW:
        low = tl.maximum(begin, ((first_position - window + 1) // TOKENS) * TOKENS)
    # Blocks are looked up a tile ahead: where keys lie is known when they are asked for.
    token_lane = tl.arange(0, TOKENS)
    ahead = tl.load(table + (low + token_lane) // BLOCK_SIZE, mask=low + token_lane < end, other=0)
    if ROTATES:
        # All reads first: one wait for all of them.
        partner = (key_dim + KEY_DIM // 2) % KEY_DIM
        new_in = key_dim < tl.where(has_new, KEY_DIM, 0)
        new_at = query + sequence.to(tl.int64) * query_stride + (KV_HEADS * GROUP + head) * KEY_DIM
        q_raw = tl.load(query_at + key_dim[None, :], mask=row_in[:, None], other=0.0).to(tl.float32)
        q_partner = tl.load(query_at + partner[None, :], mask=row_in[:, None], other=0.0).to(tl.float32)
        new_raw = tl.load(new_at + key_dim, mask=new_in, other=0.0).to(tl.float32)
        new_partner = tl.load(new_at + partner, mask=new_in, other=0.0).to(tl.float32)
        new_value = tl.load(new_at + KV_HEADS * KEY_DIM + key_dim, mask=new_in, other=0.0)
        new_block = tl.load(table + end // BLOCK_SIZE).to(tl.int64)
        turn = sequence * rotary_stride
        cosine = tl.load(cosines + turn + key_dim).to(tl.float32)
        sine = tl.load(sines + turn + key_dim).to(tl.float32)
        q_norm, q_other, k_norm, k_other = cosine, cosine, cosine, cosine
        if HAS_NORMS:
            q_norm = tl.load(norms + key_dim)
            q_other = tl.load(norms + partner)
            k_norm = tl.load(norms + KEY_DIM + key_dim)
            k_other = tl.load(norms + KEY_DIM + partner)
        q = turned(q_raw, q_partner, cosine, sine, q_norm, q_other, key_dim, epsilon, KEY_DIM, HAS_NORMS).to(
            query.dtype.element_ty
        )
        new_key = turned(
            new_raw[None, :], new_partner[None, :], cosine, sine, k_norm, k_other, key_dim, epsilon, KEY_DIM, HAS_NORMS
        ).to(query.dtype.element_ty)  # fmt: skip
        to = new_block * block_stride + head * head_stride + (end % BLOCK_SIZE) * KEY_DIM
        tl.store(keys + to + key_dim[None, :], new_key, mask=new_in[None, :])
        tl.store(values + to + key_dim, new_value, mask=new_in)
        new_score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1) * scale
        if HAS_SOFTCAP:
            new_score = softcap * (2.0 * tl.sigmoid(2.0 * new_score / softcap) - 1.0)
        top = tl.where(has_new, new_score * LOG2_E, -float("inf"))
        total = tl.full([ROWS], 1.0, tl.float32) * has_new.to(tl.float32)
        sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32) + new_value.to(tl.float32)[None, :]
    else:
        q = tl.load(query_at + key_dim[None, :], mask=row_in[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    position = first_position + row // GROUP

    for start in tl.range(low, end, TOKENS, num_stages=STAGES):
        token = start + token_lane
        inside = token < end
        block = tl.maximum(ahead, 0).to(tl.int64)
        ahead = tl.load(table + (token + TOKENS) // BLOCK_SIZE, mask=token + TOKENS < end, other=0)
        offset = token % BLOCK_SIZE
        key_at = block * block_stride + head * head_stride + offset * KEY_DIM
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
        value_at = block * value_block_stride + head * value_head_stride + offset * VALUE_DIM
        v = tl.load(
            values + value_at[:, None] + value_dim[None, :],
            mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        sums = tl.dot(weights.to(v.dtype), v, acc=sums * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        top = higher

    if count == 1:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + query_head, mask=row_in, other=0.0).to(tl.float32) * LOG2_E - top)
        total = tl.where(total == 0.0, 1.0, total)
        out_at = query_row.to(tl.int64) * (KV_HEADS * GROUP * VALUE_DIM) + query_head * VALUE_DIM
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + value_dim[None, :], result, mask=row_in[:, None] & (value_dim < VALUE_DIM)[None, :])
        return
    lane = (item * KV_HEADS + head) * FEW_ROWS + row
    tl.store(partials + lane[:, None] * VALUE_PADDED + value_dim[None, :], sums, mask=row_in[:, None])
    tl.store(partial_sums + lane * 2, top, mask=row_in)
    tl.store(partial_sums + lane * 2 + 1, total, mask=row_in)
    tl.debug_barrier()  # what all threads stored comes before what one of them now says
    before = tl.atomic_add(arrived + sequence * KV_HEADS + head, 1, sem="acq_rel")
    if before < count - 1:
        return
    tl.store(arrived + sequence * KV_HEADS + head, 0)
    few = tl.arange(0, FEW_ROWS)
    few_in = few < GROUP * QUERIES
    best = tl.full([FEW_ROWS], -float("inf"), tl.float32)
    whole = tl.zeros([FEW_ROWS], tl.float32)
    summed = tl.zeros([FEW_ROWS, VALUE_PADDED], tl.float32)
    for start in range(0, count, TOGETHER):
        other = start + tl.arange(0, TOGETHER)
        place = ((item - nth + other) * KV_HEADS + head)[:, None] * FEW_ROWS + few[None, :]
        there = (other < count)[:, None] & few_in[None, :]
        tops = tl.load(partial_sums + place * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(partial_sums + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        theirs = tl.load(
            partials + place[:, :, None] * VALUE_PADDED + value_dim[None, None, :],
            mask=there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(best, tl.max(tops, 0))
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        fade = tl.exp2(best - anchor)
        gains = tl.exp2(tops - anchor[None, :])
        summed = summed * fade[:, None] + tl.sum(theirs * gains[:, :, None], 0)
        whole = whole * fade + tl.sum(totals * gains, 0)
        best = higher
    few_head = head * GROUP + few % GROUP
    if HAS_SINKS:
        whole += tl.exp2(tl.load(sinks + few_head, mask=few_in, other=0.0).to(tl.float32) * LOG2_E - best)
    whole = tl.where(whole == 0.0, 1.0, whole)
    few_row = sequence * QUERIES + few // GROUP
    few_at = few_row.to(tl.int64) * (KV_HEADS * GROUP * VALUE_DIM) + few_head * VALUE_DIM
    result = (summed / whole[:, None]).to(out.dtype.element_ty)
    tl.store(out + few_at[:, None] + value_dim[None, :], result, mask=few_in[:, None] & (value_dim < VALUE_DIM)[None, :])
