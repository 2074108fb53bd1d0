"""Attention of decoding rows (see `kernels_decode`) in a kernel that begins before the preceding one has ended.

    the product before      ───────────────────────▶ │
    this one                   KV of STAGES tiles       │ queries, the new token │ attend, refill, attend, refill …

Cached KV does not depend on the step, so each program fetches its first tiles while queries, keys and values of the new
token are still being computed (`launch_pdl`), and lets the following product begin to read its weights. Covers
`kernels_decode` with ROTATES for one query per sequence, two-byte numbers and heads of 128; other cases, and capped scores,
use that kernel.

Written in Gluon, Triton's lower-level language, because the prefetch distance of KV must be explicit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from baton.executor.cuda.kernels_early import all_threads, await_inputs, let_begin

try:  # as newer releases call it
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import async_load
except ImportError:
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import async_copy_global_to_shared as async_load

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def _turned(x, y, cosine, sine, norm, other_norm, sign, epsilon, DIM: gl.constexpr, HAS_NORM: gl.constexpr):
    """Rows of heads x [rows, DIM], normed and rotated; y is x with each number's partner, half a head away, in its place."""
    if HAS_NORM:
        scale = gl.rsqrt(gl.sum(x * x, 1) / DIM + epsilon)[:, None]
        x = x * scale * norm[None, :]
        y = y * scale * other_norm[None, :]
    return x * cosine[None, :] + sign[None, :] * y * sine[None, :]


@gluon.jit
def _ask(
    keys,
    values,
    block,
    token,
    head,
    stage,
    key_room,
    value_room,
    wanted,
    block_stride,
    head_stride,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    COPY: gl.constexpr,
):
    """One tile of keys and values; what lies beyond the end is asked for at the last token instead."""
    dim = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    at = gl.maximum(block, 0).to(gl.int64) * block_stride + head * head_stride + (token % BLOCK_SIZE) * DIM
    there = (token >= 0)[:, None] & wanted
    async_load(key_room.index(stage), keys + at[:, None] + dim[None, :], mask=there)
    async_load(value_room.index(stage), values + at[:, None] + dim[None, :], mask=there)
    async_copy.commit_group()


@gluon.jit
def _put_together(
    out,
    partials,
    partial_sums,
    first,
    count,
    out_at,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    FEW_ROWS: gl.constexpr,
    TOGETHER: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The pieces of a sequence, always in the same order."""
    FEW: gl.constexpr = gl.BlockedLayout([1, DIM // 32], [1, 32], [num_warps, 1], [1, 0])
    row = gl.arange(0, FEW_ROWS, gl.SliceLayout(1, FEW))
    row_in = row < GROUP
    dim = gl.arange(0, DIM, gl.SliceLayout(0, FEW))
    best = gl.full([FEW_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, FEW))
    whole = gl.zeros([FEW_ROWS], gl.float32, gl.SliceLayout(1, FEW))
    summed = gl.zeros([FEW_ROWS, DIM], gl.float32, FEW)
    for start in range(0, count, TOGETHER):
        for one in gl.static_range(TOGETHER):
            place = (first + (start + one) * KV_HEADS) * FEW_ROWS + row
            there = row_in & (start + one < count)
            top = gl.load(partial_sums + place * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
            total = gl.load(partial_sums + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            sums = gl.load(
                partials + place[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
            )
            higher = gl.maximum(best, top)
            anchor = gl.where(higher == -float("inf"), 0.0, higher)
            fade = gl.exp2(best - anchor)
            gain = gl.exp2(top - anchor)
            summed = summed * fade[:, None] + sums * gain[:, None]
            whole = whole * fade + total * gain
            best = higher
    whole = gl.where(whole == 0.0, 1.0, whole)
    result = (summed / whole[:, None]).to(out.dtype.element_ty)
    gl.store(out + out_at + row[:, None] * DIM + dim[None, :], result, mask=row_in[:, None])


@gluon.jit
def attend_early(
    query,
    keys,
    values,
    out,
    tables,
    items,
    partials,
    partial_sums,
    arrived,
    cosines,
    sines,
    norms,
    query_stride,
    block_stride,
    head_stride,
    table_stride,
    rotary_stride,
    scale,
    window,
    epsilon,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    FEW_ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    TOGETHER: gl.constexpr,
    HAS_NORMS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`query` is a row of queries, keys and values as they come out of their product; see `attend_decode`."""
    ROWS: gl.constexpr = 16
    TYPE: gl.constexpr = query.dtype.element_ty
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [num_warps, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, num_warps], instr_shape=[16, 8])
    head = gl.program_id(0)
    item = gl.program_id(1)
    record = items + item * 8
    sequence = gl.load(record)
    own_slot = gl.load(record + 1)
    begin = gl.load(record + 2)
    end = gl.load(record + 3)
    context = gl.load(record + 4)
    position = gl.load(record + 5)
    count = gl.load(record + 6)
    nth = gl.load(record + 7)
    let_begin()
    if sequence >= 0:
        table = tables + own_slot.to(gl.int64) * table_stride
        has_new = end == context
        end = gl.where(has_new, end - 1, end)
        low = begin
        if HAS_WINDOW:
            low = gl.maximum(begin, ((position - window + 1) // TOKENS) * TOKENS)
        ROOM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        key_room = gl.allocate_shared_memory(TYPE, [STAGES, TOKENS, DIM], ROOM)
        value_room = gl.allocate_shared_memory(TYPE, [STAGES, TOKENS, DIM], ROOM)
        last = gl.maximum(end - 1, 0)
        lane = gl.arange(0, TOKENS, gl.SliceLayout(1, COPY))
        for stage in gl.static_range(STAGES):
            token = gl.minimum(low + stage * TOKENS + lane, last)
            block = gl.load(table + token // BLOCK_SIZE)
            _ask(
                keys, values, block, token, head, stage, key_room, value_room, low + stage * TOKENS < end, block_stride,
                head_stride, DIM, BLOCK_SIZE, COPY,
            )  # fmt: skip
        ahead = gl.load(table + gl.minimum(low + STAGES * TOKENS + lane, last) // BLOCK_SIZE)
        new_block = gl.load(table + end // BLOCK_SIZE).to(gl.int64)

        await_inputs()
        row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
        row_in = (row < GROUP)[:, None]
        dim = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
        out_dim = gl.arange(0, DIM, gl.SliceLayout(0, PRODUCT))
        partner = (dim + DIM // 2) % DIM
        sign = gl.where(dim < DIM // 2, -1.0, 1.0)
        query_at = query + sequence.to(gl.int64) * query_stride + (head * GROUP + row)[:, None] * DIM
        new_at = query + sequence.to(gl.int64) * query_stride + (KV_HEADS * GROUP + head) * DIM
        x = gl.load(query_at + dim[None, :], mask=row_in, other=0.0).to(gl.float32)
        y = gl.load(query_at + partner[None, :], mask=row_in, other=0.0).to(gl.float32)
        new_x = gl.load(new_at + dim).to(gl.float32)
        new_y = gl.load(new_at + partner).to(gl.float32)
        new_value = gl.load(new_at + KV_HEADS * DIM + dim)
        new_value_out = gl.load(new_at + KV_HEADS * DIM + out_dim).to(gl.float32)
        turn = sequence * rotary_stride
        cosine = gl.load(cosines + turn + dim).to(gl.float32)
        sine = gl.load(sines + turn + dim).to(gl.float32)
        q_norm = cosine
        q_other = cosine
        k_norm = cosine
        k_other = cosine
        if HAS_NORMS:
            q_norm = gl.load(norms + dim)
            q_other = gl.load(norms + partner)
            k_norm = gl.load(norms + DIM + dim)
            k_other = gl.load(norms + DIM + partner)
        q = _turned(x, y, cosine, sine, q_norm, q_other, sign, epsilon, DIM, HAS_NORMS).to(TYPE)
        new_key = _turned(
            new_x[None, :], new_y[None, :], cosine, sine, k_norm, k_other, sign, epsilon, DIM, HAS_NORMS
        ).to(TYPE)  # fmt: skip
        if has_new:
            to = new_block * block_stride + head * head_stride + (end % BLOCK_SIZE) * DIM
            gl.store(keys + to + dim[None, :], new_key)
            gl.store(values + to + dim, new_value)

        # The new token is what the sums begin with.
        new_score = gl.convert_layout(gl.sum(q.to(gl.float32) * new_key.to(gl.float32), 1), gl.SliceLayout(1, PRODUCT))
        once = has_new.to(gl.float32)
        top = gl.where(has_new, new_score * scale * LOG2_E, -float("inf"))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, PRODUCT)) + once
        sums = gl.zeros([ROWS, DIM], gl.float32, PRODUCT) + new_value_out[None, :] * once
        masses = gl.zeros([ROWS, TOKENS], gl.float32, PRODUCT)  # added up across threads once, at the end
        q = gl.convert_layout(q, gl.DotOperandLayout(0, PRODUCT, 2))
        nearby = gl.arange(0, TOKENS, gl.SliceLayout(0, PRODUCT))
        stage = 0
        for start in range(low, end, TOKENS):
            async_copy.wait_group(STAGES - 1)
            all_threads()
            block = ahead
            ahead = gl.load(table + gl.minimum(start + (STAGES + 1) * TOKENS + lane, last) // BLOCK_SIZE)
            k = key_room.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, PRODUCT, 2))
            scores = mma_v2(q, k, gl.zeros([ROWS, TOKENS], gl.float32, PRODUCT)) * scale
            seen = start + nearby < end
            if HAS_WINDOW:
                seen = seen & (position - start - nearby < window)
            scores = gl.where(seen[None, :], scores * LOG2_E, -float("inf"))
            higher = gl.maximum(top, gl.max(scores, 1))
            anchor = gl.where(higher == -float("inf"), 0.0, higher)
            weights = gl.exp2(scores - anchor[:, None])
            fade = gl.exp2(top - anchor)
            masses = masses * fade[:, None] + weights
            total = total * fade
            v = value_room.index(stage).load(gl.DotOperandLayout(1, PRODUCT, 2))
            sums = mma_v2(gl.convert_layout(weights.to(TYPE), gl.DotOperandLayout(0, PRODUCT, 2)), v, sums * fade[:, None])
            top = higher
            all_threads()
            token = gl.minimum(start + STAGES * TOKENS + lane, last)
            _ask(
                keys, values, block, token, head, stage, key_room, value_room, start + STAGES * TOKENS < end, block_stride,
                head_stride, DIM, BLOCK_SIZE, COPY,
            )  # fmt: skip
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        async_copy.wait_group(0)

        total = total + gl.sum(masses, 1)
        own = gl.arange(0, ROWS, gl.SliceLayout(1, PRODUCT))
        own_in = own < GROUP
        out_at = (sequence.to(gl.int64) * KV_HEADS + head) * GROUP * DIM
        if count == 1:
            whole = gl.where(total == 0.0, 1.0, total)
            result = (sums / whole[:, None]).to(TYPE)
            gl.store(out + out_at + own[:, None] * DIM + out_dim[None, :], result, mask=own_in[:, None])
        else:
            place = (item * KV_HEADS + head) * FEW_ROWS + own
            gl.store(partials + place[:, None] * DIM + out_dim[None, :], sums, mask=own_in[:, None])
            gl.store(partial_sums + place * 2, top, mask=own_in)
            gl.store(partial_sums + place * 2 + 1, total, mask=own_in)
            all_threads()  # what all threads stored comes before what one of them now says
            before = gl.atomic_add(arrived + sequence * KV_HEADS + head, 1, sem="acq_rel")
            if before == count - 1:
                gl.store(arrived + sequence * KV_HEADS + head, 0)
                _put_together(
                    out, partials, partial_sums, (item - nth) * KV_HEADS + head, count, out_at, GROUP, KV_HEADS, DIM,
                    FEW_ROWS, TOGETHER, num_warps,
                )  # fmt: skip
    else:
        await_inputs()  # or, with nobody at work, the product after this kernel would not be behind the one before it
