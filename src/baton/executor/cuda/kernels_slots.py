"""Changes the rows of slots on the device: a start replaces a whole row, growing adds blocks to tables."""

import triton
import triton.language as tl


@triton.jit
def start_slots(
    heads,
    prompt,
    given,
    tokens,
    tables,
    known,
    limits,
    tokens_stride,
    table_stride,
    table_width,
    LANES: tl.constexpr,
):
    """One program a start. A head: slot, tokens, limit, blocks, where its tokens begin, where its blocks begin."""
    head = heads + tl.program_id(0) * 6
    slot = tl.load(head).to(tl.int64)
    count = tl.load(head + 1)
    blocks = tl.load(head + 3)
    first_token = tl.load(head + 4)
    first_block = tl.load(head + 5)
    lane = tl.arange(0, LANES)
    tl.store(known + slot, count)
    tl.store(limits + slot, tl.load(head + 2))
    for start in range(0, count, LANES):
        at = start + lane
        token = tl.load(prompt + first_token + at, mask=at < count, other=0)
        tl.store(tokens + slot * tokens_stride + at, token, mask=at < count)
    for start in range(0, table_width, LANES):
        at = start + lane
        block = tl.load(given + first_block + at, mask=at < blocks, other=-1)
        tl.store(tables + slot * table_stride + at, block, mask=at < table_width)


@triton.jit(do_not_specialize=["count"])
def grow_tables(slots, at, blocks, tables, count, table_stride, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < count
    slot = tl.load(slots + lane, mask=inside, other=0).to(tl.int64)
    place = tl.load(at + lane, mask=inside, other=0)
    block = tl.load(blocks + lane, mask=inside, other=0)
    tl.store(tables + slot * table_stride + place, block, mask=inside)
