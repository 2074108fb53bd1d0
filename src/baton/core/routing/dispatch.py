"""Accepts requests, and sends waiting choices to instances that have room for them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import InvariantViolated, RefusalCode
from baton.core.routing.events import RequestArrived, SendAttempt, TimelineStage
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.placement import ChosenPlacement, Placement, PlacementDemand, PromptToPlace, holding
from baton.core.routing.placement_query import PlacementQuery
from baton.core.routing.prefix_directory import PrefixDirectory
from baton.core.routing.routed_request import ChoiceMove, ChoiceState, RoutedChoice, group_of, leads
from baton.core.routing.routed_requests import RoutedRequests
from baton.core.routing.server_absence import ServerAbsence

PASSED_OVER_MAX = 16
"""Requests at the head of the queue that find no room, before later ones are not tried any more."""


class Dispatcher:
    def __init__(self, requests: RoutedRequests, absence: ServerAbsence, seed: int) -> None:
        self.prefixes = PrefixDirectory()
        self._config = requests.config
        self._requests = requests
        self._absence = absence
        self._fleet = requests.fleet
        self._placement = Placement(requests.config, self.prefixes, seed)
        self._query = PlacementQuery(requests.fleet, requests.hashes, self._placement.reads_keys)

    def arrived(self, event: RequestArrived) -> None:
        requests = self._requests
        if event.request in requests.by_number or not event.group:
            raise InvariantViolated(f"request {event.request} arrived twice, or without a choice")
        prompts = {leads(submission): len(submission.prompt) for submission in event.group}
        refusal = requests.limits.admit(event.tenant, len(event.group), sum(prompts.values()), requests.now_us)
        if refusal is not None:
            requests.say_declined(event.request, refusal)
            return
        request = requests.open(event.request, event.tenant, event.origin, len(event.group))
        request.priority, request.asked_us = min(submission.seniority for submission in event.group)
        for choice, submission in zip(request.choices, event.group, strict=True):
            choice.submission = submission
            requests.queue.enter(choice, requests.now_us)
            requests.note(choice, TimelineStage.QUEUED, None)
        self.place()
        # Accepted requests that wait for another instance do not keep new ones out.
        waiting, waiting_max = requests.queue.count, self._config.waiting_max
        if waiting > waiting_max and request.choices[0].state is ChoiceState.WAITING:
            waiting = requests.queue.unaccepted()
        if waiting > waiting_max and request.choices[0].state is ChoiceState.WAITING:
            text = f"{waiting - len(request.choices)} choices wait for a place and at most {waiting_max} may"
            requests.decline(request, RefusalCode.QUEUE_FULL, text)
        self._absence.wait(request)

    def place(self) -> None:
        """Send every choice that is due and finds room, in the order of the queue."""
        requests, queue, placement = self._requests, self._requests.queue, self._placement
        requests.should_place = False
        servers, passed_over = self._fleet.servers, list[list[RoutedChoice]]()
        if not queue.promote_due(requests.now_us) or not servers:
            return
        while len(passed_over) < PASSED_OVER_MAX and any(map(placement.has_room, servers)):
            batch = queue.batch()
            if not batch:
                break
            wanted = self._query.of(batch)
            holders = holding(servers, wanted)
            spot = placement.choose(wanted, holders, self._fleet.prefillers)
            if not holders:
                queue.put_off(batch, requests.now_us + self._config.beat_us)  # and does not block later requests
            elif spot is None:
                passed_over.append(batch)
            else:
                self._send(batch, wanted, spot)
        for batch in passed_over:
            queue.put_back(batch)

    def _send(self, batch: Sequence[RoutedChoice], wanted: PlacementDemand, spot: ChosenPlacement) -> None:
        requests, member, request = self._requests, spot.member, batch[0].request
        prefills = {p.leader: (p, *given) for p, given in zip(wanted.prompts, spot.prefills, strict=True)}
        prefill_at = {
            name: prefiller.facts.peer_address for name, (_, prefiller, _) in prefills.items() if prefiller is not member
        }
        pairs = [(choice, self._query.settled(choice)) for choice in batch]
        for choice in batch:
            choice.sent_preemptions, choice.resumes_in_place = choice.preemptions, self._moves_no_more(choice)
            choice.sent_mask = choice.mask
        group = group_of(pairs, prefill_at, requests.move_meter.us_per_token)
        attempt = request.attempt_at(member, list(batch))
        for choice, submission in pairs:
            requests.move(choice, ChoiceMove.PLACE)
            attempt.board(choice)
            choice.attempts += 1
            choice.began_with = len(submission.prompt) + len(choice.delivered)
            requests.counts.moved_tokens += len(choice.delivered)
            if leads(submission) in prefills:
                prompt, prefiller, tokens = prefills.pop(leads(submission))
                self._expect_prefill(choice, member, prefiller, tokens, prompt)
                if prefiller is not member:
                    attempt.prefillers[choice.index] = prefiller.name
        choices = tuple(choice.index for choice in batch)
        requests.effects.append(
            SendAttempt(member.session, attempt.id, group, choices, len(request.choices), request.origin)
        )
        for choice in batch:
            requests.note(choice, TimelineStage.PLACED, member.name)

    def _moves_no_more(self, choice: RoutedChoice) -> bool:
        """Whether this attempt is its last move: it has used up its moves, or it is overdue."""
        is_overdue = choice.request.deadline_us <= self._requests.now_us
        return choice.yields >= self._config.preempt_retry_count or is_overdue

    def _expect_prefill(
        self, choice: RoutedChoice, member: FleetMember, prefiller: FleetMember, tokens: int, prompt: PromptToPlace
    ) -> None:
        choice.prefill = (prefiller, tokens)
        prefiller.prefill_tokens += tokens
        member.promised_blocks += -(-tokens // member.facts.block_size)
        for holder in (member, prefiller) if prefiller is not member else (member,):
            self.prefixes.assume(holder.session, prompt.keys, self._requests.now_us)
