"""Opens and ends the requests of clients at a router, and appends to `effects` what each choice needs.

Owns the requests that are open, the placement queue and what the parts of a router share while one event is handled: the
time, the effects and the counts. `attempts` reacts to the messages of instances, `dispatch` places choices.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from baton.core.content_hashes import ContentHashes
from baton.core.engine.request import FinishReason
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    CancelChoices,
    DeliverTokens,
    ForgetChoices,
    Instance,
    RequestDeclined,
    RequestOpened,
    RouterEffect,
    StopChoice,
    StopStringFound,
    TimelineNoted,
    TimelineStage,
    UnclaimedDropped,
)
from baton.core.routing.fleet_members import FleetMembers
from baton.core.routing.identity import RequestNumber
from baton.core.routing.move_meter import MoveMeter
from baton.core.routing.phase_notes import PhaseTimeline
from baton.core.routing.placement_queue import PlacementQueue
from baton.core.routing.rate_limits import RateLimits, RetryBudget
from baton.core.routing.routed_request import (
    TRANSITIONS,
    Attempt,
    ChoiceMove,
    ChoiceState,
    RoutedChoice,
    RoutedRequest,
    finished_as,
    outcome_of,
)
from baton.core.state_machine import StateMachine

RETRY_AFTER_S = 1
OVER_MAX = 16_384
"""Requests whose end is remembered."""


class MoveCause(Enum):
    """The reason why a choice continues elsewhere."""

    PREEMPTED = "preempted"
    LOST = "lost"
    DRAINED = "drained"
    REFUSED = "refused"
    """Because of the instance."""
    UNFIT = "unfit"
    """Refused because of the request itself, after it had run elsewhere."""


@dataclass(slots=True)
class RouterCounts:
    """Counters since the start."""

    late: int = 0
    """Events of sessions, attempts and requests that had ended."""
    retries: dict[str, int] = field(default_factory=lambda: {cause.value: 0 for cause in MoveCause})
    moved_tokens: int = 0
    """Generated tokens that were sent with a choice to another instance."""
    suspicions: dict[str, int] = field(default_factory=lambda: {"suspected": 0, "stuck": 0})
    declined: dict[str, int] = field(default_factory=dict)
    """By code of the refusal."""
    orphans: int = 0
    orphans_dropped: int = 0


class RoutedRequests:
    def __init__(self, config: RouterConfig, fleet: FleetMembers, hashes: ContentHashes) -> None:
        self.config = config
        self.fleet = fleet
        self.hashes = hashes
        self.limits = RateLimits(config)
        self.counts = RouterCounts()
        self.queue = PlacementQueue()
        self.timeline = PhaseTimeline()
        self.move_meter = MoveMeter()
        self.now_us = 0
        self.effects: list[RouterEffect] = []
        """Time of the current event."""
        self.should_place = False
        """A change that may allow a waiting choice to be placed."""
        self.by_number: dict[RequestNumber, RoutedRequest] = {}
        self.by_origin: dict[bytes, RoutedRequest] = {}
        """By digest."""
        self.over: OrderedDict[bytes, None] = OrderedDict()
        """Digests of the origins of ended requests: an instance that comes back with one of them need not keep it."""
        self._in_time: dict[RequestNumber, RoutedRequest] = {}
        """Requests with a deadline in the future, in order of it: all have the same timeout."""
        self._retries = RetryBudget(config)
        self._states = StateMachine(TRANSITIONS, "a choice")
        self._arrivals = 0

    def moves(self) -> dict[tuple[ChoiceState, ChoiceMove], int]:
        return self._states.moves()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, number: RequestNumber, tenant: str | None, origin: bytes, choices: int) -> RoutedRequest:
        self._arrivals += 1
        request = RoutedRequest(number, tenant, self.hashes.noted(digest_of(origin)), origin, self._arrivals, self.now_us,
                                self.now_us + self.config.deadline_us, self.now_us, open_choices=choices)  # fmt: skip
        request.choices = [RoutedChoice(request, index, None) for index in range(choices)]
        self.by_number[number] = self._in_time[number] = request
        if origin:
            self.by_origin[request.digest] = request
        return request

    def opened(self, request: RoutedRequest) -> None:
        """An instance has accepted it: tell its client, once."""
        if not request.opened:
            request.opened = True
            self.effects.append(RequestOpened(request.number))

    def left(self, number: RequestNumber) -> None:
        request = self.by_number.get(number)
        if request is None:
            self.counts.late += 1
            return
        request.orphan = False
        self.end_all(request, FinishReason.ABORT, None)

    def decline(self, request: RoutedRequest, code: RefusalCode, text: str) -> None:
        """No instance has accepted it, and none will; the client may retry."""
        self.refuse(request, Refusal(code, text, RETRY_AFTER_S))

    def refuse(self, request: RoutedRequest, refusal: Refusal) -> None:
        self.limits.give_back(request.tenant, request.prompt_tokens)
        self.say_declined(request.number, refusal)
        self.end_all(request, FinishReason.ERROR, None)

    def say_declined(self, number: RequestNumber, refusal: Refusal) -> None:
        self.counts.declined[refusal.code.value] = self.counts.declined.get(refusal.code.value, 0) + 1
        self.effects.append(RequestDeclined(number, refusal))

    def drop(self, request: RoutedRequest) -> None:
        """End an orphan that no client claimed; no client is told."""
        request.orphan = request.opened = False
        self.counts.orphans_dropped += 1
        self.end_all(request, FinishReason.ABORT, None)
        self.effects.append(UnclaimedDropped(request.number))

    def end_all(self, request: RoutedRequest, reason: FinishReason, fault: PdFault | None) -> None:
        still = [choice for choice in request.choices if choice.state is not ChoiceState.ENDED]
        self.call_back(still)
        for choice in still:
            done = None if reason is FinishReason.ABORT else finished_as(choice)
            self.end(choice, reason if done is None else done, fault if done is None else None)
        if not still and not request.open_choices:
            self.close(request)

    def close(self, request: RoutedRequest) -> None:
        """All choices have ended and the client was told: instances may drop everything of it."""
        if request.orphan:
            return
        self.timeline.over(request.attempts.values())
        for attempt in request.attempts.values():
            if attempt.member.session in self.fleet.members:
                self.effects.append(ForgetChoices(attempt.member.session, attempt.id))
        request.attempts.clear()
        del self.by_number[request.number]
        self._in_time.pop(request.number, None)
        if self.by_origin.get(request.digest) is request:
            del self.by_origin[request.digest]
            self.over[request.digest] = None
            if len(self.over) > OVER_MAX:
                self.over.popitem(last=False)

    # ── choices ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def cut(self, event: StopStringFound) -> None:
        request = self.by_number.get(event.request)
        choice = request.choices[event.choice] if request is not None and event.choice < len(request.choices) else None
        running = (ChoiceState.OPEN, ChoiceState.SENT, ChoiceState.WAITING)
        if choice is None or not choice.request.opened or choice.state not in running:
            self.counts.late += 1
            return
        choice.keep = min(event.keep, len(choice.delivered))
        if choice.state is ChoiceState.OPEN and choice.attempt is not None:
            self.move(choice, ChoiceMove.CUT)
            attempt = choice.attempt
            self.effects.append(StopChoice(attempt.member.session, attempt.of(choice), choice.keep))
        else:
            self.call_back([choice])
            self.end(choice, FinishReason.STOP)

    def end(
        self, choice: RoutedChoice, reason: FinishReason, fault: PdFault | None = None,
        tokens: list[int] | None = None, extras: object = None, cached: int | None = None, prompt_extras: object = None,
    ) -> None:  # fmt: skip
        request, where = choice.request, choice.where
        self.leave(choice)
        self.move(choice, ChoiceMove.END)
        choice.outcome = outcome = outcome_of(choice, reason, fault)
        if request.opened:
            self.effects.append(
                DeliverTokens(request.number, choice.index, tokens or [], extras, cached, outcome, prompt_extras)
            )
        self.note(choice, TimelineStage.ENDED, where, reason.value if fault is None else f"{reason.value}: {fault.message}")
        self.limits.close(request.tenant, len(choice.delivered), self.now_us)
        request.open_choices -= 1
        if not request.open_choices:
            self.close(request)

    def leave(self, choice: RoutedChoice) -> None:
        """The choice is not at its instance any more."""
        if choice.attempt is None:
            return
        self.prefilled(choice)
        del choice.attempt.member.choices[choice.request.number, choice.index]
        choice.attempt = None
        self.should_place = True

    def prefilled(self, choice: RoutedChoice) -> None:
        """Its prefill has ended, or is given up: it does not count at its instance any more."""
        if choice.prefill is not None:
            prefiller, tokens = choice.prefill
            prefiller.prefill_tokens -= tokens
            choice.prefill = None

    def call_back(self, choices: Iterable[RoutedChoice]) -> None:
        """Cancel these choices at the instances that still run them."""
        called: dict[Attempt, list[int]] = {}
        for choice in choices:
            if choice.attempt is not None and choice.attempt.id.attempt in choice.request.attempts:
                called.setdefault(choice.attempt, []).append(choice.index)
        for attempt, indices in called.items():
            if attempt.member.session in self.fleet.members:
                self.effects.append(CancelChoices(attempt.member.session, attempt.id, tuple(indices)))

    def move(self, choice: RoutedChoice, move: ChoiceMove) -> None:
        before = choice.state
        choice.state = self._states.after(before, move)
        if before is ChoiceState.WAITING:
            self.queue.leave(choice)
            choice.keys = None
            if choice.retry_reserved and move is not ChoiceMove.PLACE:
                self._retries.give_back()  # it was found where it was, or has ended
            choice.retry_reserved = False

    def reserve_retry(self, choice: RoutedChoice) -> int:
        """Returns the time until the budget of all retries lets this choice, which waits now, be placed."""
        choice.retry_reserved = True
        return self._retries.reserve(self.now_us)

    def note(self, choice: RoutedChoice, stage: TimelineStage, where: Instance | None, why: str = "") -> None:
        self.effects.append(TimelineNoted(choice.request.number, choice.index, stage, where, self.now_us, why))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> int | None:
        return next((request.deadline_us for request in self._in_time.values()), None)

    def end_overdue(self) -> None:
        while self._in_time:
            number, request = next(iter(self._in_time.items()))
            if request.deadline_us > self.now_us:
                return
            del self._in_time[number]
            if request.orphan:
                self.drop(request)
            elif not request.opened:
                self.decline(request, RefusalCode.NO_INSTANCE, self.overdue().reason)

    def overdue(self, why: str = "") -> PdFault:
        text = f"no instance has accepted it within {self.config.deadline_us // 1_000_000} s"
        return PdFault(PdCode.TIMEOUT, PdStage.OFFER, f"{text}: {why}" if why else text)


def sooner(one_us: int | None, other_us: int | None) -> int | None:
    if one_us is None or (other_us is not None and other_us < one_us):
        return other_us
    return one_us


def digest_of(origin: bytes) -> bytes:
    return hashlib.blake2b(origin, digest_size=16).digest()
