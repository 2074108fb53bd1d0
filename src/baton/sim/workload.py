"""Synthetic loads: equal requests or equal conversations, at a Poisson rate or from a number of clients.

Owns the shapes of such loads and their arrivals. Lengths are fixed; the seed decides only arrival times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from baton.core.errors import BatonError
from baton.sim.cluster import PlannedRequest

CALLS_MAX = 1_000_000
# The purpose of a random stream, so that two uses of one seed never draw the same stream.
_ARRIVALS = 0


class BadWorkload(BatonError):
    """A load that cannot be generated or run; the message names the numbers."""


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Conversations of equal rounds; a plain request is a conversation of one."""

    conversations: int
    input_tokens: int
    """New tokens of each round, after the history."""
    output_tokens: int
    max_tokens: int | None = None
    """The limit that clients declare, at least `output_tokens`; None: `output_tokens`."""
    rounds: int = 1
    think_us: int = 0
    rate_per_s: float | None = None
    """New conversations per second; None: one whenever a client is free."""

    def __post_init__(self) -> None:
        for name in ("conversations", "input_tokens", "output_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise BadWorkload(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.think_us < 0:
            raise BadWorkload(f"a pause of {self.think_us} µs is in the past")
        if self.rate_per_s is not None and not self.rate_per_s > 0:  # written so that NaN fails too
            raise BadWorkload(f"a rate must be above 0, not {self.rate_per_s}")
        if self.requests > CALLS_MAX:
            raise BadWorkload(f"{self.requests:,} requests are more than {CALLS_MAX:,}")

    @property
    def requests(self) -> int:
        return self.conversations * self.rounds

    @property
    def declared_tokens(self) -> int:
        return max(self.output_tokens, self.max_tokens or 0)

    @property
    def sequence_tokens_max(self) -> int:
        """The last round's prompt, with all former rounds, plus its declared tokens."""
        return self.rounds * self.input_tokens + (self.rounds - 1) * self.output_tokens + self.declared_tokens

    def calls(self, seed: int) -> list[PlannedRequest]:
        """The calls of one conversation after another, rounds in order."""
        arrivals = poisson_us(self.rate_per_s, seed) if self.rate_per_s is not None else None
        made: list[PlannedRequest] = []
        for conversation in range(self.conversations):
            at_us = next(arrivals) if arrivals is not None else None
            made.extend(self._call(conversation, number, at_us) for number in range(self.rounds))
        return made

    def _call(self, conversation: int, number: int, at_us: int | None) -> PlannedRequest:
        return PlannedRequest(
            at_us=at_us if number == 0 else None,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            max_tokens=self.declared_tokens,
            session=conversation if self.rounds > 1 else None,
            think_us=self.think_us if number else 0,
        )


def poisson_us(rate_per_s: float, seed: int) -> Iterator[int]:
    """Arrival times of a Poisson process in microseconds after the start; endless."""
    draw = np.random.default_rng([seed, _ARRIVALS])
    at_s = 0.0
    while True:
        at_s += float(draw.exponential(1.0 / rate_per_s))
        yield round(at_s * 1e6)
