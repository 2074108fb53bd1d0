"""A backend for constraints whose masks are copied from a few random ones: it needs no tokenizer, and costs next to nothing.

For measuring what masks cost on their way to a device, without what it costs to compute them. The source is ignored.
"""

from __future__ import annotations

import numpy as np

from baton.core.engine.request import Constraint
from baton.executor.constraints.contract import WORD_BITS, ConstraintBackend, Words, words_of

MASKS = 64
NAME, VERSION = "copied", "1"
CONSTRAINT = Constraint(NAME, VERSION, "any")


class CopiedMatcher:
    """About half of all tokens may come; which ones follows from the number of tokens and the last of them."""

    is_stopped = False

    def __init__(self, masks: Words, place: int = 0) -> None:
        self._masks = masks
        self._place = place

    def mask(self, out: Words) -> None:
        out[:] = self._masks[self._place]

    def consume(self, token: int) -> bool:
        if not int(self._masks[self._place, token // WORD_BITS]) >> (token % WORD_BITS) & 1:
            return False
        self._place = (self._place * 31 + token + 1) % len(self._masks)
        return True

    def copy(self) -> CopiedMatcher:
        return CopiedMatcher(self._masks, self._place)

    def forced_tokens(self) -> list[int]:
        return []


class _CopiedConstraint:
    def __init__(self, masks: Words) -> None:
        self._masks = masks

    def matcher(self) -> CopiedMatcher:
        return CopiedMatcher(self._masks)


class CopiedMasks:
    name, version = NAME, VERSION

    def __init__(self, vocabulary: int) -> None:
        draws = np.random.default_rng(0)
        words = draws.integers(0, 1 << WORD_BITS, (MASKS, words_of(vocabulary)), dtype=np.uint32)
        words[:, 0] |= np.uint32(1)  # never none
        self._masks: Words = words

    def compile(self, source: str) -> _CopiedConstraint:
        del source
        return _CopiedConstraint(self._masks)


def copied_masks(vocabulary: int) -> list[ConstraintBackend]:
    return [CopiedMasks(vocabulary)]
