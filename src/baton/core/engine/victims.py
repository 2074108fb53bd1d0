"""Chooses the request to preempt: pure functions of the table and of measured rates. None: no request may be preempted.

Only decoding requests are candidates (restarting half a prefill wastes it), and none that was preempted `max_preemptions`
times, here or elsewhere. No request is preempted for a less important one: a candidate's priority number is at least the
asker's. The asker itself may be chosen. Age is counted from the arrival at the first front end, so that a request that has
moved is not taken for a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.core.config import VictimPolicy
from baton.core.engine.plan import Int64s
from baton.core.engine.slots import Slots

Cost = Callable[[Int64s], Int64s]
"""For each row, the time to bring it back if it were preempted now."""


@dataclass(slots=True)
class RecoveryRates:
    """Measured cost of bringing a request back. Written by the parts that measure, read by those that choose."""

    prefill_us_per_token: float = 100.0
    copy_us_per_block: float = 100.0
    """From host memory to the device."""
    fetch_us_per_block: float = 500.0
    """From the store to host memory."""
    look_us: float = 500.0
    """Time of one look-up in the store."""
    move_us_per_token: float | None = None
    """From a preemption to the next token on another instance, as routers measure it. None: not measured yet."""


def candidates(slots: Slots, asker: int) -> Int64s:
    rows = slots.decoding()
    eligible = ~slots.protected[rows] & (slots.priority[rows] >= slots.priority[asker])
    return np.asarray(rows[eligible])


def choose_victim(policy: VictimPolicy, slots: Slots, asker: int, bring_back_us: Cost) -> int | None:
    """Among equals of the policy, choose the least important request, then the newest."""
    rows = slots.by_seniority(candidates(slots, asker))[::-1]
    if not len(rows):
        return None
    match policy:
        case VictimPolicy.NEWEST:
            return int(rows[0])
        case VictimPolicy.CHEAPEST:
            return int(rows[np.argmin(bring_back_us(rows))])  # the first of equals
