"""Drafts are proposed on the device as the n-gram proposer of the host proposes them."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from baton.core.errors import InvariantViolated
from baton.executor.cuda.kernels_ngram import propose_ngrams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT = 64


def guessed(sequence: list[int], least: int, most: int, drafts: int) -> list[int]:
    """Slow and obvious: the longest end first, then the latest place."""
    known = len(sequence)
    for length in range(min(most, known - 1), least - 1, -1):
        for begin in range(known - length - 1, -1, -1):
            if sequence[begin : begin + length] == sequence[known - length :]:
                return sequence[begin + length :][:drafts]
    return []


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def propose(
    known: list[list[int]], rows: list[int], least: int, most: int, drafts: int, context: int = CONTEXT
) -> list[list[int]]:
    tokens = torch.full((len(known), context), 7, dtype=torch.int32, device=DEVICE)
    for slot, sequence in enumerate(known):
        tokens[slot, : len(sequence)] = ints(*sequence)
    proposed = torch.full((len(rows), drafts), -1, dtype=torch.int32, device=DEVICE)
    counts = torch.full((len(rows),), -1, dtype=torch.int32, device=DEVICE)
    propose_ngrams(tokens, ints(*map(len, known)), ints(*rows), least, most, proposed, counts)
    assert int(proposed.min()) >= 0
    return [row[:count] for row, count in zip(proposed.tolist(), counts.tolist(), strict=True)]


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=50)


@settings(max_examples=80, deadline=None)
@given(
    known=st.lists(sequences, min_size=1, max_size=3),
    least=st.integers(1, 3),
    longer=st.integers(0, 3),
    drafts=st.integers(1, 6),
    tile=st.sampled_from([8, 64]),
)
def test_the_guess_is_what_followed_the_latest_place_like_the_longest_end(
    known: list[list[int]], least: int, longer: int, drafts: int, tile: int
) -> None:
    rows = list(range(len(known)))[::-1]
    with patch("baton.executor.cuda.kernels_ngram.TILE", tile):
        proposed = propose(known, rows, least, least + longer, drafts)
    assert proposed == [guessed(known[slot], least, least + longer, drafts) for slot in rows]


def test_a_row_that_knows_one_token_or_none_gets_no_drafts() -> None:
    assert propose([[1, 1, 1], [4], []], [1, 0, 2, 1], 1, 2, 2) == [[], [1], [], []]


def test_what_followed_is_cut_where_it_is_no_longer_known() -> None:
    assert propose([[5, 6, 5, 6]], [0], 1, 3, 4) == [[5, 6]]


def test_ends_that_are_too_long_to_look_for_are_refused() -> None:
    with pytest.raises(InvariantViolated, match="too long"):
        propose([[1, 1]], [0], 1, 32, 2)


def test_a_long_sequence_is_looked_through_to_its_beginning() -> None:
    far = [9, 8, 7, 6, *np.random.default_rng(1).integers(10, 1000, 5000).tolist(), 9, 8, 7]
    assert propose([far], [0], 2, 4, 3, context=6000) == [[6, *far[4:6]]]
