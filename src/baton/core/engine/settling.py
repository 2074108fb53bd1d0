"""Settles the result of a step: drops stale rows, appends tokens, finds stops, publishes full blocks, frees ended rows.

A row whose request has ended or was restarted since the plan is stale and dropped. A row on which scheduler and executor
disagree is broken: its request ends with an error, and nothing of the row is counted, delivered or cached. A row whose
constraint failed ends its request too, with an error of its own that is not tried again. A row that sat out stays as it was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from baton.core.config import OnPreempt
from baton.core.engine.billing import Billing
from baton.core.engine.departing import DepartingRequests
from baton.core.engine.ended import EndedRequest, StartedRequest
from baton.core.engine.ending import RequestEnding
from baton.core.engine.masks import any_true
from baton.core.engine.plan import Int32s, Int64s, Logprobs, RowOutcome, StepResult
from baton.core.engine.records import Request, Settled
from baton.core.engine.request import FinishReason, Move, Phase, PromptLogprobs, Tokens
from baton.core.engine.running_set import RunningSet
from baton.core.engine.slots import FINISHED
from baton.core.engine.step_rows import InFlightStep, same
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.handover.faults import PdCode, PdFault, PdStage

Bools = npt.NDArray[np.bool_]
Delivery = tuple[Int64s, Int32s, Tokens, tuple[Logprobs, ...]]


class StepSettling:
    def __init__(
        self,
        running: RunningSet,
        queue: WaitingQueue,
        billing: Billing,
        ending: RequestEnding,
        departing: DepartingRequests,
    ) -> None:
        self._running = running
        self._slots = running.slots
        self._queue = queue
        self._billing = billing
        self._ending = ending
        self._departing = departing
        self._burst = running.config.burst_max
        self._reschedules = running.config.on_preempt is OnPreempt.RESCHEDULE
        self.stale_results = 0
        self.broken_rows = 0
        self.sat_out_rows = 0
        """Decodes whose mask was not there in time."""
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0
        self.rescheduled = 0
        """Requests that were preempted and continue elsewhere."""

    def settle(self, result: StepResult) -> Settled:
        """Take in the result of the oldest step in flight."""
        running = self._running
        step = running.in_flight.land(result)
        live = self._fence(step)
        live, broken = self._split_broken(step, result, live)
        started: list[StartedRequest] = []
        ended: list[EndedRequest] = []
        self._note_chunks(step, live)
        delivery = self._take_tokens(step, result, live, started, ended)
        prompts: tuple[PromptLogprobs, ...] = ()
        if result.prompt_logprobs:
            delivery, prompts = self._with_prompts(step, result, live, delivery)
        running.publish_full_blocks(step.rows.slots[live])
        for row in broken.tolist():
            failed = result.outcomes[row] == RowOutcome.CONSTRAINT_FAILED
            reason = FinishReason.CONSTRAINT_FAILED if failed else FinishReason.ERROR
            self._ending.order_end(running.occupant(int(step.rows.slots[row])), reason)
        for row in range(step.stops):
            self._acknowledge(step, result, row, ended)
        return Settled(*delivery, started=tuple(started), ended=tuple(ended), prompt_logprobs=prompts)

    def _fence(self, step: InFlightStep) -> Int64s:
        """Rows (without stops) whose request is still the planned one, and still open."""
        planned, rows = step.rows, step.rows.slots
        serial, epoch, phase = self._slots.serial[rows], self._slots.epoch[rows], self._slots.phase[rows]
        if same(serial, planned.serials) and same(epoch, planned.epochs) and FINISHED not in phase.tobytes():
            return np.arange(step.stops, len(rows))
        is_live = (serial == planned.serials) & (epoch == planned.epochs) & (phase != FINISHED)
        live: Int64s = step.stops + is_live[step.stops :].nonzero()[0]
        self.stale_results += len(rows) - step.stops - len(live)
        return live

    def _split_broken(self, step: InFlightStep, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        """Sound rows, and rows whose outcome the plan does not allow or whose token count differs between the sides.

        Rows that sat out are in neither: nothing of them has changed.
        """
        slots, at = self._slots, step.rows.slots[live]
        counts, allowed = result.counts[live], step.rows.allowances[live]
        outcomes, expected = result.outcomes[live], step.rows.outcomes[live]
        known, agreed = result.known[live], slots.known[at] + counts
        slots.pending[at] -= allowed
        if same(outcomes, expected) and same(counts, allowed) and same(known, agreed):
            return live, live[:0]  # every row yielded as many tokens as it may, as in almost every step
        broken = (outcomes != expected) | (counts > allowed) | (counts < (allowed > 0)) | (known != agreed)
        sat_out = (outcomes == RowOutcome.SAT_OUT) & (counts == 0) & (known == agreed)
        sat_out[sat_out] = self._may_sit_out(step, live[sat_out])
        broken &= ~sat_out
        self.sat_out_rows += int(np.count_nonzero(sat_out))
        self.broken_rows += int(np.count_nonzero(broken & (outcomes != RowOutcome.CONSTRAINT_FAILED)))
        return live[~(broken | sat_out)], live[broken]

    def _may_sit_out(self, step: InFlightStep, rows: Int64s) -> Bools:
        """Which of these rows are decodes with a constraint."""
        constrained = [
            self._running.occupant(slot).submission.sampling.constraint is not None
            for slot in step.rows.slots[rows].tolist()
        ]
        return np.array(constrained, dtype=np.bool_) & (rows >= step.stops + len(step.chunks))

    def _note_chunks(self, step: InFlightStep, live: Int64s) -> None:
        """The KV of these positions is computed now."""
        if not step.chunks:
            return
        first, last = step.stops, step.stops + len(step.chunks)
        for row in live[(live >= first) & (live < last)].tolist():
            chunk = step.chunks[row - first]
            self._slots.computed[chunk.slot] = chunk.end

    def _take_tokens(
        self,
        step: InFlightStep,
        result: StepResult,
        live: Int64s,
        started: list[StartedRequest],
        ended: list[EndedRequest],
    ) -> Delivery:
        slots = self._slots
        rows = live[step.rows.allowances[live] > 0] if step.chunks else live
        if not len(rows):  # only stops and unfinished chunks
            return step.rows.serials[:0], result.counts[:0], result.tokens[:0], ()
        at = step.rows.slots[rows]
        accepted, stopped = self._append_all(result, rows, at)
        slots.computed[at] = slots.known[at] - 1
        if len(result.drafted):
            self.draft_tokens += int(result.drafted[rows].sum())
            self.accepted_draft_tokens += int(result.counts[rows].sum()) - len(rows)
        if step.chunks:
            for slot in at[rows < step.stops + len(step.chunks)].tolist():
                self._note_prefilled(self._running.occupant(slot), started)
        discarded = slots.discarded[at]
        if any_true(discarded):
            rows, at, accepted, stopped = rows[~discarded], at[~discarded], accepted[~discarded], stopped[~discarded]
        delivery = _delivery(step, result, rows, accepted)
        self._finish_rows(at, stopped, ended)
        return delivery

    def _with_prompts(
        self, step: InFlightStep, result: StepResult, live: Int64s, delivery: Delivery
    ) -> tuple[Delivery, tuple[PromptLogprobs, ...]]:
        """The delivery and the log-probabilities of prompts: a row that has them and no token is added at the end."""
        serials, counts, tokens, logprobs = delivery
        places = {serial: place for place, serial in enumerate(serials.tolist())}
        sound, more, prompts = frozenset(live.tolist()), [], []
        for item in result.prompt_logprobs:
            serial = int(step.rows.serials[item.row])
            if item.row not in sound or self._slots.discarded[step.rows.slots[item.row]]:
                continue
            if serial not in places:
                places[serial] = len(places)
                more.append(serial)
            prompts.append(replace(item, row=places[serial]))
        serials = np.concatenate((serials, np.array(more, dtype=serials.dtype)))
        counts = np.concatenate((counts, np.zeros(len(more), dtype=counts.dtype)))
        return (serials, counts, tokens, logprobs), tuple(prompts)

    def _append_all(self, result: StepResult, rows: Int64s, at: Int64s) -> tuple[Int32s, Bools]:
        """Append each row's tokens up to its first stop. Returns how many were taken, and which rows drew a stop."""
        firsts, counts = _firsts_of(result, rows), result.counts[rows]
        accepted = np.minimum(counts, 1)
        stopped = self._append(at, result.tokens[firsts])
        for nth in range(1, self._burst):
            going = ((counts > nth) & ~stopped).nonzero()[0]
            if not len(going):
                break
            stopped[going] = self._append(at[going], result.tokens[firsts[going] + nth])
            accepted[going] += 1
        return accepted, stopped

    def _append(self, at: Int64s, tokens: Tokens) -> Bools:
        """Append one token to each row. Returns which rows it stops."""
        slots = self._slots
        slots.append(at, tokens)
        stopped = slots.draws_stop(at, tokens)
        # A discarded row takes all its tokens too: its count must go on agreeing with the executor's.
        return stopped & ~slots.discarded[at] if any_true(stopped) else stopped

    def _note_prefilled(self, request: Request, started: list[StartedRequest]) -> None:
        """It has got its first token since its start."""
        if request.is_fresh:
            started.append(StartedRequest(request.serial, request.cached_of_prompt))
        self._billing.prefilled(request, self._running.now_us)
        self._queue.release_followers(request)

    def _finish_rows(self, at: Int64s, stopped: Bools, ended: list[EndedRequest]) -> None:
        """End the requests of rows that drew a stop token or reached their limit."""
        over = stopped | (self._slots.known[at] >= self._slots.limit[at])
        if not any_true(over):
            return
        for slot, by_stop in zip(at[over].tolist(), stopped[over].tolist(), strict=True):
            request = self._running.occupant(slot)
            if request.phase is Phase.HANDING_OVER:
                continue  # its first token is for the peer that decodes it, even a stop token
            if request.phase is not Phase.PREEMPTING:  # else its Stop is already ordered
                self._running.stopping.append(slot)
            ended.append(self._ending.end(request, FinishReason.STOP if by_stop else FinishReason.LENGTH, Move.FINISH))

    def _acknowledge(self, step: InFlightStep, result: StepResult, row: int, ended: list[EndedRequest]) -> None:
        """The executor has released a slot: its blocks are freed, and its request ends or waits again."""
        slot = int(step.rows.slots[row])
        request = self._running.occupant(slot)
        if request.phase is Phase.PREEMPTING:
            agreed = result.outcomes[row] == RowOutcome.PREEMPTED and result.known[row] == self._slots.known[slot]
            self._judge_acknowledgement(request, bool(agreed))
            if request.ends_as is None:
                self._ending.requeue(request)
            else:
                ended.append(self._ending.end(request, request.ends_as, Move.ACK_END))
        unstored = self._ending.vacate(request)
        if unstored and request.ends_as is FinishReason.RESCHEDULE and ended and ended[-1].serial == request.serial:
            self._departing.depart(ended.pop(), unstored, self._running.now_us)

    def _judge_acknowledgement(self, request: Request, agreed: bool) -> None:
        """A preempted request ends here if the sides disagree about it, or if it continues elsewhere."""
        self.broken_rows += not agreed and request.ends_as is not FinishReason.CONSTRAINT_FAILED
        if not agreed and request.ends_as is None:
            request.ends_as = FinishReason.ERROR
        if request.ends_as is None and self._reschedules and not request.submission.resumes_in_place:
            request.ends_as = FinishReason.RESCHEDULE
            self.rescheduled += 1
            request.fault = PdFault(PdCode.PREEMPTED, PdStage.DECODE, "its KV blocks were needed for other requests")


def _delivery(step: InFlightStep, result: StepResult, rows: Int64s, accepted: Int32s) -> Delivery:
    taken = int(np.add.reduce(accepted))
    if taken == len(result.tokens):
        tokens = result.tokens  # no token was cut off or dropped, as in almost every step
    else:
        within = np.arange(taken) - np.repeat(_firsts(accepted), accepted)
        tokens = result.tokens[np.repeat(_firsts_of(result, rows), accepted) + within]
    logprobs: tuple[Logprobs, ...] = ()
    if result.logprobs:
        place = {row: index for index, row in enumerate(rows.tolist())}
        logprobs = tuple(
            _cut(item, place[item.row], int(accepted[place[item.row]])) for item in result.logprobs if item.row in place
        )
    return step.rows.serials[rows], accepted, tokens, logprobs


def _firsts(counts: Int32s) -> Int64s:
    """Index of each row's first token when rows lie end to end."""
    return np.cumsum(counts, dtype=np.int64) - counts


def _firsts_of(result: StepResult, rows: Int64s) -> Int64s:
    """Index of the first token of each of these rows; each of them yields at least one."""
    if len(rows) == len(result.counts) == len(result.tokens):
        return rows  # one token each
    return _firsts(result.counts)[rows]


def _cut(item: Logprobs, row: int, lines: int) -> Logprobs:
    return Logprobs(row, item.chosen[:lines], item.top_ids[:lines], item.top[:lines])
