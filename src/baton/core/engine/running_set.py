"""The running set of one engine and what settles in it: slot table, block ledger, open requests, steps in flight.

    plan()    what a kind of scheduler puts into the next step (`_schedule`)                          → StepPlan
    settle()  fences stale rows, appends tokens, finds stops, names full blocks, frees what ended     → Settled

Up to `depth` plans are in flight at once, so a plan is made from what is *known* plus the most that steps in flight may
yield. A slot and its blocks come back in one way only: the plan carries a Stop, the executor finishes what it has and
acknowledges, and at the settling of that acknowledgement both are free. A request that ends by itself, one that the client
aborts, one whose stop string the front end found and one that is preempted all take that way. The exception is a row that
the executor was never told of: nothing in flight can name it, so it is free at once.

Which requests start, and when, is not decided here: `scheduler` has the general way, `prefill` the short one of an instance
that only prefills, `decode` adds rows whose prefill is done elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.config import OnPreempt, WorkerConfig
from baton.core.engine.blocks import BlockPool, Pin
from baton.core.engine.change_journal import PhaseNotes
from baton.core.engine.plan import (
    NO_INT32S,
    Chunk,
    Copy,
    Int32s,
    Int64s,
    Logprobs,
    Outcome,
    Start,
    StepPlan,
    StepResult,
    Stop,
)
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.prefix_publisher import Namer
from baton.core.engine.records import (
    Crew,
    EndedRequest,
    Flight,
    HandoverGauges,
    Hit,
    Request,
    SchedulerGauges,
    Settled,
    StartedRequest,
    StorageGauges,
)
from baton.core.engine.request import TRANSITIONS, FinishReason, Move, Phase, Serial, Submission, Tokens
from baton.core.engine.reserve import blocks_for
from baton.core.engine.slots import FINISHED, Slots
from baton.core.engine.victims import Rates
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import PdCode, PdFault, PdStage
from baton.core.state_machine import StateMachine
from baton.core.tiers.offload import Tiers

Bools = npt.NDArray[np.bool_]
Column = TypeVar("Column", bound=npt.NDArray[np.integer[Any]])
TOKENS, CHUNK_UNFINISHED = np.int8(Outcome.TOKENS), np.int8(Outcome.NOTHING_CHUNK_UNFINISHED)
Delivery = tuple[Int64s, Int32s, Tokens, tuple[Logprobs, ...]]


class StepBuilder:
    """A plan in the making; lives for one pass."""

    def __init__(self, step: int, budget: int, decodes: Crew) -> None:
        self.step = step
        self.budget = budget
        self.decodes = decodes
        self.preempted = False
        self.chunk_prefill_unsatisfied = False
        self.stops: list[Stop] = []
        self.copies: list[Copy] = []
        self.starts: list[Start] = []
        self.chunks: list[Chunk] = []
        self._grows: list[tuple[Int32s, Int32s, Int32s]] = []

    @property
    def may_admit(self) -> bool:
        """Not while somebody had to yield, or a started prefill is short of blocks."""
        return not (self.preempted or self.chunk_prefill_unsatisfied)

    def grow(self, slots: Int32s, at: Int32s, blocks: Int32s) -> None:
        self._grows.append((slots, at, blocks))

    def build(self) -> StepPlan:
        grow_slots = grow_at = grow_blocks = NO_INT32S
        if self._grows:
            grow_slots, grow_at, grow_blocks = (_read_only(np.concatenate(part)) for part in zip(*self._grows, strict=True))
        return StepPlan(
            step=self.step,
            base_step=self.step - 1,
            stops=tuple(self.stops),
            copies=tuple(self.copies),
            starts=tuple(self.starts),
            grow_slots=grow_slots,
            grow_at=grow_at,
            grow_blocks=grow_blocks,
            chunks=tuple(self.chunks),
            decode_slots=self.decodes.slots_named,
            decode_epochs=self.decodes.epochs,
        )


class Board(ABC):
    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        self.config = config
        self.slots = Slots(config.slots, config.table_width, config.sequence_tokens_max)
        self.pool = BlockPool(config.blocks, prefix)
        self.rates = Rates()
        self.tiers = Tiers(config, self.pool, self.rates) if config.tiers.host_rows else None
        """KV outside the pool; None where there is none."""
        self._departing: dict[Serial, tuple[EndedRequest, int]] = {}
        """Requests that go elsewhere: free of their slots since then, they end when what they leave behind is stored."""
        self._namer = Namer(self.slots, self.pool, config.block_size)
        self._requests: dict[Serial, Request] = {}
        """Every request that is open or whose slot is not free yet."""
        self._held_back = 0
        """Waiting requests that are not in the queue yet: followers of a leader that still prefills."""
        self._prefilling: list[int] = []
        """Slots with tokens left to prefill, in order of admission."""
        self._prefilled = Move.HAND_OVER if config.role.gives else Move.PREFILL_PLANNED
        """What the planning of its last chunk is to a request."""
        self._stopping: list[int] = []
        """Slots whose Stop goes into the next plan."""
        self._flights: deque[Flight] = deque()
        self._crew: Crew | None = None
        """Every row that decodes, remembered from one plan to the next; a move makes it forgotten."""
        self._phases = StateMachine(TRANSITIONS, "a request")
        self.notes: PhaseNotes | None = None
        """Set where somebody is told of phases."""
        self._now_us = 0
        self._next_serial = 0
        self._steps = 0
        self._stale_results = 0
        self._broken_rows = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._recomputed_tokens = 0
        self._draft_tokens = 0
        self._accepted_draft_tokens = 0
        self._rescheduled = 0
        """Requests that had to yield and were sent elsewhere."""

    # ── what a kind of scheduler adds ────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that have no slot."""

    @abstractmethod
    def _schedule(self, step: StepBuilder) -> None:
        """Fill a step."""

    @abstractmethod
    def _queue_up(self, request: Request) -> None:
        """A request waits, again or for the first time."""

    @abstractmethod
    def _unqueue(self, request: Request) -> None:
        """A request that waits will not run any more."""

    @abstractmethod
    def _is_restored(self, slot: int) -> None:
        """What host memory had of a row is in its blocks: it may run."""

    @abstractmethod
    def _unrestore(self, slot: int) -> None:
        """A row that may run, or soon could have, ends before any plan has named it."""

    @property
    def asleep(self) -> bool:
        """Whether only a peer or a copy can bring on what is open: no pass would do anything."""
        return False

    def set_clock(self, now_us: int) -> None:
        """When what is asked for next happens."""
        self._now_us = now_us

    # ── what others may know ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether anything is open or not yet given back."""
        return bool(self._requests or self._departing)

    def requests(self) -> tuple[Request, ...]:
        """For the laws."""
        return tuple(self._requests.values())

    def request(self, serial: Serial) -> Request | None:
        return self._requests.get(serial)

    def unplanned(self, serial: Serial) -> int:
        """How many of the tokens that it starts with no plan feeds yet, as far as the cache does not have them."""
        request = self._requests[serial]
        if request.slot is None:
            return request.tokens_at_start
        return int(self.slots.known[request.slot] - self.slots.planned[request.slot])

    def crew(self) -> Crew | None:
        """For the laws: who decodes, if that is remembered."""
        return self._crew

    def moves(self) -> dict[tuple[Phase, Move], int]:
        """How often each transition of the table was taken; a copy, for reports."""
        return self._phases.moves()

    def promised(self) -> int:
        """For the laws: blocks that no unprotected growth may touch."""
        return 0

    def gauges(self) -> SchedulerGauges:
        return SchedulerGauges(
            running=self.slots.occupied,
            waiting=self.waiting,
            blocks=self.pool.gauges(),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            stale_results=self._stale_results,
            steps=self._steps,
            preemptions_for_others=0,
            preemptions_of_self=0,
            recomputed_tokens=self._recomputed_tokens,
            chunk_prefill_unsatisfied=0,
            reserve_ratio=0.0,
            broken_rows=self._broken_rows,
            handovers=HandoverGauges(preempted=self._rescheduled),
            storage=StorageGauges() if self.tiers is None else self.tiers.gauges(),
            draft_tokens=self._draft_tokens,
            accepted_draft_tokens=self._accepted_draft_tokens,
        )

    # ── intake ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_request(
        self, submission: Submission, keys: list[Key], limit: int, now_us: int, leader: Request | None = None
    ) -> Request:
        serial = Serial(self._next_serial)
        self._next_serial += 1
        request = Request(serial, submission, limit, keys, since_us=now_us, outputs=submission.generated, leader=leader)
        self._requests[serial] = request
        return request

    def keys_of(self, submission: Submission, tokens: Tokens) -> list[Key]:
        """The root, and where the cache is on the name of each full block."""
        named = tokens if self.config.prefix_cache else tokens[:0]
        return self.pool.prefix.keys_of(named, submission.salt, self.config.block_size)

    def order_stop(
        self, serial: Serial, reason: FinishReason, now_us: int, keep: int | None = None, fault: PdFault | None = None
    ) -> EndedRequest | None:
        """End a request from outside. One that waits ends here; one that runs ends when the executor acknowledges."""
        self._now_us = now_us
        if serial in self._departing:
            return self._depart_at_once(serial, reason, keep)
        request = self._requests.get(serial)
        if request is None or request.phase is Phase.FINISHED or request.ends_as is not None:
            return None
        request.keep = keep
        request.fault = fault
        if request.phase is Phase.WAITING:
            return self._withdraw(request, reason)
        if request.slot is not None and self.slots.restoring[request.slot]:
            self._order_end_of_load(request, reason)
            return None
        if request.slot is not None and not self.slots.told[request.slot] and request.phase is not Phase.PREEMPTING:
            return self._end_untold(request, reason)
        self._order_end(request, reason)
        return None

    def _withdraw(self, request: Request, reason: FinishReason) -> EndedRequest:
        leader = request.leader
        if leader is not None and request in leader.followers:
            leader.followers.remove(request)
            self._held_back -= 1
        else:
            self._unqueue(request)
        self._release_followers(request)
        request.bill.queue_us += self._now_us - request.since_us
        self._move(request, Move.FINISH)
        del self._requests[request.serial]
        return EndedRequest(request.serial, reason, _kept(request, len(request.outputs)), request.bill, request.fault)

    def _end_untold(self, request: Request, reason: FinishReason) -> EndedRequest:
        """End a request whose row the executor never heard of."""
        ended: list[EndedRequest] = []
        slot = self._slot_of(request)
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        self._unrestore(slot)
        self._end(request, reason, Move.FINISH, ended)
        self._vacate(request)
        return ended[0]

    def _order_end(self, request: Request, reason: FinishReason) -> None:
        """Its next acknowledgement is its end; what it still yields is nobody's."""
        if request.ends_as is not None:
            return
        request.ends_as = reason
        self.slots.muted[self._slot_of(request)] = True
        self._release_followers(request)
        if request.phase is not Phase.PREEMPTING:
            self._order_stop(request, Move.ORDER_STOP)

    def _order_stop(self, request: Request, move: Move) -> None:
        slot = self._slot_of(request)
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        self._move(request, move)
        self._stopping.append(slot)

    def _release_followers(self, leader: Request) -> None:
        """Let sibling choices into the queue."""
        self._held_back -= len(leader.followers)
        for follower in leader.followers:
            self._queue_up(follower)
        leader.followers.clear()

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, now_us: int) -> StepPlan | None:
        """The next step, or None when there is nothing to do in it."""
        self._now_us = now_us
        step = StepBuilder(self._steps + 1, self.config.step_tokens, self._decoding())
        self._schedule(step)
        plan = step.build()
        if plan.is_empty:
            return None
        self._steps += 1
        self._flights.append(self._flight_of(plan, step.decodes))
        return plan

    def _order_stops(self, step: StepBuilder) -> None:
        step.stops = [Stop(slot, int(self.slots.epoch[slot])) for slot in self._stopping]
        self._stopping.clear()

    def _decoding(self) -> Crew:
        if self._crew is None:
            self._crew = self._crew_of_decodes(self.slots.decoding())
        return self._crew

    def _crew_of_decodes(self, rows: Int64s) -> Crew:
        return self._crew_of(rows, np.full(len(rows), self.config.burst, dtype=np.int32))

    def _crew_of(self, rows: Int64s, allowances: Int32s) -> Crew:
        slots = self.slots
        return Crew(
            slots=_read_only(rows),
            slots_named=_read_only(rows.astype(np.int32)),
            epochs=_read_only(slots.epoch[rows]),
            serials=_read_only(slots.serial[rows]),
            allowances=_read_only(allowances),
            outcomes=_read_only(np.where(allowances > 0, TOKENS, CHUNK_UNFINISHED)),
        )

    def _plan_chunk(self, step: StepBuilder, slot: int) -> None:
        slots = self.slots
        begin, known = int(slots.planned[slot]), int(slots.known[slot])
        end = min(known, begin + step.budget)
        self._grow_to(step, slot, end)
        step.chunks.append(Chunk(slot, int(slots.epoch[slot]), begin, end, samples=end == known))
        step.budget -= end - begin
        slots.planned[slot] = end
        if end == known:
            slots.pending[slot] = 1
            self._prefilling.remove(slot)
            self._move(self._occupant(slot), self._prefilled)

    def _grow_to(self, step: StepBuilder, slot: int, tokens: int) -> None:
        held = int(self.slots.held[slot])
        missing = blocks_for(tokens, self.config.block_size) - held
        if missing > 0:
            blocks = self.pool.take(missing)
            self.slots.append_blocks(slot, blocks)
            at = np.arange(held, held + missing, dtype=np.int32)
            step.grow(np.full(missing, slot, dtype=np.int32), at, blocks)

    def _look_up(self, request: Request) -> Hit:
        block_size, tokens = self.config.block_size, request.tokens_at_start
        # Even a full hit computes the last token: its logits choose the next one.
        usable = (tokens - 1) // block_size
        found = self.pool.prefix.longest(request.keys[1 : usable + 1]) if self.config.prefix_cache else []
        blocks = np.array(found, dtype=np.int32)
        tail = (tokens - 1) % block_size
        source = self._tail_of_leader(request) if tail and len(found) == usable else None
        computed = len(found) * block_size + (tail if source is not None else 0)
        return Hit(blocks, source, computed)

    def _blocks_to_take(self, tokens: int, hit: Hit) -> int:
        """How many fewer are available once a request has a row with room for so many tokens."""
        return blocks_for(tokens, self.config.block_size) - len(hit.blocks) + self.pool.unreferenced(hit.blocks)

    def _tail_of_leader(self, request: Request) -> int | None:
        """The block in which a sibling choice holds the end of the same prompt, if it still does."""
        leader = request.leader
        if leader is None or len(request.outputs) or leader.slot is None or leader.phase is not Phase.RUNNING_DECODE:
            return None
        last = len(request.submission.prompt) - 1
        if int(self.slots.computed[leader.slot]) < last:
            return None
        return int(self.slots.table[leader.slot, last // self.config.block_size])

    def _occupy(self, request: Request, hit: Hit, move: Move) -> int:
        """Give a request a row, with the blocks that the cache has for it."""
        slot = self.slots.claim(request.serial)
        request.slot = slot
        request.epoch += 1
        self._move(request, move)
        self.pool.hold(hit.blocks)
        self.slots.append_blocks(slot, hit.blocks)
        self._fill_row(slot, request, hit)
        self._namer.start(slot, request, hit)
        return slot

    def _tell_start(self, step: StepBuilder, slot: int, tokens: Tokens, computed: int) -> None:
        """Put the row's Start into the step: from here on only the executor's acknowledgement frees it."""
        request, blocks = self._occupant(slot), self.slots.blocks(slot)
        blocks.setflags(write=False)
        tokens.setflags(write=False)
        self.slots.told[slot] = True
        step.starts.append(
            Start(
                slot=slot,
                epoch=request.epoch,
                tokens=tokens,
                prompt_tokens=len(request.submission.prompt),
                computed=computed,
                limit=request.limit,
                sampling=request.submission.sampling,
                blocks=blocks,
            )
        )

    def _fill_row(self, slot: int, request: Request, hit: Hit) -> None:
        slots, submission = self.slots, request.submission
        slots.epoch[slot] = request.epoch
        slots.priority[slot] = submission.priority
        slots.prompt[slot] = len(submission.prompt)
        slots.restore(slot, request.outputs)
        slots.planned[slot] = slots.computed[slot] = hit.computed
        slots.limit[slot] = request.limit
        slots.stops_from[slot] = len(submission.prompt) + submission.sampling.min_tokens
        slots.set_stop_ids(slot, submission.sampling.stop_token_ids)

    def _charge_start(self, request: Request, found: int) -> None:
        """So many of the tokens it starts with need not be computed."""
        bill = request.bill
        request.found_tokens = found
        if request.is_fresh:
            bill.cached_tokens = found
            request.computed_ever = found
            self._count_look_up(request, found)
        bill.queue_us += self._now_us - request.since_us
        request.since_us = self._now_us

    def _count_look_up(self, request: Request, found: int) -> None:
        self._prefix_queries += request.tokens_at_start
        self._prefix_hits += found

    def _flight_of(self, plan: StepPlan, decodes: Crew) -> Flight:
        if not (plan.stops or plan.chunks):
            return Flight(plan.step, decodes, 0, ())
        heads = [stop.slot for stop in plan.stops] + [chunk.slot for chunk in plan.chunks]
        may_yield = [0] * len(plan.stops) + [int(chunk.samples) for chunk in plan.chunks]
        rows = np.concatenate((np.array(heads, dtype=np.int64), decodes.slots))
        allowances = np.concatenate((np.array(may_yield, dtype=np.int32), decodes.allowances))
        return Flight(plan.step, self._crew_of(rows, allowances), len(plan.stops), plan.chunks)

    # ── settling ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, result: StepResult, now_us: int) -> Settled:
        """Take in the result of the oldest step in flight."""
        self._now_us = now_us
        flight = self._land(result)
        live = self._fence(flight)
        live, broken = self._split_broken(flight, result, live)
        started: list[StartedRequest] = []
        ended: list[EndedRequest] = []
        self._note_chunks(flight, live)
        delivery = self._take_tokens(flight, result, live, started, ended)
        self._name_full_blocks(flight.crew.slots[live])
        for row in broken.tolist():
            self._order_end(self._occupant(int(flight.crew.slots[row])), FinishReason.ERROR)
        for row in range(flight.stops):
            self._acknowledge(flight, result, row, ended)
        return Settled(*delivery, started=tuple(started), ended=tuple(ended))

    def _land(self, result: StepResult) -> Flight:
        if not self._flights or self._flights[0].step != result.step:
            due = self._flights[0].step if self._flights else "none"
            raise InvariantViolated(f"result of step {result.step} arrived while step {due} was due")
        flight = self._flights.popleft()
        if not (_same(flight.crew.slots_named, result.slots) and _same(flight.crew.epochs, result.epochs)):
            raise InvariantViolated(f"the result of step {result.step} names other rows than its plan")
        return flight

    def _fence(self, flight: Flight) -> Int64s:
        """Rows (stops aside) whose request is still the one that was planned, and still open."""
        crew, rows = flight.crew, flight.crew.slots
        serial, epoch, phase = self.slots.serial[rows], self.slots.epoch[rows], self.slots.phase[rows]
        if _same(serial, crew.serials) and _same(epoch, crew.epochs) and FINISHED not in phase.tobytes():
            return np.arange(flight.stops, len(rows))
        is_live = (serial == crew.serials) & (epoch == crew.epochs) & (phase != FINISHED)
        live: Int64s = flight.stops + is_live[flight.stops :].nonzero()[0]
        self._stale_results += len(rows) - flight.stops - len(live)
        return live

    def _note_chunks(self, flight: Flight, live: Int64s) -> None:
        """The KV of these positions exists now."""
        if not flight.chunks:
            return
        first, last = flight.stops, flight.stops + len(flight.chunks)
        for row in live[(live >= first) & (live < last)].tolist():
            chunk = flight.chunks[row - first]
            self.slots.computed[chunk.slot] = chunk.end

    def _take_tokens(
        self,
        flight: Flight,
        result: StepResult,
        live: Int64s,
        started: list[StartedRequest],
        ended: list[EndedRequest],
    ) -> Delivery:
        slots, crew = self.slots, flight.crew
        rows = live[crew.allowances[live] > 0] if flight.chunks else live
        at = crew.slots[rows]
        accepted, stopped = self._append_all(result, rows, at)
        slots.computed[at] = slots.known[at] - 1
        if len(result.drafted):
            self._draft_tokens += int(result.drafted[rows].sum())
            self._accepted_draft_tokens += int(result.counts[rows].sum()) - len(rows)
        if flight.chunks:
            for slot in at[rows < flight.stops + len(flight.chunks)].tolist():
                self._note_prefilled(self._occupant(slot), started)
        muted = slots.muted[at]
        if np.count_nonzero(muted):
            rows, at, accepted, stopped = rows[~muted], at[~muted], accepted[~muted], stopped[~muted]
        delivery = self._delivery(flight, result, rows, accepted)
        self._finish_rows(at, stopped, ended)
        return delivery

    def _note_prefilled(self, request: Request, started: list[StartedRequest]) -> None:
        """The first token since its start has come."""
        if request.is_fresh:
            started.append(StartedRequest(request.serial, request.cached_of_prompt))
        request.bill.prefill_us += self._now_us - request.since_us
        request.since_us = self._now_us
        self._release_followers(request)

    def _split_broken(self, flight: Flight, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        """Sound rows, and those whose outcome their plan does not allow or whose token count differs between the sides.

        What a broken row computed is unknown, so nothing of it is counted, delivered or cached.
        """
        slots, at = self.slots, flight.crew.slots[live]
        counts, allowed = result.counts[live], flight.crew.allowances[live]
        outcomes, expected = result.outcomes[live], flight.crew.outcomes[live]
        known, agreed = result.known[live], slots.known[at] + counts
        slots.pending[at] -= allowed
        if _same(outcomes, expected) and _same(counts, allowed) and _same(known, agreed):
            return live, live[:0]  # every row yielded all it may, as in almost every step
        broken = (outcomes != expected) | (counts > allowed) | (counts < (allowed > 0)) | (known != agreed)
        self._broken_rows += int(np.count_nonzero(broken))
        return live[~broken], live[broken]

    def _append_all(self, result: StepResult, rows: Int64s, at: Int64s) -> tuple[Int32s, Bools]:
        """Append each row's tokens up to its first stop; answers how many were taken, and which rows drew a stop."""
        firsts, counts = _firsts_of(result, rows), result.counts[rows]
        accepted = np.minimum(counts, 1)
        stopped = self._append(at, result.tokens[firsts])
        for nth in range(1, self.config.burst):
            going = ((counts > nth) & ~stopped).nonzero()[0]
            if not len(going):
                break
            stopped[going] = self._append(at[going], result.tokens[firsts[going] + nth])
            accepted[going] += 1
        return accepted, stopped

    def _append(self, at: Int64s, tokens: Tokens) -> Bools:
        """One token for each row. Answers which rows it stops."""
        slots = self.slots
        slots.append(at, tokens)
        stopped = slots.draws_stop(at, tokens)
        # A muted row takes all its tokens, though nobody hears them: its count must go on agreeing with the executor's.
        return stopped & ~slots.muted[at] if np.count_nonzero(stopped) else stopped

    def _delivery(self, flight: Flight, result: StepResult, rows: Int64s, accepted: Int32s) -> Delivery:
        taken = int(accepted.sum())
        if taken == len(result.tokens):
            tokens = result.tokens  # nothing was cut off or dropped, as in almost every step
        else:
            within = np.arange(taken) - np.repeat(_firsts(accepted), accepted)
            tokens = result.tokens[np.repeat(_firsts_of(result, rows), accepted) + within]
        logprobs: tuple[Logprobs, ...] = ()
        if result.logprobs:
            place = {row: index for index, row in enumerate(rows.tolist())}
            logprobs = tuple(
                _cut(item, place[item.row], int(accepted[place[item.row]])) for item in result.logprobs if item.row in place
            )
        return flight.crew.serials[rows], accepted, tokens, logprobs

    def _finish_rows(self, at: Int64s, stopped: Bools, ended: list[EndedRequest]) -> None:
        """End the requests of rows that drew a stop token or reached their limit."""
        over = stopped | (self.slots.known[at] >= self.slots.limit[at])
        if not np.count_nonzero(over):
            return
        for slot, by_stop in zip(at[over].tolist(), stopped[over].tolist(), strict=True):
            request = self._occupant(slot)
            if request.phase is Phase.HANDING_OVER:
                continue  # its first token is for the peer that will decode it, whatever it is
            if request.phase is not Phase.PREEMPTING:  # else its Stop is on the way already
                self._stopping.append(slot)
            self._end(request, FinishReason.STOP if by_stop else FinishReason.LENGTH, Move.FINISH, ended)

    def _end(self, request: Request, reason: FinishReason, move: Move, ended: list[EndedRequest]) -> None:
        slot = self._slot_of(request)
        self._charge_run(request)
        self._move(request, move)
        self._release_followers(request)
        generated = int(self.slots.known[slot] - self.slots.prompt[slot])
        ended.append(EndedRequest(request.serial, reason, _kept(request, generated), request.bill, request.fault))

    def _charge_run(self, request: Request) -> None:
        """Close the stage that a running request is in."""
        slot, bill = self._slot_of(request), request.bill
        spent = self._now_us - request.since_us
        first_since_start = int(self.slots.known[slot]) > request.tokens_at_start
        bill.decode_us += spent if first_since_start else 0
        bill.prefill_us += 0 if first_since_start else spent
        self._charge_tokens(request, int(self.slots.computed[slot]))
        request.since_us = self._now_us

    def _charge_tokens(self, request: Request, computed: int) -> None:
        """Of what this stay computed, positions that had been computed before count as recomputed."""
        again = max(0, min(computed, request.computed_ever) - request.found_tokens)
        request.bill.recomputed_tokens += again
        request.bill.computed_tokens += max(0, computed - request.computed_ever)
        request.computed_ever = max(computed, request.computed_ever)
        self._recomputed_tokens += again

    def _name_full_blocks(self, at: Int64s) -> None:
        if not self.config.prefix_cache:
            return
        plain, others = self._namer.unnamed(at)
        self._namer.name_outputs(plain)
        for slot in others.tolist():
            self._namer.name_all(slot, self._occupant(slot))

    def _acknowledge(self, flight: Flight, result: StepResult, row: int, ended: list[EndedRequest]) -> None:
        """The executor let go of a slot: its blocks come back, and its request ends or waits again."""
        slot = int(flight.crew.slots[row])
        request = self._occupant(slot)
        if request.phase is Phase.PREEMPTING:
            agreed = result.outcomes[row] == Outcome.PREEMPTED and result.known[row] == self.slots.known[slot]
            self._broken_rows += not agreed
            if not agreed and request.ends_as is None:
                request.ends_as = FinishReason.ERROR
            if request.ends_as is None and self.config.on_preempt is OnPreempt.RESCHEDULE:
                request.ends_as = FinishReason.RESCHEDULE
                self._rescheduled += 1
                request.fault = PdFault(PdCode.PREEMPTED, PdStage.DECODE, "its KV blocks were needed for other requests")
            if request.ends_as is None:
                self._requeue(request)
            else:
                self._end(request, request.ends_as, Move.ACK_END, ended)
        unstored = self._vacate(request)
        if unstored and request.ends_as is FinishReason.RESCHEDULE and ended and ended[-1].serial == request.serial:
            self._depart(ended.pop(), unstored)

    def lend(self, serial: Serial) -> None:
        """A transfer reads the request's blocks from here on."""
        self._requests[serial].lent = True

    def give_back(self, serial: Serial) -> None:
        """No transfer reads them any more; what had ended meanwhile is free now. One that was never lent may be gone."""
        request = self._requests.get(serial)
        if request is None:
            return
        request.lent = False
        if request.phase is Phase.FINISHED:
            self._vacate(request)

    def _vacate(self, request: Request) -> list[Key]:
        """Its slot and blocks are nobody's any more; a request that has ended is forgotten.

        What of its KV is saved is read a while longer. Answers what the store is to have of it and has not yet.
        """
        if request.lent:
            return []
        slot = self._slot_of(request)
        unstored = self._save(request)
        self.pool.drop(self.slots.blocks(slot))
        self.slots.vacate(slot)
        request.slot = None
        if request.phase is Phase.FINISHED:
            del self._requests[request.serial]
        return unstored

    # ── KV outside the pool ──────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, request: Request) -> list[Key]:
        config, tiers = self.config.tiers, self.tiers
        preempted = request.phase is Phase.WAITING or request.ends_as is FinishReason.RESCHEDULE
        wanted = config.save_preempted if preempted else config.save_finished
        if tiers is None or not wanted or request.ends_as is FinishReason.ERROR:
            return []
        blocks = self.slots.blocks(self._slot_of(request))
        if not config.cache_outputs:
            blocks = blocks[: len(request.submission.prompt) // self.config.block_size]
        return tiers.save(blocks, preempted, self._now_us)

    def _depart(self, ended: EndedRequest, unstored: list[Key]) -> None:
        if self.tiers is not None:
            self._departing[ended.serial] = ended, self._now_us
            self.tiers.depart(ended.serial, unstored, self._now_us)

    def departing(self) -> tuple[Serial, ...]:
        """Requests whose end waits for what they leave behind."""
        return tuple(self._departing)

    def departed(self, serial: Serial) -> EndedRequest:
        """What it leaves behind is stored, or will not be: its end may be told."""
        ended, since_us = self._departing.pop(serial)
        ended.bill.transfer_us += self._now_us - since_us
        return ended

    def _depart_at_once(self, serial: Serial, reason: FinishReason, keep: int | None) -> EndedRequest:
        if self.tiers is not None:
            self.tiers.forget_departure(serial)
        ended = self.departed(serial)
        generated = ended.generated_tokens if keep is None else min(keep, ended.generated_tokens)
        return replace(ended, reason=reason, generated_tokens=generated, fault=None)

    def _host_rows(self, request: Request, hit: Hit) -> Int32s:
        """Where host memory continues what the cache has, as far as that is worth bringing back."""
        if self.tiers is None:
            return NO_INT32S
        rows = self.tiers.host.run(self._keys_after(request, hit))
        return rows if len(rows) and self.tiers.brings_back(len(rows)) else NO_INT32S

    def _keys_after(self, request: Request, hit: Hit) -> list[Key]:
        """Names of the blocks that would have to be computed, the last token's aside."""
        usable = (request.tokens_at_start - 1) // self.config.block_size
        return request.keys[1 + len(hit.blocks) : usable + 1]

    def _seek(self, seeker: Hashable, request: Request) -> bool:
        """Have the store asked for what neither the cache nor host memory has. False: not now."""
        if self.tiers is None or not self.config.tiers.store:
            return True
        after = self._keys_after(request, self._look_up(request))
        here = len(self.tiers.host.run(after))
        self.tiers.host.touch(after[:here])
        return self.tiers.seek(seeker, after[here:], self._now_us)

    def _restore(self, request: Request, hit: Hit, rows: Int32s, protected: bool) -> None:
        """A row and all blocks of what it starts with; it may run when host memory's share has been copied into them."""
        if self.tiers is None:
            raise InvariantViolated("KV was to be restored where there is none outside the pool")
        slots, size = self.slots, self.config.block_size
        slot = self._occupy(request, hit, Move.RESTORE)
        slots.protected[slot] = protected
        fresh = self.pool.take(blocks_for(request.tokens_at_start, size) - len(hit.blocks))
        slots.append_blocks(slot, fresh)
        arriving = fresh[: len(rows)]
        self.pool.pin(arriving, Pin.RECEIVING)
        slots.restoring[slot] = True
        request.found_tokens = hit.computed
        request.computed_ever = max(request.computed_ever, hit.computed)
        request.bill.queue_us += self._now_us - request.since_us
        request.since_us = self._now_us
        first = len(hit.blocks) + 1
        self.tiers.load(request.serial, request.keys[first : first + len(rows)], rows, arriving, self._now_us)

    def loaded(self, serial: Serial, blocks: int, now_us: int) -> EndedRequest | None:
        """So many blocks came from host memory, and nothing writes to its blocks any more. What is missing is computed."""
        self._now_us = now_us
        request = self._requests[serial]
        slot = self._slot_of(request)
        self.slots.restoring[slot] = False
        self.pool.pin(self.pool.pinned(self.slots.blocks(slot)), Pin.NONE)
        request.bill.transfer_us += now_us - request.since_us
        request.since_us = now_us
        if request.ends_as is not None:
            ended: list[EndedRequest] = []
            self._end(request, request.ends_as, Move.ACK_END, ended)
            self._vacate(request)
            return ended[0]
        tokens = blocks * self.config.block_size
        computed = request.found_tokens + tokens
        self.slots.planned[slot] = self.slots.computed[slot] = computed
        request.bill.restored_tokens += tokens
        self._name_full_blocks(np.array([slot], dtype=np.int64))
        self._charge_start(request, computed)
        self._is_restored(slot)
        return None

    def _order_end_of_load(self, request: Request, reason: FinishReason) -> None:
        request.ends_as = reason
        self._unrestore(self._slot_of(request))
        self._release_followers(request)
        self._move(request, Move.ORDER_STOP)
        if self.tiers is not None:
            self.tiers.give_up_load(request.serial)

    def _requeue(self, request: Request) -> None:
        """Back to the head of the queue, with exactly what was delivered to continue from."""
        self._charge_run(request)
        request.outputs = self.slots.outputs(self._slot_of(request))
        request.is_sought, request.sought_again = False, 0
        known = np.concatenate((request.submission.prompt, request.outputs))
        request.keys = self.keys_of(request.submission, known)
        self._move(request, Move.ACK_PREEMPTION)
        self._queue_up(request)

    # ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _occupant(self, slot: int) -> Request:
        return self._requests[Serial(int(self.slots.serial[slot]))]

    def _slot_of(self, request: Request) -> int:
        if request.slot is None:
            raise InvariantViolated(f"request {request.serial} in {request.phase.name} has no slot")
        return request.slot

    def _move(self, request: Request, move: Move) -> None:
        """The only place where a phase changes."""
        self._crew = None
        request.phase = phase = self._phases.after(request.phase, move)
        if self.notes is not None:
            self.notes.note(request.serial, phase, self._now_us)
        if request.slot is not None:
            self.slots.phase[request.slot] = phase


def _kept(request: Request, generated: int) -> int:
    return generated if request.keep is None else min(generated, request.keep)


def _firsts(counts: Int32s) -> Int64s:
    """Where each row's tokens begin when rows lie end to end."""
    return np.cumsum(counts, dtype=np.int64) - counts


def _firsts_of(result: StepResult, rows: Int64s) -> Int64s:
    """Where the tokens of these rows begin; they are sound, so that each yields at least one."""
    if len(rows) == len(result.counts) == len(result.tokens):
        return rows  # one token each
    return _firsts(result.counts)[rows]


def _same(one: Column, other: Column) -> bool:
    """Equal element for element. As bytes, because numpy takes ten times as long for arrays of a few rows."""
    return len(one) == len(other) and (one.tobytes() == other.tobytes() or np.array_equal(one, other))


def _read_only(column: Column) -> Column:
    column.setflags(write=False)
    return column


def _cut(item: Logprobs, row: int, lines: int) -> Logprobs:
    return Logprobs(row, item.chosen[:lines], item.top_ids[:lines], item.top[:lines])
