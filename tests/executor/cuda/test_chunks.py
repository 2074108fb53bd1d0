"""Chunks as arrays: what fills a step up to a captured size changes nothing about the chunks and does nothing itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.executor.contract import ExecutorShape
from baton.executor.cuda.chunks import (
    ALIGNMENT,
    CHUNK_TOKENS,
    NO_CHUNKS,
    ChunkArrays,
    ChunkFrame,
    MixedSize,
    lay_out_chunks,
    mixed_sizes,
    smallest_size,
)
from baton.executor.packing import FeedRange
from baton.executor.slot_table import NO_BLOCK, SlotTable

SHAPE = ExecutorShape(slots=8, blocks=8 * 6, block_size=4, context_tokens=24)
SPARE = SHAPE.slots
MOST = 5


def table_of_all() -> SlotTable:
    table = SlotTable(SHAPE)
    table.tokens[:] = 1 + np.arange(table.tokens.size).reshape(table.tokens.shape)
    table.table[:] = np.random.default_rng(0).permutation(SHAPE.blocks).reshape(table.table.shape)
    return table


TABLE = table_of_all()


@st.composite
def feeds(draw: st.DrawFn) -> list[FeedRange]:
    slots = draw(st.lists(st.integers(0, SHAPE.slots - 1), max_size=MOST, unique=True))
    spans = [
        sorted(draw(st.lists(st.integers(0, SHAPE.context_tokens), min_size=2, max_size=2, unique=True))) for _ in slots
    ]
    return [FeedRange(slot, begin, end, draw(st.booleans())) for slot, (begin, end) in zip(slots, spans, strict=True)]


def filled_of(chunks: ChunkArrays, spare_rows: int, queries: int) -> tuple[ChunkFrame, ChunkArrays]:
    frame = ChunkFrame(len(chunks.positions) + spare_rows, MOST, queries, SPARE)
    filled = frame.fill(chunks)
    assert len(filled) == frame.length
    return frame, ChunkArrays(*(filled[place] for place in frame.places))


def laid_out(chosen: list[FeedRange], queries: int) -> ChunkArrays:
    return lay_out_chunks(chosen, TABLE, queries) if chosen else NO_CHUNKS


def rows_of_tiles(chunks: ChunkArrays, queries: int) -> list[tuple[int, int]]:
    """(row, sequence) of every lane of a tile that is inside its sequence: what the attention kernel reads and writes."""
    rows = []
    for sequence, start in zip(chunks.tile_sequences.tolist(), chunks.tile_starts.tolist(), strict=True):
        first, end = chunks.query_starts[sequence : sequence + 2].tolist()
        rows += [(first + lane, sequence) for lane in range(start, start + queries) if first + lane < end]
    return rows


@given(feeds(), st.integers(0, 30), st.integers(1, 16))
def test_what_is_filled_up_keeps_the_chunks_as_they_were(chosen: list[FeedRange], spare_rows: int, queries: int) -> None:
    plain = laid_out(chosen, queries)
    _, filled = filled_of(plain, spare_rows, queries)
    for name, before, after in zip(ChunkArrays._fields, plain, filled, strict=True):
        assert after[: len(before)].tolist() == before.tolist(), name


@given(feeds(), st.integers(0, 30), st.integers(1, 16))
def test_every_row_is_in_one_tile_of_its_own_sequence(chosen: list[FeedRange], spare_rows: int, queries: int) -> None:
    frame, filled = filled_of(laid_out(chosen, queries), spare_rows, queries)
    lengths = [feed.end - feed.begin for feed in chosen]
    sequences = [*np.repeat(np.arange(len(chosen)), lengths).tolist(), *[MOST] * spare_rows]
    assert sorted(rows_of_tiles(filled, queries)) == list(enumerate(sequences))
    assert len(sequences) == frame.tokens


@given(feeds(), st.integers(0, 30), st.integers(1, 16))
def test_what_fills_up_writes_nowhere_attends_to_nothing_and_is_drawn_for_nobody(
    chosen: list[FeedRange], spare_rows: int, queries: int
) -> None:
    plain = laid_out(chosen, queries)
    _, filled = filled_of(plain, spare_rows, queries)
    used, samples = len(plain.positions), len(plain.logit_rows)
    assert set(filled.write_blocks[used:].tolist()) <= {NO_BLOCK}
    assert set(filled.row_slots[used:].tolist()) <= {SPARE}
    assert filled.contexts[MOST] == 0
    assert filled.slots[MOST] == SPARE
    assert set(filled.drawn_slots[samples:].tolist()) <= {SPARE}
    assert all(0 <= row < max(1, used + spare_rows) for row in filled.logit_rows.tolist())
    assert len(filled.logit_rows) == len(filled.drawn_slots) == len(filled.drawn_positions) == MOST


@given(feeds().filter(bool), st.integers(1, 16))
def test_chunks_name_their_tokens_and_blocks(chosen: list[FeedRange], queries: int) -> None:
    chunks = lay_out_chunks(chosen, TABLE, queries)
    row = 0
    for feed in chosen:
        for position in range(feed.begin, feed.end):
            assert chunks.ids[row] == TABLE.tokens[feed.slot, position]
            assert chunks.write_blocks[row] == TABLE.table[feed.slot, position // SHAPE.block_size]
            assert (chunks.row_slots[row], chunks.positions[row]) == (feed.slot, position)
            assert chunks.write_offsets[row] == position % SHAPE.block_size
            row += 1
    assert row == len(chunks.ids)
    ends = [(feed.slot, feed.end) for feed in chosen if feed.samples]
    assert list(zip(chunks.drawn_slots.tolist(), chunks.drawn_positions.tolist(), strict=True)) == ends
    assert [(chunks.row_slots[at], chunks.positions[at] + 1) for at in chunks.logit_rows.tolist()] == ends


@given(st.integers(1, 600), st.integers(1, 20), st.sampled_from([64, 128]))
def test_places_are_aligned_and_do_not_overlap(tokens: int, most: int, queries: int) -> None:
    frame = ChunkFrame(tokens, most, queries, SPARE)
    ends = [0, *(place.stop for place in frame.places)]
    assert all(place.start % ALIGNMENT == 0 and place.start >= end for place, end in zip(frame.places, ends, strict=False))
    assert frame.length >= ends[-1]


@given(st.integers(1, 9000), st.integers(1, 2000))
def test_sizes_are_few_and_none_has_more_than_a_step_may_have(step_tokens: int, slots: int) -> None:
    sizes = mixed_sizes(step_tokens, slots)
    assert len(set(sizes)) == len(sizes) <= 28
    assert all(size.tokens <= step_tokens and size.sequences <= slots for size in sizes)
    for tokens in CHUNK_TOKENS:
        if tokens <= step_tokens:
            assert {MixedSize(tokens, 0), MixedSize(tokens, slots)} <= set(sizes)


@given(st.integers(64, 9000), st.integers(1, 300), st.integers(1, 600), st.integers(0, 300))
def test_a_step_takes_the_least_size_that_holds_it(step_tokens: int, slots: int, tokens: int, decodes: int) -> None:
    sizes = mixed_sizes(step_tokens, slots)
    size = smallest_size(sizes, tokens, decodes)
    holding = [other for other in sizes if other.tokens >= tokens and other.sequences >= decodes]
    if size is None:
        assert not holding
        assert tokens > max(other.tokens for other in sizes) or decodes > slots
    else:
        assert size in holding
        assert all(size.tokens <= other.tokens and size.sequences <= other.sequences for other in holding)


def test_without_chunks_nothing_is_done() -> None:
    _, filled = filled_of(NO_CHUNKS, 32, 16)
    assert set(filled.write_blocks.tolist()) == {NO_BLOCK}
    assert {sequence for _, sequence in rows_of_tiles(filled, 16)} == {MOST}
    with pytest.raises(ValueError, match="could not broadcast"):
        ChunkFrame(2, MOST, 16, SPARE).fill(lay_out_chunks([FeedRange(0, 0, 3, False)], TABLE, 16))
