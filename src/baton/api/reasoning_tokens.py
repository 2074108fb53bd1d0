"""Counts the tokens of an answer that are reasoning.

Tokens are looked at one by one, so that the count does not depend on how they came. Those of the markers count too.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.api.detokenise import Detokenizer


class ReasoningCounter:
    """Counts up to the end of the reasoning; an answer that does not begin with `opening` has none."""

    def __init__(self, detokenizer: Detokenizer, opening: str, closings: Sequence[str], begins_inside: bool) -> None:
        """`detokenizer` is of this counter's own."""
        self._detokenizer = detokenizer
        self._opening = opening
        self._closings = closings
        self._tail_length = max(map(len, closings)) - 1
        self._is_inside = begins_inside
        self._is_over = False
        self._text = ""
        """The beginning of the answer, or inside of the reasoning as much of its end as a marker may begin in."""
        self._tokens = 0

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._is_over:
                return
            self._tokens += 1
            self._take(self._detokenizer.push((token,)))

    def _take(self, text: str) -> None:
        self._text += text
        if not self._is_inside:
            self._text = self._text.lstrip()
            self._is_inside = self._text.startswith(self._opening)
            self._is_over = not self._opening.startswith(self._text) and not self._is_inside
        if self._is_inside:
            self._is_over = any(closing in self._text for closing in self._closings)
            self._text = self._text[-self._tail_length :]

    @property
    def count(self) -> int:
        return self._tokens if self._is_inside else 0
