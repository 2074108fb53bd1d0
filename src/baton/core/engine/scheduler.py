"""The general scheduler: a queue, admission beside a reserve, decodes that grow, and preemption when blocks run out.

A pass plans decodes first, then unfinished prefills, then new requests, within the token budget. A preempted request goes
back to the head of the queue with exactly the tokens that were delivered.

How progress is assured when blocks run out:

* A decode that finds no block waits out the step, and enough victims are ordered to yield for it (`_relieve`). With nobody
  to yield, it waits for what is coming back.
* A request that yielded `max_preemptions` times is protected: it comes back only with its whole need promised, and no growth
  of others may touch what is promised. So protected requests always finish.
* A prefill starts only if all its tokens fit beside what earlier prefills still lack. So when everything else is gone,
  the prefills that are left fit together; the oldest of them then need not leave a reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from baton.core.config import WorkerConfig
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.plan import Copy, Int64s
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.records import Hit, Request
from baton.core.engine.request import Move, Serial, Submission
from baton.core.engine.reserve import Promises, blocks_for
from baton.core.engine.running_set import Board, StepBuilder
from baton.core.engine.slots import DECODING, NO_REQUEST, PREEMPTING
from baton.core.engine.victims import choose_victim, computing_us, copying_us
from baton.core.engine.waiting_queue import WaitingQueue

SOUGHT_AHEAD = 8
"""So many at the head of the queue are looked for in the store; so many may pass one that waits for it."""
SOUGHT_AGAIN_MAX = 2
"""So often one that could be let in is looked for in the store once more."""


@dataclass(frozen=True, slots=True)
class Admit:
    hit: Hit
    protected: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """It does not fit yet."""


class Scheduler(Board):
    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        super().__init__(config, prefix)
        self._promises = Promises(config)
        self._waiting = WaitingQueue()
        self._restored: list[int] = []
        """Rows whose KV has come back from host memory; their Start goes into the next plan."""
        self._preemptions_for_others = 0
        self._preemptions_of_self = 0
        self._unsatisfied_passes = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._held_back

    @property
    def asleep(self) -> bool:
        due = self._flights or self._stopping or self._restored or len(self._waiting)
        return not due and self.slots.occupied == self._waiting_for_kv()

    def _waiting_for_kv(self) -> int:
        """Rows that no pass can bring on."""
        return self.slots.loading

    def promised(self) -> int:
        return self._promises.promised(self.slots)

    def gauges(self) -> SchedulerGauges:
        return replace(
            super().gauges(),
            preemptions_for_others=self._preemptions_for_others,
            preemptions_of_self=self._preemptions_of_self,
            chunk_prefill_unsatisfied=self._unsatisfied_passes,
            reserve_ratio=self._promises.policy.ratio,
        )

    # ── the queue ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, submission: Submission, limit: int, now_us: int, leader: Serial | None = None) -> Serial:
        """Put a request, already found possible, into the queue, or behind the leader whose blocks it shares."""
        leading = None if leader is None else self._requests[leader]
        request = self._new_request(submission, self._keys_to_start(submission, leading), limit, now_us, leading)
        if leading is None:
            self._queue_up(request)
        else:
            leading.followers.append(request)
            self._held_back += 1
        return request.serial

    def _keys_to_start(self, submission: Submission, leader: Request | None) -> list[Key]:
        """The leader's names as far as they are of the prompt that both share: beyond it each goes its own way."""
        if leader is None or len(submission.generated):
            return self.keys_of(submission, submission.known)
        return leader.keys[: 1 + len(submission.prompt) // self.config.block_size]

    def _queue_up(self, request: Request) -> None:
        self._waiting.push(request)

    def _unqueue(self, request: Request) -> None:
        self._waiting.remove(request)
        if self.tiers is not None:
            self.tiers.forget_seeker(request.serial)

    # ── a pass ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _schedule(self, step: StepBuilder) -> None:
        self._continue_decodes(step)
        self._order_stops(step)
        self._continue_prefills(step)
        self._prefetch()
        if step.may_admit:
            self._admit_waiting(step)
        self._note_pass(step)

    def _note_pass(self, step: StepBuilder) -> None:
        """Every pass with work lowers the reserve, also one that could schedule nothing: so whoever waits gets in."""
        self._unsatisfied_passes += step.chunk_prefill_unsatisfied
        if self.has_work:
            self._promises.policy.after_pass()

    def _continue_decodes(self, step: StepBuilder) -> None:
        slots, config, rows = self.slots, self.config, step.decodes.slots
        reach, limit = slots.known[rows] + slots.pending[rows], slots.limit[rows]
        open_rows = reach < limit
        if np.count_nonzero(open_rows) < len(rows):
            rows, reach, limit = rows[open_rows], reach[open_rows], limit[open_rows]
        ends = np.minimum(reach + (config.burst - 1), limit)
        short = ends > slots.held[rows] * config.block_size
        if np.count_nonzero(short):
            rows = self._grow_or_wait(step, rows, rows[short])
        slots.pending[rows] += config.burst
        step.budget -= len(rows) * config.burst
        if len(rows) < len(step.decodes.slots):
            step.decodes = self._crew_of_decodes(rows)

    def _grow_or_wait(self, step: StepBuilder, rows: Int64s, short: Int64s) -> Int64s:
        """One more block for each row that needs it, the most important first. Answers the rows that can decode."""
        slots = self.slots
        free_for_all = self.pool.available - self._promises.promised(slots)
        sure = slots.protected[short]
        if np.count_nonzero(~sure) > free_for_all:
            asking = short[~sure]
            asking = asking[np.lexsort((slots.serial[asking], slots.priority[asking]))]
            fed, starved = asking[: max(0, free_for_all)], asking[max(0, free_for_all) :]
            self._relieve(step, starved)
            short = np.concatenate((short[sure], fed))
            rows = rows[~np.isin(rows, starved)]
            rows = rows[slots.phase[rows] == DECODING]
            short = short[slots.phase[short] == DECODING]
        if len(short):
            self._grow_by_one(step, short)
        return rows

    def _relieve(self, step: StepBuilder, starved: Int64s) -> None:
        """Order victims to yield until what comes back is enough for those who found no block."""
        coming = self._coming_back()
        for asker in starved.tolist():
            if self.slots.phase[asker] != DECODING:
                continue  # it was itself the victim for somebody before it
            while coming < 1:
                victim = choose_victim(self.config.victims, self.slots, asker, self._bring_back_us)
                if victim is None:
                    return
                coming += self.pool.exclusive(self.slots.blocks(victim))
                self._preempt(step, victim, asker)
                if victim == asker:
                    break
            else:
                coming -= 1

    def _bring_back_us(self, rows: Int64s) -> Int64s:
        """By computing it again or, where it would be kept, by a copy: whichever is quicker."""
        lost = self._lost_tokens(rows)
        computing = computing_us(lost, self.rates)
        if self.tiers is None or not self.config.tiers.save_preempted:
            return computing
        return np.minimum(computing, copying_us(lost, self.config.block_size, self.rates))

    def _lost_tokens(self, rows: Int64s) -> Int64s:
        """How many tokens of each row would be gone: what others hold too is still there when it resumes."""
        slots, size = self.slots, self.config.block_size
        kept = [slots.held[slot] - self.pool.exclusive(slots.blocks(slot)) for slot in rows.tolist()]
        return np.asarray(np.maximum(0, slots.known[rows] - np.array(kept, dtype=np.int64) * size))

    def _coming_back(self) -> int:
        """Blocks that will be free once the slots that are being let go of are; those shared by two of them do not count."""
        slots = self.slots
        stopping = np.flatnonzero((slots.serial != NO_REQUEST) & (slots.phase >= PREEMPTING))
        return self.pool.leaving + sum(self.pool.exclusive(slots.blocks(slot)) for slot in stopping.tolist())

    def _preempt(self, step: StepBuilder, victim: int, asker: int) -> None:
        request = self._occupant(victim)
        step.preempted = True
        request.bill.preemptions += 1
        if victim == asker:
            self._preemptions_of_self += 1
        else:
            self._preemptions_for_others += 1
        self._order_stop(request, Move.PREEMPT)
        self._promises.policy.after_preemption(self.slots)

    def _grow_by_one(self, step: StepBuilder, rows: Int64s) -> None:
        """`burst` never exceeds a block, so one block a row is always enough."""
        slots = self.slots
        blocks, at = self.pool.take(len(rows)), slots.held[rows]
        slots.table[rows, at] = blocks
        slots.held[rows] += 1
        step.grow(rows.astype(np.int32), at.astype(np.int32), blocks)

    def _continue_prefills(self, step: StepBuilder) -> None:
        self._begin_restored(step)
        for slot in tuple(self._prefilling):
            if step.budget <= 0:
                return
            if not self._chunk_fits(step, slot):
                step.chunk_prefill_unsatisfied = True
                return
            self._plan_chunk(step, slot)

    def _chunk_fits(self, step: StepBuilder, slot: int) -> bool:
        """Whether the next chunk leaves what is kept for the others; its own need is not held against it."""
        slots = self.slots
        end = min(int(slots.known[slot]), int(slots.planned[slot]) + step.budget)
        missing = blocks_for(end, self.config.block_size) - int(slots.held[slot])
        if missing <= 0 or slots.protected[slot]:
            return True
        nobody_decodes = not len(slots.decoding())
        kept = self._promises.promised(slots) if nobody_decodes else self._promises.kept(slots, asker=slot)
        return missing <= self.pool.available - kept

    def _begin_restored(self, step: StepBuilder) -> None:
        for slot in self._restored:
            request = self._occupant(slot)
            self._move(request, Move.ADMIT)
            tokens = np.concatenate((request.submission.prompt, request.outputs))
            self._tell_start(step, slot, tokens, int(self.slots.computed[slot]))
            self._prefilling.append(slot)
        self._restored.clear()

    def _is_restored(self, slot: int) -> None:
        self._restored.append(slot)

    def _unrestore(self, slot: int) -> None:
        if slot in self._restored:
            self._restored.remove(slot)

    def _prefetch(self) -> None:
        """Have the store asked for what those at the head of the queue start with; they may not come to wait for it."""
        if not self.config.tiers.store:
            return
        for request in self._waiting.first(SOUGHT_AHEAD):
            if not request.is_sought and self._prefills_here(request):
                request.is_sought = self._seek(request.serial, request)

    def _prefills_here(self, request: Request) -> bool:
        """Whether what it starts with is needed here."""
        del request
        return True

    def _next_waiting(self) -> Request | None:
        """The head of the queue; one that is being brought from the store lets others pass."""
        tiers = self.tiers
        if tiers is None:
            return self._waiting.head
        return next((request for request in self._waiting.first(SOUGHT_AHEAD) if not tiers.is_seeking(request.serial)), None)

    def _admit_waiting(self, step: StepBuilder) -> None:
        while (request := self._next_waiting()) and step.budget > 0 and self._has_row:
            match self._consider(request):
                case Admit(hit, _) if self._is_sought_again(request, hit):
                    continue  # it lets others pass
                case Admit(hit, protected):
                    self._waiting.remove(request)
                    self._let_in(step, request, hit, protected)
                case Wait():
                    return

    def _is_sought_again(self, request: Request, hit: Hit) -> bool:
        """What it starts with may have been in host memory, or on its way to the store, when it began to wait, and be in the
        store alone by now."""
        tiers = self.tiers
        if tiers is None or request.sought_again >= SOUGHT_AGAIN_MAX or not self._prefills_here(request):
            return False
        after = self._keys_after(request, hit)
        missing = after[len(tiers.host.run(after)) :]
        if not missing or not tiers.is_known_stored(missing[0]):
            return False
        request.sought_again += 1
        tiers.seek(request.serial, missing, self._now_us)
        return tiers.is_seeking(request.serial)

    @property
    def _has_row(self) -> bool:
        """Whether one more request may have a slot."""
        return self.slots.has_room

    def _kept(self) -> int:
        """Blocks that a newcomer may not touch."""
        return self._promises.kept(self.slots)

    def _let_in(self, step: StepBuilder, request: Request, hit: Hit, protected: bool) -> None:
        rows = self._host_rows(request, hit)
        if len(rows):
            self._restore(request, hit, rows, protected)
        else:
            self._start(step, request, hit, protected)

    def _consider(self, request: Request) -> Admit | Wait:
        """Whether a request's tokens fit beside what is kept for the running ones. Changes nothing."""
        hit = self._look_up(request)
        protected = self._protects(request)
        fits = self._blocks_to_take(self._wanted(request, protected), hit) <= self.pool.available - self._kept()
        return Admit(hit, protected) if fits else Wait()

    def _protects(self, request: Request) -> bool:
        """Whether it has yielded so often that it is never again a victim."""
        return request.bill.preemptions >= self.config.max_preemptions

    def _wanted(self, request: Request, protected: bool) -> int:
        """How many tokens there must be room for before it is let in."""
        return request.limit if protected else request.tokens_at_start

    def _start(self, step: StepBuilder, request: Request, hit: Hit, protected: bool) -> None:
        slots = self.slots
        slot = self._occupy(request, hit, Move.ADMIT)
        slots.protected[slot] = protected
        self._charge_start(request, hit.computed)
        if hit.copy_from is not None:
            target = self.pool.take(1)
            slots.append_blocks(slot, target)
            step.copies.append(Copy(hit.copy_from, int(target[0])))
        tokens = np.concatenate((request.submission.prompt, request.outputs))
        self._tell_start(step, slot, tokens, hit.computed)
        self._prefilling.append(slot)
        self._plan_chunk(step, slot)
