"""Carries the choices of all bodies: opens and ends them, moves them on, and gives them places.

Owns the bodies, the legs and the waiting room; everything that befalls a choice goes through here and is said in `effects`.
Who belongs to the fleet, and what an earlier router has left behind, is decided elsewhere.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.core.engine.request import FinishReason
from baton.core.errors import InvariantViolated, Refusal, RefusalCode
from baton.core.handover.messages import PdCode, PdFault, PdStage
from baton.core.routing.events import (
    Arrived,
    AttemptAccepted,
    AttemptRefused,
    CallBack,
    Came,
    ChoiceEnd,
    Cut,
    CutShort,
    Declined,
    Delivered,
    Forget,
    Instance,
    Leg,
    Noted,
    Opened,
    OrphanDropped,
    PhaseNote,
    RequestNumber,
    RouterConfig,
    RouterEffect,
    Send,
    Session,
    Stage,
)  # fmt: skip
from baton.core.routing.fleet_members import FleetMember, FleetMembers
from baton.core.routing.phase_notes import PhaseTimeline
from baton.core.routing.placement import Placement, Prompt, Spot, Wanted, holding
from baton.core.routing.placement_query import PlacementQuery
from baton.core.routing.placement_queue import PlacementQueue
from baton.core.routing.prefix_directory import PrefixDirectory
from baton.core.routing.rate_limits import RateLimits, RetryBudget
from baton.core.routing.routed_request import (
    ABOUT_THE_INSTANCE,
    TRANSITIONS,
    Attempt,
    ChoiceMove,
    ChoiceState,
    RoutedChoice,
    RoutedRequest,
    add_bill,
    fault_of,
    fault_of_refusal,
    finished_as,
    group_of,
    is_preemption,
    jittered_us,
    leads,
    loss_of,
    outcome_of,
)  # fmt: skip
from baton.core.state_machine import StateMachine

PASSED_OVER_MAX = 16
"""Bodies at the head of the line that find no room, before those behind them are not tried any more."""
RETRY_AFTER_S = 1
OVER_MAX = 16_384
"""Bodies whose end is remembered."""


class Cause(Enum):
    """Why a choice goes on elsewhere."""

    PREEMPTED = "preempted"
    LOST = "lost"
    DRAINED = "drained"
    REFUSED = "refused"
    """For a reason of the instance: not counted."""
    UNFIT = "unfit"
    """Refused for a reason of its own, after it had run elsewhere."""


MOVE_OF = {
    Cause.PREEMPTED: ChoiceMove.YIELD,
    Cause.LOST: ChoiceMove.LOSE,
    Cause.DRAINED: ChoiceMove.MOVE,
    Cause.REFUSED: ChoiceMove.REFUSE,
    Cause.UNFIT: ChoiceMove.REFUSE,
}


@dataclass(slots=True)
class RouterCounts:
    """Since the start."""

    late: int = 0
    """Events of sessions, legs and bodies that were over."""
    retries: dict[str, int] = field(default_factory=lambda: {cause.value: 0 for cause in Cause})
    moved_tokens: int = 0
    """Generated tokens that travelled with a choice to another instance."""
    suspicions: dict[str, int] = field(default_factory=lambda: {"suspected": 0, "stuck": 0})
    declined: dict[str, int] = field(default_factory=dict)
    """By code of the refusal."""
    orphans: int = 0
    orphans_dropped: int = 0


class Carrier:
    def __init__(self, config: RouterConfig, fleet: FleetMembers, prefix_secret: bytes, seed: int) -> None:
        self.config = config
        self.fleet = fleet
        self.holdings = PrefixDirectory()
        self.quota = RateLimits(config)
        self.counts = RouterCounts()
        self.room = PlacementQueue()
        self.now_us = 0
        self.effects: list[RouterEffect] = []
        """Of the event that is being handled."""
        self.bodies: dict[RequestNumber, RoutedRequest] = {}
        self._in_time: dict[RequestNumber, RoutedRequest] = {}
        """Those whose deadline is to come, in order of it: all have the same time."""
        self.by_origin: dict[bytes, RoutedRequest] = {}
        """By digest."""
        self.over: OrderedDict[bytes, None] = OrderedDict()
        """Digests of origins whose bodies are over: an instance that comes back with one of them need not keep it."""
        self.stirred = False
        """Something has changed that may give somebody a place."""
        self._placement = Placement(config, self.holdings, seed)
        self._phases = PhaseTimeline()
        self._wants = PlacementQuery(fleet, prefix_secret, self._placement.reads_keys)
        self._budget = RetryBudget(config)
        self._seed = seed
        self._legs: dict[Leg, Attempt] = {}
        self._states = StateMachine(TRANSITIONS, "a choice")
        self._arrivals = 0
        self._legs_made = 0
        self._absent_since_us: int | None = None
        """Since when nobody serves."""
        self._absent_due_us: int | None = None
        """When the first who waits for somebody to serve has waited long enough."""

    def moves(self) -> dict[tuple[ChoiceState, ChoiceMove], int]:
        return self._states.moves()

    def next_deadline(self) -> int | None:
        due_us = sooner(self.room.next_due(), self._absent_due_us)
        return sooner(due_us, next(iter(self._in_time.values())).deadline_us) if self._in_time else due_us

    def expire(self) -> None:
        self._end_overdue()
        self._give_up_absent()
        self.holdings.expire(self.now_us)
        self.stirred = True

    # ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrived(self, event: Arrived) -> None:
        if event.body in self.bodies or not event.group:
            raise InvariantViolated(f"body {event.body} arrived twice, or without a choice")
        prompts = {leads(submission): len(submission.prompt) for submission in event.group}
        refusal = self.quota.admit(event.tenant, len(event.group), sum(prompts.values()), self.now_us)
        if refusal is not None:
            self._say_declined(event.body, refusal)
            return
        body = self.open_body(event.body, event.tenant, event.origin, len(event.group))
        body.priority = min(submission.priority for submission in event.group)
        for choice, submission in zip(body.choices, event.group, strict=True):
            choice.submission = submission
            self.room.enter(choice, self.now_us)
            self.note(choice, Stage.QUEUED, None)
        self.place()
        if self.room.count > self.config.waiting_max and body.choices[0].state is ChoiceState.WAITING:
            text = (
                f"{self.room.count - len(body.choices)} choices wait for a place and at most {self.config.waiting_max} may"
            )
            self._decline(body, Refusal(RefusalCode.QUEUE_FULL, text, RETRY_AFTER_S))
        self._wait_for_somebody()

    def open_body(self, number: RequestNumber, tenant: str | None, origin: bytes, choices: int) -> RoutedRequest:
        self._arrivals += 1
        body = RoutedRequest(number, tenant, digest_of(origin), origin, self._arrivals, self.now_us,
                       self.now_us + self.config.deadline_us, open_choices=choices)  # fmt: skip
        body.choices = [RoutedChoice(body, index, None) for index in range(choices)]
        self.bodies[number] = self._in_time[number] = body
        if origin:
            self.by_origin[body.digest] = body
        return body

    def left(self, number: RequestNumber) -> None:
        body = self.bodies.get(number)
        if body is None:
            self.counts.late += 1
            return
        body.orphan = False
        self.end_all(body, FinishReason.ABORT, None)

    def cut(self, event: Cut) -> None:
        body = self.bodies.get(event.body)
        choice = body.choices[event.choice] if body is not None and event.choice < len(body.choices) else None
        if (
            choice is None
            or not choice.body.opened
            or choice.state not in (ChoiceState.OPEN, ChoiceState.SENT, ChoiceState.WAITING)
        ):
            self.counts.late += 1
            return
        choice.keep = min(event.keep, len(choice.delivered))
        if choice.state is ChoiceState.OPEN and choice.leg is not None:
            self.move(choice, ChoiceMove.CUT)
            leg = choice.leg
            self.effects.append(CutShort(leg.member.session, leg.leg, choice.place, choice.keep))
        else:
            self.call_back([choice])
            self.end(choice, FinishReason.STOP)

    def _decline(self, body: RoutedRequest, refusal: Refusal) -> None:
        """No instance has taken it, and none will."""
        self.quota.give_back(body.tenant, _prompt_tokens(body))
        self._say_declined(body.body, refusal)
        self.end_all(body, FinishReason.ERROR, None)

    def _say_declined(self, body: RequestNumber, refusal: Refusal) -> None:
        self.counts.declined[refusal.code.value] = self.counts.declined.get(refusal.code.value, 0) + 1
        self.effects.append(Declined(body, refusal))

    def drop(self, body: RoutedRequest) -> None:
        """An orphan that nobody came for: nobody hears how it ends."""
        body.orphan = body.opened = False
        self.counts.orphans_dropped += 1
        self.end_all(body, FinishReason.ABORT, None)
        self.effects.append(OrphanDropped(body.body))

    def end_all(
        self, body: RoutedRequest, reason: FinishReason, fault: PdFault | None, but: Sequence[RoutedChoice] = ()
    ) -> None:
        still = [choice for choice in body.choices if choice.state is not ChoiceState.ENDED and choice not in but]
        self.call_back(still)
        for choice in still:
            done = None if reason is FinishReason.ABORT else finished_as(choice)
            self.end(choice, reason if done is None else done, fault if done is None else None)
        if not still and not body.open_choices:
            self.close_body(body)

    def close_body(self, body: RoutedRequest) -> None:
        """All of it has ended and somebody has heard of that: nobody needs to keep anything of it."""
        if body.orphan:
            return
        self._phases.over(body.legs)
        for leg in body.legs:
            del self._legs[leg.leg]
            if leg.member.session in self.fleet.members:
                self.effects.append(Forget(leg.member.session, leg.leg))
        del self.bodies[body.body]
        self._in_time.pop(body.body, None)
        if self.by_origin.get(body.digest) is body:
            del self.by_origin[body.digest]
            self.over[body.digest] = None
            if len(self.over) > OVER_MAX:
                self.over.popitem(last=False)

    # ── choices ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def came(self, event: Came) -> None:
        choice = self._at(event.session, event.leg, event.place)
        if choice is None or choice.leg is None:
            self.counts.late += 1
            return
        choice.leg.member.heard_us = self.now_us
        if choice.state is not ChoiceState.OPEN:
            self._came_after_cut(choice, event.end)
            return
        tokens, cached, end = event.tokens, None, event.end
        if choice.prefill is not None and tokens:
            self._prefilled(choice)
        if event.cached_tokens is not None and choice.cached_tokens is None:
            choice.cached_tokens = cached = event.cached_tokens
        choice.delivered += tokens
        if end is None:
            self.effects.append(Delivered(choice.body.body, choice.index, tokens, event.extras, cached, None))
            return
        add_bill(choice, end.bill)
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            if end.generated_tokens < len(choice.delivered):
                choice.keep = end.generated_tokens  # its client had cut it, and then its router was lost
            self.end(choice, end.reason, None, tokens, event.extras, cached)
            return
        if tokens:
            self.effects.append(Delivered(choice.body.body, choice.index, tokens, event.extras, cached, None))
        cause = Cause.PREEMPTED if is_preemption(end) else Cause.LOST
        self.carry_on(choice, cause, fault_of(end, choice.leg.member.name))

    def noted(self, member: FleetMember, notes: Sequence[PhaseNote]) -> None:
        self.effects += self._phases.noted(member, notes, self._legs, self.now_us)

    def _came_after_cut(self, choice: RoutedChoice, end: ChoiceEnd | None) -> None:
        """Tokens mean nothing any more; the end brings the bill."""
        if choice.state is ChoiceState.CUT and end is not None:
            add_bill(choice, end.bill)
            self.end(choice, FinishReason.STOP)
        else:
            self.counts.late += 1

    def taken(self, event: AttemptAccepted) -> None:
        sent = self._sent(event.session, event.leg)
        for choice in sent:
            self.move(choice, ChoiceMove.TAKE)
            self._legs[event.leg].taken = True
            choice.refusals, choice.turned_down_by = 0, None
            self.opened(choice.body)
            if choice.attempts > 1 and choice.leg is not None:
                self.note(choice, Stage.RESUMED, choice.leg.member.name)
        if not sent:
            self.counts.late += 1

    def opened(self, body: RoutedRequest) -> None:
        if not body.opened:
            body.opened = True
            self.effects.append(Opened(body.body))

    def refused(self, event: AttemptRefused) -> None:
        sent = self._sent(event.session, event.leg)
        journey = self._legs.get(event.leg)
        if journey is not None and journey.member.session == event.session and not journey.taken:
            del self._legs[event.leg]
            journey.body.legs.remove(journey)  # there is nothing to call back or to forget
        if journey is None or not sent:
            self.counts.late += 1
            return
        about_instance = event.refusal.code in ABOUT_THE_INSTANCE
        if not (about_instance or journey.body.opened):
            self._decline(journey.body, event.refusal)
            return
        for choice in sent:
            self.carry_on(choice, Cause.REFUSED if about_instance else Cause.UNFIT, fault_of_refusal(event.refusal))

    def _at(self, session: Session, leg: Leg, place: int) -> RoutedChoice | None:
        """The choice that is at that place of a leg, if the leg still has it."""
        journey = self._legs.get(leg)
        if journey is None or journey.member.session != session or not 0 <= place < len(journey.choices):
            return None
        choice = journey.choices[place]
        return choice if choice.leg is journey else None

    def _sent(self, session: Session, leg: Leg) -> list[RoutedChoice]:
        """Those of a leg that wait for its answer."""
        journey = self._legs.get(leg)
        if journey is None or journey.member.session != session:
            return []
        return [choice for choice in journey.choices if choice.leg is journey and choice.state is ChoiceState.SENT]

    def carry_on(self, choice: RoutedChoice, cause: Cause, fault: PdFault) -> None:
        """It cannot stay where it is. Goes on elsewhere, unless it had its last token or was carried often enough."""
        reason, where = finished_as(choice), self._where(choice)
        if reason is not None:
            self.end(choice, reason)
            return
        if not self._may_go_on(choice, cause, where):
            self._give_up(choice, fault)
            return
        if choice.body.deadline_us <= self.now_us:
            self._give_up(choice, self._overdue(fault.reason))
            return
        self.leave(choice)
        self.move(choice, MOVE_OF[cause])
        self.room.enter(choice, self.now_us + self._delay_us(choice, cause))
        self._wait_for_somebody()
        self.counts.retries[cause.value] += 1
        stage = Stage.PREEMPTED if cause is Cause.PREEMPTED else Stage.MOVED
        self.note(choice, stage, where, f"{cause.value}: {fault.reason}")

    def lose(self, member: FleetMember, why: str) -> None:
        """Nothing more will be heard of an instance: what it had goes on elsewhere."""
        for choice in list(member.aboard.values()):
            if choice.leg is not None:  # else its body was given up with one before it
                self.carry_on(choice, Cause.LOST, loss_of(choice, f"{member.name} was lost: {why}"))

    def clear_out(self, member: FleetMember) -> None:
        """It drains for too long: what is still open there goes on elsewhere, if anybody else is there."""
        if not self.fleet.servers:
            return
        moving = [choice for choice in member.aboard.values() if choice.state is ChoiceState.OPEN]
        self.call_back(moving)
        for choice in moving:
            self.carry_on(choice, Cause.DRAINED, loss_of(choice, f"{member.name} drains"))

    def _may_go_on(self, choice: RoutedChoice, cause: Cause, where: Instance | None) -> bool:
        match cause:
            case Cause.PREEMPTED | Cause.UNFIT:
                choice.preemptions += 1
                if where is not None and (self.config.preempt_retry_exclude_decode or cause is Cause.UNFIT):
                    choice.avoid = [name for name in choice.avoid if name != where] + [where]
                return choice.preemptions <= self.config.preempt_retry_count
            case Cause.LOST:
                choice.losses += 1
                choice.fruitless = choice.fruitless + 1 if choice.lost_with == len(choice.delivered) else 1
                choice.lost_with = len(choice.delivered)
                choice.turned_down_by = where
                is_deadly = choice.fruitless >= self.config.fruitless_loss_count
                return choice.losses <= self.config.loss_retry_count and not is_deadly
            case Cause.REFUSED:
                choice.refusals += 1
                choice.turned_down_by = where
                return True
            case Cause.DRAINED:
                return True

    def _delay_us(self, choice: RoutedChoice, cause: Cause) -> int:
        match cause:
            case Cause.PREEMPTED | Cause.UNFIT:
                nth = choice.preemptions
            case Cause.LOST:
                nth = choice.losses - 1
            case Cause.REFUSED:
                nth = choice.refusals
            case Cause.DRAINED:
                nth = 0
        delay_us = jittered_us(self.config, self._seed, choice.body.body, nth) if nth else 0
        return delay_us if cause in (Cause.REFUSED, Cause.DRAINED) else delay_us + self._budget.delay_us(self.now_us)

    def _give_up(self, choice: RoutedChoice, fault: PdFault) -> None:
        if choice.body.opened:
            self.end(choice, FinishReason.RESCHEDULE, fault)
        else:
            text = f"no instance could take the request: {fault.reason}"
            self._decline(choice.body, Refusal(RefusalCode.NO_INSTANCE, text, RETRY_AFTER_S))

    def end(
        self, choice: RoutedChoice, reason: FinishReason, fault: PdFault | None = None,
        tokens: list[int] | None = None, extras: object = None, cached: int | None = None,
    ) -> None:  # fmt: skip
        body, where = choice.body, self._where(choice)
        self.leave(choice)
        self.move(choice, ChoiceMove.END)
        choice.outcome = outcome = outcome_of(choice, reason, fault)
        if body.opened:
            self.effects.append(Delivered(body.body, choice.index, tokens or [], extras, cached, outcome))
        self.note(choice, Stage.ENDED, where, reason.value if fault is None else f"{reason.value}: {fault.message}")
        self.quota.close(body.tenant, len(choice.delivered), self.now_us)
        body.open_choices -= 1
        if not body.open_choices:
            self.close_body(body)

    def leave(self, choice: RoutedChoice) -> None:
        """It is not at its instance any more."""
        if choice.leg is None:
            return
        if choice.prefill is not None:
            self._prefilled(choice)
        del choice.leg.member.aboard[choice.body.body, choice.index]
        choice.leg = None
        self.stirred = True

    def _prefilled(self, choice: RoutedChoice) -> None:
        if choice.prefill is not None:
            giver, tokens = choice.prefill
            giver.prefill_tokens -= tokens
            choice.prefill = None

    def call_back(self, choices: Iterable[RoutedChoice]) -> None:
        """Instances that are still there need not go on with these."""
        places: dict[Leg, list[int]] = {}
        for choice in choices:
            if choice.leg is not None and choice.leg.leg in self._legs:
                places.setdefault(choice.leg.leg, []).append(choice.place)
        for leg, numbers in places.items():
            session = self._legs[leg].member.session
            if session in self.fleet.members:
                self.effects.append(CallBack(session, leg, tuple(numbers)))

    def _where(self, choice: RoutedChoice) -> Instance | None:
        return None if choice.leg is None else choice.leg.member.name

    def move(self, choice: RoutedChoice, move: ChoiceMove) -> None:
        before = choice.state
        choice.state = self._states.after(before, move)
        if before is ChoiceState.WAITING:
            self.room.leave(choice)
            choice.keys = None

    def note(self, choice: RoutedChoice, stage: Stage, where: Instance | None, why: str = "") -> None:
        self.effects.append(Noted(choice.body.body, choice.index, stage, where, self.now_us, why))

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def place(self) -> None:
        """Whoever is due and finds room goes, in the order of the line."""
        self.stirred = False
        servers, passed_over = self.fleet.servers, list[list[RoutedChoice]]()
        if not self.room.ripen(self.now_us) or not servers:
            return
        while len(passed_over) < PASSED_OVER_MAX and any(map(self._placement.has_room, servers)):
            party = self.room.party()
            if not party:
                break
            wanted = self._wants.of(party)
            holders = holding(servers, wanted)
            spot = self._placement.choose(wanted, holders, self.fleet.givers)
            if not holders:
                self.room.put_off(party, self.now_us + self.config.beat_us)  # and not in the way of those behind it
            elif spot is None:
                passed_over.append(party)
            else:
                self._send(party, wanted, spot)
        for party in passed_over:
            self.room.put_back(party)

    def _send(self, party: Sequence[RoutedChoice], wanted: Wanted, spot: Spot) -> None:
        member, body = spot.member, party[0].body
        prefills = {p.leader: (p, *given) for p, given in zip(wanted.prompts, spot.prefills, strict=True)}
        prefill_at = {name: giver.facts.peer_address for name, (_, giver, _) in prefills.items() if giver is not member}
        pairs = [(choice, self._wants.settled(choice)) for choice in party]
        group = group_of(pairs, prefill_at)
        journey = self.journey(member, body, list(party))
        for place, (choice, submission) in enumerate(pairs):
            self.move(choice, ChoiceMove.PLACE)
            self.board(choice, journey, place)
            choice.attempts += 1
            choice.began_with = len(submission.prompt) + len(choice.delivered)
            self.counts.moved_tokens += len(choice.delivered)
            if leads(submission) in prefills:
                prompt, giver, tokens = prefills.pop(leads(submission))
                self._expect_prefill(choice, member, giver, tokens, prompt)
                if giver is not member:
                    journey.givers[place] = giver.name
        choices = tuple(choice.index for choice in party)
        self.effects.append(Send(member.session, journey.leg, group, choices, len(body.choices), body.origin))
        for choice in party:
            self.note(choice, Stage.PLACED, member.name)

    def journey(self, member: FleetMember, body: RoutedRequest, choices: list[RoutedChoice]) -> Attempt:
        self._legs_made += 1
        journey = Attempt(Leg(self._legs_made), member, body, choices)
        self._legs[journey.leg] = journey
        body.legs.append(journey)
        return journey

    def board(self, choice: RoutedChoice, journey: Attempt, place: int) -> None:
        choice.leg, choice.place = journey, place
        journey.member.aboard[choice.body.body, choice.index] = choice

    def _expect_prefill(
        self, choice: RoutedChoice, member: FleetMember, giver: FleetMember, tokens: int, prompt: Prompt
    ) -> None:
        choice.prefill = (giver, tokens)
        giver.prefill_tokens += tokens
        member.promised_blocks += -(-tokens // member.facts.block_size)
        for holder in (member, giver) if giver is not member else (member,):
            self.holdings.assume(holder.session, prompt.keys, self.now_us)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_overdue(self) -> None:
        while self._in_time:
            number, body = next(iter(self._in_time.items()))
            if body.deadline_us > self.now_us:
                return
            del self._in_time[number]
            if body.orphan:
                self.drop(body)
            elif body.opened:
                flows = [choice for choice in body.choices if choice.state is ChoiceState.OPEN and choice.delivered]
                self.end_all(body, FinishReason.RESCHEDULE, self._overdue(), but=flows)
            else:
                self._decline(body, Refusal(RefusalCode.NO_INSTANCE, self._overdue().reason, RETRY_AFTER_S))

    def _overdue(self, why: str = "") -> PdFault:
        text = f"it has not ended within {self.config.deadline_us // 1_000_000} s"
        return PdFault(PdCode.TIMEOUT, PdStage.DECODE, f"{text}: {why}" if why else text)

    def watch_absence(self) -> None:
        if self.fleet.servers:
            self._absent_since_us = self._absent_due_us = None
        elif self._absent_since_us is None:
            self._absent_since_us = self.now_us
            self._absent_due_us = self.now_us + self.config.absent_us if self.room.count else None

    def _wait_for_somebody(self) -> None:
        if self._absent_since_us is not None and self._absent_due_us is None:
            self._absent_due_us = self.now_us + self.config.absent_us

    def _give_up_absent(self) -> None:
        """Nobody serves: who has nothing yet does not wait for ever."""
        since_us, due_us = self._absent_since_us, self._absent_due_us
        if since_us is None or due_us is None or due_us > self.now_us:
            return
        waits = [c.body for c in self.room.everybody() if not any(other.delivered for other in c.body.choices)]
        times = []
        text = f"no instance has served for {self.config.absent_us // 1000} ms"
        for body in dict.fromkeys(waits):
            patience_us = max(since_us, body.arrived_us) + self.config.absent_us
            if patience_us > self.now_us:
                times.append(patience_us)
            elif body.opened:
                self.end_all(body, FinishReason.RESCHEDULE, PdFault(PdCode.NOT_DELIVERED, PdStage.PREFILL, text))
            else:
                self._decline(body, Refusal(RefusalCode.NO_INSTANCE, text, RETRY_AFTER_S))
        self._absent_due_us = min(times, default=None)


def sooner(one_us: int | None, other_us: int | None) -> int | None:
    if one_us is None or (other_us is not None and other_us < one_us):
        return other_us
    return one_us


def digest_of(origin: bytes) -> bytes:
    return hashlib.blake2b(origin, digest_size=16).digest()


def _prompt_tokens(body: RoutedRequest) -> int:
    prompts = {leads(c.submission): len(c.submission.prompt) for c in body.choices if c.submission is not None}
    return sum(prompts.values())
