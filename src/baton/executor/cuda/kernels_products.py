"""Products with few rows: the weights are read once, at memory speed, and norms, gates and residuals are fused.

    out[M, N] = x[M, K] · weight[N, K]ᵀ        M up to a few hundred; N and K thousands

A program owns COLUMNS rows of the weight (columns of the result) and all of x, which stays in the cache. With few columns, K
is divided among DEPTH programs; the last of them to end adds the parts up, always in the same order.
"""

import triton
import triton.language as tl

from baton.executor.cuda.kernels_layer import gate_value


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    x,
    weight,
    bias,
    residual,
    out,
    parts,
    arrived,
    rows,
    columns,
    width,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row_tile = tl.program_id(2)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    each = width // DEPTH
    first = part * each
    column_in = column < columns
    row_in = row < rows
    x_at = x + row[None, :] * x_stride + (first + lane)[:, None]
    weight_at = weight + column.to(tl.int64)[:, None] * width + (first + lane)[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    ups = tl.zeros([COLUMNS, ROWS], tl.float32)
    for _ in tl.range(0, each, WIDTH, num_stages=STAGES):
        inputs = tl.load(x_at, mask=row_in[None, :], other=0.0)
        weights = tl.load(weight_at, mask=column_in[:, None], other=0.0, eviction_policy="evict_first")
        sums = tl.dot(weights, inputs, acc=sums, input_precision=PRECISION)
        if GATED:
            more = tl.load(
                weight_at + columns.to(tl.int64) * width, mask=column_in[:, None], other=0.0, eviction_policy="evict_first"
            )
            ups = tl.dot(more, inputs, acc=ups, input_precision=PRECISION)
        x_at += WIDTH
        weight_at += WIDTH
    inside = column_in[:, None] & row_in[None, :]
    cell = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    if DEPTH > 1:
        tiles = tl.num_programs(0)
        place = row_tile * tiles + tile
        SIZE: tl.constexpr = COLUMNS * ROWS * (2 if GATED else 1)
        mine = parts + (place.to(tl.int64) * DEPTH + part) * SIZE
        tl.store(mine + cell, sums)
        if GATED:
            tl.store(mine + COLUMNS * ROWS + cell, ups)
        tl.debug_barrier()  # what all threads stored comes before what one of them now says
        if tl.atomic_add(arrived + place, 1, sem="acq_rel") < DEPTH - 1:
            return
        tl.store(arrived + place, 0)
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        ups = tl.zeros([COLUMNS, ROWS], tl.float32)
        for other in tl.static_range(DEPTH):
            theirs = parts + (place.to(tl.int64) * DEPTH + other) * SIZE
            sums += tl.load(theirs + cell, cache_modifier=".cg")
            if GATED:
                ups += tl.load(theirs + COLUMNS * ROWS + cell, cache_modifier=".cg")
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column_in, other=0.0).to(tl.float32)[:, None]
        if GATED:
            ups += tl.load(bias + columns + column, mask=column_in, other=0.0).to(tl.float32)[:, None]
    if GATED:
        sums = gate_value(sums, KIND) * ups
    out_at = row.to(tl.int64)[None, :] * out_stride + column[:, None]
    if HAS_RESIDUAL:
        sums += tl.load(residual + out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + out_at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def one_row(
    x,
    weight,
    norm,
    bias,
    residual,
    out,
    columns,
    width,
    epsilon,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """x of one row: sums instead of matrix instructions, and the norm before the product made on the way."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_in = column < columns
    lane = tl.arange(0, WIDTH)
    weight_at = weight + column.to(tl.int64)[:, None] * width + lane[None, :]
    up_at = weight_at + columns.to(tl.int64) * width
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    ups = tl.zeros([COLUMNS, WIDTH], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    for start in range(0, width, WIDTH):
        weights = tl.load(weight_at + start, mask=column_in[:, None], other=0.0, eviction_policy="evict_first")
        inputs = tl.load(x + start + lane).to(tl.float32)
        if HAS_NORM:
            squares += inputs * inputs
            inputs = inputs * tl.load(norm + start + lane)
        sums += weights.to(tl.float32) * inputs[None, :]
        if GATED:
            more = tl.load(up_at + start, mask=column_in[:, None], other=0.0, eviction_policy="evict_first")
            ups += more.to(tl.float32) * inputs[None, :]
    result = tl.sum(sums, 1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / width + epsilon)
        result = result * scale
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column_in, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1)
        if HAS_NORM:
            up = up * scale
        if HAS_BIAS:
            up += tl.load(bias + columns + column, mask=column_in, other=0.0).to(tl.float32)
        result = gate_value(result, KIND) * up
    if HAS_RESIDUAL:
        result += tl.load(residual + column, mask=column_in, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column_in)
