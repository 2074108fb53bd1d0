"""Reactions to the messages of instances about attempts: deliver tokens, and continue elsewhere what cannot stay.

A choice continues elsewhere after a refusal, a preemption, a loss or a drain; each retry waits in the placement queue for
its back-off. Losses are limited, since the choice may cause them. Want of room ends nothing: the last move resumes in
place.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from baton.core.engine.ended import EndedRequest
from baton.core.engine.request import FinishReason, MaskReference
from baton.core.errors import RefusalCode
from baton.core.handover.faults import PdFault
from baton.core.routing.events import (
    AttemptAccepted,
    AttemptRefused,
    DeliverTokens,
    Instance,
    MaskCame,
    PhaseReport,
    Session,
    TimelineStage,
    TokensCame,
    WantMask,
)
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.identity import AttemptId, ChoiceAttempt
from baton.core.routing.routed_request import (
    ABOUT_THE_INSTANCE,
    NO_KV,
    OVER,
    Attempt,
    ChoiceMove,
    ChoiceState,
    RoutedChoice,
    add_bill,
    attempt_key,
    fault_of,
    fault_of_refusal,
    finished_as,
    is_preemption,
    jittered_us,
    loss_of,
)
from baton.core.routing.routed_requests import MoveCause, RoutedRequests
from baton.core.routing.server_absence import ServerAbsence

MOVE_OF = {
    MoveCause.PREEMPTED: ChoiceMove.YIELD,
    MoveCause.LOST: ChoiceMove.LOSE,
    MoveCause.DRAINED: ChoiceMove.MOVE,
    MoveCause.REFUSED: ChoiceMove.REFUSE,
    MoveCause.UNFIT: ChoiceMove.REFUSE,
}


class Attempts:
    def __init__(self, requests: RoutedRequests, absence: ServerAbsence, seed: int) -> None:
        self._config = requests.config
        self._requests = requests
        self._absence = absence
        self._seed = seed

    # ── messages of instances ────────────────────────────────────────────────────────────────────────────────────────────

    def came(self, event: TokensCame) -> None:
        requests, choice = self._requests, self._choice_of(event.session, event.attempt)
        if choice is None or choice.attempt is None:
            requests.counts.late += 1
            return
        if choice.state is not ChoiceState.OPEN:
            self._came_after_cut(choice, event.end)
            return
        tokens, cached, end = event.tokens, None, event.end
        if choice.prefill is not None and tokens:
            requests.prefilled(choice)
        if event.cached_tokens is not None and choice.cached_tokens is None:
            choice.cached_tokens = cached = event.cached_tokens
        if tokens:
            requests.move_meter.resumed(choice, requests.now_us)
        choice.delivered += tokens
        if end is None:
            requests.effects.append(_delivery(event, cached))
            return
        add_bill(choice, end.bill)
        if end.reason in OVER:
            if end.generated_tokens < len(choice.delivered):
                choice.keep = end.generated_tokens  # its client had cut it, and then its router was lost
            requests.end(choice, end.reason, None, tokens, event.extras, cached, event.prompt_extras)
            return
        if tokens or event.prompt_extras is not None:
            requests.effects.append(_delivery(event, cached))
        choice.billed.add(attempt_key(choice.attempt.member, end))
        if end.fault is not None and end.fault.code in NO_KV:
            choice.failed_handovers += 1
        cause = MoveCause.PREEMPTED if is_preemption(end) else MoveCause.LOST
        self.go_on_elsewhere(choice, cause, fault_of(end, choice.attempt.member.name))

    def _came_after_cut(self, choice: RoutedChoice, end: EndedRequest | None) -> None:
        """Drop the tokens; the end has the bill."""
        if choice.state is ChoiceState.CUT and end is not None:
            add_bill(choice, end.bill)
            self._requests.end(choice, FinishReason.STOP)
        else:
            self._requests.counts.late += 1

    def noted(self, member: FleetMember, notes: Sequence[PhaseReport]) -> None:
        requests = self._requests
        requests.effects += requests.timeline.noted(member, notes, requests.by_number, requests.now_us)

    def preempted(self, member: FleetMember, counts: Sequence[tuple[ChoiceAttempt, int]]) -> None:
        """Remember how often choices were preempted that resume there, for when their instance is lost."""
        for which, count in counts:
            choice = self._choice_of(member.session, which)
            if choice is not None:
                choice.preemptions = max(choice.preemptions, count)

    def accepted(self, event: AttemptAccepted) -> None:
        requests, attempt = self._requests, self._attempt(event.session, event.attempt)
        sent = _unanswered(attempt)
        if attempt is None or not sent:
            requests.counts.late += 1
            return
        attempt.accepted = True
        for choice in sent:
            requests.move(choice, ChoiceMove.TAKE)
            choice.refusals, choice.turned_down_by = 0, None
            requests.opened(choice.request)
            if choice.attempts > 1:
                requests.note(choice, TimelineStage.RESUMED, attempt.member.name)

    def refused(self, event: AttemptRefused) -> None:
        attempt = self._attempt(event.session, event.attempt)
        sent = _unanswered(attempt)
        if attempt is not None and not attempt.accepted:
            del attempt.request.attempts[attempt.id.attempt]  # nothing to cancel or to forget there
        if attempt is None or not sent:
            self._requests.counts.late += 1
            return
        about_instance = event.refusal.code in ABOUT_THE_INSTANCE
        if not (about_instance or attempt.request.opened):
            self._requests.refuse(attempt.request, event.refusal)
            return
        for choice in sent:
            if choice.attempt is not None:  # else its request ended with an earlier choice
                choice.goes_alone |= event.refusal.code is RefusalCode.GROUP_TOO_LARGE
                is_version = event.refusal.code is RefusalCode.OTHER_BACKEND_VERSION
                cause = MoveCause.REFUSED if about_instance else MoveCause.UNFIT
                fault = fault_of_refusal(event.refusal)
                if is_version and not self._continues_under_another_version(choice):
                    self._give_up(choice, fault)
                else:
                    self.go_on_elsewhere(choice, cause, fault)

    def _continues_under_another_version(self, choice: RoutedChoice) -> bool:
        """An instance with another version of its constraint's backend refused it: find out which mask it needs, then offer
        it with that one; after all have refused that, with none. False: they have refused that too for `absent_us`, in which
        an instance with its version could have come."""
        requests, submission, count = self._requests, choice.submission, len(choice.delivered)
        if submission is None or submission.sampling.constraint is None:
            return False
        if choice.mask_wanted != count:
            choice.mask, choice.mask_wanted, choice.mask_refused_by = None, count, []
            choice.version_missing_us = None
            constraint = submission.sampling.constraint
            which = choice.request.number, choice.index
            requests.effects.append(WantMask(*which, constraint, tuple(choice.delivered)))
        elif choice.mask is not None and choice.mask == choice.sent_mask and choice.where is not None:
            choice.mask_refused_by.append(choice.where)
            if all(server.name in choice.mask_refused_by for server in requests.fleet.servers):
                if not choice.mask.digest and choice.version_missing_us is None:
                    choice.version_missing_us = requests.now_us
                choice.mask, choice.mask_refused_by = replace(choice.mask, digest=b""), []
                since_us = choice.version_missing_us
                return since_us is None or requests.now_us < since_us + self._config.absent_us
        return True

    def mask_came(self, event: MaskCame) -> None:
        request = self._requests.by_number.get(event.request)
        choice = None if request is None else request.choices[event.choice]
        submission = None if choice is None else choice.submission
        if choice is None or submission is None or submission.sampling.constraint is None:
            return
        if event.outputs == choice.mask_wanted == len(choice.delivered):
            choice.mask = MaskReference(submission.sampling.constraint.began_under, event.outputs, event.digest)

    def _attempt(self, session: Session, which: AttemptId | ChoiceAttempt) -> Attempt | None:
        """None for an attempt that has ended, or of another session."""
        request = self._requests.by_number.get(which.request)
        attempt = None if request is None else request.attempts.get(which.attempt)
        return attempt if attempt is not None and attempt.member.session == session else None

    def _choice_of(self, session: Session, which: ChoiceAttempt) -> RoutedChoice | None:
        """The choice, if it is still in this attempt."""
        attempt = self._attempt(session, which)
        if attempt is None or not 0 <= which.choice < len(attempt.request.choices):
            return None
        choice = attempt.request.choices[which.choice]
        return choice if choice.attempt is attempt else None

    # ── continuing elsewhere ─────────────────────────────────────────────────────────────────────────────────────────────

    def lose(self, member: FleetMember, why: str) -> None:
        """An instance is lost: its choices continue elsewhere."""
        for choice in list(member.choices.values()):
            if choice.attempt is not None:  # else its request ended with an earlier choice
                self.go_on_elsewhere(choice, MoveCause.LOST, loss_of(choice, f"{member.name} was lost: {why}"))

    def move_all(self, member: FleetMember) -> None:
        """It drains for too long: its open choices continue elsewhere, if another instance serves."""
        requests = self._requests
        if not requests.fleet.servers:
            return
        moving = [choice for choice in member.choices.values() if choice.state is ChoiceState.OPEN]
        requests.call_back(moving)
        for choice in moving:
            self.go_on_elsewhere(choice, MoveCause.DRAINED, loss_of(choice, f"{member.name} drains"))

    def go_on_elsewhere(self, choice: RoutedChoice, cause: MoveCause, fault: PdFault) -> None:
        """Put it back into the placement queue, unless it has its last token, was lost too often, or was never accepted in
        time."""
        requests, reason, where = self._requests, finished_as(choice), choice.where
        if reason is not None:
            requests.end(choice, reason)
            return
        if not self._may_go_on(choice, cause, where):
            self._give_up(choice, fault)
            return
        if choice.request.deadline_us <= requests.now_us and not choice.request.opened:
            self._give_up(choice, requests.overdue(fault.reason))
            return
        if choice.state is ChoiceState.OPEN:
            choice.request.waits_since_us = requests.now_us
        if cause is MoveCause.PREEMPTED:
            requests.move_meter.yielded(choice, requests.now_us)
        requests.leave(choice)
        requests.move(choice, MOVE_OF[cause])
        requests.queue.enter(choice, requests.now_us + self._delay_us(choice, cause))
        self._absence.wait(choice.request)
        requests.counts.retries[cause.value] += 1
        stage = TimelineStage.PREEMPTED if cause is MoveCause.PREEMPTED else TimelineStage.MOVED
        requests.note(choice, stage, where, f"{cause.value}: {fault.reason}")

    def _may_go_on(self, choice: RoutedChoice, cause: MoveCause, where: Instance | None) -> bool:
        match cause:
            case MoveCause.PREEMPTED | MoveCause.UNFIT:
                choice.yields += 1
                if where is not None:
                    places = choice.yielded_at if cause is MoveCause.PREEMPTED else choice.unfit_at
                    places[:] = [name for name in places if name != where] + [where]
                return True
            case MoveCause.LOST:
                choice.losses += 1
                choice.fruitless = choice.fruitless + 1 if choice.lost_with == len(choice.delivered) else 1
                choice.lost_with = len(choice.delivered)
                choice.turned_down_by = where
                is_deadly = choice.fruitless >= self._config.fruitless_loss_count
                return choice.losses <= self._config.loss_retry_count and not is_deadly
            case MoveCause.REFUSED:
                choice.refusals += 1
                choice.turned_down_by = where
                return True
            case MoveCause.DRAINED:
                return True

    def _delay_us(self, choice: RoutedChoice, cause: MoveCause) -> int:
        match cause:
            case MoveCause.PREEMPTED | MoveCause.UNFIT:
                nth = choice.yields
            case MoveCause.LOST:
                nth = choice.losses - 1
            case MoveCause.REFUSED:
                nth = choice.refusals
            case MoveCause.DRAINED:
                nth = 0
        delay_us = jittered_us(self._config, self._seed, choice.request.number, nth) if nth else 0
        if cause in (MoveCause.REFUSED, MoveCause.DRAINED):
            return delay_us
        return delay_us + self._requests.reserve_retry(choice)

    def _give_up(self, choice: RoutedChoice, fault: PdFault) -> None:
        if choice.request.opened:
            self._requests.end(choice, FinishReason.RESCHEDULE, fault)
        else:
            text = f"no instance could take the request: {fault.reason}"
            self._requests.decline(choice.request, RefusalCode.NO_INSTANCE, text)


def _delivery(event: TokensCame, cached: int | None) -> DeliverTokens:
    which = event.attempt
    return DeliverTokens(which.request, which.choice, event.tokens, event.extras, cached, None, event.prompt_extras)


def _unanswered(attempt: Attempt | None) -> list[RoutedChoice]:
    """The choices of an attempt that is not answered yet."""
    if attempt is None:
        return []
    return [choice for choice in attempt.choices if choice.attempt is attempt and choice.state is ChoiceState.SENT]
