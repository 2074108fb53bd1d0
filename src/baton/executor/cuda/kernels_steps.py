"""The slots on the device before and after a forward: the inputs of decodes, and the tokens that they yield.

A slot's row: `tokens` known so far, `known` (how many), `limits`, and its block table. `prepare_decodes` reads them at the
beginning of a step, `advance` writes them at its end, so a step needs nothing from the host but the ids of its slots.

    codes of a row     0 not in a slot     1 out of blocks     2 at its limit     3 computes     4 sits out
"""

import triton
import triton.language as tl

EMPTY, DRY, DONE, RUNS, SITS_OUT = 0, 1, 2, 3, 4
_DRY: tl.constexpr = tl.constexpr(1)
_DONE: tl.constexpr = tl.constexpr(2)
_RUNS: tl.constexpr = tl.constexpr(3)


@triton.jit(do_not_specialize=["sequences", "items", "target_items"])
def prepare_decodes(
    slots,
    tokens,
    known,
    limits,
    tables,
    drafts,
    draft_counts,
    ids,
    positions,
    row_slots,
    write_blocks,
    write_offsets,
    contexts,
    first_positions,
    codes,
    fed,
    first_items,
    item_counts,
    piece_tokens,
    records,
    sequences,
    spare,
    items,
    target_items,
    least_tokens,
    tokens_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERIES_PADDED: tl.constexpr,
    ITEMS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program. Of each sequence: what it feeds and where that goes, and how attention over it is cut into pieces."""
    row = tl.arange(0, SEQUENCES)
    inside = row < sequences
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    real = inside & (slot != spare)
    count = tl.load(known + slot, mask=real, other=1)
    limit = tl.load(limits + slot, mask=real, other=0)
    first = count - 1
    last_block = tl.load(tables + slot * table_stride + first // BLOCK_SIZE, mask=real, other=-1)
    runs = real & (last_block >= 0) & (count < limit)
    code = tl.where(last_block < 0, _DRY, tl.where(count < limit, _RUNS, _DONE))
    tl.store(codes + row, tl.where(real, code, 0), mask=inside)

    query = tl.arange(0, QUERIES_PADDED)
    cell = row[:, None] * QUERIES + query[None, :]
    cell_in = inside[:, None] & (query < QUERIES)[None, :]
    position = first[:, None] + query[None, :]
    drafted = tl.zeros([SEQUENCES], tl.int32)
    if QUERIES > 1:
        drafted = tl.load(draft_counts + row, mask=runs, other=0)
    # What stands at a position yields the token after it, and none may stand at the limit.
    may = (query[None, :] <= drafted[:, None]) & (position < (limit - 1)[:, None])
    block = tl.load(
        tables + slot[:, None] * table_stride + position // BLOCK_SIZE, mask=runs[:, None] & may & cell_in, other=-1
    )
    # Blocks are given out in order, so that whoever lacks one lacks all after it.
    feeds = runs[:, None] & may & cell_in & (block >= 0)
    count_fed = tl.sum(feeds.to(tl.int32), 1)
    token = tl.load(tokens + slot * tokens_stride + first, mask=runs, other=0)
    identifier = token[:, None] + tl.zeros([SEQUENCES, QUERIES_PADDED], tl.int32)
    if QUERIES > 1:
        draft = drafts + row[:, None] * (QUERIES - 1) + query[None, :] - 1
        proposed = tl.load(draft, mask=feeds & (query > 0)[None, :], other=0)
        identifier = tl.where((query == 0)[None, :], identifier, proposed)
    tl.store(ids + cell, identifier, mask=cell_in)
    tl.store(positions + cell, tl.where(feeds, position, 0), mask=cell_in)
    tl.store(row_slots + cell, slot.to(tl.int32)[:, None] + tl.zeros([SEQUENCES, QUERIES_PADDED], tl.int32), mask=cell_in)
    tl.store(write_blocks + cell, tl.where(feeds, block, -1), mask=cell_in)
    tl.store(write_offsets + cell, position % BLOCK_SIZE, mask=cell_in)
    context = tl.where(runs, first + count_fed, 0)
    tl.store(contexts + row, context, mask=inside)
    tl.store(first_positions + row, first, mask=inside)
    tl.store(fed + row, count_fed, mask=inside)

    cut_pieces(
        context, row, inside, first_items, item_counts, piece_tokens, records, items, target_items, least_tokens, ITEMS, STEP
    )


@triton.jit
def cut_pieces(
    context,
    row,
    inside,
    first_items,
    item_counts,
    piece_tokens,
    records,
    items,
    target_items,
    least_tokens,
    ITEMS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Into how many pieces of which length attention over each context is cut (see `kernels_decode`)."""
    even = (tl.sum(context, 0) + target_items - 1) // target_items
    piece = tl.maximum(((even + STEP - 1) // STEP) * STEP, least_tokens)
    pieces = (context + piece - 1) // piece
    tl.store(first_items + row, tl.cumsum(pieces, 0) - pieces, mask=inside)
    tl.store(item_counts + row, pieces, mask=inside)
    tl.store(piece_tokens, piece)
    for start in range(0, items, ITEMS):
        item = start + tl.arange(0, ITEMS)
        tl.store(records + item * 8, tl.full([ITEMS], -1, tl.int32), mask=item < items)


@triton.jit
def name_items(slots, contexts, first_positions, first_items, item_counts, piece_tokens, items, ITEMS: tl.constexpr):
    """One program a sequence: writes the records of its items (see `kernels_decode`)."""
    sequence = tl.program_id(0)
    first = tl.load(first_items + sequence)
    count = tl.load(item_counts + sequence)
    slot = tl.load(slots + sequence)
    context = tl.load(contexts + sequence)
    first_position = tl.load(first_positions + sequence)
    piece = tl.load(piece_tokens)
    same = tl.zeros([ITEMS], tl.int32)
    for start in range(0, count, ITEMS):
        nth = start + tl.arange(0, ITEMS)
        inside = nth < count
        record = items + (first + nth) * 8
        tl.store(record, same + sequence, mask=inside)
        tl.store(record + 1, same + slot, mask=inside)
        tl.store(record + 2, nth * piece, mask=inside)
        tl.store(record + 3, tl.minimum(nth * piece + piece, context), mask=inside)
        tl.store(record + 4, same + context, mask=inside)
        tl.store(record + 5, same + first_position, mask=inside)
        tl.store(record + 6, same + count, mask=inside)
        tl.store(record + 7, nth, mask=inside)


@triton.jit(do_not_specialize=["sequences"])
def advance(
    slots,
    drawn,
    drafts,
    codes,
    fed,
    tokens,
    known,
    limits,
    yielded,
    counts,
    afterwards,
    sequences,
    tokens_stride,
    SEQUENCES: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERIES_PADDED: tl.constexpr,
):
    """One program. Drafts are good as long as they are what was drawn in their place; the token drawn after the last good
    one is the last that comes. Writes them into their slots, and tells the host which, how many, and how many are known."""
    row = tl.arange(0, SEQUENCES)
    inside = row < sequences
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    runs = inside & (tl.load(codes + row, mask=inside, other=0) == _RUNS)
    count = tl.load(known + slot, mask=inside, other=0)
    query = tl.arange(0, QUERIES_PADDED)
    cell = row[:, None] * QUERIES + query[None, :]
    cell_in = runs[:, None] & (query < QUERIES)[None, :]
    token = tl.load(drawn + cell, mask=cell_in, other=0)
    yields = tl.where(runs, 1, 0)
    if QUERIES > 1:
        feeds = tl.load(fed + row, mask=runs, other=0)
        follows = cell_in & (query[None, :] + 1 < feeds[:, None])
        proposed = tl.load(drafts + row[:, None] * (QUERIES - 1) + query[None, :], mask=follows, other=-1)
        good = follows & (proposed == token)
        bad_before = tl.cumsum((~good & (query < QUERIES)[None, :]).to(tl.int32), 1)
        yields = yields + tl.sum((good & (bad_before == 0)).to(tl.int32), 1)
        yields = tl.where(runs, tl.minimum(yields, tl.load(limits + slot, mask=runs, other=0) - count), 0)
    keeps = cell_in & (query[None, :] < yields[:, None])
    tl.store(tokens + slot[:, None] * tokens_stride + count[:, None] + query[None, :], token, mask=keeps)
    tl.store(known + slot, count + yields, mask=runs)
    tl.store(yielded + cell, token, mask=inside[:, None] & (query < QUERIES)[None, :])
    tl.store(counts + row, yields, mask=inside)
    tl.store(afterwards + row, count + yields, mask=inside)
