"""Drafts: guesses of the next tokens, checked in the same step as the token that a decode computes anyway.

Owns the proposers and the rule of acceptance. Knows tokens only: no model, block, plan or sampling parameter.

    known     … t(n-1)         drafts  d1 d2 d3
    fed       t(n-1)  d1  d2  d3
    drawn     s0      s1  s2  s3         s0 stands; s1 if d1 = s0; s2 if besides d2 = s1; and so on

Each row is drawn as if no other had been fed: at its own position, with that position's noise. So the tokens that stand
are those that decoding one at a time would have given; a draft saves a step or it does not, and changes no token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.config import BadConfig
from baton.core.engine.plan import Int32s, Int64s
from baton.core.engine.request import Tokens

CELLS_MAX = 1 << 21
"""Most tokens searched in one array operation, which bounds its memory."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Guesses for some rows. Row i has `counts[i]` of them, at the beginning of `tokens[i]`."""

    tokens: Int32s
    """[rows, the most drafts]"""
    counts: Int32s
    """[rows]"""

    @property
    def within(self) -> npt.NDArray[np.bool_]:
        """[rows, the most drafts]: which cells of `tokens` are drafts."""
        return np.asarray(np.arange(self.tokens.shape[1]) < self.counts[:, None])

    def cut(self, room: Int64s) -> DraftTokens:
        """Keep at most `room[i]` drafts of row i."""
        return DraftTokens(self.tokens, np.minimum(self.counts, room).astype(np.int32))

    def instead(self, others: DraftTokens) -> DraftTokens:
        """The drafts of `others` where a row has some there, else these."""
        width = max(self.tokens.shape[1], others.tokens.shape[1])
        ours, theirs = (np.pad(one.tokens, ((0, 0), (0, width - one.tokens.shape[1]))) for one in (self, others))
        has = others.counts > 0
        return DraftTokens(np.where(has[:, None], theirs, ours), np.where(has, others.counts, self.counts))


def drafts_of(rows: Sequence[Sequence[int]]) -> DraftTokens:
    """Drafts listed row by row."""
    tokens = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int32)
    for row, drafts in enumerate(rows):
        tokens[row, : len(drafts)] = drafts
    return DraftTokens(tokens, np.array([len(drafts) for drafts in rows], dtype=np.int32))


def no_drafts(rows: int) -> DraftTokens:
    return DraftTokens(np.empty((rows, 0), dtype=np.int32), np.zeros(rows, dtype=np.int32))


class DraftProposer(Protocol):
    def propose(self, tokens: Int32s, slots: Int32s, known: Int64s) -> DraftTokens:
        """Guess what follows the first `known[i]` (at least 1) of `tokens[slots[i]]`, for every i."""

    def __str__(self) -> str:
        """A description for the operator."""


@dataclass(frozen=True, slots=True)
class NaiveProposer:
    """Proposes no drafts: the code for drafts runs, and each step yields one token per decode."""

    def propose(self, tokens: Int32s, slots: Int32s, known: Int64s) -> DraftTokens:
        del tokens, known
        return no_drafts(len(slots))

    def __str__(self) -> str:
        return "no drafts"


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Proposes the tokens that followed an earlier occurrence of the sequence's last n-gram.

    Takes the longest n-gram of `ngram_min` to `ngram_max` tokens that occurs earlier in the sequence, and its latest
    occurrence. The proposal is what follows there: up to `drafts` tokens, as far as they are known.
    """

    drafts: int
    ngram_min: int
    ngram_max: int

    def __post_init__(self) -> None:
        if self.drafts < 1:
            raise BadConfig(f"draft_tokens must be at least 1, not {self.drafts}")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise BadConfig(f"ngram_min ({self.ngram_min}) and ngram_max ({self.ngram_max}) must rise from 1")

    def propose(self, tokens: Int32s, slots: Int32s, known: Int64s) -> DraftTokens:
        resumes = known.copy()
        for rows in _in_portions(known):
            resumes[rows] = self._resumes(tokens[slots[rows], : int(known[rows[0]])], known[rows])
        places = np.minimum(resumes[:, None] + np.arange(self.drafts), known[:, None] - 1)
        counts = np.minimum(known - resumes, self.drafts).astype(np.int32)
        return DraftTokens(tokens[slots[:, None], places], counts)

    def _resumes(self, tokens: Int32s, known: Int64s) -> Int64s:
        """For each row, the position where the proposal begins; the end of the known tokens if nothing was found.

        All rows together: first every place that holds a row's last token, then of those the ones that also have the token
        before it, and so on. They are few after the first look.
        """
        resumes = known.copy()
        rows, at = (tokens == tokens[np.arange(len(known)), known - 1][:, None]).nonzero()
        earlier = at < known[rows] - 1
        rows, at = rows[earlier], at[earlier]
        for length in range(1, self.ngram_max + 1):
            if length > 1:
                goes_on = at >= length - 1
                rows, at = rows[goes_on], at[goes_on]
                alike = tokens[rows, at - (length - 1)] == tokens[rows, known[rows] - length]
                rows, at = rows[alike], at[alike]
            if length >= self.ngram_min:
                # A row's places come in rising order, and of several values for one element numpy keeps the last.
                resumes[rows] = at + 1
        return resumes

    def __str__(self) -> str:
        return f"up to {self.drafts} drafts by n-grams of {self.ngram_min} to {self.ngram_max}"


def _in_portions(known: Int64s) -> Iterator[Int64s]:
    """All rows, the longest first, in portions of at most CELLS_MAX tokens."""
    order: Int64s = np.argsort(-known, kind="stable")
    begin = 0
    while begin < len(order):
        end = begin + max(1, CELLS_MAX // int(known[order[begin]]))
        yield order[begin:end]
        begin = end


def accepted_drafts(drawn: Tokens, drafts: DraftTokens) -> Int32s:
    """How many drafts of each row are accepted. `drawn` has 1 + counts[i] tokens for row i, row after row."""
    width = drafts.tokens.shape[1]
    if not width:
        return np.zeros(len(drafts.counts), dtype=np.int32)
    firsts = np.cumsum(1 + drafts.counts) - (1 + drafts.counts)
    places = np.minimum(firsts[:, None] + np.arange(width), len(drawn) - 1)
    agrees = drafts.within & (drawn[places] == drafts.tokens)
    return np.asarray(np.logical_and.accumulate(agrees, axis=1).sum(axis=1), dtype=np.int32)
