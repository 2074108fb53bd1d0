"""Around a forward, drafts are fed as far as there is room, and kept exactly as long as they agree with what was drawn."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

import triton

from baton.core.errors import InvariantViolated
from baton.executor.cuda.drafting import propose_on_device
from baton.executor.cuda.kernels_steps import DONE, DRY, EMPTY, RUNS, advance, prepare_decodes
from baton.executor.drafts import DraftTokens, NaiveProposer, NgramProposer, no_drafts

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT, BLOCK_SIZE, NOTHING = 64, 8, 7


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=DEVICE)


@dataclass
class Came:
    """Of a step, by row."""

    codes: list[int]
    fed: list[int]
    counts: list[int]
    known: list[int]
    yielded: list[list[int]]


class Slots:
    """The tables of an executor, one row a slot and a spare one that belongs to nobody."""

    def __init__(self, sequences: list[list[int]], limits: list[int] | None = None, blocks: list[int] | None = None) -> None:
        width = CONTEXT // BLOCK_SIZE + 1
        self.spare = len(sequences)
        self.tokens = torch.full((self.spare + 1, CONTEXT + 8), NOTHING, dtype=torch.int32, device=DEVICE)
        self.tables = torch.full((self.spare + 1, width), -1, dtype=torch.int32, device=DEVICE)
        for slot, sequence in enumerate(sequences):
            self.tokens[slot, : len(sequence)] = ints(*sequence)
            self.tables[slot, : width if blocks is None else blocks[slot]] = 3
        self.known = ints(*map(len, sequences), 1)
        self.limits = ints(*(limits or [CONTEXT] * len(sequences)), 0)

    def step(self, slots: list[int], drawn: list[list[int]], drafts: list[list[int]], most: int) -> Came:
        """`drawn` has one token for each row that may be fed, whether it is or not."""
        rows, queries = len(slots), most + 1
        padded = torch.zeros((rows, max(1, most)), dtype=torch.int32, device=DEVICE)
        for row, mine in enumerate(drafts):
            padded[row, : len(mine)] = ints(*mine)
        named, codes, fed = ints(*slots), zeros(rows), zeros(rows)
        sizes = {"SEQUENCES": 16, "QUERIES": queries, "QUERIES_PADDED": triton.next_power_of_2(queries)}
        columns = [zeros(rows * queries) for _ in range(5)]
        prepare_decodes[(1,)](
            named, self.tokens, self.known, self.limits, self.tables, padded, ints(*map(len, drafts)), *columns, zeros(rows),
            zeros(rows), codes, fed, zeros(rows), zeros(rows), zeros(1), zeros(8 * 32), rows, self.spare, 32, 16, 8,
            self.tokens.stride(0), self.tables.stride(0), BLOCK_SIZE=BLOCK_SIZE, ITEMS=32, STEP=8, **sizes,
        )  # fmt: skip
        yielded, counts, afterwards = zeros(rows * queries), zeros(rows), zeros(rows)
        advance[(1,)](
            named, torch.tensor(drawn, dtype=torch.int32, device=DEVICE).view(-1), padded, codes, fed, self.tokens,
            self.known, self.limits, yielded, counts, afterwards, rows, self.tokens.stride(0), **sizes,
        )  # fmt: skip
        kept = [row[:count] for row, count in zip(yielded.view(rows, queries).tolist(), counts.tolist(), strict=True)]
        return Came(codes.tolist(), fed.tolist(), counts.tolist(), afterwards.tolist(), kept)

    def sequence(self, slot: int) -> list[int]:
        return self.tokens[slot, : int(self.known[slot])].tolist()

    def untouched(self, slot: int) -> bool:
        return set(self.tokens[slot, int(self.known[slot]) :].tolist()) <= {NOTHING}


def fed_of(known: int, drafts: int, limit: int, blocks: int) -> int:
    """Slow and obvious: a token is fed while it is a draft, may have a follower, and has a block."""
    fed = 0
    while fed <= drafts and known + fed < limit and known - 1 + fed < blocks * BLOCK_SIZE:
        fed += 1
    return fed


@settings(max_examples=40, deadline=None)
@given(data=st.data(), most=st.integers(0, 5), rows=st.integers(1, 3))
def test_drafts_stand_until_the_first_that_differs_within_limits_and_blocks(
    data: st.DataObject, most: int, rows: int
) -> None:
    token = st.integers(0, 1)
    known = [data.draw(st.lists(token, min_size=1, max_size=20)) for _ in range(rows)]
    limits = [len(sequence) + data.draw(st.integers(0, most + 2)) for sequence in known]
    blocks = [data.draw(st.integers(0, 4)) for _ in known]
    drawn = [data.draw(st.lists(token, min_size=most + 1, max_size=most + 1)) for _ in range(rows)]
    drafts = [data.draw(st.lists(token, max_size=most)) for _ in range(rows)]
    slots = Slots(known, limits, blocks)
    came = slots.step(list(range(rows)), drawn, drafts, most)
    for slot in range(rows):
        fed = fed_of(len(known[slot]), len(drafts[slot]), limits[slot], blocks[slot])
        stands = min(1, fed)
        while stands and stands < fed and drafts[slot][stands - 1] == drawn[slot][stands - 1]:
            stands += 1
        assert (came.fed[slot], came.counts[slot]) == (fed, stands)
        assert came.yielded[slot] == drawn[slot][:stands]
        assert slots.sequence(slot) == known[slot] + drawn[slot][:stands]
        assert came.known[slot] == len(known[slot]) + stands
        assert slots.untouched(slot)


def test_a_slot_whose_last_token_has_no_block_keeps_nothing() -> None:
    slots = Slots([[1] * 8, [1] * 9], blocks=[1, 1])
    came = slots.step([0, 1], [[5], [5]], [[], []], 0)
    assert (came.codes, came.counts) == ([RUNS, DRY], [1, 0])
    assert slots.sequence(0) == [1] * 8 + [5]
    assert slots.sequence(1) == [1] * 9


def test_a_slot_at_its_limit_keeps_nothing() -> None:
    slots = Slots([[1, 2]], limits=[2])
    came = slots.step([0], [[3, 4]], [[3]], 1)
    assert (came.codes, came.fed, came.counts, came.known) == ([DONE], [0], [0], [2])


def test_rows_that_pad_a_batch_change_nothing() -> None:
    slots = Slots([[1, 2]])
    came = slots.step([0, 1, 1], [[3, 4], [5, 6], [7, 8]], [[3], [5], []], 1)
    assert (came.codes, came.counts) == ([RUNS, EMPTY, EMPTY], [2, 0, 0])
    assert slots.sequence(0) == [1, 2, 3, 4]
    assert int(slots.known[1]) == 1
    assert set(slots.tokens[1].tolist()) == {NOTHING}


def test_n_grams_of_the_settings_are_proposed_for_the_rows_of_a_step() -> None:
    slots = Slots([[5, 6, 7, 5, 6], [1, 2, 3]])
    propose = propose_on_device(NgramProposer(3, 2, 4), slots.tokens, slots.known, 3)
    assert propose is not None
    drafts, counts = torch.full((12,), -1, dtype=torch.int32, device=DEVICE), torch.full_like(zeros(4), -1)
    propose(ints(1, 0, slots.spare), drafts, counts)
    assert counts.tolist() == [0, 3, 0, -1], "rows that are not named stay as they are"
    assert drafts[3:6].tolist() == [7, 5, 6]


def test_who_guesses_nothing_costs_nothing() -> None:
    slots = Slots([[1]])
    assert propose_on_device(NaiveProposer(), slots.tokens, slots.known, 4) is None
    assert propose_on_device(NgramProposer(4, 2, 5), slots.tokens, slots.known, 0) is None


def test_a_proposer_without_a_kernel_is_refused() -> None:
    class Oracle:
        def propose(self, tokens: object, slots: list[int], known: object) -> DraftTokens:
            return no_drafts(len(slots))

    slots = Slots([[1]])
    with pytest.raises(InvariantViolated, match="no kernel"):
        propose_on_device(Oracle(), slots.tokens, slots.known, 2)
