"""Adoption of requests that instances kept while their router was gone: this router's own, or those of an earlier one.

An instance that joins reports the requests it holds. A waiting choice of ours continues there if the instance's history has
all tokens that were delivered. A request that is unknown here is an orphan: it is routed like any other, until a client
claims it or its grace period ends. Several instances may hold the same choice, because it moved: the longest history wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from baton.core.engine.ended import EndedRequest
from baton.core.engine.request import NO_TOKENS, FinishReason, Submission
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.events import DeliverTokens, HeldChoice, RequestClaimed, TimelineStage, UnclaimedFound
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.identity import ChoiceAttempt, RequestNumber
from baton.core.routing.routed_request import (
    OVER,
    Attempt,
    ChoiceMove,
    ChoiceState,
    RoutedChoice,
    RoutedRequest,
    add_bill,
    attempt_key,
    finished_as,
    is_preemption,
    leads,
)
from baton.core.routing.routed_requests import RoutedRequests, digest_of

Kept = tuple[int, ChoiceAttempt]
"""A serial of the instance, and the attempt it belongs to from now on."""


class Adoption:
    def __init__(self, requests: RoutedRequests) -> None:
        self._requests = requests
        self._pending: dict[RequestNumber, RoutedRequest] = {}
        """Requests without a client, or with a choice that no instance has reported; ordered by the end of grace."""
        self._made = 0

    def next_deadline(self) -> int | None:
        return next((request.grace_us for request in self._pending.values()), None)

    # ── joins ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def adopt(self, member: FleetMember, held: Sequence[HeldChoice]) -> tuple[Kept, ...]:
        """Take over the requests of a joining instance. Returns the serials that it continues; it drops the others."""
        keep: list[Kept] = []
        found: dict[RequestNumber, dict[int, HeldChoice]] = {}
        """Orphans found in this join, by choice: for their log-probabilities."""
        furthest, hashes = _furthest(held), self._requests.hashes
        digests: dict[bytes, bytes] = {}
        """Origin → digest: one origin may be megabytes long, and belong to hundreds of choices."""
        for item in held:
            if item.serial not in furthest:
                continue
            if item.origin not in digests:
                digests[item.origin] = hashes.noted(digest_of(item.origin))
            request = self._request_of(item, digests[item.origin])
            choice = None if request is None else request.choices[item.choice]
            if choice is None or not _wanted(choice, item):
                continue
            if not choice.request.opened and choice.request.orphan:
                found.setdefault(choice.request.number, {})[choice.index] = item
            keep.append((item.serial, self._take_over(choice, item, member)))
        for number, known in found.items():
            self._announce(self._pending[number], known)
        return tuple(keep)

    def _request_of(self, item: HeldChoice, digest: bytes) -> RoutedRequest | None:
        requests = self._requests
        if not item.origin or not 0 <= item.choice < item.body_choices or digest in requests.over:
            return None
        request = requests.by_origin.get(digest)
        if request is None:
            self._made += 1
            request = requests.open(RequestNumber(-self._made), None, item.origin, item.body_choices)
            request.orphan, request.grace_us = True, requests.now_us + requests.config.orphan_grace_us
            request.priority, request.asked_us = item.submission.seniority
            for choice in request.choices:
                choice.state = ChoiceState.ABSENT
            self._pending[request.number] = request
            requests.counts.orphans += 1
        return request if len(request.choices) == item.body_choices else None

    def _take_over(self, choice: RoutedChoice, item: HeldChoice, member: FleetMember) -> ChoiceAttempt:
        """Continue the choice where it is held, or elsewhere from the reported tokens."""
        requests = self._requests
        self._make_wait(choice, item)
        if not choice.request.orphan:
            requests.opened(choice.request)  # an instance had accepted it, and was lost before it could say so
        missing = _history(item)[len(choice.delivered) :]
        choice.delivered += missing
        choice.keys = None
        cached = item.cached_tokens if choice.cached_tokens is None else None
        choice.cached_tokens = item.cached_tokens if choice.cached_tokens is None else choice.cached_tokens
        attempt = choice.request.attempt_at(member, [choice])
        extras = list(item.extras[max(0, len(item.extras) - len(missing)) :]) if item.extras and missing else None
        choice.began_with = len(item.submission.prompt) + len(item.submission.generated)
        self._keep_seniority(choice, item)
        if item.end is not None:
            self._count_once(choice, item.end, member)
        reason = item.end.reason if item.end is not None and item.end.reason in OVER else None
        if item.end is not None and reason is None:
            reason = finished_as(choice)
        elif item.end is not None and item.end.generated_tokens < len(choice.delivered):
            choice.keep = item.end.generated_tokens  # its client had cut it
        if reason is not None:
            if item.end is not None and item.end.generated_tokens < len(choice.delivered):
                choice.keep = item.end.generated_tokens  # it was cut before its router was lost
            requests.end(choice, reason, None, missing, extras, cached, item.prompt_extras)
            return attempt.of(choice)
        if choice.request.opened and (missing or cached is not None or item.prompt_extras is not None):
            requests.effects.append(
                DeliverTokens(choice.request.number, choice.index, missing, extras, cached, None, item.prompt_extras)
            )
        if item.end is None:
            self._resume(choice, attempt)
        return attempt.of(choice)

    def _keep_seniority(self, choice: RoutedChoice, item: HeldChoice) -> None:
        """It is as old, and was preempted as often, as the instance says; and if it was to move no more, it does not."""
        request, count = choice.request, self._requests.config.preempt_retry_count
        request.asked_us = min(request.asked_us, item.submission.arrived_us)
        choice.sent_preemptions = item.submission.preemptions
        choice.preemptions = max(choice.preemptions, item.preemptions)
        if item.submission.resumes_in_place:
            choice.yields = max(choice.yields, count)

    def _count_once(self, choice: RoutedChoice, end: EndedRequest, member: FleetMember) -> None:
        """The end of an attempt, which this router may know already: an instance reports it until the request is over."""
        key = attempt_key(member, end)
        if key not in choice.billed:
            choice.billed.add(key)
            add_bill(choice, end.bill)
            choice.yields += is_preemption(end)

    def _make_wait(self, choice: RoutedChoice, item: HeldChoice) -> None:
        requests = self._requests
        # Not at once: another instance may be about to report a longer history.
        soon_us = requests.now_us + requests.config.backoff_us_max
        if choice.state is ChoiceState.ABSENT:
            choice.submission = _asked(choice.request, item.submission)
            choice.attempts = 2 if len(item.submission.generated) else 1
            requests.move(choice, ChoiceMove.FIND)
            requests.queue.enter(choice, soon_us)
        elif choice.state is not ChoiceState.WAITING:
            requests.call_back([choice])
            requests.leave(choice)
            requests.move(choice, ChoiceMove.LOSE)
            requests.queue.enter(choice, soon_us)

    def _resume(self, choice: RoutedChoice, attempt: Attempt) -> None:
        """The choice was not lost: continue it in this attempt, and take the loss off its counts."""
        requests = self._requests
        attempt.accepted = True
        requests.move(choice, ChoiceMove.RESUME)
        attempt.board(choice)
        choice.losses, choice.fruitless = max(0, choice.losses - 1), max(0, choice.fruitless - 1)
        choice.refusals, choice.turned_down_by = 0, None
        requests.note(choice, TimelineStage.RESUMED, attempt.member.name)

    def _announce(self, request: RoutedRequest, found: dict[int, HeldChoice]) -> None:
        choices, request.opened = request.choices, True
        told = [found.get(choice.index) for choice in choices]
        self._requests.effects.append(
            UnclaimedFound(
                request.number,
                request.origin,
                tuple(None if choice.state is ChoiceState.ABSENT else tuple(choice.delivered) for choice in choices),
                tuple(() if item is None else item.extras for item in told),
                tuple(choice.cached_tokens for choice in choices),
                tuple(choice.outcome for choice in choices),
                tuple(None if item is None else item.prompt_extras for item in told),
            )
        )

    # ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def claimed(self, event: RequestClaimed) -> None:
        requests, request = self._requests, self._pending.get(event.request)
        if request is None or not request.orphan:
            requests.counts.late += 1
            return
        request.orphan = False
        if len(event.group) == len(request.choices):
            self._ask_again(request, event)
        if not request.open_choices:
            requests.close(request)
        self._sift()

    def _ask_again(self, request: RoutedRequest, event: RequestClaimed) -> None:
        """Choices that no instance has reported start from the beginning: their tokens depend only on the submission."""
        requests = self._requests
        limits = {len(c.submission.prompt): c.submission.max_tokens for c in request.choices if c.submission is not None}
        for choice, asked in zip(request.choices, event.group, strict=True):
            if choice.state is ChoiceState.ABSENT:
                limit = limits.get(len(asked.prompt)) if asked.max_tokens is None else asked.max_tokens
                choice.submission = _asked(request, replace(asked, max_tokens=limit))
                requests.move(choice, ChoiceMove.FIND)
                requests.queue.enter(choice, max(requests.now_us, request.arrived_us + requests.config.backoff_us_max))
        requests.should_place = True

    def expire(self) -> None:
        """Drop an orphan that was not claimed; end the missing choices of one that was."""
        requests = self._requests
        self._sift()
        for request in [b for b in self._pending.values() if b.grace_us is not None and b.grace_us <= requests.now_us]:
            del self._pending[request.number]
            if request.orphan:
                requests.drop(request)
                continue
            fault = PdFault(
                PdCode.NOT_DELIVERED, PdStage.DECODE, "the instance that had it was lost together with its router"
            )
            for choice in request.choices:
                if choice.state is ChoiceState.ABSENT:
                    requests.end(choice, FinishReason.RESCHEDULE, fault)

    def _sift(self) -> None:
        self._pending = {
            number: request
            for number, request in self._pending.items()
            if number in self._requests.by_number
            and (request.orphan or any(c.state is ChoiceState.ABSENT for c in request.choices))
        }


def _asked(request: RoutedRequest, submission: Submission) -> Submission:
    """The submission as the client made it, led by the first known choice with the same prompt."""
    known = (choice.submission for choice in request.choices if choice.submission is not None)
    leader = next((leads(other) for other in known if np.array_equal(other.prompt, submission.prompt)), None)
    return replace(submission, leader=leader, generated=NO_TOKENS, prefill_at="", preemptions=0, resumes_in_place=False)


def _history(item: HeldChoice) -> list[int]:
    return [*item.submission.generated.tolist(), *item.tokens]


def _furthest(held: Sequence[HeldChoice]) -> set[int]:
    """For each choice the serial with the longest history; of equals, an ended one, then a running one."""
    best: dict[tuple[bytes, int, int], tuple[tuple[int, bool, bool], int]] = {}
    for item in held:
        over = item.end is not None and item.end.reason in OVER
        worth = (len(item.submission.generated) + len(item.tokens), over, item.end is None)
        which = (item.origin, item.body_choices, item.choice)
        if which not in best or worth > best[which][0]:
            best[which] = (worth, item.serial)
    return {serial for _, serial in best.values()}


def _wanted(choice: RoutedChoice, item: HeldChoice) -> bool:
    delivered, history = choice.delivered, _history(item)
    if history[: len(delivered)] != delivered:
        return False
    # It was preempted elsewhere meanwhile: this instance does not know that, and might preempt it once too often.
    if item.end is None and item.preemptions < choice.preemptions:
        return False
    if choice.state in (ChoiceState.ABSENT, ChoiceState.WAITING):
        return True
    # Another instance runs it by now. A choice of ours stays there; an orphan's may be the shorter of two histories.
    return choice.request.orphan and choice.state in (ChoiceState.SENT, ChoiceState.OPEN) and len(history) > len(delivered)
