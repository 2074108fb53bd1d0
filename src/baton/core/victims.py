"""Whom to preempt: pure functions of the table and of measured rates. None is an answer: nobody may be asked to yield.

Only decoding requests are candidates (restarting half a prefill wastes it), and none that has yielded `max_preemptions`
times. Nobody yields for the benefit of a less important request: a candidate's priority number is at least the asker's.
The asker itself may be the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.core.config import VictimPolicy
from baton.core.plan import Int64s
from baton.core.slots import Slots

LostTokens = Callable[[Int64s], Int64s]
"""For each row, how many tokens it would have to compute again if it yielded now."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What bringing a request back costs, as measured."""

    prefill_us_per_token: float = 100.0


def candidates(slots: Slots, asker: int) -> Int64s:
    rows = slots.decoding()
    eligible = ~slots.protected[rows] & (slots.priority[rows] >= slots.priority[asker])
    return np.asarray(rows[eligible])


def choose_victim(policy: VictimPolicy, slots: Slots, asker: int, lost_tokens: LostTokens, rates: Rates) -> int | None:
    """Among equals of the policy the least important, then the newest arrival, yields."""
    rows = candidates(slots, asker)
    if not len(rows):
        return None
    match policy:
        case VictimPolicy.NEWEST:
            order = np.lexsort((slots.serial[rows], slots.priority[rows]))
            return int(rows[order[-1]])
        case VictimPolicy.CHEAPEST:
            order = np.lexsort((-slots.serial[rows], -slots.priority[rows], bring_back_us(lost_tokens(rows), rates)))
            return int(rows[order[0]])


def bring_back_us(lost_tokens: Int64s, rates: Rates) -> Int64s:
    """Time to compute again what would be lost."""
    return np.asarray((lost_tokens * rates.prefill_us_per_token).astype(np.int64))
