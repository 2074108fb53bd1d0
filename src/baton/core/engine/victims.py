"""Chooses whom to preempt: pure functions of the table and of measured rates. None: no request may be asked to yield.

Only decoding requests are candidates (restarting half a prefill wastes it), and none that has yielded `max_preemptions`
times. Nobody yields for the benefit of a less important request: a candidate's priority number is at least the asker's.
The asker itself may be the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.core.config import VictimPolicy
from baton.core.engine.plan import Int64s
from baton.core.engine.slots import Slots

Cost = Callable[[Int64s], Int64s]
"""For each row, the time that bringing it back would take if it yielded now."""


@dataclass(slots=True)
class RecoveryRates:
    """What bringing a request back costs, as measured; those who measure write it, those who choose read it."""

    prefill_us_per_token: float = 100.0
    copy_us_per_block: float = 100.0
    """From host memory to the device."""
    fetch_us_per_block: float = 500.0
    """From the store to host memory."""
    look_us: float = 500.0
    """To learn what the store has."""


def candidates(slots: Slots, asker: int) -> Int64s:
    rows = slots.decoding()
    eligible = ~slots.protected[rows] & (slots.priority[rows] >= slots.priority[asker])
    return np.asarray(rows[eligible])


def choose_victim(policy: VictimPolicy, slots: Slots, asker: int, bring_back_us: Cost) -> int | None:
    """Among equals of the policy the least important, then the newest arrival, yields."""
    rows = candidates(slots, asker)
    if not len(rows):
        return None
    match policy:
        case VictimPolicy.NEWEST:
            order = np.lexsort((slots.serial[rows], slots.priority[rows]))
            return int(rows[order[-1]])
        case VictimPolicy.CHEAPEST:
            order = np.lexsort((-slots.serial[rows], -slots.priority[rows], bring_back_us(rows)))
            return int(rows[order[0]])


def computing_us(tokens: Int64s, rates: RecoveryRates) -> Int64s:
    """Time to compute again what would be lost."""
    return np.asarray((tokens * rates.prefill_us_per_token).astype(np.int64))


def copying_us(tokens: Int64s, block_size: int, rates: RecoveryRates) -> Int64s:
    """Time to bring back what would be lost where host memory keeps whole blocks of it."""
    blocks = tokens // block_size
    copying = (blocks * rates.copy_us_per_block).astype(np.int64)
    return np.asarray(copying + computing_us(tokens - blocks * block_size, rates))
