"""The scheduler of one engine, composed of its parts.

    plan()    what the pass of this composition puts into the next step                                   → StepPlan
    settle()  fences stale rows, appends tokens, finds stops, publishes full blocks, frees what ended     → Settled

    part                              its one job
    RunningSet                        slots, block pool, open requests, steps in flight
    PrefixLookup                      cached blocks of a request
    WaitingQueue                      requests that wait, in order
    Admission                         whether one fits beside reserve, promises and bookings; starting it
    QueuedRequests, RestoredRows,     sources of rows: the queue, host memory, a peer's prefills, prefills held for a peer
    ArrivingRows, HeldPrefills
    StartedPrefills, PrefillChunks    chunks of prompts
    BlockPressure                     growth of decodes, victims, preemption
    GeneralPass, ShortPrefillPass     the order in which these fill a step
    StepSettling, RequestEnding,      results, ends, and ends that wait for the store
    DepartingRequests
    KvRestoring, Tiers                KV from and to host memory and the store
    Billing                           tokens and times of each request

Everything is wired here: `SchedulerParts` has what all compositions share, and there is one function for each role.
"""

from __future__ import annotations

from baton.core.config import PrefillPath, WorkerConfig
from baton.core.engine.admission import Admission
from baton.core.engine.arriving_rows import ArrivingRows
from baton.core.engine.billing import Billing
from baton.core.engine.change_journal import PhaseNotes
from baton.core.engine.departing import DepartingRequests
from baton.core.engine.ended import EndedRequest
from baton.core.engine.ending import RequestEnding
from baton.core.engine.gauges import DraftGauges, HandoverGauges, SchedulerGauges
from baton.core.engine.held_prefills import HeldPrefills, PrefillsForQueue, PrefillsWithBlocks
from baton.core.engine.passes import GeneralPass, PlanningPass, ShortPrefillPass
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefills import PrefillChunks, StartedPrefills
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.pressure import BlockPressure
from baton.core.engine.queued_requests import QueuedRequests
from baton.core.engine.records import Request, Settled
from baton.core.engine.request import FinishReason, Move, Phase, Serial, Submission, Tokens
from baton.core.engine.reserve import BlockPromises
from baton.core.engine.restoring import KvRestoring, RestoredRows
from baton.core.engine.row_source import NoPeerPrefills, PeerPrefills, RowSource
from baton.core.engine.running_set import RunningSet
from baton.core.engine.settling import StepSettling
from baton.core.engine.victims import RecoveryRates
from baton.core.engine.waiting_queue import NoQueue, WaitingQueue
from baton.core.handover.faults import PdFault
from baton.core.tiers.offload import tiers_of


class SchedulerParts:
    """The parts of every composition."""

    def __init__(self, config: WorkerConfig, prefix: PrefixIndex, queue: WaitingQueue) -> None:
        self.queue = queue
        self.rates = RecoveryRates()
        self.billing = Billing()
        self.running = RunningSet(config, prefix)
        self.tiers = tiers_of(config, self.running.pool, self.rates)
        self.lookup = PrefixLookup(self.running)
        self.chunks = PrefillChunks(self.running)
        self.departing = DepartingRequests(self.tiers)
        self.ending = RequestEnding(self.running, queue, self.lookup, self.billing, self.tiers)
        self.settling = StepSettling(self.running, queue, self.billing, self.ending, self.departing)
        self.restoring = KvRestoring(self.running, queue, self.lookup, self.billing, self.ending, self.tiers)


class GeneralSchedulerParts(SchedulerParts):
    """The additional parts of compositions with a queue."""

    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        super().__init__(config, prefix, WaitingQueue())
        self.promises = BlockPromises(config)
        self.admission = Admission(self.running, self.lookup, self.promises, self.chunks, self.billing)

    def scheduler(self, peers: PeerPrefills, *others: RowSource) -> Scheduler:
        queued = QueuedRequests(self.running, self.queue, self.admission, self.lookup, self.restoring, self.tiers, peers)
        general = GeneralPass(
            self.running,
            BlockPressure(self.running, self.promises, self.tiers, self.rates),
            self.promises,
            StartedPrefills(self.running, self.chunks, self.promises),
            queued,
            RestoredRows(self.running),
            self.departing,
            others,
        )
        return Scheduler(self, general)


def mixed_scheduler(config: WorkerConfig, prefix: PrefixIndex) -> Scheduler:
    """Prefills and decodes the requests of clients."""
    return GeneralSchedulerParts(config, prefix).scheduler(NoPeerPrefills())


def decode_scheduler(config: WorkerConfig, prefix: PrefixIndex) -> tuple[Scheduler, ArrivingRows]:
    """Like the mixed one, with peers that prefill for it."""
    parts = GeneralSchedulerParts(config, prefix)
    arriving = ArrivingRows(
        parts.running, parts.queue, parts.admission, parts.lookup, parts.billing, parts.ending, parts.tiers
    )
    return parts.scheduler(arriving, arriving), arriving


def prefill_scheduler(config: WorkerConfig, prefix: PrefixIndex) -> tuple[Scheduler, HeldPrefills]:
    """Only prefills, for peers."""
    if config.prefill_path is PrefillPath.GENERAL:
        general = GeneralSchedulerParts(config, prefix)
        waiting = PrefillsForQueue(general.running, general.queue)
        return general.scheduler(NoPeerPrefills(), waiting), waiting
    parts = SchedulerParts(config, prefix, NoQueue())
    held = PrefillsWithBlocks(parts.running, parts.lookup, parts.billing, parts.restoring)
    return Scheduler(parts, ShortPrefillPass(parts.running, parts.chunks, parts.billing, held)), held


class Scheduler:
    def __init__(self, parts: SchedulerParts, passing: PlanningPass) -> None:
        self.running = parts.running
        self.config = parts.running.config
        self.slots = parts.running.slots
        self.pool = parts.running.pool
        self.tiers = parts.tiers
        self.rates = parts.rates
        self.lookup = parts.lookup
        self._pass = passing
        self._queue = parts.queue
        self._billing = parts.billing
        self._ending = parts.ending
        self._settling = parts.settling
        self._restoring = parts.restoring
        self._departing = parts.departing

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_clock(self, now_us: int) -> None:
        """Set the time of the next calls."""
        self.running.now_us = now_us

    def plan(self, now_us: int) -> StepPlan | None:
        """The next step, or None when there is nothing to do in it."""
        self.running.now_us = now_us
        step = self.running.begin_step()
        self._pass.fill(step)
        return self.running.launch(step)

    def settle(self, result: StepResult, now_us: int) -> Settled:
        """Take in the result of the oldest step in flight."""
        self.running.now_us = now_us
        return self._settling.settle(result)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, submission: Submission, limit: int, now_us: int, leader: Serial | None = None) -> Serial:
        """Queue a request that passed its checks, or hold it back behind the leader whose blocks it shares."""
        self.running.now_us = now_us
        leading = None if leader is None else self.running.requests[leader]
        keys = self.lookup.keys_to_start(submission, leading)
        request = self.running.new_request(submission, keys, limit, leading)
        if leading is None:
            self._queue.push(request)
        else:
            self._queue.hold_back(request, leading)
        return request.serial

    def order_stop(
        self, serial: Serial, reason: FinishReason, now_us: int, keep: int | None = None, fault: PdFault | None = None
    ) -> EndedRequest | None:
        """End a request from outside. A waiting one ends here; a running one ends when the executor acknowledges."""
        self.running.now_us = now_us
        if serial in self._departing:
            return self._departing.end_at_once(serial, reason, keep, now_us)
        request = self.running.requests.get(serial)
        if request is None or request.phase is Phase.FINISHED or request.ends_as is not None:
            return None
        request.keep = keep
        request.fault = fault
        return self._stop(request, reason)

    def _stop(self, request: Request, reason: FinishReason) -> EndedRequest | None:
        slots, slot = self.slots, request.slot
        if slot is None:
            self._pass.withdraw(request)
            return self._ending.withdraw(request, reason)
        self._pass.forget_row(slot)
        if slots.restoring[slot]:
            self._restoring.order_end(request, reason)
        elif not slots.started[slot] and request.phase is not Phase.PREEMPTING:
            return self._ending.end_unstarted(request, reason)
        else:
            self._ending.order_end(request, reason)
        return None

    def loaded(self, serial: Serial, blocks: int, now_us: int) -> EndedRequest | None:
        """The copy from host memory has ended and brought `blocks` leading blocks. The rest is computed."""
        self.running.now_us = now_us
        outcome = self._restoring.loaded(serial, blocks)
        if isinstance(outcome, EndedRequest):
            return outcome
        self._pass.restored(outcome)
        return None

    def departing(self) -> tuple[Serial, ...]:
        """Requests whose end waits for their KV to be stored."""
        return self._departing.serials()

    def departed(self, serial: Serial) -> EndedRequest:
        """Its KV is stored, or will not be: its end may be reported."""
        return self._departing.departed(serial, self.running.now_us)

    def pin(self, serial: Serial) -> None:
        """A transfer to a peer reads the request's blocks from now on."""
        self._ending.pin(serial)

    def unpin(self, serial: Serial) -> None:
        """No transfer reads the request's blocks any more."""
        self._ending.unpin(serial)

    # ── views ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        return self._pass.waiting

    @property
    def asleep(self) -> bool:
        """Whether all open requests wait for a peer or a copy, so that a pass would do nothing."""
        return self._pass.asleep

    @property
    def in_flight(self) -> int:
        return len(self.running.in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request is open or any slot is not free yet."""
        return bool(self.running.requests or self._departing)

    @property
    def notes(self) -> PhaseNotes | None:
        return self.running.notes

    def keep_notes(self) -> None:
        """Note every phase that a request enters from now on. Counts of preemptions that were not taken yet are kept."""
        self.running.notes = PhaseNotes(self.running.notes)

    def requests(self) -> tuple[Request, ...]:
        """For the laws."""
        return tuple(self.running.requests.values())

    def queued(self) -> list[Request]:
        """For the laws: the requests in the queue, in order."""
        return self._queue.first(len(self._queue))

    def request(self, serial: Serial) -> Request | None:
        return self.running.requests.get(serial)

    def unplanned(self, serial: Serial) -> int:
        """Uncached tokens of its start that no plan feeds yet."""
        request = self.running.requests[serial]
        if request.slot is None:
            return request.tokens_at_start - self.lookup.find(request).computed
        return int(self.slots.known[request.slot] - self.slots.planned[request.slot])

    def keys_of(self, submission: Submission, tokens: Tokens) -> list[Key]:
        return self.lookup.keys_of(submission, tokens)

    def moves(self) -> dict[tuple[Phase, Move], int]:
        """Number of times each transition of the table was taken; a copy, for reports."""
        return self.running.moves()

    def promised(self) -> int:
        """For the laws: blocks promised to protected rows."""
        return self._pass.promised()

    @property
    def broken_rows(self) -> int:
        """Rows on which scheduler and executor disagreed. Each ended its request with an error."""
        return self._settling.broken_rows

    def drafts(self) -> DraftGauges:
        return DraftGauges(self._settling.draft_tokens, self._settling.accepted_draft_tokens)

    def gauges(self) -> SchedulerGauges:
        settling, billing, pressure = self._settling, self._billing, self._pass.pressure()
        blocks = self.pool.gauges()
        return SchedulerGauges(
            running=self.slots.occupied,
            waiting=self._pass.waiting,
            free_blocks=blocks.free,
            evictable_blocks=blocks.evictable,
            running_blocks=blocks.running,
            leased_blocks=blocks.leased,
            receiving_blocks=blocks.receiving,
            leaving_blocks=blocks.leaving,
            prefix_queries=billing.prefix_queries,
            prefix_hits=billing.prefix_hits,
            stale_results=settling.stale_results,
            sat_out_rows=settling.sat_out_rows,
            steps=self.running.steps,
            preemptions_for_others=pressure.preemptions_for_others,
            preemptions_of_self=pressure.preemptions_of_self,
            recomputed_tokens=billing.recomputed_tokens,
            chunk_prefill_unsatisfied=pressure.chunk_prefill_unsatisfied,
            reserve_ratio=pressure.reserve_ratio,
            handovers=HandoverGauges(preempted=settling.rescheduled),
            storage=self.tiers.gauges(),
        )
