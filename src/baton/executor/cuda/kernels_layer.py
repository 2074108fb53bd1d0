"""The operations between the products of a layer, each in one pass: norms, rotation with the KV write, gates."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def norm_rows(
    x,
    weight,
    out,
    width,
    epsilon,
    x_stride,
    WIDTH: tl.constexpr,
):
    """Root-mean-square norm of each row, in float32; the weight is given in float32."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < width
    value = tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    factor = tl.load(weight + lane, mask=inside, other=0.0)
    tl.store(out + row * width + lane, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_and_norm_rows(
    parts,
    residual,
    weight,
    out,
    normal,
    rows,
    width,
    epsilon,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The residual and the parts [PARTS, rows, width] of a product, added up; then the norm of each row. With EARLY it may
    be launched before the parts are there."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < width
    factor = tl.load(weight + lane, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(residual + row * width + lane, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + (part * rows + row) * width + lane, mask=inside, other=0.0).to(tl.float32)
    kept = value.to(out.dtype.element_ty)
    tl.store(out + row * width + lane, kept, mask=inside)
    value = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    tl.store(normal + row * width + lane, (value * scale * factor).to(normal.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_write(
    qkv,
    query,
    keys,
    values,
    cosines,
    sines,
    norms,
    write_blocks,
    write_offsets,
    epsilon,
    qkv_stride,
    rotary_stride,
    block_stride,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """One program: some heads of one token. Queries are normed, rotated and laid out anew; keys likewise, into their block;
    values into their block as they are. A token whose block is negative is written nowhere. `norms` are the weights for
    queries, then those for keys."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS_EACH
    head = first_head + tl.arange(0, HEADS_EACH)
    lane = tl.arange(0, HALF)
    half_in = lane < DIM // 2
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & half_in[None, :]
    at = qkv + token * qkv_stride + head[:, None] * DIM + lane[None, :]
    left = tl.load(at, mask=inside, other=0.0)
    right = tl.load(at + DIM // 2, mask=inside, other=0.0)
    block = tl.load(write_blocks + token).to(tl.int64)
    offset = tl.load(write_offsets + token)
    heads_kept = tl.where(block >= 0, HEADS + 2 * KV_HEADS, 0)
    kept = (head < heads_kept)[:, None] & half_in[None, :]
    if first_head >= HEADS + KV_HEADS:
        to = values + block * block_stride + (head - HEADS - KV_HEADS)[:, None] * head_stride + offset * DIM + lane[None, :]
        tl.store(to, left, mask=kept)
        tl.store(to + DIM // 2, right, mask=kept)
    else:
        x = left.to(tl.float32)
        y = right.to(tl.float32)
        if HAS_NORMS:
            norm = norms + tl.where(first_head < HEADS, 0, DIM)
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + epsilon)[:, None]
            x = x * scale * tl.load(norm + lane, mask=half_in, other=0.0)[None, :]
            y = y * scale * tl.load(norm + DIM // 2 + lane, mask=half_in, other=0.0)[None, :]
        turn = token * rotary_stride + lane
        x_cosine = tl.load(cosines + turn, mask=half_in, other=0.0).to(tl.float32)[None, :]
        x_sine = tl.load(sines + turn, mask=half_in, other=0.0).to(tl.float32)[None, :]
        y_cosine = tl.load(cosines + turn + DIM // 2, mask=half_in, other=0.0).to(tl.float32)[None, :]
        y_sine = tl.load(sines + turn + DIM // 2, mask=half_in, other=0.0).to(tl.float32)[None, :]
        new_left = (x * x_cosine - y * x_sine).to(query.dtype.element_ty)
        new_right = (y * y_cosine + x * y_sine).to(query.dtype.element_ty)
        if first_head < HEADS:
            to_query = query + token * (HEADS * DIM) + head[:, None] * DIM + lane[None, :]
            tl.store(to_query, new_left, mask=inside)
            tl.store(to_query + DIM // 2, new_right, mask=inside)
        else:
            to_key = keys + block * block_stride + (head - HEADS)[:, None] * head_stride + offset * DIM + lane[None, :]
            tl.store(to_key, new_left, mask=kept)
            tl.store(to_key + DIM // 2, new_right, mask=kept)


@triton.jit
def write_rows(
    key,
    value,
    keys,
    values,
    write_blocks,
    write_offsets,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    block_stride,
    cache_head_stride,
    value_block_stride,
    value_cache_head_stride,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    """One program: one head of one token, key and value as the model made them, into their block."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    block = tl.load(write_blocks + token).to(tl.int64)
    offset = tl.load(write_offsets + token)
    if block < 0:
        return
    lane = tl.arange(0, KEY_PADDED)
    row = tl.load(key + head * key_head_stride + token * key_token_stride + lane, mask=lane < KEY_DIM)
    to = keys + block * block_stride + head * cache_head_stride + offset * KEY_DIM + lane
    tl.store(to, row, mask=lane < KEY_DIM)
    lane = tl.arange(0, VALUE_PADDED)
    row = tl.load(value + head * value_head_stride + token * value_token_stride + lane, mask=lane < VALUE_DIM)
    to = values + block * value_block_stride + head * value_cache_head_stride + offset * VALUE_DIM + lane
    tl.store(to, row, mask=lane < VALUE_DIM)


@triton.jit
def gate_value(gate, KIND: tl.constexpr):
    if KIND == 0:  # SiLU
        gated = gate * tl.sigmoid(gate)
    else:  # GELU by tanh
        gated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gated


@triton.jit
def gate_rows(
    gate_up,
    out,
    width,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: a piece of one row; the first half of a row is the gate, the second what it lets through. With EARLY it
    may be launched before the rows are there."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = lane < width
    gate = tl.load(gate_up + row * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + lane, mask=inside, other=0.0)
    gated = gate_value(gate, KIND).to(up.dtype)
    tl.store(out + row * width + lane, (gated.to(tl.float32) * up.to(tl.float32)).to(up.dtype), mask=inside)
