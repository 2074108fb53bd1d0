"""Counts how many tokens the steps of an engine compute, for the front end's metrics."""

from __future__ import annotations

from bisect import bisect_left

from baton.core.engine.gauges import STEP_TOKENS, StepSizes


class StepSizeCounts:
    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TOKENS) + 1)
        self._tokens = 0
        self._has_changed = False

    def add(self, tokens: int) -> None:
        """A step was launched. One that only stops requests computes nothing, and is not counted."""
        if not tokens:
            return
        self._counts[bisect_left(STEP_TOKENS, tokens)] += 1
        self._tokens += tokens
        self._has_changed = True

    def take(self) -> StepSizes | None:
        """All counts since the start; None if they are those last taken."""
        if not self._has_changed:
            return None
        self._has_changed = False
        return StepSizes(tuple(self._counts), self._tokens)
