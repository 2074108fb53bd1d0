"""Products with few rows by Hopper's copy engine: weights stream through shared memory and are prefetched early.

    out[M, N] = x[M, K] · weight[N, K]ᵀ        M up to 64; N and K thousands

    the kernel before   ──────────────────────────▶ │
    this one                 weights of STAGES tiles   │ x │ multiply, refill, multiply, refill …

One program per processor fills its shared memory with weights while the preceding kernel still runs (`launch_pdl`), and only
then waits for x, so that memory is busy between two products too. Before `await_inputs` nothing may be read that a kernel of
the step writes. A program owns whole units of work, a unit being COLUMNS rows of the weight and one of DEPTH parts of K; the
last program of a tile to end adds the parts up, always in the same order.

The norm before a product is half computed by the product before that. With HAS_NEXT, the kernel also writes the row times
the weights of the norm (`weighed`), and its sum of squares in as many parts as there are tiles; with SQUARES, such parts
scale the result.

Written in Gluon, Triton's lower-level language, because the prefetch distance of weights must be explicit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.executor.cuda.kernels_early import all_threads, await_inputs, let_begin

try:  # as newer releases call it
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load


@gluon.jit
def _ask_weights(
    wanted,
    slot,
    unit,
    at,
    each,
    weights,
    room,
    ready,
    OWN: gl.constexpr,
    DEPTH: gl.constexpr,
    GATED: gl.constexpr,
    BYTES: gl.constexpr,
):
    """BYTES: of the weights, and of the inputs that are asked for later."""
    mbarrier.expect(ready.index(slot), BYTES, pred=wanted)
    column = (unit // DEPTH) * OWN
    depth = (unit % DEPTH) * each + at
    if GATED:
        async_load(weights, [0, column, depth], ready.index(slot), room.index(slot), pred=wanted)
    else:
        async_load(weights, [column, depth], ready.index(slot), room.index(slot), pred=wanted)


@gluon.jit
def _ask_inputs(wanted, slot, unit, at, each, inputs, room, ready, DEPTH: gl.constexpr):
    depth = (unit % DEPTH) * each + at
    async_load(inputs, [0, depth], ready.index(slot), room.index(slot), pred=wanted)


@gluon.jit
def _onward(unit, at, each, programs, WIDTH: gl.constexpr):
    """The unit and the place in it that come after."""
    ends = at + WIDTH == each
    return gl.where(ends, unit + programs, unit), gl.where(ends, 0, at + WIDTH)


@gluon.jit
def _gate_value(gate, KIND: gl.constexpr):
    """SiLU, or GELU by tanh."""
    inner = gate if KIND == 0 else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp(-inner))


@gluon.jit(do_not_specialize=["rows"])
def stream_rows(
    inputs,
    weights,
    bias,
    residual,
    out,
    parts,
    arrived,
    squares,
    next_norm,
    weighed,
    next_squares,
    rows,
    columns,
    width,
    epsilon,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    DEPTH: gl.constexpr,
    GATED: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SQUARES: gl.constexpr,
    SQUARES_PADDED: gl.constexpr,
    HAS_NEXT: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`inputs` and `weights` are descriptors; gated weights are two halves of a whole, and a tile has a share of both."""
    OWN: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    BYTES: gl.constexpr = (COLUMNS + ROWS) * WIDTH * 2
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    PLAIN: gl.constexpr = gl.BlockedLayout([OWN // 32, 1], [32, 1], [1, num_warps], [0, 1])
    LANES: gl.constexpr = 32 if ROWS > 32 else ROWS
    ADDED: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [num_warps, 1], [1, 0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    units = (columns + OWN - 1) // OWN * DEPTH
    each = width // DEPTH
    if GATED:
        weight_room = gl.allocate_shared_memory(weights.dtype, [STAGES, 2, OWN, WIDTH], weights.layout)
    else:
        weight_room = gl.allocate_shared_memory(weights.dtype, [STAGES, COLUMNS, WIDTH], weights.layout)
    input_room = gl.allocate_shared_memory(inputs.dtype, [STAGES, ROWS, WIDTH], inputs.layout)
    sum_room = gl.allocate_shared_memory(gl.float32, [COLUMNS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    all_threads()
    unit = program
    at = 0
    for slot in gl.static_range(STAGES):
        _ask_weights(unit < units, slot, unit, at, each, weights, weight_room, ready, OWN, DEPTH, GATED, BYTES)
        unit, at = _onward(unit, at, each, programs, WIDTH)
    await_inputs()
    let_begin()
    unit = program
    at = 0
    for slot in gl.static_range(STAGES):
        _ask_inputs(unit < units, slot, unit, at, each, inputs, input_room, ready, DEPTH)
        unit, at = _onward(unit, at, each, programs, WIDTH)

    row = gl.arange(0, ROWS, gl.SliceLayout(0, PLAIN))
    row_in = row < rows
    if SQUARES > 0:
        some = gl.arange(0, ROWS, gl.SliceLayout(0, ADDED))
        nth = gl.arange(0, SQUARES_PADDED, gl.SliceLayout(1, ADDED))
        known = (nth < SQUARES)[:, None] & (some < rows)[None, :]
        squared = gl.load(squares + nth[:, None] * rows + some[None, :], mask=known, other=0.0)
        scale = gl.convert_layout(gl.rsqrt(gl.sum(squared, 0) / width + epsilon), gl.SliceLayout(0, PLAIN))
    slot = 0
    turn = 0
    spent = 0
    started = False
    for mine in range(program, units, programs):
        tile = mine // DEPTH
        column = tile * OWN + gl.arange(0, OWN, gl.SliceLayout(1, PLAIN))
        column_in = column < columns
        inside = column_in[:, None] & row_in[None, :]
        place = row[None, :] * columns + column[:, None]
        if HAS_RESIDUAL:  # before the product: what is read here has arrived when it is needed
            carried = gl.load(residual + place, mask=inside, other=0.0)
        if HAS_NEXT:
            factor = gl.load(next_norm + column, mask=column_in, other=0.0)
        sums = gl.zeros([COLUMNS, ROWS], gl.float32, PRODUCT)
        for _ in range(0, each, WIDTH):
            mbarrier.wait(ready.index(slot), turn)
            block = weight_room.index(slot).reshape([COLUMNS, WIDTH]) if GATED else weight_room.index(slot)
            sums = warpgroup_mma(block, input_room.index(slot).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            all_threads()
            # The product before this one is made: its room is free.
            wanted = started & (unit < units)
            _ask_weights(wanted, spent, unit, at, each, weights, weight_room, ready, OWN, DEPTH, GATED, BYTES)
            _ask_inputs(wanted, spent, unit, at, each, inputs, input_room, ready, DEPTH)
            if started:
                unit, at = _onward(unit, at, each, programs, WIDTH)
            started = True
            spent = slot
            turn = gl.where(slot == STAGES - 1, turn ^ 1, turn)
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        sums = warpgroup_mma_wait(0, deps=[sums])

        sum_room.store(sums)
        all_threads()
        if GATED:
            value = sum_room.slice(0, OWN).load(PLAIN)
            up = sum_room.slice(OWN, OWN).load(PLAIN)
        else:
            value = sum_room.load(PLAIN)
        all_threads()
        last = True
        if DEPTH > 1:
            SIZE: gl.constexpr = OWN * ROWS
            own = gl.arange(0, OWN, gl.SliceLayout(1, PLAIN))
            cell = own[:, None] + gl.arange(0, ROWS, gl.SliceLayout(0, PLAIN))[None, :] * OWN
            gl.store(parts + mine * SIZE + cell, value)
            all_threads()  # what all threads stored comes before what one of them now says
            last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == DEPTH - 1
            if last:
                gl.store(arrived + tile, 0)
                value = gl.zeros([OWN, ROWS], gl.float32, PLAIN)
                for other in gl.static_range(DEPTH):
                    value += gl.load(parts + (tile * DEPTH + other) * SIZE + cell, cache_modifier=".cg")
        if last:
            if SQUARES > 0:
                value = value * scale[None, :]
            if HAS_BIAS:
                value += gl.load(bias + column, mask=column_in, other=0.0).to(gl.float32)[:, None]
            if GATED:
                if SQUARES > 0:
                    up = up * scale[None, :]
                if HAS_BIAS:
                    up += gl.load(bias + columns + column, mask=column_in, other=0.0).to(gl.float32)[:, None]
                value = _gate_value(value, KIND) * up
            if HAS_RESIDUAL:
                value += carried.to(gl.float32)
            result = value.to(out.dtype.element_ty)
            gl.store(out + place, result, mask=inside)
            if HAS_NEXT:
                kept = gl.where(inside, result.to(gl.float32), 0.0)
                gl.store(weighed + place, (kept * factor[:, None]).to(weighed.dtype.element_ty), mask=inside)
                gl.store(next_squares + tile * rows + row, gl.sum(kept * kept, 0), mask=row_in)
