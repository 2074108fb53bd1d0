"""Drafts are kept on the device exactly as long as they agree with what was drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from baton.executor.cuda.kernels_accept import accept_drafts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT, BLOCK_SIZE = 64, 8


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Slots:
    """The tables of an executor, one row a slot and a spare one that has reached its limit."""

    def __init__(self, sequences: list[list[int]], limits: list[int] | None = None, blocks: list[int] | None = None) -> None:
        width = CONTEXT // BLOCK_SIZE
        self.tokens = torch.full((len(sequences) + 1, CONTEXT), 7, dtype=torch.int32, device=DEVICE)
        self.table = torch.full((len(sequences) + 1, width), -1, dtype=torch.int32, device=DEVICE)
        for slot, sequence in enumerate(sequences):
            self.tokens[slot, : len(sequence)] = ints(*sequence)
            self.table[slot, : width if blocks is None else blocks[slot]] = 3
        self.known = ints(*map(len, sequences), 0)
        self.limits = ints(*(limits or [CONTEXT] * len(sequences)), 0)

    def accept(self, slots: list[int], drawn: list[list[int]], drafts: list[list[int]], most: int) -> list[int]:
        padded = torch.zeros((len(slots), most), dtype=torch.int32, device=DEVICE)
        for row, mine in enumerate(drafts):
            padded[row, : len(mine)] = ints(*mine)
        kept = torch.full((len(slots),), -1, dtype=torch.int32, device=DEVICE)
        table = torch.tensor(drawn, dtype=torch.int32, device=DEVICE)
        counts = ints(*map(len, drafts))
        accept_drafts(
            table, padded, counts, ints(*slots), self.limits, self.table, BLOCK_SIZE, self.tokens, self.known, kept
        )
        return kept.tolist()

    def sequence(self, slot: int) -> list[int]:
        return self.tokens[slot, : int(self.known[slot])].tolist()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), most=st.integers(0, 5), rows=st.integers(1, 3))
def test_drafts_stand_until_the_first_that_differs_and_never_past_the_limit(
    data: st.DataObject, most: int, rows: int
) -> None:
    token = st.integers(0, 1)
    known = [data.draw(st.lists(token, min_size=1, max_size=20)) for _ in range(rows)]
    limits = [len(sequence) + data.draw(st.integers(0, most + 2)) for sequence in known]
    drawn = [data.draw(st.lists(token, min_size=most + 1, max_size=most + 1)) for _ in range(rows)]
    drafts = [data.draw(st.lists(token, max_size=most)) for _ in range(rows)]
    slots = Slots(known, limits)
    kept = slots.accept(list(range(rows)), drawn, drafts, most)
    for slot in range(rows):
        stands = 1
        while stands <= len(drafts[slot]) and drafts[slot][stands - 1] == drawn[slot][stands - 1]:
            stands += 1
        stands = min(stands, limits[slot] - len(known[slot]))
        assert kept[slot] == stands
        assert slots.sequence(slot) == known[slot] + drawn[slot][:stands]
        assert set(slots.tokens[slot, len(known[slot]) + stands :].tolist()) <= {7}


def test_a_slot_whose_last_token_has_no_block_keeps_nothing() -> None:
    slots = Slots([[1] * 8, [1] * 9], blocks=[1, 1])
    assert slots.accept([0, 1], [[5], [5]], [[], []], 0) == [1, 0]
    assert slots.sequence(0) == [1] * 8 + [5]
    assert slots.sequence(1) == [1] * 9


def test_rows_that_pad_a_batch_change_nothing() -> None:
    slots = Slots([[1, 2]])
    assert slots.accept([0, 1, 1], [[3, 4], [5, 6], [7, 8]], [[3], [5], []], 1) == [2, 0, 0]
    assert slots.sequence(0) == [1, 2, 3, 4]
    assert int(slots.known[1]) == 0
