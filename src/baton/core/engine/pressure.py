"""Growth of decodes, and preemption when blocks run out.

A decode that finds no block skips the step, and enough victims are preempted for it. Without a victim it waits for blocks
that are being freed. A request that was preempted `max_preemptions` times, here or elsewhere, is protected: it is admitted
only with its whole remaining need promised, and other rows may not take promised blocks. So protected requests always
finish.
"""

from __future__ import annotations

import numpy as np

from baton.core.engine.masks import all_true, any_true
from baton.core.engine.plan import Int64s
from baton.core.engine.preemption_record import Preemption
from baton.core.engine.records import Request
from baton.core.engine.recovery_cost import RecoveryCost
from baton.core.engine.request import Move
from baton.core.engine.reserve import BlockPromises
from baton.core.engine.running_set import RunningSet
from baton.core.engine.slots import DECODING, NO_REQUEST, PREEMPTING
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.step_rows import StepRows
from baton.core.engine.victims import RecoveryRates, choose_victim
from baton.core.tiers.offload import AnyTiers


class BlockPressure:
    def __init__(self, running: RunningSet, promises: BlockPromises, tiers: AnyTiers, rates: RecoveryRates) -> None:
        self._running = running
        self._config = running.config
        self._slots = running.slots
        self._pool = running.pool
        self._promises = promises
        self.cost = RecoveryCost(running, tiers, rates)
        self.preemptions_for_others = 0
        self.preemptions_of_self = 0

    def continue_decodes(self, step: StepBuilder) -> None:
        slots, config, rows = self._slots, self._config, step.decodes.slots
        if not len(rows):
            return
        reach, limit = slots.known[rows] + slots.pending[rows], slots.limit[rows]
        open_rows = reach < limit
        if not all_true(open_rows):
            rows, reach, limit = rows[open_rows], reach[open_rows], limit[open_rows]
        ends = np.minimum(reach + slots.burst[rows] - 1, limit)
        short = ends > slots.held[rows] * config.block_size
        if any_true(short):
            rows = self._grow_or_wait(step, rows, rows[short])
        bursts = slots.burst[rows]
        slots.pending[rows] += bursts
        step.budget -= int(np.add.reduce(bursts))
        if len(rows) < len(step.decodes.slots):
            step.decodes = StepRows.of_decodes(slots, rows)

    def _grow_or_wait(self, step: StepBuilder, rows: Int64s, short: Int64s) -> Int64s:
        """Give one more block to each row that needs it, by seniority. Returns the rows that can decode."""
        slots = self._slots
        free_for_all = self._pool.available - self._promises.promised(slots)
        sure = slots.protected[short]
        if np.count_nonzero(~sure) > free_for_all:
            asking = slots.by_seniority(short[~sure])
            fed, starved = asking[: max(0, free_for_all)], asking[max(0, free_for_all) :]
            self._relieve(step, starved)
            short = np.concatenate((short[sure], fed))
            rows = rows[~np.isin(rows, starved)]
            rows = rows[slots.phase[rows] == DECODING]
            short = short[slots.phase[short] == DECODING]
        if len(short):
            self._grow_by_one(step, short)
        return rows

    def _grow_by_one(self, step: StepBuilder, rows: Int64s) -> None:
        """One block a row is always enough, because `burst` never exceeds a block."""
        slots = self._slots
        blocks, at = self._pool.take(len(rows)), slots.held[rows]
        slots.table[rows, at] = blocks
        slots.held[rows] += 1
        step.grow(rows.astype(np.int32), at.astype(np.int32), blocks)

    def _relieve(self, step: StepBuilder, starved: Int64s) -> None:
        """Preempt victims until the blocks being freed are enough for the rows that found none."""
        coming = self._coming_back()
        for asker in starved.tolist():
            if self._slots.phase[asker] != DECODING:
                continue  # it was itself preempted for a row before it
            while coming < 1:
                victim = choose_victim(self._config.victims, self._slots, asker, self.cost.bring_back_us)
                if victim is None:
                    return
                coming += self._pool.exclusive(self._slots.blocks(victim))
                self._preempt(step, victim, asker)
                if victim == asker:
                    break
            else:
                coming -= 1

    def _coming_back(self) -> int:
        """Blocks that the slots being released will free; blocks shared by two of them do not count."""
        slots = self._slots
        stopping = np.flatnonzero((slots.serial != NO_REQUEST) & (slots.phase >= PREEMPTING))
        return self._pool.leaving + sum(self._pool.exclusive(slots.blocks(slot)) for slot in stopping.tolist())

    def _preempt(self, step: StepBuilder, victim: int, asker: int) -> None:
        request = self._running.occupant(victim)
        step.preempted = True
        request.bill.preemptions += 1
        self._running.note_preemption(request)
        if victim == asker:
            self.preemptions_of_self += 1
        else:
            self.preemptions_for_others += 1
        self._record(request, victim, "self" if victim == asker else "growth")
        self._running.order_stop(request, Move.PREEMPT)
        self._promises.policy.after_preemption(self._slots)

    def _record(self, request: Request, slot: int, cause: str) -> None:
        """Before its row is stopped: what it holds is what it loses."""
        cost = self.cost.estimate(slot)
        self._running.preempted.add(
            Preemption(
                request.submission.request_id,
                cause,
                request.preemptions,
                cost.way.name.lower(),
                cost.compute_tokens,
                cost.restore_blocks,
                cost.cost_us,
            )
        )
