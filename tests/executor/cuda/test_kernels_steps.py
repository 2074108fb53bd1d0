"""What kernels do to the slots around a forward is what a few lines of Python would do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.attending import ints

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from baton.executor.cuda.kernels_decode import ITEM_WORDS
from baton.executor.cuda.kernels_slots import grow_tables, start_slots
from baton.executor.cuda.kernels_steps import DONE, DRY, EMPTY, RUNS, advance, name_items, prepare_decodes
from baton.executor.slot_table import NO_BLOCK

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # by the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a device the executor's tests run the same kernels"),
]

BLOCK_SIZE, CONTEXT, QUERIES = 4, 24, 3
SPARE = 4
"""The row that belongs to nobody, after those of four slots."""
ROWS, TARGET = 16, 6
STEP = 8


def blank(*size: int) -> torch.Tensor:
    return torch.full(size, -9, dtype=torch.int32)


@dataclass(frozen=True)
class Slot:
    known: int
    limit: int
    blocks: int


slots_of = st.builds(Slot, known=st.integers(1, CONTEXT - 1), limit=st.integers(1, CONTEXT), blocks=st.integers(0, 6))


class Slots:
    """As on the device; tokens are 100 · slot + position, blocks 10 · slot + their place."""

    def __init__(self, rows: list[Slot]) -> None:
        self.rows = rows
        self.tokens = (torch.arange(SPARE + 1)[:, None] * 100 + torch.arange(CONTEXT + QUERIES)).int()
        self.known, self.limits = ints(*(row.known for row in rows), 1), ints(*(row.limit for row in rows), 0)
        places = torch.arange(CONTEXT // BLOCK_SIZE + 1)
        owned = torch.tensor([row.blocks for row in rows] + [0])
        names = (torch.arange(SPARE + 1)[:, None] * 10 + places).int()
        self.tables = torch.where(places < owned[:, None], names, NO_BLOCK)

    def code(self, slot: int) -> int:
        if slot == SPARE:
            return EMPTY
        row = self.rows[slot]
        if (row.known - 1) // BLOCK_SIZE >= row.blocks:
            return DRY
        return RUNS if row.known < row.limit else DONE

    def feeds(self, slot: int, drafts: int) -> int:
        if self.code(slot) != RUNS:
            return 0
        row = self.rows[slot]
        with_blocks = row.blocks * BLOCK_SIZE - (row.known - 1)
        return min(1 + drafts, row.limit - row.known, with_blocks)


class Prepared:
    def __init__(self, slots: Slots, named: list[int], drafts: torch.Tensor, counts: list[int], queries: int) -> None:
        count, items = len(named), len(named) + TARGET
        cells = count * queries
        self.ids, self.positions, self.row_slots = blank(cells), blank(cells), blank(cells)
        self.write_blocks, self.write_offsets = blank(cells), blank(cells)
        self.contexts, self.first_positions, self.codes, self.fed = (blank(count) for _ in range(4))
        self.first_items, self.item_counts, self.piece = blank(count), blank(count), blank(1)
        self.records = blank(items * ITEM_WORDS)
        prepare_decodes[(1,)](
            ints(*named), slots.tokens, slots.known, slots.limits, slots.tables, drafts, ints(*counts), self.ids,
            self.positions, self.row_slots, self.write_blocks, self.write_offsets, self.contexts, self.first_positions,
            self.codes, self.fed, self.first_items, self.item_counts, self.piece, self.records, count, SPARE, items, TARGET,
            STEP, slots.tokens.stride(0), slots.tables.stride(0), BLOCK_SIZE=BLOCK_SIZE, SEQUENCES=ROWS, QUERIES=queries,
            QUERIES_PADDED=1 if queries == 1 else 4, ITEMS=8, STEP=STEP,
        )  # fmt: skip
        name_items[(count,)](
            ints(*named), self.contexts, self.first_positions, self.first_items, self.item_counts, self.piece, self.records,
            ITEMS=2,
        )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(slots_of, min_size=SPARE, max_size=SPARE),
    named=st.lists(st.integers(0, SPARE), min_size=1, max_size=5, unique=True),
    counts=st.lists(st.integers(0, QUERIES - 1), min_size=5, max_size=5),
    queries=st.sampled_from([1, QUERIES]),
)
def test_a_decode_feeds_its_last_token_and_the_drafts_that_limit_and_blocks_have_room_for(
    rows: list[Slot], named: list[int], counts: list[int], queries: int
) -> None:
    slots, drafts = Slots(rows), torch.arange(5000, 5000 + 5 * (QUERIES - 1), dtype=torch.int32)
    drafted = counts[: len(named)] if queries > 1 else [0] * len(named)
    seen = Prepared(slots, named, drafts, drafted, queries)
    assert seen.codes.tolist() == [slots.code(slot) for slot in named]
    assert seen.fed.tolist() == [slots.feeds(slot, drafts) for slot, drafts in zip(named, drafted, strict=True)]
    for row, slot in enumerate(named):
        first, fed = int(slots.known[slot]) - 1, int(seen.fed[row])
        cells = range(row * queries, row * queries + fed)
        own = [int(slots.tokens[slot, first]), *drafts.tolist()[row * (queries - 1) : (row + 1) * (queries - 1)]]
        places = range(first, first + fed)
        assert seen.ids[cells].tolist() == own[:fed]
        assert seen.positions[cells].tolist() == list(places)
        assert seen.row_slots[cells].tolist() == [slot] * fed
        assert seen.write_blocks[cells].tolist() == [int(slots.tables[slot, place // BLOCK_SIZE]) for place in places]
        assert seen.write_offsets[cells].tolist() == [place % BLOCK_SIZE for place in places]
        unfed = range(row * queries + fed, (row + 1) * queries)
        assert seen.write_blocks[unfed].tolist() == [-1] * len(unfed), "what is not fed would be written"
        assert int(seen.contexts[row]) == (first + fed if fed else 0)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(slots_of, min_size=SPARE, max_size=SPARE),
    named=st.lists(st.integers(0, SPARE), min_size=1, max_size=5, unique=True),
)
def test_the_pieces_of_a_step_cover_every_context_once_and_fit_into_the_items(rows: list[Slot], named: list[int]) -> None:
    seen = Prepared(Slots(rows), named, ints(0), [0] * len(named), 1)
    records = seen.records.view(-1, ITEM_WORDS).tolist()
    pieces = [record for record in records if record[0] >= 0]
    assert records[len(pieces) :] == [[-1, *record[1:]] for record in records[len(pieces) :]], "items to spare come last"
    for row, slot in enumerate(named):
        own = [record for record in pieces if record[0] == row]
        context, first = int(seen.contexts[row]), int(seen.first_positions[row])
        ends = [min((nth + 1) * int(seen.piece), context) for nth in range(len(own))]
        begins = [0, *ends[:-1]] if own else []
        assert own == [
            [row, slot, begin, end, context, first, len(own), nth]
            for nth, (begin, end) in enumerate(zip(begins, ends, strict=True))
        ]
        assert (ends[-1] if ends else 0) == context


class Advanced:
    def __init__(
        self, slots: Slots, named: list[int], drawn: torch.Tensor, drafts: torch.Tensor, fed: list[int], queries: int
    ) -> None:
        count = len(named)
        self.yielded, self.counts, self.afterwards = blank(count * queries), blank(count), blank(count)
        codes = ints(*(slots.code(slot) for slot in named))
        advance[(1,)](
            ints(*named), drawn, drafts, codes, ints(*fed), slots.tokens, slots.known, slots.limits, self.yielded,
            self.counts, self.afterwards, count, slots.tokens.stride(0), SEQUENCES=ROWS, QUERIES=queries,
            QUERIES_PADDED=1 if queries == 1 else 4,
        )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(slots_of, min_size=SPARE, max_size=SPARE),
    named=st.lists(st.integers(0, SPARE), min_size=1, max_size=5, unique=True),
    counts=st.lists(st.integers(0, QUERIES - 1), min_size=5, max_size=5),
    cells=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=15, max_size=15),
    queries=st.sampled_from([1, QUERIES]),
)
def test_drafts_stand_as_long_as_they_are_what_was_drawn(
    rows: list[Slot], named: list[int], counts: list[int], cells: list[tuple[int, int]], queries: int
) -> None:
    slots = Slots(rows)
    fed = [slots.feeds(slot, counts[row] if queries > 1 else 0) for row, slot in enumerate(named)]
    drawn, drafts = ints(*(cell for cell, _ in cells)), ints(*(cell for _, cell in cells))
    tokens, known = slots.tokens.clone(), slots.known.clone()
    seen = Advanced(slots, named, drawn, drafts, fed, queries)
    for row, slot in enumerate(named):
        own = drawn.tolist()[row * queries : row * queries + fed[row]]
        guesses = drafts.tolist()[row * (queries - 1) : row * (queries - 1) + fed[row] - 1] if fed[row] else []
        good = next((nth for nth, guess in enumerate(guesses) if guess != own[nth]), len(guesses))
        stands = own[: good + 1] if fed[row] else []
        assert int(seen.counts[row]) == len(stands)
        assert seen.yielded.tolist()[row * queries : row * queries + len(stands)] == stands
        tokens[slot, int(known[slot]) : int(known[slot]) + len(stands)] = ints(*stands)
        known[slot] += len(stands)
        assert int(seen.afterwards[row]) == int(known[slot])
    assert torch.equal(slots.tokens, tokens)
    assert torch.equal(slots.known, known)


@pytest.mark.parametrize("drawn_at_limit", [1, 2])
def test_a_run_of_good_drafts_never_passes_the_limit(drawn_at_limit: int) -> None:
    slots = Slots([Slot(6, 6 + drawn_at_limit, 6)] + [Slot(1, 1, 0)] * 3)
    seen = Advanced(slots, [0], ints(7, 7, 7), ints(7, 7), [3], QUERIES)
    assert (int(seen.counts[0]), int(slots.known[0])) == (drawn_at_limit, 6 + drawn_at_limit)


def test_a_start_rewrites_its_row_and_no_other() -> None:
    slots = Slots([Slot(9, 20, 3)] * SPARE)
    tokens, tables = slots.tokens.clone(), slots.tables.clone()
    heads = ints(2, 5, 17, 2, 3, 1, 0, 1, 8, 0, 8, 3)
    prompt, given = ints(0, 0, 0, 11, 12, 13, 14, 15, 21), ints(99, 40, 41)
    start_slots[(2,)](
        heads, prompt, given, slots.tokens, slots.tables, slots.known, slots.limits, slots.tokens.stride(0),
        slots.tables.stride(0), slots.tables.shape[1], LANES=4,
    )  # fmt: skip
    tokens[2, :5], tokens[0, 0] = ints(11, 12, 13, 14, 15), 21
    tables[2], tables[0] = NO_BLOCK, NO_BLOCK
    tables[2, :2] = ints(40, 41)
    assert torch.equal(slots.tokens, tokens)
    assert torch.equal(slots.tables, tables)
    assert slots.known.tolist() == [1, 9, 5, 9, 1]
    assert slots.limits.tolist() == [8, 20, 17, 20, 0]


def test_grown_blocks_are_found_where_they_were_put_and_nothing_else_changes() -> None:
    slots = Slots([Slot(9, 20, 3)] * SPARE)
    tables = slots.tables.clone()
    grow_tables[(2,)](ints(1, 3, 1), ints(3, 3, 4), ints(50, 51, 52), slots.tables, 3, slots.tables.stride(0), LANES=2)
    tables[1, 3], tables[3, 3], tables[1, 4] = 50, 51, 52
    assert torch.equal(slots.tables, tables)
