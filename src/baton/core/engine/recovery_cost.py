"""The time to bring a preempted request back, by measured rates: the least over the ways back that exist for it.

    compute   prefill the lost tokens again, all of them if it moves; always possible
    host      copy whole blocks from this instance's host memory, compute the rest; only if it resumes here
    store     look up, fetch and copy whole blocks, compute the rest; only while the store can be used
    move      run it on another instance, as long as the router has seen that take; only if it ends here to move

A request that resumes here finds the blocks that other rows share with it. One that moves takes only its tokens along, so
its cost is counted over the whole sequence, whichever way.

Each rate is written where it is measured: prefill by `worker.PrefillMeter`, host and store by `tiers.bring_back`, moves by
the router (`routing.move_meter`), which sends its rate with every submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from baton.core.config import OnPreempt
from baton.core.engine.plan import Int64s
from baton.core.engine.running_set import RunningSet
from baton.core.engine.victims import RecoveryRates
from baton.core.tiers.offload import AnyTiers

Bools = npt.NDArray[np.bool_]
ABSENT_US = np.iinfo(np.int64).max
"""Cost of a way back that does not exist."""


class WayBack(IntEnum):
    """Index of a way back in a table of costs."""

    COMPUTE = 0
    HOST = 1
    STORE = 2
    MOVE = 3


@dataclass(frozen=True, slots=True)
class LostRows:
    """What requests lose if they are preempted now, and the ways back that each of them has. One entry a row."""

    known: Int64s
    """Tokens of the whole sequence."""
    lost: Int64s
    """Tokens whose KV no other row holds here."""
    kept_blocks: Int64s
    """Leading blocks of the whole sequence that would be saved outside the pool."""
    leaves: Bools
    """Whether it would end here, to go on at another instance."""
    is_saved: bool
    """Host memory keeps what is preempted."""
    is_stored: bool
    """The store gets it too, and can be asked."""

    def copied_blocks(self, block_size: int) -> Int64s:
        """Blocks that host memory would give back."""
        shared = -(-(self.known - self.lost) // block_size)
        return np.asarray(np.clip(self.kept_blocks - shared, 0, self.lost // block_size))

    @property
    def recomputed(self) -> Int64s:
        """Tokens to compute where nothing is copied back."""
        return np.where(self.leaves, self.known, self.lost)


@dataclass(frozen=True, slots=True)
class RecoveryEstimate:
    """The quickest way back of one request."""

    way: WayBack
    compute_tokens: int
    restore_blocks: int
    cost_us: int


def recovery_costs_us(rows: LostRows, block_size: int, rates: RecoveryRates) -> Int64s:
    """One line for each WayBack, one column for each row."""
    copied, recomputed = rows.copied_blocks(block_size), rows.recomputed
    fetched = np.where(rows.leaves, rows.kept_blocks, copied)
    unfetched = recomputed - fetched * block_size
    prefill_us, copy_us, move_us = rates.prefill_us_per_token, rates.copy_us_per_block, rates.move_us_per_token
    table = np.full((len(WayBack), len(rows.known)), ABSENT_US)
    table[WayBack.COMPUTE] = recomputed * prefill_us
    if rows.is_saved:
        host_us = copied * copy_us + (rows.lost - copied * block_size) * prefill_us
        table[WayBack.HOST] = np.where(rows.leaves, ABSENT_US, host_us.astype(np.int64))
    if rows.is_stored:
        table[WayBack.STORE] = rates.look_us + fetched * (rates.fetch_us_per_block + copy_us) + unfetched * prefill_us
    if move_us is not None:
        table[WayBack.MOVE] = np.where(rows.leaves, (rows.known * move_us).astype(np.int64), ABSENT_US)
    return table


def recovery_estimate(row: LostRows, block_size: int, rates: RecoveryRates) -> RecoveryEstimate:
    """Of one row."""
    costs_us = recovery_costs_us(row, block_size, rates)[:, 0]
    way = WayBack(int(costs_us.argmin()))
    blocks = 0
    if way is WayBack.HOST or (way is WayBack.STORE and not row.leaves[0]):
        blocks = int(row.copied_blocks(block_size)[0])
    elif way is WayBack.STORE:
        blocks = int(row.kept_blocks[0])
    return RecoveryEstimate(way, int(row.recomputed[0]) - blocks * block_size, blocks, int(costs_us[way]))


class RecoveryCost:
    """The costs of a running set's rows."""

    def __init__(self, running: RunningSet, tiers: AnyTiers, rates: RecoveryRates) -> None:
        self._running = running
        self._config = running.config
        self._tiers = tiers
        self._rates = rates

    def bring_back_us(self, rows: Int64s) -> Int64s:
        """For each row, the cost of its quickest way back."""
        return np.asarray(self.costs_us(rows).min(axis=0))

    def costs_us(self, rows: Int64s) -> Int64s:
        """One line for each WayBack; ABSENT_US where a row does not have it."""
        return recovery_costs_us(self._lost_rows(rows), self._config.block_size, self._rates)

    def estimate(self, slot: int) -> RecoveryEstimate:
        """What bringing this row's request back would cost."""
        rows = self._lost_rows(np.array([slot], dtype=np.int64))
        return recovery_estimate(rows, self._config.block_size, self._rates)

    def _lost_rows(self, rows: Int64s) -> LostRows:
        slots, size, tiers = self._running.slots, self._config.block_size, self._tiers
        known = slots.known[rows]
        return LostRows(
            known=known,
            lost=np.maximum(0, known - self._shared_blocks(rows) * size),
            kept_blocks=np.minimum(self._savable_tokens(rows) // size, tiers.host.rows),
            leaves=self._leaves(rows),
            is_saved=tiers.saves_preempted,
            is_stored=tiers.stores_preempted,
        )

    def _leaves(self, rows: Int64s) -> Bools:
        """Whether each row's request, preempted, would end here to move; not on its last move, which resumes in place."""
        if self._config.on_preempt is not OnPreempt.RESCHEDULE:
            return np.zeros(len(rows), dtype=np.bool_)
        requests = [self._running.occupant(slot) for slot in rows.tolist()]
        return np.array([not request.submission.resumes_in_place for request in requests], dtype=np.bool_)

    def _shared_blocks(self, rows: Int64s) -> Int64s:
        """Blocks of each row that other rows hold as well: they are still here when it resumes."""
        slots, pool = self._running.slots, self._running.pool
        shared = [slots.held[slot] - pool.exclusive(slots.blocks(slot)) for slot in rows.tolist()]
        return np.array(shared, dtype=np.int64)

    def _savable_tokens(self, rows: Int64s) -> Int64s:
        """Tokens of each row whose KV may be saved outside the pool."""
        slots = self._running.slots
        computed = slots.computed[rows]
        return computed if self._config.tiers.cache_outputs else np.minimum(computed, slots.prompt[rows])
