"""One engine's decisions as one object: events go in, effects come out.

    effects  = worker.handle(event, now_us)
    deadline = worker.next_deadline()          # when a Tick is due; None when there is nothing to wait for

The worker has no clock, thread or socket. The real engine process and the simulator drive this same object. Planning happens
on Tick rather than on arrival, so that a driver can hand in everything that has arrived before a step is planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from baton.core.config import WorkerConfig
from baton.core.engine.block_contents import BlockEvents
from baton.core.engine.change_journal import KEYS_MAX, CachedKeysChanged, EngineChanges
from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.held_prefills import HeldPrefills
from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, StopAt, Submit
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.records import Settled
from baton.core.engine.request import FinishReason, RequestId, Serial, Submission
from baton.core.engine.scheduler import Scheduler, decode_scheduler, mixed_scheduler, prefill_scheduler
from baton.core.engine.submission_checks import refuse_group
from baton.core.engine.victims import RecoveryRates
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.decode_side import DecodeSide
from baton.core.handover.messages import PeerEffect, PeerEvent
from baton.core.handover.prefill_side import PrefillSide
from baton.core.handover.protocol import Acts, HandoverSide
from baton.core.tiers.outcomes import Departed, Loaded, Outcome
from baton.core.tiers.transfers import StorageEffect, StorageEvent, TransferDone, TransferFailed, TransferFenced

IDLE_PASS_US = 1000
"""Time until the next pass after one that planned nothing, while requests are open."""
METERED_TOKENS = 32
"""Steps with fewer prefill tokens are not used to measure its cost."""
PrefillComposition = Callable[[WorkerConfig, PrefixIndex], tuple[Scheduler, HeldPrefills]]
"""Composes the scheduler of an instance that only prefills; `prefill_scheduler` is the one that serves."""
RETRY_AFTER_S = 1
"""Retry-After of a refusal because of a full queue: one second is about one queue position on a busy GPU."""


class StepDone(Struct, frozen=True, gc=False):
    result: StepResult


@dataclass(frozen=True, slots=True)
class FrontEndLost:
    """The front end is gone, and all clients with it: every open request ends."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline` has passed."""


Event = Submit | Cancel | StopAt | StepDone | Drain | ReportChanges | FrontEndLost | Tick | PeerEvent | StorageEvent


@dataclass(frozen=True, slots=True)
class GroupRefused:
    ticket: int
    refusal: Refusal


class Launch(Struct, frozen=True, gc=False):
    """Give this plan to the executor; hand its result back as StepDone."""

    plan: StepPlan


class Deliver(Struct, frozen=True, gc=False):
    """The result of a step, for the front end."""

    settled: Settled


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request ended outside a step."""

    ended: EndedRequest


Effect = Accepted | GroupRefused | Launch | Deliver | Withdrawn | PeerEffect | StorageEffect


class PrefillMeter:
    """Measures the cost of a prefill token from finished steps. A step counts from its launch or its predecessor's end."""

    def __init__(self) -> None:
        self._launched: deque[tuple[int, StepPlan]] = deque()
        self._last_done_us = 0

    def launched(self, plan: StepPlan, now_us: int) -> None:
        self._launched.append((now_us, plan))

    def done(self, rates: RecoveryRates, drafts: int, now_us: int) -> None:
        """`drafts`: tokens that the step has fed in addition to its plan."""
        launched_us, plan = self._launched.popleft()
        spent_us = now_us - max(launched_us, self._last_done_us)
        self._last_done_us = now_us
        prefill_tokens = plan.tokens - len(plan.decode_slots)
        if prefill_tokens < METERED_TOKENS or spent_us <= 0:
            return
        seen = spent_us / (plan.tokens + drafts)
        rates.prefill_us_per_token = rates.prefill_us_per_token * 0.8 + seen * 0.2


class Worker:
    def __init__(
        self,
        config: WorkerConfig,
        prefix: PrefixIndex,
        handover_secret: bytes = b"",
        prefilling: PrefillComposition | None = None,
    ) -> None:
        self.config = config
        self.hashes = prefix.hashes
        self.scheduler: Scheduler
        self.prefill_side: PrefillSide | None = None
        self.decode_side: DecodeSide | None = None
        if config.role.gives:
            self.scheduler, held = (prefilling or prefill_scheduler)(config, prefix)
            self.prefill_side = PrefillSide(config, self.scheduler, held)
        elif config.role.takes:
            self.scheduler, arriving = decode_scheduler(config, prefix)
            self.decode_side = DecodeSide(config, self.scheduler, arriving, handover_secret)
        else:
            self.scheduler = mixed_scheduler(config, prefix)
        if config.kv_events:
            prefix.keep_contents()
        self._side = self.prefill_side or self.decode_side or HandoverSide()
        self._tiers = self.scheduler.tiers
        self._draining = False
        self._meter = PrefillMeter()
        self._now_us = 0
        self._planned_out = False
        """The last pass planned nothing, and no event has come since."""
        self._deadline_us: int | None = None
        self._deadline_known = False
        """Whether `_deadline_us` is the next deadline: drivers ask for it several times an event."""

    def snapshot_fields(self) -> dict[str, object]:
        """Without the deadline that asking for it keeps: it is computed again."""
        return {name: value for name, value in vars(self).items() if name not in ("_deadline_us", "_deadline_known")}

    def restore_fields(self, fields: dict[str, object]) -> None:
        vars(self).update(fields, _deadline_us=None, _deadline_known=False)

    def handle(self, event: Event, now_us: int) -> list[Effect]:
        self._now_us = now_us
        self._deadline_known = False
        self.scheduler.set_clock(now_us)
        idle_pass = False
        effects: list[Effect] = []
        match event:
            case Tick():
                effects, idle_pass = self._pass()
            case StepDone(result):
                effects = self._settle(result)
            case Submit():
                effects = [self._submit(event)]
            case Cancel(serial):
                effects = self._stop(Serial(serial), FinishReason.ABORT, None)
            case StopAt(serial, keep):
                effects = self._stop(Serial(serial), FinishReason.STOP, keep)
            case Drain():
                self._drain()
            case ReportChanges():
                self._keep_changes()
            case FrontEndLost():
                effects = self._stop_all()
            case TransferDone() | TransferFailed() | TransferFenced():
                effects = self._transferred(event)
            case _:
                effects = _effects(self._side.handle(event, now_us))
        self._planned_out = idle_pass
        effects += self._outcomes(self._tiers.take_outcomes())
        effects += self._tiers.take_orders()
        return effects

    def next_deadline(self) -> int | None:
        """A pass is due at once if it could plan something, and after IDLE_PASS_US in any case while a request is open."""
        if not self._deadline_known:
            self._deadline_us = self._earliest()
            self._deadline_known = True
        return self._deadline_us

    def _earliest(self) -> int | None:
        due_us, side_us = self._tiers.next_deadline(), self._side.next_deadline()
        if due_us is None or (side_us is not None and side_us < due_us):
            due_us = side_us
        scheduler = self.scheduler
        if scheduler.has_work and not scheduler.asleep:
            could_plan = not self._planned_out and scheduler.in_flight < self.config.depth
            pass_us = self._now_us if could_plan else self._now_us + IDLE_PASS_US
            if due_us is None or pass_us < due_us:
                due_us = pass_us
        return due_us

    def gauges(self) -> SchedulerGauges:
        gauges = self.scheduler.gauges()
        handovers = replace(self._side.gauges(), preempted=gauges.handovers.preempted)
        return replace(gauges, waiting=gauges.waiting + self._side.queued, handovers=handovers)

    def changes(self, now_us: int) -> EngineChanges:
        """Changes since the last call, if `ReportChanges` asked to keep them; at most KEYS_MAX keys."""
        journal, notes = self.scheduler.pool.prefix.journal, self.scheduler.notes
        names = CachedKeysChanged() if journal is None else journal.take(KEYS_MAX)
        return EngineChanges(names) if notes is None else EngineChanges(names, notes.take(now_us), notes.take_preempted())

    @property
    def has_block_events(self) -> bool:
        contents = self.scheduler.pool.prefix.contents
        return contents is not None and contents.has_changes

    def block_events(self) -> BlockEvents:
        """Changes of cached blocks since the last call, at most KEYS_MAX blocks. Needs `kv_events` in the configuration."""
        contents = self.scheduler.pool.prefix.contents
        return BlockEvents(False, (), ()) if contents is None else contents.take(KEYS_MAX)

    def retell_blocks(self) -> None:
        """Let `block_events` begin anew: a reader has missed too much."""
        if (contents := self.scheduler.pool.prefix.contents) is not None:
            contents.restart()

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.has_work or self._tiers.busy or self._side.open())

    def _pass(self) -> tuple[list[Effect], bool]:
        self._tiers.expire(self._now_us)
        effects = _effects(self._side.expire(self._now_us))
        if self.scheduler.in_flight >= self.config.depth:
            return effects, False
        plan = self.scheduler.plan(self._now_us)
        effects += _effects(self._side.planned(plan, self._now_us))
        if plan is None:
            return effects, True
        self._meter.launched(plan, self._now_us)
        return [*effects, Launch(plan)], False

    def _settle(self, result: StepResult) -> list[Effect]:
        self._meter.done(self.scheduler.rates, result.drafts, self._now_us)
        settled = self.scheduler.settle(result, self._now_us)
        return _effects(self._side.settled(settled, self._now_us))

    def _transferred(self, event: StorageEvent) -> list[Effect]:
        self._tiers.handle(event, self._now_us)
        return _effects(self._side.advance(self._now_us))

    def _outcomes(self, outcomes: list[Outcome]) -> list[Effect]:
        acts: Acts = []
        has_made_room = False
        for outcome in outcomes:
            match outcome:
                case Loaded(serial, blocks):
                    ended = self.scheduler.loaded(serial, blocks, self._now_us)
                case Departed(serial):
                    ended = self.scheduler.departed(serial)
            if ended is not None:
                acts += self._side.left(ended)
                has_made_room = True
        if has_made_room:  # for what waits: perhaps no other event comes
            acts += self._side.advance(self._now_us)
        return _effects(acts)

    def _drain(self) -> None:
        self._draining = True
        self._side.draining = True

    def _keep_changes(self) -> None:
        self.scheduler.pool.prefix.keep_journal()
        if self.prefill_side is None:  # a prefill for a peer is known by the peer's serial, not by ours
            self.scheduler.keep_notes()

    def _stop(self, serial: Serial, reason: FinishReason, keep: int | None) -> list[Effect]:
        if not self.config.role.serves:
            return []  # all open requests are its peers'
        if self.decode_side is not None and self.decode_side.knows(serial):
            return _effects(self.decode_side.cancel(serial, reason, self._now_us))
        ended = self.scheduler.order_stop(serial, reason, self._now_us, keep)
        return [Withdrawn(ended)] if ended else []

    def _stop_all(self) -> list[Effect]:
        serials = [*(request.serial for request in self.scheduler.requests()), *self.scheduler.departing()]
        return [effect for serial in serials for effect in self._stop(Serial(serial), FinishReason.ABORT, None)]

    def _submit(self, event: Submit) -> Accepted | GroupRefused:
        if not self.config.role.serves:
            text = "this instance only prefills for others"
            return GroupRefused(event.ticket, Refusal(RefusalCode.WRONG_ROLE, text))
        refusal = self._refusal(event.group)
        if refusal:
            return GroupRefused(event.ticket, refusal)
        serials: dict[RequestId, Serial] = {}
        for submission in event.group:
            leader = serials[submission.leader] if submission.leader is not None else None
            if submission.move_us_per_token is not None:
                self.scheduler.rates.move_us_per_token = submission.move_us_per_token
            serials[submission.request_id] = self.scheduler.enqueue(
                submission, self._limit(submission), self._now_us, leader
            )
        return Accepted(event.ticket, tuple(serials.values()))

    def _limit(self, submission: Submission) -> int:
        """The longest that the sequence may become; a `max_tokens` beyond that is cut."""
        longest = self.config.sequence_tokens_max
        return longest if submission.max_tokens is None else min(longest, len(submission.prompt) + submission.max_tokens)

    def _refusal(self, group: tuple[Submission, ...]) -> Refusal | None:
        if self._draining:
            return Refusal(RefusalCode.DRAINING, "this instance is draining and accepts no new requests", RETRY_AFTER_S)
        if refusal := refuse_group(group, self.config):
            return refusal
        if self.scheduler.waiting + len(group) > self.config.waiting_max:
            text = f"the queue is full: {self.scheduler.waiting} requests wait and at most {self.config.waiting_max} may"
            return Refusal(RefusalCode.QUEUE_FULL, text, RETRY_AFTER_S)
        return None


def _effects(acts: Acts) -> list[Effect]:
    """Orders of a hand-over unchanged; results and ends as the front end gets those of any other request."""
    effects: list[Effect] = []
    for act in acts:
        match act:
            case Settled():
                effects.append(Deliver(act))
            case EndedRequest():
                effects.append(Withdrawn(act))
            case _:
                effects.append(act)
    return effects
