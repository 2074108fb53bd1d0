"""Checks of the promises a router makes about requests and attempts, against the record of its present life."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from baton.core.engine.request import FinishReason, Sampling, Submission
from baton.core.handover.faults import PdCode
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import ChoiceOutcome
from baton.executor.constraints.version_skew import digest_after
from baton.executor.scripted import SCRIPTED_CONSTRAINTS
from baton.sim.attempt_records import ChoiceAtInstance, ChoiceSeen, RequestSeen, RouterLifeSeen, SessionSeen
from baton.sim.client_requests import VOCABULARY
from baton.sim.law_names import (
    ANSWERS_IN_TIME,
    BACK_OFF,
    DESERVED_END,
    DRAINS_IN_TIME,
    ENDS_AT_ONCE,
    ENDS_ONCE,
    FORGOTTEN,
    GOES_ON,
    HEARS_IN_TIME,
    LAST_MOVE,
    NO_CIRCLES,
    NOT_YOUNGER,
    ONE_PLACE,
    OPEN_COUNTS,
    PREFILLS_IN_PLACE,
    RIGHT_PLACE,
    ROOM_FOR_ALL,
    SUSPECTED_IN_TIME,
    TRUE_BILL,
    TRUE_NAMES,
    WAITS_IN_TIME,
    LawBroken,
)
from baton.sim.router_watcher import RouterView

SLACK_US = 5_000
"""Allowance, beyond one heartbeat interval, for noticing silence."""
KEYS_LOOKED_AT = 8
NO_ROOM = (PdCode.REFUSED, PdCode.PREEMPTED, PdCode.TIMEOUT)
NO_KV = (PdCode.NOT_DELIVERED, PdCode.TIMEOUT)
HANDOVERS_IN_VAIN = 2
TIMES = ("queue_us", "prefill_us", "transfer_us", "decode_us", "preemptions")


class AttemptLaws:
    def __init__(self, config: RouterConfig, life: RouterLifeSeen) -> None:
        self._config = config
        self._life = life

    def may_be_placed(self, request: RequestSeen, choice: ChoiceSeen, session: SessionSeen, now_us: int) -> None:
        config, placement = self._config, choice.placement
        if request.over or choice.outcome is not None:
            raise LawBroken(ENDS_ONCE, f"{choice.name} has ended, and a leg of it goes to {session.name}")
        if placement is not None and placement.ended is None and not placement.called_back:
            raise LawBroken(ONE_PLACE, f"{choice.name} is open at {placement.session.name} and goes to {session.name}")
        if choice.losses > config.loss_retry_count:
            raise LawBroken(DESERVED_END, f"{choice.name}: {choice.losses} losses, and goes on")
        if choice.no_room_us is not None and now_us < choice.no_room_us + config.backoff_us // 2:
            raise LawBroken(
                BACK_OFF, f"{choice.name} goes to {session.name} {now_us - choice.no_room_us} µs after a refusal"
            )
        choice.no_room_us = None

    def stays_if_it_must(self, request: RequestSeen, choice: ChoiceSeen, item: Submission, now_us: int) -> None:
        """The last allowed move, and every one after the deadline, resumes in place."""
        is_last = choice.yields >= self._config.preempt_retry_count
        is_overdue = now_us >= request.arrived_us + self._config.deadline_us
        if (is_last or is_overdue) and not item.resumes_in_place:
            raise LawBroken(LAST_MOVE, f"{choice.name} had to yield {choice.yields} times and may have to again")

    def goes_where_room_is(self, choice: ChoiceSeen, item: Submission, session: SessionSeen) -> None:
        """After it had to yield: to an instance with room, or back to where it was."""
        if not choice.yielded_at:
            return
        longest = len(item.prompt) + (item.max_tokens or 1)
        if item.resumes_in_place and not session.holds(longest):
            raise LawBroken(LAST_MOVE, f"{choice.name} may become {longest} tokens long and goes to {session.join}")
        self._avoids(choice, item, session, longest)
        last = choice.yielded_at[-1]
        homes = [home for home in self._life.sessions.values() if home.name == last and home.serves and home.holds(longest)]
        if homes and session.name != last and last != choice.turned_down_by and session.room() == 0:
            raise LawBroken(NO_CIRCLES, f"{choice.name} leaves {last} for {session.name}, which has no room either")

    def _avoids(self, choice: ChoiceSeen, item: Submission, session: SessionSeen, longest: int) -> None:
        if not self._config.preempt_retry_exclude_decode or session.name not in choice.yielded_at:
            return
        avoided, need = {*choice.yielded_at, choice.turned_down_by}, item.known_tokens
        others = [other for other in self._life.sessions.values() if other.serves and other.name not in avoided]
        others = [other for other in others if other.holds(longest) and other.may_have_one_more(self._config.ahead)]
        roomy = [
            other.name
            for other in others
            if not other.placed_since and other.join is not None and (other.room() or 0) * other.join.block_size >= need
        ]
        if roomy:
            raise LawBroken(RIGHT_PLACE, f"{choice.name} goes back to {session.name}, though {roomy} have room")

    def gave_out(self, request: RequestSeen, choice: ChoiceSeen, now_us: int) -> bool:
        """Whether it was lost too often, was not accepted in time, or has waited too long for an instance."""
        config, life = self._config, self._life
        losses_max = min(config.loss_retry_count, config.fruitless_loss_count - 1)
        waits_since_us = max(c.waits_since_us for c in request.choices if c is choice or c.outcome is None)
        absent_us = now_us - max(life.served_us, request.arrived_us, waits_since_us)
        nobody = absent_us >= config.absent_us and not any(s.serves for s in life.sessions.values())
        nobody = nobody and not self._is_awaited(life.began_us, now_us)
        overdue = now_us >= request.arrived_us + config.deadline_us and not request.accepted
        return choice.losses > losses_max or nobody or overdue

    def _lacks_its_version(self, choice: ChoiceSeen, now_us: int) -> bool:
        """Whether instances have refused it for the version of its constraint for as long as one with that version may take
        to come back."""
        refused_us = choice.version_refused_us
        return refused_us is not None and now_us >= refused_us + self._config.absent_us

    def _is_awaited(self, began_us: int | None, now_us: int) -> bool:
        """Whether instances that were expected have not served yet, and the time that they have is not over."""
        config = self._config
        is_missing = len(self._life.served_names) < config.expected_instances
        return is_missing and began_us is not None and now_us < began_us + config.start_us

    def deserved(self, request: RequestSeen, choice: ChoiceSeen, outcome: ChoiceOutcome, now_us: int) -> None:
        if outcome.reason in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if self._lacks_its_version(choice, now_us):
            return
        if outcome.fault is not None and outcome.fault.code in NO_ROOM:
            raise LawBroken(ROOM_FOR_ALL, f"{choice.name} ends after {choice.yields} times no room: {outcome}")
        if outcome.reason is FinishReason.ABORT and not request.claimed and request.found:
            return  # its client did not come back
        if not (self.gave_out(request, choice, now_us) or request.found):
            counts = f"{choice.yields} times no room, {choice.losses} losses, open for {now_us - request.arrived_us} µs"
            raise LawBroken(DESERVED_END, f"{choice.name} is given up after {counts}: {outcome}")

    def counted(self, view: RouterView) -> None:
        ours = {session.number: 0 for session in self._life.sessions.values() if session.welcomed}
        for request in self._life.requests.values():
            for choice in request.choices:
                if choice.placement is not None and choice.placement.is_open:
                    ours[choice.placement.session.number] += 1
        theirs = view.open_at()
        if ours != theirs:
            raise LawBroken(OPEN_COUNTS, f"the router counts {theirs}, and it is {ours}")

    def waits_in_time(self, now_us: int) -> None:
        config, late_us = self._config, self._config.beat_us + SLACK_US
        serves = any(session.serves for session in self._life.sessions.values())
        for request in self._life.requests.values():
            if request.over or (request.found and not request.claimed):
                continue
            old_us = now_us - max(request.arrived_us, self._life.woke_us)
            if not request.accepted and not request.found and old_us > config.deadline_us + late_us:
                raise LawBroken(WAITS_IN_TIME, f"{request.origin!r} is {old_us} µs old")
            if serves:
                continue
            since_us = max(request.arrived_us, *(choice.waits_since_us for choice in request.choices))
            alone_us = now_us - max(since_us, self._life.served_us, self._life.woke_us)
            if self._is_awaited(self._life.asked_us, now_us):
                continue
            if alone_us > config.absent_us + SLACK_US and not request.has_begun:
                raise LawBroken(WAITS_IN_TIME, f"{request.origin!r} has waited for {alone_us} µs, and nobody serves")
        for session in self._life.sessions.values():
            due_us = max(session.drains_us + config.drain_us, self._life.woke_us, self._life.served_us_before)
            if not (session.welcomed and session.drains and serves):
                continue
            for placement in session.open_choices():
                if (
                    placement.serial is not None
                    and not placement.stopped
                    and now_us > max(due_us, placement.opened_us) + late_us
                ):
                    raise LawBroken(
                        DRAINS_IN_TIME, f"{placement.choice.name} is still at {session.name} since {session.drains_us}"
                    )

    def forgets_names(self, dead: SessionSeen, view: RouterView) -> None:
        for key in sorted(dead.said)[:KEYS_LOOKED_AT]:
            for number in view.holders(key):
                holder = self._life.sessions.get(number)
                if holder is None or (key not in holder.said and not holder.attempts):
                    raise LawBroken(
                        TRUE_NAMES, f"{dead.name} is gone, and what it had cached is credited to session {number}"
                    )

    def in_time(self, session: SessionSeen, now_us: int) -> None:
        quiet_us = now_us - session.sign_us
        if session.doomed or quiet_us > self._config.suspect_us + self._config.beat_us + SLACK_US:
            raise LawBroken(
                SUSPECTED_IN_TIME, f"{session.name} is still a member, {quiet_us} µs after its last sign of life"
            )
        if session.is_deaf:
            raise LawBroken(HEARS_IN_TIME, f"{session.name} has not heard the router since {session.hears_us}")
        if session.is_late:
            raise LawBroken(ANSWERS_IN_TIME, f"{session.name} leaves a leg unanswered since {session.unanswered_us}")


def same_request(choice: ChoiceSeen, item: Submission) -> None:
    generated = item.generated.tolist()
    if generated != choice.delivered:
        raise LawBroken(GOES_ON, f"{choice.name} had {choice.delivered}, and its leg goes on after {generated}")
    asked = choice.asked
    if asked is None:
        return
    sampling = _without_reference(choice, item.sampling)
    if item.prompt.tobytes() != choice.prompt or (asked.request_id, asked.sampling, asked.salt, asked.priority) != (
        item.request_id, sampling, item.salt, item.priority,
    ):  # fmt: skip
        raise LawBroken(GOES_ON, f"{choice.name} asked for {asked}, and its leg for {item}")
    if choice.max_tokens is None:
        choice.max_tokens = item.max_tokens
    if item.max_tokens != choice.max_tokens:
        raise LawBroken(GOES_ON, f"{choice.name} asked for {choice.max_tokens} tokens, its leg for {item.max_tokens}")


def _without_reference(choice: ChoiceSeen, sampling: Sampling) -> Sampling:
    """As the client asked for it. A mask for instances of another version to compare is the one after what was delivered."""
    constraint = sampling.constraint
    if constraint is None or isinstance(constraint.version, str):
        return sampling
    outputs, digest = constraint.version.outputs, constraint.version.digest
    true = digest_after(SCRIPTED_CONSTRAINTS, constraint, choice.delivered, VOCABULARY)
    if outputs != len(choice.delivered) or digest not in (b"", true):
        raise LawBroken(GOES_ON, f"{choice.name} had {len(choice.delivered)} tokens, and its leg a mask after {outputs}")
    return replace(sampling, constraint=replace(constraint, version=constraint.began_under))


def not_younger(choice: ChoiceSeen, item: Submission, seniority: tuple[int, int] | None) -> None:
    """`seniority`: as the client's first front end has set it, if that was seen."""
    if seniority is not None and item.seniority != seniority:
        raise LawBroken(NOT_YOUNGER, f"{choice.name} of {seniority} is sent on as one of {item.seniority}")
    if item.preemptions < choice.preemptions:
        raise LawBroken(
            NOT_YOUNGER, f"{choice.name} was preempted {choice.preemptions} times and is sent on with {item.preemptions}"
        )


def found_not_younger(placement: ChoiceAtInstance) -> None:
    """A request goes on where it was found only if that instance knows how often it was preempted."""
    choice, where = placement.choice, placement.session.name
    if placement.reported < choice.preemptions:
        known = f"{choice.preemptions} preemptions, {where} of {placement.reported}"
        raise LawBroken(NOT_YOUNGER, f"{choice.name} goes on where it was found: its router knows of {known}")


def prefills_in_place(choice: ChoiceSeen, item: Submission) -> None:
    if choice.failed_handovers >= HANDOVERS_IN_VAIN and (item.prefill_at or not item.prefills_in_place):
        raise LawBroken(
            PREFILLS_IN_PLACE, f"{choice.name}: {choice.failed_handovers} hand-overs failed, and peers are asked"
        )


def counts_kept(request: RequestSeen, counts: Sequence[int]) -> None:
    """`counts`: what the router knows of the preemptions of each choice."""
    for choice, count in zip(request.choices, counts, strict=False):
        if choice.outcome is None and count < choice.preemptions:
            raise LawBroken(NOT_YOUNGER, f"{choice.name} was preempted {choice.preemptions} times, the router knows {count}")


def billed(request: RequestSeen, choice: ChoiceSeen, outcome: ChoiceOutcome) -> None:
    bill = outcome.bill
    if request.found:
        return
    for name in TIMES:
        if getattr(bill, name) != sum(getattr(item, name) for item in choice.bills):
            raise LawBroken(TRUE_BILL, f"{choice.name}: {name} of {choice.bills} is not that of {bill}")
    fed = sum(item.computed_tokens + item.recomputed_tokens for item in choice.bills)
    if bill.computed_tokens + bill.recomputed_tokens != fed or bill.attempts != choice.attempts:
        raise LawBroken(TRUE_BILL, f"{choice.name} had {choice.attempts} legs with {choice.bills}, and is billed {bill}")
    least = len(choice.prompt) // 4 + outcome.generated_tokens - 1
    whole = choice.attempts == len(choice.bills) == 1 and outcome.reason is FinishReason.LENGTH
    if whole and bill.cached_tokens + bill.computed_tokens != least:
        raise LawBroken(TRUE_BILL, f"{choice.name}: {least} tokens had to be fed: {bill}")


def let_go(request: RequestSeen) -> None:
    """Check that an ended request is cancelled where it still ran, and forgotten by the instances that hold it."""
    for placement in request.placements:
        if placement.session.over or not placement.session.welcomed or placement.serial is None or placement.called_back:
            continue
        if placement.ended is None and not placement.stopped and not placement.forgotten:
            raise LawBroken(ENDS_AT_ONCE, f"{placement.choice.name} is over, and {placement.session.name} still computes it")
        if not placement.forgotten and all(other.ended is not None for other in placement.attempt.placements):
            raise LawBroken(FORGOTTEN, f"{placement.choice.name} is over, and {placement.session.name} keeps it")
