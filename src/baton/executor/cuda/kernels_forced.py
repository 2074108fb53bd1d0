"""Drafts that a grammar forces, and the rows of a step in which each decode has as many rows as it may need.

    decodes    A            B    C                 each is planned in full: QUERIES cells, of which some are fed
    cells      A0 A1 … A7   B0   C0 C1 … C7
    rows       A0 A1 A2 B0 C0 -  -  -              of the forward: those that the host gave room, then padding

A row is a sequence of its own in attention, with all keys of its slot up to its position: the keys of a step are in their
blocks before attention begins.
"""

import triton
import triton.language as tl

from baton.executor.cuda.kernels_steps import cut_pieces

PLAN_HEAD: tl.constexpr = tl.constexpr(2)
"""Words of a plan before its tokens: the position of the first, and their number."""


@triton.jit
def propose_forced(
    slots,
    tokens,
    known,
    plans,
    planned,
    rooms,
    others,
    other_counts,
    drafts,
    counts,
    tokens_stride,
    plan_stride,
    PLANNED: tl.constexpr,
    OTHERS: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_PADDED: tl.constexpr,
):
    """One program: one decode. Its drafts are what its plan says of the next positions, if it has a plan and all that has
    become known since agrees; else the other drafts. `rooms` bounds either."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    room = tl.load(rooms + row)
    count = tl.load(known + slot)
    plan = plans + slot * plan_stride
    has_plan = tl.load(planned + row) > 0
    base = tl.load(plan, mask=has_plan, other=0)
    length = tl.load(plan + 1, mask=has_plan, other=0)
    at = count - base
    lane = tl.arange(0, PLANNED)
    since = (lane < at) & (lane < length)
    said = tl.load(plan + PLAN_HEAD + lane, mask=since, other=0)
    came = tl.load(tokens + slot * tokens_stride + base + lane, mask=since, other=0)
    differs = tl.sum(tl.where(said != came, 1, 0), 0)
    left = tl.where((at >= 0) & (differs == 0), tl.maximum(length - at, 0), 0)
    draft_lane = tl.arange(0, DRAFTS_PADDED)
    draft = tl.load(plan + PLAN_HEAD + at + draft_lane, mask=draft_lane < left, other=0)
    number = left
    if OTHERS > 0:
        other = tl.load(others + row * OTHERS + draft_lane, mask=draft_lane < OTHERS, other=0)
        draft = tl.where(left > 0, draft, other)
        number = tl.where(left > 0, left, tl.load(other_counts + row))
    number = tl.minimum(tl.minimum(number, room), DRAFTS)
    tl.store(drafts + row * DRAFTS + draft_lane, tl.where(draft_lane < number, draft, 0), mask=draft_lane < DRAFTS)
    tl.store(counts + row, number)


@triton.jit(do_not_specialize=["rows", "items", "target_items"])
def gather_rows(
    cells,
    cell_ids,
    cell_positions,
    cell_slots,
    cell_blocks,
    cell_offsets,
    ids,
    positions,
    row_slots,
    write_blocks,
    write_offsets,
    slots,
    contexts,
    first_positions,
    first_items,
    item_counts,
    piece_tokens,
    records,
    rows,
    spare,
    items,
    target_items,
    least_tokens,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program. Takes each row from its cell; a row without a cell (-1), or whose cell is not fed, computes nothing."""
    row = tl.arange(0, ROWS)
    inside = row < rows
    cell = tl.load(cells + row, mask=inside, other=-1)
    real = cell >= 0
    slot = tl.load(cell_slots + cell, mask=real, other=spare)
    position = tl.load(cell_positions + cell, mask=real, other=0)
    block = tl.load(cell_blocks + cell, mask=real, other=-1)
    tl.store(ids + row, tl.load(cell_ids + cell, mask=real, other=0), mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(row_slots + row, slot, mask=inside)
    tl.store(write_blocks + row, block, mask=inside)
    tl.store(write_offsets + row, tl.load(cell_offsets + cell, mask=real, other=0), mask=inside)
    context = tl.where(block >= 0, position + 1, 0)
    tl.store(slots + row, slot, mask=inside)
    tl.store(contexts + row, context, mask=inside)
    tl.store(first_positions + row, position, mask=inside)
    cut_pieces(
        context, row, inside, first_items, item_counts, piece_tokens, records, items, target_items, least_tokens, ITEMS, STEP
    )
