"""Who guesses what, and which guesses stand, without a model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import BadConfig
from baton.core.engine.plan import Int32s
from baton.executor import drafts
from baton.executor.drafts import DraftTokens, NaiveProposer, NgramProposer, accepted_drafts, no_drafts

SEQUENCES = st.lists(st.integers(0, 3), min_size=1, max_size=40)
"""Of few different tokens, so that they repeat themselves."""
NGRAMS = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4)).map(
    lambda sizes: NgramProposer(drafts=sizes[0], ngram_min=sizes[1], ngram_max=sizes[1] + sizes[2])
)


def guesses(
    proposer: NgramProposer | NaiveProposer, sequences: list[list[int]], slots: list[int] | None = None
) -> list[list[int]]:
    """What is guessed for each sequence when all of them are asked about at once; behind a sequence lies rubbish."""
    slots = list(range(len(sequences))) if slots is None else slots
    table = np.full((max(slots) + 1, max(map(len, sequences)) + 3), 1, dtype=np.int32)
    for slot, sequence in zip(slots, sequences, strict=True):
        table[slot, : len(sequence)] = sequence
    known = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    made = proposer.propose(table, np.array(slots, dtype=np.int32), known)
    assert made.counts.dtype == made.tokens.dtype == np.int32
    return [row[:count].tolist() for row, count in zip(made.tokens, made.counts, strict=True)]


def by_the_book(proposer: NgramProposer, sequence: list[int]) -> list[int]:
    """The definition, word for word."""
    known = len(sequence)
    for length in range(proposer.ngram_max, proposer.ngram_min - 1, -1):
        for begin in range(known - length - 1, -1, -1):
            if sequence[begin : begin + length] == sequence[known - length :]:
                return sequence[begin + length : begin + length + proposer.drafts]
    return []


@given(NGRAMS, st.lists(SEQUENCES, min_size=1, max_size=6))
def test_the_longest_end_that_came_before_counts_and_its_latest_place(
    proposer: NgramProposer, sequences: list[list[int]]
) -> None:
    assert guesses(proposer, sequences) == [by_the_book(proposer, sequence) for sequence in sequences]


@given(NGRAMS, st.lists(SEQUENCES, min_size=1, max_size=6))
def test_a_guess_does_not_depend_on_neighbours_their_order_or_how_many_are_looked_at_together(
    proposer: NgramProposer, sequences: list[list[int]]
) -> None:
    alone = [guesses(proposer, [sequence])[0] for sequence in sequences]
    slots = [3 * place for place in reversed(range(len(sequences)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "CELLS_MAX", 45)
        assert guesses(proposer, sequences, slots) == alone


@pytest.mark.parametrize(
    ("sequence", "guess"),
    [
        ([7, 8, 9, 1, 7, 8], [9, 1, 7]),
        ([7, 8, 9, 7, 8, 5, 7, 8], [5, 7, 8]),
        ([1, 7, 8, 9, 6, 7, 8, 5, 1, 7, 8], [9, 6, 7]),
        ([4, 4, 4], [4]),
        ([0, 1, 0], []),
        ([0, 0, 0, 0], [0]),
        ([5], []),
    ],
    ids=["follows", "latest", "longest", "overlaps", "too short", "zero is a token", "alone"],
)
def test_examples(sequence: list[int], guess: list[int]) -> None:
    assert guesses(NgramProposer(drafts=3, ngram_min=2, ngram_max=3), [sequence]) == [guess]


def test_nobody_asks_and_nothing_is_guessed() -> None:
    table, nobody = np.zeros((2, 8), dtype=np.int32), np.empty(0, dtype=np.int32)
    made = NgramProposer(4, 1, 3).propose(table, nobody, nobody.astype(np.int64))
    assert (len(made.tokens), len(made.counts)) == (0, 0)


@given(st.lists(SEQUENCES, min_size=1, max_size=4))
def test_naive_guesses_nothing(sequences: list[list[int]]) -> None:
    assert guesses(NaiveProposer(), sequences) == [[] for _ in sequences]


@pytest.mark.parametrize(("count", "least", "most"), [(0, 1, 3), (4, 0, 3), (4, 3, 2)])
def test_sizes_that_make_no_sense_are_refused(count: int, least: int, most: int) -> None:
    with pytest.raises(BadConfig):
        NgramProposer(count, least, most)


def rectangle(guessed: list[list[int]], width: int) -> DraftTokens:
    tokens: Int32s = np.full((len(guessed), width), 9, dtype=np.int32)
    for row, guess in enumerate(guessed):
        tokens[row, : len(guess)] = guess
    return DraftTokens(tokens, np.array([len(guess) for guess in guessed], dtype=np.int32))


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4), min_size=1, max_size=5), st.data())
def test_drafts_stand_up_to_the_first_that_was_not_drawn(rows: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    """Each row is a list of (drawn, guessed); what is drawn behind the last draft is of no consequence."""
    drawn: list[int] = []
    for row in rows:
        drawn += [token for token, _ in row] + [data.draw(st.integers(0, 2))]
    wanted = []
    for row in rows:
        right = [token == guess for token, guess in row]
        wanted.append(right.index(False) if False in right else len(right))
    made = rectangle([[guess for _, guess in row] for row in rows], width=data.draw(st.integers(4, 5)))
    assert accepted_drafts(np.array(drawn, dtype=np.int32), made).tolist() == wanted


def test_without_drafts_none_stand() -> None:
    assert accepted_drafts(np.array([3, 4], dtype=np.int32), no_drafts(2)).tolist() == [0, 0]


def test_a_cut_leaves_the_first_ones() -> None:
    made = rectangle([[1, 2, 3], [4]], width=3).cut(np.array([2, 5]))
    assert made.counts.tolist() == [2, 1]
    assert made.within.tolist() == [[True, True, False], [True, False, False]]
