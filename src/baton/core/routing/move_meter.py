"""Measures how long a preempted request takes until it runs again at another instance, for instances that choose victims.

A move counts from the end of the attempt that was preempted to the next token, whatever lies between: back-off, the
placement queue, the queue of the other instance, its prefill. Only completed moves are measured.
"""

from __future__ import annotations

from baton.core.bounds import MOVE_US_PER_TOKEN_MAX
from baton.core.routing.routed_request import RoutedChoice

NEWEST_SHARE = 0.2
"""Weight of a new measurement in the rate."""


class MoveMeter:
    def __init__(self) -> None:
        self.us_per_token: float | None = None
        """Per token of the whole sequence, prompt and outputs; None: nothing was measured."""

    def yielded(self, choice: RoutedChoice, now_us: int) -> None:
        """It was preempted, and is about to move."""
        choice.yielded_us = now_us

    def resumed(self, choice: RoutedChoice, now_us: int) -> None:
        """Tokens came from its current attempt."""
        if choice.yielded_us is None:
            return
        seen = min((now_us - choice.yielded_us) / max(1, choice.began_with), MOVE_US_PER_TOKEN_MAX)
        choice.yielded_us = None
        believed = self.us_per_token
        self.us_per_token = seen if believed is None else believed * (1 - NEWEST_SHARE) + seen * NEWEST_SHARE
