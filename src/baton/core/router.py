"""A router's decisions behind one door: facts go in, orders come out.

    effects  = router.handle(event, now_us)
    deadline = router.next_deadline()          # when a Due is due; None when there is nothing to wait for

Bodies of clients come in, and each of their choices is carried from instance to instance until it has ended: the client gets
every token once and in order, and one end. What is late (of sessions, legs and bodies that are over) is counted and means
nothing. A body that is left before an instance has taken it gets no answer; every other one is Opened or Declined, once.

Has no clock, socket or random source: the real node and a simulator drive this same object. Who belongs to the fleet is
`fleet`'s business, which prefix is where `holdings`', where to go `placement`'s, what a choice is allowed `carrying`'s.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from baton.core.carrying import (
    ABOUT_THE_INSTANCE,
    TRANSITIONS,
    Carried,
    Carry,
    CarryMove,
    Choice,
    Journey,
    add_bill,
    fault_of,
    fault_of_refusal,
    finished_as,
    group_of,
    is_preemption,
    jittered_us,
    leads,
    loss_of,
    next_carry,
    outcome_of,
)
from baton.core.errors import InvariantViolated, Refusal, RefusalCode
from baton.core.fleet import Fleet, InstanceView, Member, MemberMove, MemberState
from baton.core.holdings import Holdings
from baton.core.peers import PdCode, PdFault, PdStage
from baton.core.placement import Placement, Prompt, Spot, Wanted
from baton.core.prefix import PrefixIndex
from baton.core.quota import Quota, RetryBudget
from baton.core.request import FinishReason, RequestId, Submission, frozen_tokens
from baton.core.routing import (
    Admit,
    Arrived,
    Beaten,
    Body,
    CallBack,
    Came,
    ChoiceEnd,
    Claimed,
    Cut,
    CutShort,
    Declined,
    Delivered,
    Drains,
    Due,
    FleetChanged,
    Forget,
    HangUp,
    Instance,
    Joined,
    Left,
    Leg,
    LegRefused,
    LegTaken,
    Neighbours,
    Noted,
    Opened,
    OrderDrain,
    OrphanDropped,
    Parted,
    RouterConfig,
    RouterEffect,
    RouterEvent,
    Send,
    Session,
    Stage,
    TurnAway,
)
from baton.core.waiting import WaitingRoom

ADDRESSES_MAX = 256
"""Givers that a taker is told of."""
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
    Cause.PREEMPTED: CarryMove.YIELD,
    Cause.LOST: CarryMove.LOSE,
    Cause.DRAINED: CarryMove.MOVE,
    Cause.REFUSED: CarryMove.REFUSE,
    Cause.UNFIT: CarryMove.REFUSE,
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


class Router:
    def __init__(self, config: RouterConfig, prefix_secret: bytes, seed: int) -> None:
        self.config = config
        self.fleet = Fleet(config)
        self.holdings = Holdings()
        self.quota = Quota(config)
        self.counts = RouterCounts()
        self._placement = Placement(config, self.holdings, seed)
        self._budget = RetryBudget(config)
        self._room = WaitingRoom()
        self._secret = prefix_secret
        self._prefix: PrefixIndex | None = None
        self._seed = seed
        self._bodies: OrderedDict[Body, Carried] = OrderedDict()
        """In order of their deadlines: all have the same time."""
        self._by_origin: dict[bytes, Carried] = {}
        """By digest."""
        self._over: OrderedDict[bytes, None] = OrderedDict()
        """Digests of origins whose bodies are over: an instance that comes back with one of them need not keep it."""
        self._orphans: dict[Body, Carried] = {}
        """Those that nobody has claimed."""
        self._legs: dict[Leg, Journey] = {}
        self._moves = dict.fromkeys(TRANSITIONS, 0)
        self._addresses: tuple[str, ...] = ()
        """Of the givers, as takers were told."""
        self._arrivals = 0
        self._legs_made = 0
        self._orphans_made = 0
        self._now_us = 0
        self._tick_us = 0
        self._absent_since_us: int | None = None
        """Since when nobody serves."""
        self._absent_due_us: int | None = None
        """When the first who waits for somebody to serve has waited long enough."""
        self._stirred = False
        """Something has changed that may give somebody a place."""
        self._started = False
        self._effects: list[RouterEffect] = []

    # ── what others may know ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        """Choices that wait for a place."""
        return self._room.count

    @property
    def open_bodies(self) -> int:
        return len(self._bodies)

    def views(self) -> list[InstanceView]:
        return self.fleet.views(self._now_us)

    def moves(self) -> dict[tuple[Carry, CarryMove], int]:
        """How often each transition of a choice was taken; those of instances are the fleet's."""
        return dict(self._moves)

    def carried(self) -> tuple[Carried, ...]:
        """For the laws."""
        return tuple(self._bodies.values())

    # ── the door ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: RouterEvent, now_us: int) -> list[RouterEffect]:
        effects: list[RouterEffect] = []
        self._effects = effects
        self._wake(now_us)
        match event:
            case Came():
                self._came(event)
            case Beaten():
                self._beaten(event)
            case LegTaken():
                self._taken(event)
            case LegRefused():
                self._refused(event)
            case Arrived():
                self._arrived(event)
            case Left(body):
                self._left(body)
            case Cut():
                self._cut(event)
            case Joined():
                self._joined(event)
            case Parted(session, reason):
                self._parted(session, reason)
            case Drains(name):
                self._drains(name)
            case Claimed():
                self._claimed(event)
            case Due():
                self._due()
        if self._stirred:
            self._place()
        return effects

    def next_deadline(self) -> int | None:
        times = [self._room.next_due(), self._absent_due_us]
        if self.fleet.members:
            times.append(self._tick_us)
        if self._bodies:
            times.append(next(iter(self._bodies.values())).deadline_us)
        times += [orphan.claim_by_us for orphan in self._orphans.values()]
        return min((time for time in times if time is not None), default=None)

    def _wake(self, now_us: int) -> None:
        """While it is awake something happens at least every beat: after a longer gap, it was not there to listen."""
        gap_us, beat_us = now_us - self._now_us, self.config.beat_us
        self._now_us = now_us
        if not self._started:
            self._started = True
            self._watch_absence()
        elif gap_us > 2 * beat_us and self.fleet.members:
            self.fleet.excuse(gap_us - beat_us)

    def _due(self) -> None:
        now_us = self._now_us
        self._tick_us = now_us + self.config.beat_us
        for suspicion in self.fleet.silent(now_us):
            self._suspect(suspicion.member, suspicion.what, suspicion.why)
        for member in self.fleet.drained_too_long(now_us):
            self._clear_out(member)
        self._end_overdue()
        self._drop_orphans()
        self._give_up_absent()
        self.holdings.expire(now_us)
        self._stirred = True

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _joined(self, event: Joined) -> None:
        facts, fleet, now_us = event.facts, self.fleet, self._now_us
        if event.session in fleet.members:
            self.counts.late += 1
            return
        if not self._bodies:
            fleet.forget_model()
        objection = fleet.objection(facts)
        if objection is not None:
            self._effects.append(TurnAway(event.session, objection.reason, objection.fenced))
            what = "fenced" if objection.fenced else "refused"
            self._effects.append(FleetChanged(facts.name, facts.incarnation, what, objection.reason))
            return
        old = fleet.by_name.get(facts.name)
        if old is not None:
            same = old.facts.incarnation == facts.incarnation
            why = "it has connected again" if same else f"incarnation {facts.incarnation} has joined"
            self._effects.append(HangUp(old.session, why))
            self._lose(old, MemberMove.SUCCEED, "lost", why)
        if not fleet.members:
            self._tick_us = now_us + self.config.beat_us
        member = fleet.admit(event.session, facts, event.draining, now_us)
        self.holdings.open(event.session, facts.blocks)
        self._effects.append(Admit(event.session, (), tuple(held.serial for held in event.held)))
        self._effects.append(FleetChanged(facts.name, facts.incarnation, "joined", facts.role))
        if member.state is MemberState.DRAINING:
            self._effects.append(FleetChanged(facts.name, facts.incarnation, "draining", "it was draining when it joined"))
        self._regroup(member)

    def _parted(self, session: Session, reason: str) -> None:
        member = self.fleet.members.get(session)
        if member is None:
            self.counts.late += 1
        else:
            self._lose(member, MemberMove.PART, "lost", reason)

    def _beaten(self, event: Beaten) -> None:
        member = self.fleet.members.get(event.session)
        if member is None:
            self.counts.late += 1
            return
        suspicion = self.fleet.beaten(member, event.sign, self._now_us)
        if suspicion is not None:
            self._suspect(member, suspicion.what, suspicion.why)
            return
        names = event.sign.names
        if names.fresh or names.named or names.forgotten:
            self.holdings.hear(event.session, names)

    def _drains(self, name: Instance) -> None:
        member = self.fleet.by_name.get(name)
        if member is None or member.state is not MemberState.JOINED:
            self.counts.late += 1
            return
        self.fleet.drain(member, self._now_us)
        self._effects.append(OrderDrain(member.session))
        self._effects.append(FleetChanged(name, member.facts.incarnation, "draining", "it takes nothing new"))
        self._regroup()

    def _suspect(self, member: Member, what: str, why: str) -> None:
        self.counts.suspicions[what] += 1
        self._effects.append(HangUp(member.session, why))
        self._lose(member, MemberMove.SUSPECT, what, why)

    def _lose(self, member: Member, move: MemberMove, what: str, why: str) -> None:
        """Nothing more will be heard of it: what it had goes on elsewhere."""
        self.fleet.remove(member, move)
        self.holdings.close(member.session)
        self._effects.append(FleetChanged(member.name, member.facts.incarnation, what, why))
        for choice in list(member.aboard.values()):
            if choice.leg is not None:  # else its body was given up with one before it
                self._carry_on(choice, Cause.LOST, loss_of(choice, f"{member.name} was lost: {why}"))
        self._regroup()

    def _clear_out(self, member: Member) -> None:
        """It drains for too long: what is still open there goes on elsewhere, if anybody else is there."""
        if not self.fleet.servers:
            return
        moving = [choice for choice in member.aboard.values() if choice.state is Carry.OPEN]
        self._call_back(moving)
        for choice in moving:
            self._carry_on(choice, Cause.DRAINED, loss_of(choice, f"{member.name} drains"))

    def _regroup(self, newcomer: Member | None = None) -> None:
        """Whoever takes is told of a change among those who give; it may be that somebody serves again, or nobody does."""
        addresses = tuple(giver.facts.peer_address for giver in self.fleet.givers)[:ADDRESSES_MAX]
        changed = addresses != self._addresses
        self._addresses = addresses
        for member in self.fleet.members.values():
            if member.role.takes and (changed or member is newcomer):
                self._effects.append(Neighbours(member.session, addresses))
        self._watch_absence()
        self._stirred = True

    # ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, event: Arrived) -> None:
        if event.body in self._bodies or not event.group:
            raise InvariantViolated(f"body {event.body} arrived twice, or without a choice")
        prompts = {leads(submission): len(submission.prompt) for submission in event.group}
        refusal = self.quota.admit(event.tenant, len(event.group), sum(prompts.values()), self._now_us)
        if refusal is not None:
            self._say_declined(event.body, refusal)
            return
        body = self._open_body(event.body, event.tenant, event.origin, len(event.group))
        body.priority = min(submission.priority for submission in event.group)
        for choice, submission in zip(body.choices, event.group, strict=True):
            choice.submission = submission
            self._room.enter(choice, self._now_us)
            self._note(choice, Stage.QUEUED, None)
        self._place()
        if self._room.count > self.config.waiting_max and body.choices[0].state is Carry.WAITING:
            text = (
                f"{self._room.count - len(body.choices)} choices wait for a place and at most {self.config.waiting_max} may"
            )
            self._decline(body, Refusal(RefusalCode.QUEUE_FULL, text, RETRY_AFTER_S))
        elif self._absent_since_us is not None and self._absent_due_us is None:
            self._absent_due_us = self._now_us + self.config.absent_us

    def _open_body(self, number: Body, tenant: str | None, origin: bytes, choices: int) -> Carried:
        self._arrivals += 1
        body = Carried(number, tenant, _digest(origin), origin, self._arrivals, self._now_us,
                       self._now_us + self.config.deadline_us, open_choices=choices)  # fmt: skip
        body.choices = [Choice(body, index, None) for index in range(choices)]
        self._bodies[number] = body
        if origin:
            self._by_origin[body.digest] = body
        return body

    def _left(self, number: Body) -> None:
        body = self._bodies.get(number)
        if body is None:
            self.counts.late += 1
            return
        body.claim_by_us = None
        self._orphans.pop(number, None)
        self._end_all(body, FinishReason.ABORT, None)

    def _cut(self, event: Cut) -> None:
        body = self._bodies.get(event.body)
        choice = body.choices[event.choice] if body is not None and event.choice < len(body.choices) else None
        if choice is None or not choice.body.opened or choice.state not in (Carry.OPEN, Carry.SENT, Carry.WAITING):
            self.counts.late += 1
            return
        choice.keep = min(event.keep, len(choice.delivered))
        if choice.state is Carry.OPEN and choice.leg is not None:
            self._move(choice, CarryMove.CUT)
            leg = choice.leg
            self._effects.append(CutShort(leg.member.session, leg.leg, choice.place, choice.keep))
        else:
            self._call_back([choice])
            self._end(choice, FinishReason.STOP)

    def _claimed(self, event: Claimed) -> None:
        body = self._orphans.pop(event.body, None)
        if body is None:
            self.counts.late += 1
            return
        body.claim_by_us = None
        if not body.open_choices:
            self._close_body(body)

    def _decline(self, body: Carried, refusal: Refusal) -> None:
        """No instance has taken it, and none will."""
        self.quota.give_back(body.tenant, _prompt_tokens(body))
        self._say_declined(body.body, refusal)
        self._end_all(body, FinishReason.ERROR, None)

    def _say_declined(self, body: Body, refusal: Refusal) -> None:
        self.counts.declined[refusal.code.value] = self.counts.declined.get(refusal.code.value, 0) + 1
        self._effects.append(Declined(body, refusal))

    def _end_all(self, body: Carried, reason: FinishReason, fault: PdFault | None) -> None:
        still = [choice for choice in body.choices if choice.state is not Carry.ENDED]
        self._call_back(still)
        for choice in still:
            self._end(choice, reason, fault)
        if not still:
            self._close_body(body)

    def _close_body(self, body: Carried) -> None:
        """All of it has ended and somebody has heard of that: nobody needs to keep anything of it."""
        if body.claim_by_us is not None:
            return
        for leg in body.legs:
            del self._legs[leg.leg]
            if leg.member.session in self.fleet.members:
                self._effects.append(Forget(leg.member.session, leg.leg))
        del self._bodies[body.body]
        if self._by_origin.get(body.digest) is body:
            del self._by_origin[body.digest]
            self._over[body.digest] = None
            if len(self._over) > OVER_MAX:
                self._over.popitem(last=False)

    # ── choices ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _came(self, event: Came) -> None:
        choice = self._at(event.session, event.leg, event.place)
        if choice is None or choice.leg is None:
            self.counts.late += 1
            return
        choice.leg.member.heard_us = self._now_us
        if choice.state is not Carry.OPEN:
            self._came_after_cut(choice, event.end)
            return
        tokens, cached, end = event.tokens, None, event.end
        if choice.prefill is not None and tokens:
            self._prefilled(choice)
        if event.cached_tokens is not None and choice.cached_tokens is None:
            choice.cached_tokens = cached = event.cached_tokens
        choice.delivered += tokens
        if end is None:
            self._effects.append(Delivered(choice.body.body, choice.index, tokens, event.extras, cached, None))
            return
        add_bill(choice, end.bill)
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._end(choice, end.reason, None, tokens, event.extras, cached)
            return
        if tokens:
            self._effects.append(Delivered(choice.body.body, choice.index, tokens, event.extras, cached, None))
        cause = Cause.PREEMPTED if is_preemption(end) else Cause.LOST
        self._carry_on(choice, cause, fault_of(end, choice.leg.member.name))

    def _came_after_cut(self, choice: Choice, end: ChoiceEnd | None) -> None:
        """Tokens mean nothing any more; the end brings the bill."""
        if choice.state is Carry.CUT and end is not None:
            add_bill(choice, end.bill)
            self._end(choice, FinishReason.STOP)
        else:
            self.counts.late += 1

    def _taken(self, event: LegTaken) -> None:
        sent = self._sent(event.session, event.leg)
        for choice in sent:
            self._move(choice, CarryMove.TAKE)
            choice.refusals, choice.turned_down_by = 0, None
            body = choice.body
            if not body.opened:
                body.opened = True
                self._effects.append(Opened(body.body))
            if choice.attempts > 1 and choice.leg is not None:
                self._note(choice, Stage.RESUMED, choice.leg.member.name)
        if not sent:
            self.counts.late += 1

    def _refused(self, event: LegRefused) -> None:
        sent = self._sent(event.session, event.leg)
        journey = self._legs.get(event.leg)
        if journey is None or not sent:
            self.counts.late += 1
            return
        about_instance = event.refusal.code in ABOUT_THE_INSTANCE
        if not (about_instance or journey.body.opened):
            self._decline(journey.body, event.refusal)
            return
        for choice in sent:
            self._carry_on(choice, Cause.REFUSED if about_instance else Cause.UNFIT, fault_of_refusal(event.refusal))
        if event.leg in self._legs:
            del self._legs[event.leg]
            journey.body.legs.remove(journey)

    def _at(self, session: Session, leg: Leg, place: int) -> Choice | None:
        """The choice that is at that place of a leg, if the leg still has it."""
        journey = self._legs.get(leg)
        if journey is None or journey.member.session != session or not 0 <= place < len(journey.choices):
            return None
        choice = journey.choices[place]
        return choice if choice.leg is journey else None

    def _sent(self, session: Session, leg: Leg) -> list[Choice]:
        """Those of a leg that wait for its answer."""
        journey = self._legs.get(leg)
        if journey is None or journey.member.session != session:
            return []
        return [choice for choice in journey.choices if choice.leg is journey and choice.state is Carry.SENT]

    def _carry_on(self, choice: Choice, cause: Cause, fault: PdFault) -> None:
        """It cannot stay where it is. Goes on elsewhere, unless it had its last token or was carried often enough."""
        reason, where = finished_as(choice), self._where(choice)
        if reason is not None:
            self._end(choice, reason)
            return
        if not self._may_go_on(choice, cause, where):
            self._give_up(choice, fault)
            return
        self._leave(choice)
        self._move(choice, MOVE_OF[cause])
        self._room.enter(choice, self._now_us + self._delay_us(choice, cause))
        self.counts.retries[cause.value] += 1
        if cause is Cause.PREEMPTED:
            self._note(choice, Stage.PREEMPTED, where, fault.reason)
        else:
            self._note(choice, Stage.MOVED, where, fault.reason)

    def _may_go_on(self, choice: Choice, cause: Cause, where: Instance | None) -> bool:
        match cause:
            case Cause.PREEMPTED | Cause.UNFIT:
                choice.preemptions += 1
                if where is not None and (self.config.preempt_retry_exclude_decode or cause is Cause.UNFIT):
                    choice.avoid = [name for name in choice.avoid if name != where] + [where]
                return choice.preemptions <= self.config.preempt_retry_count
            case Cause.LOST:
                choice.losses += 1
                choice.turned_down_by = where
                return choice.losses <= self.config.loss_retry_count
            case Cause.REFUSED:
                choice.refusals += 1
                choice.turned_down_by = where
                return True
            case Cause.DRAINED:
                return True

    def _delay_us(self, choice: Choice, cause: Cause) -> int:
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
        return delay_us if cause in (Cause.REFUSED, Cause.DRAINED) else delay_us + self._budget.delay_us(self._now_us)

    def _give_up(self, choice: Choice, fault: PdFault) -> None:
        if choice.body.opened:
            self._end(choice, FinishReason.RESCHEDULE, fault)
        else:
            text = f"no instance could take the request: {fault.reason}"
            self._decline(choice.body, Refusal(RefusalCode.NO_INSTANCE, text, RETRY_AFTER_S))

    def _end(
        self, choice: Choice, reason: FinishReason, fault: PdFault | None = None,
        tokens: list[int] | None = None, extras: object = None, cached: int | None = None,
    ) -> None:  # fmt: skip
        body, where = choice.body, self._where(choice)
        self._leave(choice)
        self._move(choice, CarryMove.END)
        if body.opened:
            outcome = outcome_of(choice, reason, fault)
            self._effects.append(Delivered(body.body, choice.index, tokens or [], extras, cached, outcome))
        self._note(choice, Stage.ENDED, where, reason.value if fault is None else f"{reason.value}: {fault.message}")
        self.quota.close(body.tenant, len(choice.delivered), self._now_us)
        body.open_choices -= 1
        if not body.open_choices:
            self._close_body(body)

    def _leave(self, choice: Choice) -> None:
        """It is not at its instance any more."""
        if choice.leg is None:
            return
        if choice.prefill is not None:
            self._prefilled(choice)
        del choice.leg.member.aboard[choice.body.body, choice.index]
        choice.leg = None
        self._stirred = True

    def _prefilled(self, choice: Choice) -> None:
        if choice.prefill is not None:
            giver, tokens = choice.prefill
            giver.prefill_tokens -= tokens
            choice.prefill = None

    def _call_back(self, choices: Iterable[Choice]) -> None:
        """Instances need not go on with these."""
        places: dict[Leg, list[int]] = {}
        for choice in choices:
            if choice.leg is not None:
                places.setdefault(choice.leg.leg, []).append(choice.place)
        for leg, numbers in places.items():
            self._effects.append(CallBack(self._legs[leg].member.session, leg, tuple(numbers)))

    def _where(self, choice: Choice) -> Instance | None:
        return None if choice.leg is None else choice.leg.member.name

    def _move(self, choice: Choice, move: CarryMove) -> None:
        before = choice.state
        choice.state = next_carry(before, move)
        self._moves[before, move] += 1
        if before is Carry.WAITING:
            self._room.leave(choice)

    def _note(self, choice: Choice, stage: Stage, where: Instance | None, why: str = "") -> None:
        self._effects.append(Noted(choice.body.body, choice.index, stage, where, self._now_us, why))

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self) -> None:
        """Whoever is due and finds room goes, in the order of the line."""
        self._stirred = False
        servers, passed_over = self.fleet.servers, list[list[Choice]]()
        if not self._room.ripen(self._now_us) or not servers:
            return
        while len(passed_over) < PASSED_OVER_MAX and any(map(self._placement.has_room, servers)):
            party = self._room.party()
            if not party:
                break
            wanted = self._wanted(party)
            spot = self._placement.choose(wanted, servers, self.fleet.givers)
            if spot is None:
                passed_over.append(party)
            else:
                self._send(party, wanted, spot)
        for party in passed_over:
            self._room.put_back(party)

    def _wanted(self, party: Sequence[Choice]) -> Wanted:
        first: dict[RequestId, tuple[Choice, Submission]] = {}
        tokens: dict[RequestId, int] = {}
        longest, avoid = 0, list[Instance]()
        for choice in party:
            submission = self._settled(choice)
            prompt = leads(submission)
            first.setdefault(prompt, (choice, submission))
            tokens[prompt] = tokens.get(prompt, len(submission.prompt)) + len(choice.delivered)
            longest = max(longest, len(submission.prompt) + (submission.max_tokens or 1))
            avoid += choice.avoid
            if choice.turned_down_by is not None:
                avoid.append(choice.turned_down_by)
        prompts = [Prompt(name, tokens[name], self._keys(name, *first[name])) for name in first]
        return Wanted(tuple(prompts), longest, tuple(avoid))

    def _settled(self, choice: Choice) -> Submission:
        """Its submission with a limit, the same for all legs: where the client gave none, as much as fits anywhere."""
        submission = choice.submission
        if submission is None:
            raise InvariantViolated(f"choice {choice.index} of body {choice.body.body} waits without a submission")
        if submission.max_tokens is None:
            prompt = len(submission.prompt)
            contexts = [m.facts.context_tokens for m in self.fleet.servers if m.facts.context_tokens > prompt]
            submission = choice.submission = replace(submission, max_tokens=max(1, min(contexts, default=0) - prompt))
        return submission

    def _keys(self, name: RequestId, choice: Choice, submission: Submission) -> Sequence[bytes]:
        model, body = self.fleet.model, choice.body
        if not self._placement.reads_keys or model is None:
            return ()
        if self._prefix is None or self._prefix.fingerprint != model.fingerprint:
            self._prefix = PrefixIndex(self._secret, model.fingerprint, 0)
        if choice.delivered:
            known = np.concatenate([submission.prompt, frozen_tokens(choice.delivered)])
            return self._prefix.keys_of(known, submission.salt, model.block_size)[1:]
        if name not in body.keys:
            body.keys[name] = list(self._prefix.keys_of(submission.prompt, submission.salt, model.block_size)[1:])
        return body.keys[name]

    def _send(self, party: Sequence[Choice], wanted: Wanted, spot: Spot) -> None:
        member, body = spot.member, party[0].body
        prefills = {p.leader: (p, *given) for p, given in zip(wanted.prompts, spot.prefills, strict=True)}
        prefill_at = {name: giver.facts.peer_address for name, (_, giver, _) in prefills.items() if giver is not member}
        pairs = [(choice, self._settled(choice)) for choice in party]
        group = group_of(pairs, prefill_at)
        journey = self._journey(member, body, list(party))
        for place, (choice, submission) in enumerate(pairs):
            self._move(choice, CarryMove.PLACE)
            self._board(choice, journey, place, len(submission.prompt))
            self.counts.moved_tokens += len(choice.delivered)
            if leads(submission) in prefills:
                prompt, giver, tokens = prefills.pop(leads(submission))
                self._expect_prefill(choice, member, giver, tokens, prompt)
        choices = tuple(choice.index for choice in party)
        self._effects.append(Send(member.session, journey.leg, group, choices, len(body.choices), body.origin))
        for choice in party:
            self._note(choice, Stage.PLACED, member.name)

    def _journey(self, member: Member, body: Carried, choices: list[Choice]) -> Journey:
        self._legs_made += 1
        journey = Journey(Leg(self._legs_made), member, body, choices)
        self._legs[journey.leg] = journey
        body.legs.append(journey)
        return journey

    def _board(self, choice: Choice, journey: Journey, place: int, prompt_tokens: int) -> None:
        choice.leg, choice.place = journey, place
        choice.attempts += 1
        choice.began_with = prompt_tokens + len(choice.delivered)
        journey.member.aboard[choice.body.body, choice.index] = choice

    def _expect_prefill(self, choice: Choice, member: Member, giver: Member, tokens: int, prompt: Prompt) -> None:
        choice.prefill = (giver, tokens)
        giver.prefill_tokens += tokens
        member.promised_blocks += -(-tokens // member.facts.block_size)
        for holder in (member, giver) if giver is not member else (member,):
            self.holdings.assume(holder.session, prompt.keys, self._now_us)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_overdue(self) -> None:
        while self._bodies:
            body = next(iter(self._bodies.values()))
            if body.deadline_us > self._now_us:
                return
            text = f"it has not ended within {self.config.deadline_us // 1_000_000} s"
            body.claim_by_us = None
            if self._orphans.pop(body.body, None) is not None:
                self._effects.append(OrphanDropped(body.body))
            if body.opened:
                self._end_all(body, FinishReason.RESCHEDULE, PdFault(PdCode.TIMEOUT, PdStage.DECODE, text))
            else:
                self._decline(body, Refusal(RefusalCode.NO_INSTANCE, text, RETRY_AFTER_S))

    def _drop_orphans(self) -> None:
        for body in [b for b in self._orphans.values() if b.claim_by_us is not None and b.claim_by_us <= self._now_us]:
            body.claim_by_us = None
            del self._orphans[body.body]
            self.counts.orphans_dropped += 1
            self._end_all(body, FinishReason.ABORT, None)
            self._effects.append(OrphanDropped(body.body))

    def _watch_absence(self) -> None:
        if self.fleet.servers:
            self._absent_since_us = self._absent_due_us = None
        elif self._absent_since_us is None:
            self._absent_since_us = self._now_us
            self._absent_due_us = self._now_us + self.config.absent_us if self._room.count else None

    def _give_up_absent(self) -> None:
        """Nobody serves: who has nothing yet does not wait for ever."""
        since_us, due_us = self._absent_since_us, self._absent_due_us
        if since_us is None or due_us is None or due_us > self._now_us:
            return
        waits = [c.body for c in self._room.everybody() if not any(other.delivered for other in c.body.choices)]
        times = []
        text = f"no instance has served for {self.config.absent_us // 1000} ms"
        for body in dict.fromkeys(waits):
            patience_us = max(since_us, body.arrived_us) + self.config.absent_us
            if patience_us > self._now_us:
                times.append(patience_us)
            elif body.opened:
                self._end_all(body, FinishReason.RESCHEDULE, PdFault(PdCode.NOT_DELIVERED, PdStage.PREFILL, text))
            else:
                self._decline(body, Refusal(RefusalCode.NO_INSTANCE, text, RETRY_AFTER_S))
        self._absent_due_us = min(times, default=None)


def _digest(origin: bytes) -> bytes:
    return hashlib.blake2b(origin, digest_size=16).digest()


def _prompt_tokens(body: Carried) -> int:
    prompts = {leads(c.submission): len(c.submission.prompt) for c in body.choices if c.submission is not None}
    return sum(prompts.values())
