"""The protocol of a backend for constrained answers. One contract test suite runs against all backends.

    backend ── compile(source) ──▶ CompiledConstraint ── matcher() ──▶ Matcher ── copy() ──▶ Matcher

A matcher is at one place of one answer: it says which tokens may come next and takes the one that came. It is a function of
the source and of the tokens it has taken, so it is rebuilt from these after a preemption or a move, and never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.executor.constraints.constraint_error import ConstraintError as ConstraintError

Words = npt.NDArray[np.uint32]
"""A mask: bit `token % 32` of word `token // 32` is set where the token may come next."""
WORD_BITS = 32


class Matcher(Protocol):
    """Used by one thread at a time. A method that raises ConstraintError will do so for ever after."""

    def mask(self, out: Words) -> None:
        """Write the tokens that may come next: never none. Stop tokens are among them exactly where the answer may end, and
        are the only ones once it has ended or nothing more can come. Asking again gives the same."""

    def consume(self, token: int) -> bool:
        """Take the next token. False, and nothing changed, if it is not one that `mask` allows."""

    def copy(self) -> Matcher:
        """An independent matcher at the same place."""

    def forced_tokens(self) -> list[int]:
        """The most likely tokens of text that has no alternative; empty where there is none. A guess about how the text is
        cut into tokens: the mask may allow others."""

    @property
    def is_stopped(self) -> bool:
        """Whether only a stop token can come."""


class CompiledConstraint(Protocol):
    """Never changes; used from several threads."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""


class ConstraintBackend(Protocol):
    """Used from several threads."""

    name: str
    version: str
    """Two backends of one name and version allow the same tokens."""

    def compile(self, source: str) -> CompiledConstraint:
        """Raises ConstraintError."""


def words_of(vocabulary: int) -> int:
    """Number of words of a mask."""
    return -(-vocabulary // WORD_BITS)


def set_bits(out: Words, tokens: Sequence[int]) -> None:
    """Allow exactly these tokens."""
    out[:] = 0
    ids = np.asarray(tokens, dtype=np.int64)
    np.bitwise_or.at(out, ids // WORD_BITS, (np.uint32(1) << (ids % WORD_BITS).astype(np.uint32)))


def allowed_of(words: Words, vocabulary: int) -> npt.NDArray[np.bool_]:
    """[…, vocabulary]: which tokens a mask, or each of several, allows."""
    bits = np.unpackbits(words.astype("<u4", copy=False).view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :vocabulary].view(np.bool_)
