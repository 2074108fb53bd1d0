"""The running set of one engine: slot table, block pool, open requests and the steps in flight.

Up to `depth` plans are in flight at once, so a plan is made from what is *known* plus the most that steps in flight may
yield. A slot and its blocks are freed in one way only: a plan has a Stop for the slot, the executor finishes its work and
acknowledges, and when that acknowledgement settles both are free. This holds for requests that end by themselves, that the
client aborts, that a stop string cuts and that are preempted. The exception is a row that was never started on the executor:
no step in flight can refer to it, so it is freed at once.

Which requests start, and when, is not decided here: `scheduler` wires the parts that do.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.config import WorkerConfig
from baton.core.engine.blocks import BlockPool, Pin
from baton.core.engine.change_journal import PhaseNotes
from baton.core.engine.plan import Int64s, Start, StepPlan, Stop
from baton.core.engine.preemption_record import RecentPreemptions
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.prefix_publisher import PrefixPublisher
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.request import TRANSITIONS, Move, Phase, Sampling, Serial, Submission, Tokens
from baton.core.engine.slots import Slots
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.step_rows import StepRows, StepsInFlight
from baton.core.errors import InvariantViolated
from baton.core.state_machine import StateMachine


class RunningSet:
    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        self.config = config
        self.slots = Slots(config.slots, config.table_width, config.sequence_tokens_max)
        self.pool = BlockPool(config.blocks, prefix)
        self.in_flight = StepsInFlight(self.slots)
        self.requests: dict[Serial, Request] = {}
        """Every request that is open or whose slot is not free yet."""
        self.prefilling: list[int] = []
        """Slots with tokens left to prefill, in order of admission."""
        self.stopping: list[int] = []
        """Slots whose Stop goes into the next plan."""
        self.now_us = 0
        """Time of the current event; set from outside."""
        self.steps = 0
        self.preempted = RecentPreemptions()
        self.notes: PhaseNotes | None = None
        """Set once phases are to be reported."""
        self._publisher = PrefixPublisher(self.slots, self.pool, config.block_size)
        self._decoding: StepRows | None = None
        """All decoding rows; None after a request began or ceased to decode."""
        self._phases = StateMachine(TRANSITIONS, "a request")
        self._next_serial = 0

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def new_request(self, submission: Submission, keys: list[Key], limit: int, leader: Request | None = None) -> Request:
        serial = Serial(self._next_serial)
        self._next_serial += 1
        request = Request(serial, submission, limit, keys, since_us=self.now_us, outputs=submission.generated, leader=leader)
        self.requests[serial] = request
        return request

    def occupant(self, slot: int) -> Request:
        return self.requests[Serial(int(self.slots.serial[slot]))]

    def slot_of(self, request: Request) -> int:
        if request.slot is None:
            raise InvariantViolated(f"request {request.serial} in {request.phase.name} has no slot")
        return request.slot

    def move(self, request: Request, move: Move) -> None:
        """The only place where a phase changes."""
        phase = self._phases.after(request.phase, move)
        if Phase.RUNNING_DECODE in (phase, request.phase):
            self._decoding = None
        request.phase = phase
        if self.notes is not None:
            self.notes.note(request.serial, phase, self.now_us)
        if request.slot is not None:
            self.slots.phase[request.slot] = phase

    def note_preemption(self, request: Request) -> None:
        if self.notes is not None:
            self.notes.preempted(request.serial, request.preemptions)

    def moves(self) -> dict[tuple[Phase, Move], int]:
        """Number of times each transition of the table was taken; a copy, for reports."""
        return self._phases.moves()

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def occupy(self, request: Request, hit: PrefixHit, move: Move) -> int:
        """Give a request a row, with its cached blocks."""
        slot = self.slots.claim(request.serial)
        request.slot = slot
        request.epoch += 1
        self.move(request, move)
        self.pool.hold(hit.blocks)
        self.slots.append_blocks(slot, hit.blocks)
        self._fill_row(slot, request, hit)
        self._publisher.start(slot, request, hit)
        return slot

    def _fill_row(self, slot: int, request: Request, hit: PrefixHit) -> None:
        slots, submission = self.slots, request.submission
        slots.epoch[slot] = request.epoch
        slots.priority[slot], slots.arrived[slot] = submission.seniority
        slots.prompt[slot] = len(submission.prompt)
        slots.restore(slot, request.outputs)
        slots.planned[slot] = slots.computed[slot] = hit.computed
        slots.limit[slot] = request.limit
        slots.burst[slot] = self.config.burst if submission.sampling.constraint is None else self.config.burst_max
        slots.stops_from[slot] = len(submission.prompt) + submission.sampling.min_tokens
        slots.set_stop_ids(slot, submission.sampling.stop_token_ids)

    def start_row(self, step: StepBuilder, slot: int, tokens: Tokens, computed: int) -> None:
        """Put the row's Start into the step: from now on only the executor's acknowledgement frees it."""
        request, blocks = self.occupant(slot), self.slots.blocks(slot)
        blocks.setflags(write=False)
        tokens.setflags(write=False)
        self.slots.started[slot] = True
        step.starts.append(
            Start(
                slot=slot,
                epoch=request.epoch,
                tokens=tokens,
                prompt_tokens=len(request.submission.prompt),
                computed=computed,
                limit=request.limit,
                sampling=_sampling_of(request),
                blocks=blocks,
            )
        )

    def order_stop(self, request: Request, move: Move) -> None:
        """Put the Stop of its row into the next plan."""
        slot = self.slot_of(request)
        if slot in self.prefilling:
            self.prefilling.remove(slot)
        self.move(request, move)
        self.stopping.append(slot)

    def pin(self, request: Request, pin: Pin) -> None:
        """Change the pin of the pinned blocks of its row."""
        self.pool.pin(self.pool.pinned(self.slots.blocks(self.slot_of(request))), pin)

    def vacate(self, request: Request) -> None:
        """Free its slot and blocks; forget the request if it has ended."""
        slot = self.slot_of(request)
        self.pool.drop(self.slots.blocks(slot))
        self.slots.vacate(slot)
        request.slot = None
        if request.phase is Phase.FINISHED:
            del self.requests[request.serial]

    def publish_full_blocks(self, at: Int64s) -> None:
        """Publish every full block of these rows in the prefix cache."""
        if not self.config.prefix_cache:
            return
        plain, others = self._publisher.unpublished(at)
        self._publisher.publish_outputs(plain)
        for slot in others.tolist():
            self._publisher.publish_all(slot, self.occupant(slot))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_step(self) -> StepBuilder:
        return StepBuilder(self.steps + 1, self.config.step_tokens, self._decoding_rows())

    def _decoding_rows(self) -> StepRows:
        if self._decoding is None:
            self._decoding = StepRows.of_decodes(self.slots, self.slots.decoding())
        return self._decoding

    def remembered_decodes(self) -> StepRows | None:
        """For the laws: the remembered decoding rows, if any."""
        return self._decoding

    def order_stops(self, step: StepBuilder) -> None:
        step.stops = [Stop(slot, int(self.slots.epoch[slot])) for slot in self.stopping]
        self.stopping.clear()

    def launch(self, step: StepBuilder) -> StepPlan | None:
        """The plan of a filled step, which is in flight from now on; None if the step is empty."""
        if step.is_empty:
            return None
        plan = step.build()
        self.steps += 1
        self.in_flight.launch(plan, step.decodes)
        return plan


def _sampling_of(request: Request) -> Sampling:
    """As the executor needs it now: log-probabilities of the prompt are reported once."""
    sampling = request.submission.sampling
    if sampling.prompt_logprobs is None or request.scores_prompt:
        return sampling
    return replace(sampling, prompt_logprobs=None)
