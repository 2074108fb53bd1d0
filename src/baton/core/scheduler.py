"""Plans steps and settles their results. Owns the queue, the slot table and the block ledger of one engine.

    plan()    decodes first, then unfinished prefills, then new requests, within the token budget     → StepPlan
    settle()  fences stale rows, appends tokens, finds stops, publishes full blocks, frees what ended → Settled

Up to `depth` plans are in flight at once, so a plan is made from what is *known* plus the most that steps in flight may
yield. A slot and its blocks come back in one way only: the plan carries a Stop, the executor finishes what it has and
acknowledges, and at the settling of that acknowledgement both are free. A request that ends by itself, one that the client
aborts and one whose stop string the front end found all take that way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.core.blocks import BlockGauges, BlockPool
from baton.core.config import WorkerConfig
from baton.core.errors import InvariantViolated
from baton.core.plan import Chunk, Copy, Int32s, Int64s, Logprobs, Outcome, Start, StepPlan, StepResult, Stop
from baton.core.prefix import Key, PrefixIndex
from baton.core.request import FinishReason, Move, Phase, Serial, Submission, Tokens, next_phase
from baton.core.reserve import WholeNeed, blocks_for
from baton.core.slots import Slots

Bools = npt.NDArray[np.bool_]
Delivery = tuple[Int64s, Int32s, Tokens, tuple[Logprobs, ...]]


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler remembers of an open request. `phase` is its one state."""

    serial: Serial
    submission: Submission
    limit: int
    keys: list[Key]
    """The root, then the name of each full block of the prompt."""
    phase: Phase = Phase.WAITING
    epoch: int = 0
    """How often it was started."""
    slot: int | None = None
    cached_tokens: int = 0
    followers: list[Request] = field(default_factory=list)
    """Sibling choices that wait for this one's prompt blocks."""
    leader: Request | None = None
    ends_as: FinishReason | None = None
    """Set with the order to stop: how it ends when the executor acknowledges."""
    keep: int | None = None
    """How many outputs count, where the front end cut the answer (a stop string)."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a new request need not compute: whole cached blocks, then part of a sibling's last block."""

    blocks: Int32s
    copy_from: int | None
    computed: int


@dataclass(frozen=True, slots=True)
class Admit:
    hit: Hit


@dataclass(frozen=True, slots=True)
class Wait:
    """It does not fit yet."""


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request whose first token has just come."""

    serial: Serial
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EndedRequest:
    serial: Serial
    reason: FinishReason
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Settled:
    """What one step brought, for the front end. Row i yields `counts[i]` of `tokens`, row after row."""

    serials: Int64s
    counts: Int32s
    tokens: Tokens
    logprobs: tuple[Logprobs, ...]
    """Their `row` indexes this object's rows, and they have as many lines as the row has tokens."""
    started: tuple[StartedRequest, ...]
    ended: tuple[EndedRequest, ...]


@dataclass(frozen=True, slots=True)
class SchedulerGauges:
    running: int
    waiting: int
    blocks: BlockGauges
    prefix_queries: int
    """Prompt tokens looked up."""
    prefix_hits: int
    """Prompt tokens found."""
    stale_results: int
    steps: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched plan, remembered until its result settles. Rows: stops, chunks, decodes."""

    step: int
    slots: Int64s
    """As numpy indexes fastest: a pass indexes with these a dozen times."""
    epochs: Int64s
    serials: Int64s
    allowances: Int64s
    """The most tokens that each row may yield."""
    stops: int
    chunks: tuple[Chunk, ...]


class StepBuilder:
    """A plan in the making; lives for one pass."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.stops: list[Stop] = []
        self.copies: list[Copy] = []
        self.starts: list[Start] = []
        self.chunks: list[Chunk] = []
        self.decode_slots: Int32s = np.empty(0, dtype=np.int32)
        self.decode_epochs: Int64s = np.empty(0, dtype=np.int64)
        self._grows: list[tuple[Int32s, Int32s, Int32s]] = []

    def grow(self, slots: Int32s, at: Int32s, blocks: Int32s) -> None:
        self._grows.append((slots, at, blocks))

    def build(self) -> StepPlan:
        grows = [np.concatenate(part) for part in zip(*self._grows, strict=True)] if self._grows else None
        plan = StepPlan(
            step=self.step,
            base_step=self.step - 1,
            stops=tuple(self.stops),
            copies=tuple(self.copies),
            starts=tuple(self.starts),
            chunks=tuple(self.chunks),
            decode_slots=self.decode_slots,
            decode_epochs=self.decode_epochs,
            **(dict(zip(("grow_slots", "grow_at", "grow_blocks"), grows, strict=True)) if grows else {}),
        )
        for array in (plan.grow_slots, plan.grow_at, plan.grow_blocks, plan.decode_slots, plan.decode_epochs):
            array.setflags(write=False)
        return plan


class Scheduler:
    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        self.config = config
        self.slots = Slots(config.slots, config.table_width, config.sequence_tokens_max)
        self.pool = BlockPool(config.blocks, prefix)
        self._reserve = WholeNeed(config.block_size)
        self._requests: dict[Serial, Request] = {}
        """Every request that is open or whose slot is not free yet."""
        self._waiting: deque[Request] = deque()
        self._held_back = 0
        """Waiting requests that are not in the queue yet: followers of a leader that still prefills."""
        self._prefilling: list[int] = []
        """Slots with prompt left to plan, in order of admission."""
        self._stopping: list[int] = []
        """Slots whose Stop goes into the next plan."""
        self._tips: list[Key] = [Key(b"")] * config.slots
        """The name of the last block that each slot offered to the prefix index."""
        self._flights: deque[Flight] = deque()
        self._next_serial = 0
        self._steps = 0
        self._stale_results = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    # ── what others may know ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._held_back

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether anything is open or not yet given back."""
        return bool(self._requests)

    def requests(self) -> tuple[Request, ...]:
        """For the laws."""
        return tuple(self._requests.values())

    def request(self, serial: Serial) -> Request | None:
        return self._requests.get(serial)

    def gauges(self) -> SchedulerGauges:
        return SchedulerGauges(
            running=self.slots.occupied,
            waiting=self.waiting,
            blocks=self.pool.gauges(),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            stale_results=self._stale_results,
            steps=self._steps,
        )

    # ── intake ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, submission: Submission, limit: int, leader: Serial | None = None) -> Serial:
        """Put a request, already found possible, at the end of the queue, or behind the leader whose blocks it shares."""
        serial = Serial(self._next_serial)
        self._next_serial += 1
        keys = self.pool.prefix.keys_of(submission.prompt, submission.salt, self.config.block_size)
        request = Request(serial, submission, limit, keys)
        self._requests[serial] = request
        if leader is None:
            self._waiting.append(request)
        else:
            request.leader = self._requests[leader]
            request.leader.followers.append(request)
            self._held_back += 1
        return serial

    def order_stop(self, serial: Serial, reason: FinishReason, keep: int | None = None) -> EndedRequest | None:
        """End a request from outside. One that waits ends here; one that runs ends when the executor acknowledges."""
        request = self._requests.get(serial)
        if request is None or request.phase in (Phase.PREEMPTING, Phase.FINISHED):
            return None
        if request.phase is Phase.WAITING:
            return self._withdraw(request, reason)
        request.keep = keep
        self._order_stop(request, reason)
        return None

    def _withdraw(self, request: Request, reason: FinishReason) -> EndedRequest:
        leader = request.leader
        if leader is not None and request in leader.followers:
            leader.followers.remove(request)
            self._held_back -= 1
        else:
            self._waiting.remove(request)
        self._release_followers(request)
        self._move(request, Move.FINISH)
        del self._requests[request.serial]
        return EndedRequest(request.serial, reason, 0, 0)

    def _order_stop(self, request: Request, reason: FinishReason) -> None:
        slot = self._slot_of(request)
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        request.ends_as = reason
        self._move(request, Move.ORDER_STOP)
        self._stopping.append(slot)
        self._release_followers(request)

    def _release_followers(self, leader: Request) -> None:
        """Let sibling choices into the queue, at its head: they arrived with their leader."""
        self._held_back -= len(leader.followers)
        self._waiting.extendleft(reversed(leader.followers))
        leader.followers.clear()

    # ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do in it."""
        step = StepBuilder(self._steps + 1, self.config.step_tokens)
        self._order_stops(step)
        self._continue_decodes(step)
        self._continue_prefills(step)
        self._admit_waiting(step)
        plan = step.build()
        if plan.is_empty:
            return None
        self._steps += 1
        self._flights.append(self._flight_of(plan))
        return plan

    def _order_stops(self, step: StepBuilder) -> None:
        step.stops = [Stop(slot, int(self.slots.epoch[slot])) for slot in self._stopping]
        self._stopping.clear()

    def _continue_decodes(self, step: StepBuilder) -> None:
        slots, config = self.slots, self.config
        rows = slots.in_phase(Phase.RUNNING_DECODE)
        reach = slots.known[rows] + slots.pending[rows]
        open_rows = reach < slots.limit[rows]
        rows, reach = rows[open_rows], reach[open_rows]
        ends = np.minimum(reach + config.burst - 1, slots.limit[rows])
        short = rows[ends > slots.held[rows] * config.block_size]
        if len(short):
            self._grow_by_one(step, short)
        slots.pending[rows] += config.burst
        step.budget -= len(rows) * config.burst
        step.decode_slots = rows.astype(np.int32)
        step.decode_epochs = slots.epoch[rows]

    def _grow_by_one(self, step: StepBuilder, rows: Int64s) -> None:
        """One more block for each row: `burst` never exceeds a block, so one is always enough."""
        slots = self.slots
        blocks, at = self.pool.take(len(rows)), slots.held[rows]
        slots.table[rows, at] = blocks
        slots.held[rows] += 1
        step.grow(rows.astype(np.int32), at.astype(np.int32), blocks)

    def _continue_prefills(self, step: StepBuilder) -> None:
        for slot in tuple(self._prefilling):
            if step.budget <= 0:
                return
            self._plan_chunk(step, slot)

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
            self._move(self._occupant(slot), Move.PREFILL_PLANNED)

    def _grow_to(self, step: StepBuilder, slot: int, tokens: int) -> None:
        held = int(self.slots.held[slot])
        missing = blocks_for(tokens, self.config.block_size) - held
        if missing > 0:
            blocks = self.pool.take(missing)
            self.slots.append_blocks(slot, blocks)
            at = np.arange(held, held + missing, dtype=np.int32)
            step.grow(np.full(missing, slot, dtype=np.int32), at, blocks)

    def _admit_waiting(self, step: StepBuilder) -> None:
        while self._waiting and step.budget > 0 and self.slots.has_room:
            match self._consider(self._waiting[0]):
                case Admit(hit):
                    self._start(step, self._waiting.popleft(), hit)
                case Wait():
                    return

    def _consider(self, request: Request) -> Admit | Wait:
        """Whether a request's whole need fits beside what the running ones reserve. Changes nothing."""
        hit = self._look_up(request)
        need = blocks_for(request.limit, self.config.block_size) - len(hit.blocks) + self.pool.unreferenced(hit.blocks)
        fits = need <= self.pool.available - self._reserve.blocks(self.slots)
        return Admit(hit) if fits else Wait()

    def _look_up(self, request: Request) -> Hit:
        block_size, prompt_tokens = self.config.block_size, len(request.submission.prompt)
        # Even a full hit computes the last token: its logits choose the next one.
        usable = (prompt_tokens - 1) // block_size
        found = self.pool.prefix.longest(request.keys[1 : usable + 1]) if self.config.prefix_cache else []
        blocks = np.array(found, dtype=np.int32)
        tail = (prompt_tokens - 1) % block_size
        source = self._tail_of_leader(request) if tail and len(found) == usable else None
        computed = len(found) * block_size + (tail if source is not None else 0)
        return Hit(blocks, source, computed)

    def _tail_of_leader(self, request: Request) -> int | None:
        """The block in which a sibling choice holds the end of the same prompt, if it still does."""
        leader = request.leader
        if leader is None or leader.slot is None or leader.phase is not Phase.RUNNING_DECODE:
            return None
        last = len(request.submission.prompt) - 1
        if int(self.slots.computed[leader.slot]) < last:
            return None
        return int(self.slots.table[leader.slot, last // self.config.block_size])

    def _start(self, step: StepBuilder, request: Request, hit: Hit) -> None:
        slots, submission = self.slots, request.submission
        slot = slots.claim(request.serial)
        request.slot = slot
        request.epoch += 1
        request.cached_tokens = hit.computed
        self._move(request, Move.ADMIT)
        self.pool.hold(hit.blocks)
        slots.append_blocks(slot, hit.blocks)
        if hit.copy_from is not None:
            target = self.pool.take(1)
            slots.append_blocks(slot, target)
            step.copies.append(Copy(hit.copy_from, int(target[0])))
        self._fill_row(slot, request, hit)
        blocks = slots.blocks(slot)
        blocks.setflags(write=False)
        step.starts.append(
            Start(
                slot=slot,
                epoch=request.epoch,
                tokens=submission.prompt,
                prompt_tokens=len(submission.prompt),
                computed=hit.computed,
                limit=request.limit,
                sampling=submission.sampling,
                blocks=blocks,
            )
        )
        self._prefilling.append(slot)
        self._plan_chunk(step, slot)

    def _fill_row(self, slot: int, request: Request, hit: Hit) -> None:
        slots, sampling, prompt_tokens = self.slots, request.submission.sampling, len(request.submission.prompt)
        slots.epoch[slot] = request.epoch
        slots.prompt[slot] = slots.known[slot] = prompt_tokens
        slots.planned[slot] = slots.computed[slot] = hit.computed
        slots.limit[slot] = request.limit
        slots.stops_from[slot] = prompt_tokens + sampling.min_tokens
        slots.set_stop_ids(slot, sampling.stop_token_ids)
        slots.published[slot] = len(hit.blocks)
        self._tips[slot] = request.keys[len(hit.blocks)]
        self._prefix_queries += prompt_tokens
        self._prefix_hits += hit.computed

    def _flight_of(self, plan: StepPlan) -> Flight:
        stop_slots = [stop.slot for stop in plan.stops]
        chunk_slots = [chunk.slot for chunk in plan.chunks]
        heads = np.array(stop_slots + chunk_slots, dtype=np.int64)
        rows: Int64s = np.concatenate((heads, plan.decode_slots), dtype=np.int64)
        allowances = np.full(len(rows), self.config.burst, dtype=np.int64)
        allowances[: len(heads)] = [0] * len(stop_slots) + [int(chunk.samples) for chunk in plan.chunks]
        return Flight(
            step=plan.step,
            slots=rows,
            epochs=self.slots.epoch[rows],
            serials=self.slots.serial[rows],
            allowances=allowances,
            stops=len(stop_slots),
            chunks=plan.chunks,
        )

    # ── settling ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, result: StepResult) -> Settled:
        """Take in the result of the oldest step in flight."""
        flight = self._land(result)
        live = self._fence(flight)
        self._note_chunks(flight, live)
        started: list[StartedRequest] = []
        ended: list[EndedRequest] = []
        delivery = self._take_tokens(flight, result, live, started, ended)
        self._publish_full_blocks(flight.slots[live])
        for row in range(flight.stops):
            self._acknowledge(flight, result, row, ended)
        return Settled(*delivery, started=tuple(started), ended=tuple(ended))

    def _land(self, result: StepResult) -> Flight:
        if not self._flights or self._flights[0].step != result.step:
            due = self._flights[0].step if self._flights else "none"
            raise InvariantViolated(f"result of step {result.step} arrived while step {due} was due")
        flight = self._flights.popleft()
        if not (np.array_equal(flight.slots, result.slots) and np.array_equal(flight.epochs, result.epochs)):
            raise InvariantViolated(f"the result of step {result.step} names other rows than its plan")
        return flight

    def _fence(self, flight: Flight) -> Int64s:
        """Rows (stops aside) whose request is still the one that was planned, and still open."""
        slots, rows = self.slots, flight.slots
        same = (slots.serial[rows] == flight.serials) & (slots.epoch[rows] == flight.epochs)
        live = flight.stops + np.flatnonzero((same & (slots.phase[rows] != Phase.FINISHED))[flight.stops :])
        self._stale_results += len(rows) - flight.stops - len(live)
        return live

    def _note_chunks(self, flight: Flight, live: Int64s) -> None:
        """The KV of these prompt positions exists now."""
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
        slots = self.slots
        slots.pending[flight.slots[live]] -= flight.allowances[live]
        broken = self._disagreeing(flight, result, live)
        rows = live[(result.outcomes[live] == Outcome.TOKENS) & ~broken]
        accepted, stopped = self._append_all(flight, result, rows)
        at = flight.slots[rows]
        slots.computed[at] = slots.known[at] - 1
        heard = slots.phase[at] != Phase.PREEMPTING
        delivery = self._delivery(flight, result, rows[heard], accepted[heard])
        for row in rows[rows < flight.stops + len(flight.chunks)].tolist():
            request = self._occupant(int(flight.slots[row]))
            started.append(StartedRequest(request.serial, request.cached_tokens))
            self._release_followers(request)
        self._finish_rows(at[heard], stopped[heard], ended)
        for row in live[broken].tolist():
            self._break(self._occupant(int(flight.slots[row])))
        return delivery

    def _disagreeing(self, flight: Flight, result: StepResult, live: Int64s) -> Bools:
        """Live rows whose outcome is not what their plan allows, or whose token count differs between the two sides."""
        counts, allowed = result.counts[live], flight.allowances[live]
        expected = np.where(allowed > 0, Outcome.TOKENS, Outcome.NOTHING_CHUNK_UNFINISHED)
        wrong = (result.outcomes[live] != expected) | (counts > allowed) | ((allowed > 0) & (counts < 1))
        miscounted = result.known[live] != self.slots.known[flight.slots[live]] + counts
        return np.asarray(wrong | miscounted)

    def _append_all(self, flight: Flight, result: StepResult, rows: Int64s) -> tuple[Int64s, Bools]:
        """Append each row's tokens up to its first stop; answers how many were taken, and which rows drew a stop."""
        slots, firsts, counts = self.slots, _firsts(result.counts)[rows], result.counts[rows]
        accepted = np.zeros(len(rows), dtype=np.int64)
        stopped = np.zeros(len(rows), dtype=np.bool_)
        going = np.arange(len(rows))
        for nth in range(int(counts.max(initial=0))):
            if nth:
                going = going[counts[going] > nth]
            tokens = result.tokens[firsts[going] + nth]
            at = flight.slots[rows[going]]
            slots.append(at, tokens)
            accepted[going] = nth + 1
            stopped[going] = drew_stop = slots.draws_stop(at, tokens)
            going = going[~drew_stop]
        return accepted, stopped

    def _delivery(self, flight: Flight, result: StepResult, rows: Int64s, accepted: Int64s) -> Delivery:
        if int(accepted.sum()) == len(result.tokens):
            tokens = result.tokens  # nothing was cut off or dropped, as in almost every step
        else:
            within = np.arange(int(accepted.sum())) - np.repeat(_firsts(accepted), accepted)
            tokens = result.tokens[np.repeat(_firsts(result.counts)[rows], accepted) + within]
        logprobs: tuple[Logprobs, ...] = ()
        if result.logprobs:
            place = {row: index for index, row in enumerate(rows.tolist())}
            logprobs = tuple(
                _cut(item, place[item.row], int(accepted[place[item.row]])) for item in result.logprobs if item.row in place
            )
        return flight.serials[rows], accepted.astype(np.int32), tokens, logprobs

    def _finish_rows(self, at: Int64s, stopped: Bools, ended: list[EndedRequest]) -> None:
        """End the requests of rows that drew a stop token or reached their limit."""
        over = stopped | (self.slots.known[at] >= self.slots.limit[at])
        for slot, by_stop in zip(at[over].tolist(), stopped[over].tolist(), strict=True):
            reason = FinishReason.STOP if by_stop else FinishReason.LENGTH
            self._end(self._occupant(slot), reason, Move.FINISH, ended)
            self._stopping.append(slot)

    def _end(self, request: Request, reason: FinishReason, move: Move, ended: list[EndedRequest]) -> None:
        slot = self._slot_of(request)
        generated = int(self.slots.known[slot] - self.slots.prompt[slot])
        if request.keep is not None:
            generated = min(generated, request.keep)
        self._move(request, move)
        self._release_followers(request)
        ended.append(EndedRequest(request.serial, reason, request.cached_tokens, generated))

    def _break(self, request: Request) -> None:
        """The two sides disagree about this request: it ends with an error, its slot comes back as always."""
        if request.phase is Phase.PREEMPTING:
            request.ends_as = FinishReason.ERROR
        else:
            self._order_stop(request, FinishReason.ERROR)

    def _publish_full_blocks(self, at: Int64s) -> None:
        """Name the blocks that this step filled. The last sampled token has no KV, so its block is never among them."""
        if not self.config.prefix_cache:
            return
        slots, block_size = self.slots, self.config.block_size
        full = slots.computed[at] // block_size
        more = full > slots.published[at]
        at, full = at[more], full[more]
        # In steady decode each row fills one block of outputs at a time: those are gathered and named together.
        one_of_outputs = (full == slots.published[at] + 1) & (slots.published[at] * block_size >= slots.prompt[at])
        self._publish_outputs(at[one_of_outputs])
        for slot, upto in zip(at[~one_of_outputs].tolist(), full[~one_of_outputs].tolist(), strict=True):
            self._publish(slot, upto)

    def _publish_outputs(self, at: Int64s) -> None:
        """Name the next block of each row, which holds outputs only."""
        if not len(at):
            return
        slots, next_block = self.slots, self.slots.published[at]
        data = slots.output_blocks(at, next_block * self.config.block_size - slots.prompt[at], self.config.block_size)
        rows = at.tolist()
        tips = [self._tips[slot] for slot in rows]
        keys = self.pool.prefix.chain_each(tips, data)
        self.pool.publish(keys, tips, slots.table[at, next_block].tolist())
        for slot, key in zip(rows, keys, strict=True):
            self._tips[slot] = key
        slots.published[at] += 1

    def _publish(self, slot: int, upto: int) -> None:
        """Name a row's blocks up to `upto`; they hold prompt, or prompt and outputs, or are many at once."""
        slots, request = self.slots, self._occupant(slot)
        first = int(slots.published[slot])
        chain = [self._tips[slot]]
        for index in range(first, upto):
            if index + 1 < len(request.keys):
                chain.append(request.keys[index + 1])
            else:
                data = self._block_bytes(slot, request, index * self.config.block_size)
                chain.append(self.pool.prefix.chain(chain[-1], data))
        self.pool.publish(chain[1:], chain[:-1], slots.table[slot, first:upto].tolist())
        slots.published[slot] = upto
        self._tips[slot] = chain[-1]

    def _block_bytes(self, slot: int, request: Request, begin: int) -> bytes:
        """The tokens of the block that begins at position `begin`, which may straddle prompt and outputs."""
        prompt = request.submission.prompt
        end = begin + self.config.block_size
        split = len(prompt)
        head = prompt[begin:split].tobytes() if begin < split else b""
        return head + self.slots.output_bytes(slot, max(begin, split) - split, end - split)

    def _acknowledge(self, flight: Flight, result: StepResult, row: int, ended: list[EndedRequest]) -> None:
        """The executor let go of a slot: its blocks come back, and a request that was waiting for this ends."""
        slot = int(flight.slots[row])
        request = self._occupant(slot)
        if result.outcomes[row] != Outcome.PREEMPTED:
            raise InvariantViolated(f"slot {slot} was ordered to stop and answered {Outcome(result.outcomes[row]).name}")
        if request.phase is Phase.PREEMPTING:
            agreed = int(result.known[row]) == int(self.slots.known[slot])
            reason = request.ends_as if agreed and request.ends_as else FinishReason.ERROR
            self._end(request, reason, Move.ACK_STOP, ended)
        self.pool.drop(self.slots.blocks(slot))
        self.slots.vacate(slot)
        request.slot = None
        del self._requests[request.serial]

    # ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _occupant(self, slot: int) -> Request:
        return self._requests[Serial(int(self.slots.serial[slot]))]

    def _slot_of(self, request: Request) -> int:
        if request.slot is None:
            raise InvariantViolated(f"request {request.serial} in {request.phase.name} has no slot")
        return request.slot

    def _move(self, request: Request, move: Move) -> None:
        """The only place where a phase changes."""
        request.phase = next_phase(request.phase, move)
        if request.slot is not None:
            self.slots.phase[request.slot] = request.phase


def _firsts(counts: npt.NDArray[np.int32] | Int64s) -> Int64s:
    """Where each row's tokens begin when rows lie end to end."""
    return np.cumsum(counts, dtype=np.int64) - counts


def _cut(item: Logprobs, row: int, lines: int) -> Logprobs:
    return Logprobs(row, item.chosen[:lines], item.top_ids[:lines], item.top[:lines])
