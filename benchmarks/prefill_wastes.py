"""What a general scheduler elsewhere wastes on an instance that only prefills, as switches of an experiment.

Owns schedulers that are composed of the product's parts with one or more of them exchanged for a wasteful one. None of them
serves anybody. Each waste is modelled on what is known of schedulers that treat a prefill instance as any other:

    outputs      a request takes the blocks of its prompt and of max_tokens when it arrives, not when its turn comes
    gate         a chunk whose blocks are held asks for them again, beside a reserve for the outputs of all started rows
    no overlap   a pass begins when the step before it has ended: one step in flight, and each step waits for its pass
    preempted    blocks are taken chunk by chunk, a prefill is started when its first chunk fits, and where the oldest finds
                 no room the newest gives up its blocks with all that it has computed
    lost signal  the first layer's signal is lost, so that a step's KV leaves when the step is over, in every step

Where nothing else could ever free a block, the oldest prefill goes on whatever the gate says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.admission import Admission
from baton.core.engine.held_prefills import HeldPrefills, PrefillsForQueue, PrefillsWithBlocks
from baton.core.engine.passes import GeneralPass
from baton.core.engine.prefills import PrefillChunks, StartedPrefills
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.pressure import BlockPressure
from baton.core.engine.queued_requests import QueuedRequests
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.request import Move, Phase, Serial, Submission
from baton.core.engine.reserve import BlockPromises, blocks_for
from baton.core.engine.restoring import RestoredRows
from baton.core.engine.row_source import NoPeerPrefills
from baton.core.engine.running_set import RunningSet
from baton.core.engine.scheduler import GeneralSchedulerParts, Scheduler
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.engine.worker import PrefillComposition
from baton.sim.timed_transfers import KvLinkModel


class Waste(StrEnum):
    OUTPUTS = "outputs"
    GATE = "gate"
    NO_OVERLAP = "no overlap"
    PREEMPTED = "preempted"
    LOST_SIGNAL = "lost signal"


SCHEDULED = frozenset([Waste.OUTPUTS, Waste.GATE, Waste.PREEMPTED])
"""Those that need another scheduler; the others are a setting and a link."""


@dataclass(frozen=True, slots=True)
class LostSignals(KvLinkModel):
    """KV of a step is not sent layer by layer, but when the step is over."""

    def layers_us(self, takes_us: int) -> list[int]:
        return [takes_us] * self.layers


def wasteful_scheduler(wastes: Iterable[Waste], output_tokens: int) -> PrefillComposition:
    """A general scheduler with these wastes; `output_tokens` are reserved or taken for each request's outputs."""
    chosen = frozenset(wastes)

    def compose(config: WorkerConfig, prefix: PrefixIndex) -> tuple[Scheduler, HeldPrefills]:
        return WastefulParts(config, prefix, chosen, output_tokens).composed()

    return compose


class WastefulParts(GeneralSchedulerParts):
    def __init__(self, config: WorkerConfig, prefix: PrefixIndex, wastes: frozenset[Waste], output_tokens: int) -> None:
        super().__init__(config, prefix)
        self.pressure = BlockPressure(self.running, self.promises, self.tiers, self.rates)
        self._wastes = wastes
        self._output_tokens = output_tokens
        arrives = Waste.OUTPUTS in wastes
        self.taken_tokens = output_tokens if arrives else 0
        if arrives:
            self.chunks = PrefillsAndOutputs(self.running, output_tokens)
            self.admission = AdmissionWithOutputs(self, output_tokens)
        elif Waste.PREEMPTED in wastes:
            self.chunks = ChunkwisePrefills(self.running)
            self.admission = FirstChunkAdmission(self.running, self.lookup, self.promises, self.chunks, self.billing)

    def composed(self) -> tuple[Scheduler, HeldPrefills]:
        limit_tokens = self._output_tokens if Waste.GATE in self._wastes else 0
        if Waste.OUTPUTS in self._wastes:
            arrived = BlocksOnArrival(self, self.taken_tokens, limit_tokens)
            return EagerScheduler(self, self._pass(arrived)), arrived
        waiting = PrefillsWithOutputs(self.running, self.queue, limit_tokens)
        return Scheduler(self, self._pass(waiting)), waiting

    def _pass(self, source: BlocksOnArrival | PrefillsForQueue) -> GeneralPass:
        queued = QueuedRequests(
            self.running, self.queue, self.admission, self.lookup, self.restoring, self.tiers, NoPeerPrefills()
        )
        return GeneralPass(
            self.running,
            self.pressure,
            self.promises,
            self._prefills(),
            queued,
            RestoredRows(self.running),
            self.departing,
            (source,),
        )

    def _prefills(self) -> StartedPrefills:
        gated = Waste.GATE in self._wastes
        if Waste.PREEMPTED in self._wastes:
            return PreemptingPrefills(self.running, self.chunks, self.promises, gated, self.pressure)
        return GatedPrefills(self.running, self.chunks, self.promises, gated)


class EagerScheduler(Scheduler):
    """Takes in every request when it arrives: nothing counts as work ahead."""

    def unplanned(self, serial: Serial) -> int:
        del serial
        return 0


class PrefillsWithOutputs(PrefillsForQueue):
    """Requests whose limit leaves room for outputs, so that a reserve is kept for them."""

    def __init__(self, running: RunningSet, queue: WaitingQueue, limit_tokens: int) -> None:
        super().__init__(running, queue)
        self._limit_tokens = limit_tokens

    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        return super().hold(submission, keys, limit + self._limit_tokens, now_us)


class BlocksOnArrival(PrefillsWithBlocks):
    """A source of rows that hold the blocks of their prompts and outputs from their arrival on."""

    waiting = 0

    def __init__(self, parts: GeneralSchedulerParts, output_tokens: int, limit_tokens: int) -> None:
        super().__init__(parts.running, parts.lookup, parts.billing, parts.restoring)
        self._queue = parts.queue
        self._output_tokens = output_tokens
        self._limit_tokens = limit_tokens
        self._idle: dict[int, None] = {}
        """Slots whose peer has not granted room yet."""
        self._due: dict[int, None] = {}
        """Slots that begin with the next step."""

    def hold(self, submission: Submission, keys: list[Key], limit: int, now_us: int) -> Serial | None:
        running, slots, size = self._running, self._running.slots, self._running.config.block_size
        running.now_us = now_us
        if not slots.has_room or len(self._queue):  # a preempted prefill comes first
            return None
        request = running.new_request(submission, keys, limit + self._limit_tokens)
        hit = self._lookup.find(request)
        tokens = request.tokens_at_start + self._output_tokens
        if self._lookup.blocks_to_take(tokens, hit) > running.pool.available:
            del running.requests[request.serial]
            return None
        slot = running.occupy(request, hit, Move.ADMIT)
        slots.append_blocks(slot, running.pool.take(blocks_for(tokens, size) - len(hit.blocks)))
        self._billing.start(request, hit.computed, now_us)
        self._idle[slot] = None
        return request.serial

    def begin(self, serial: Serial) -> None:
        slot = self._running.slot_of(self._running.requests[serial])
        del self._idle[slot]
        self._due[slot] = None

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    @property
    def stalled(self) -> int:
        return len(self._idle) + int(np.count_nonzero(self._running.slots.phase == Phase.HANDING_OVER))

    def begin_rows(self, step: StepBuilder) -> None:
        running = self._running
        for slot in self._due:
            request = running.occupant(slot)
            self._billing.queued(request, running.now_us)
            running.start_row(step, slot, request.submission.known.copy(), int(running.slots.computed[slot]))
            running.prefilling.append(slot)
        self._due.clear()

    def withdraw(self, request: Request) -> bool:
        del request
        return False

    def forget_row(self, slot: int) -> None:
        self._idle.pop(slot, None)
        self._due.pop(slot, None)


class GatedPrefills(StartedPrefills):
    """Asks for the blocks of a chunk again, though they are held, where `gated`."""

    def __init__(self, running: RunningSet, chunks: PrefillChunks, promises: BlockPromises, gated: bool) -> None:
        super().__init__(running, chunks, promises)
        self._gated = gated
        self.closed_passes = 0
        """Passes in which a chunk that could have run did not."""

    def _next_fits(self, step: StepBuilder, slot: int) -> bool:
        if not super()._next_fits(step, slot):
            return False
        if not self._gated or self._nothing_else_ends():
            return True
        slots, size = self._running.slots, self._running.config.block_size
        begin = int(slots.planned[slot])
        end = min(int(slots.known[slot]), begin + step.budget)
        asked = blocks_for(end, size) - begin // size
        fits = asked <= self._running.pool.available - self._promises.kept(slots, asker=slot)
        self.closed_passes += not fits
        return fits

    def _nothing_else_ends(self) -> bool:
        running = self._running
        handing_over = np.count_nonzero(running.slots.phase == Phase.HANDING_OVER)
        return not (running.in_flight or running.stopping or handing_over)


class PreemptingPrefills(GatedPrefills):
    """Where the oldest prefill does not fit, the newest gives up its blocks and all that it has computed."""

    def __init__(
        self,
        running: RunningSet,
        chunks: PrefillChunks,
        promises: BlockPromises,
        gated: bool,
        pressure: BlockPressure,
    ) -> None:
        super().__init__(running, chunks, promises, gated)
        self._pressure = pressure

    def continue_all(self, step: StepBuilder) -> None:
        super().continue_all(step)
        if step.chunk_prefill_unsatisfied and len(self._running.prefilling) > 1:
            self._preempt(step, self._running.prefilling[-1])

    def _preempt(self, step: StepBuilder, slot: int) -> None:
        request = self._running.occupant(slot)
        step.preempted = True
        request.bill.preemptions += 1
        self._pressure.preemptions_for_others += 1
        request.pinned = False  # what of it was sent has arrived; the rest is sent when it is computed again
        self._running.order_stop(request, Move.ORDER_STOP)


class PrefillsAndOutputs(PrefillChunks):
    """Takes the blocks of prompt and outputs with the first chunk, for a preempted prefill that comes back."""

    def __init__(self, running: RunningSet, output_tokens: int) -> None:
        super().__init__(running)
        self._output_tokens = output_tokens

    def _grow_to(self, step: StepBuilder, slot: int, tokens: int) -> None:
        super()._grow_to(step, slot, tokens + self._output_tokens)


class AdmissionWithOutputs(Admission):
    """Looks whether prompt and outputs of a preempted prefill fit again."""

    def __init__(self, parts: GeneralSchedulerParts, output_tokens: int) -> None:
        super().__init__(parts.running, parts.lookup, parts.promises, parts.chunks, parts.billing)
        self._output_tokens = output_tokens

    def blocks_needed(self, request: Request, protected: bool, hit: PrefixHit) -> int:
        del protected
        return self._lookup.blocks_to_take(request.tokens_at_start + self._output_tokens, hit)


class ChunkwisePrefills(PrefillChunks):
    """Takes the blocks of a chunk with the chunk, not those of the whole prompt with the first."""

    def __init__(self, running: RunningSet) -> None:
        super().__init__(running)
        self._whole_prompt = False


class FirstChunkAdmission(Admission):
    """Looks whether the first chunk fits, whatever the rest of the prompt will need."""

    def blocks_needed(self, request: Request, protected: bool, hit: PrefixHit) -> int:
        del protected
        first = min(request.tokens_at_start, hit.computed + self._running.config.step_tokens)
        return self._lookup.blocks_to_take(first, hit)
