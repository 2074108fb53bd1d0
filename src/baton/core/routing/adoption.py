"""What instances have kept of requests that a router lost sight of: this router's own, or those of one that is no more.

An instance that joins tells what it holds. A choice of ours that waits goes on there, if all that was delivered is in its
history. A body that nobody here knows is an orphan: it is carried like any other, until a client claims it or the grace is
over. Several instances may hold the same choice, because it moved: the longest history wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from baton.core.engine.request import NO_TOKENS, FinishReason, Submission
from baton.core.handover.messages import PdCode, PdFault, PdStage
from baton.core.routing.events import Claimed, Delivered, HeldChoice, Leg, Orphan, RequestNumber, Stage
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.routed_request import (
    Attempt,
    ChoiceMove,
    ChoiceState,
    RoutedChoice,
    RoutedRequest,
    add_bill,
    finished_as,
    leads,
)
from baton.core.routing.routed_requests import Carrier, digest_of

Kept = tuple[int, Leg, int]
"""Serial, leg, place."""
OVER = (FinishReason.STOP, FinishReason.LENGTH)


class Adoption:
    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._pending: dict[RequestNumber, RoutedRequest] = {}
        """Those that nobody has claimed, or of which a choice is still missing; in order of their grace."""
        self._made = 0

    def next_deadline(self) -> int | None:
        return next((body.grace_us for body in self._pending.values()), None)

    # ── joins ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def adopt(self, member: FleetMember, held: Sequence[HeldChoice]) -> tuple[Kept, ...]:
        """Which serials the instance goes on with; nobody wants the others."""
        keep: list[Kept] = []
        extras: dict[RequestNumber, dict[int, tuple[object, ...]]] = {}
        """Of the orphans that are found in this join."""
        furthest = _furthest(held)
        digests: dict[bytes, bytes] = {}
        """By origin: one may be megabytes, and have hundreds of choices."""
        for item in held:
            if item.serial not in furthest:
                continue
            if item.origin not in digests:
                digests[item.origin] = digest_of(item.origin)
            body = self._body_of(item, digests[item.origin])
            choice = None if body is None else body.choices[item.choice]
            if choice is None or not _wanted(choice, item):
                continue
            if not choice.body.opened and choice.body.orphan:
                extras.setdefault(choice.body.body, {})[choice.index] = item.extras
            keep.append((item.serial, self._take_over(choice, item, member), 0))
        for number, known in extras.items():
            self._announce(self._pending[number], known)
        return tuple(keep)

    def _body_of(self, item: HeldChoice, digest: bytes) -> RoutedRequest | None:
        carrier = self._carrier
        if not item.origin or not 0 <= item.choice < item.body_choices or digest in carrier.over:
            return None
        body = carrier.by_origin.get(digest)
        if body is None:
            self._made += 1
            body = carrier.open_body(RequestNumber(-self._made), None, item.origin, item.body_choices)
            body.orphan, body.grace_us = True, carrier.now_us + carrier.config.orphan_grace_us
            body.priority = item.submission.priority
            for choice in body.choices:
                choice.state = ChoiceState.ABSENT
            self._pending[body.body] = body
            carrier.counts.orphans += 1
        return body if len(body.choices) == item.body_choices else None

    def _take_over(self, choice: RoutedChoice, item: HeldChoice, member: FleetMember) -> Leg:
        """The choice goes on where it is held, or from what is known of it there."""
        carrier = self._carrier
        self._make_wait(choice, item)
        if not choice.body.orphan:
            carrier.opened(choice.body)  # an instance had taken it, and was lost before it could say so
        missing = _history(item)[len(choice.delivered) :]
        choice.delivered += missing
        choice.keys = None
        cached = item.cached_tokens if choice.cached_tokens is None else None
        choice.cached_tokens = item.cached_tokens if choice.cached_tokens is None else choice.cached_tokens
        journey = carrier.journey(member, choice.body, [choice])
        extras = list(item.extras[max(0, len(item.extras) - len(missing)) :]) if item.extras and missing else None
        choice.began_with = len(item.submission.prompt) + len(item.submission.generated)
        if item.end is not None:
            add_bill(choice, item.end.bill)
        reason = item.end.reason if item.end is not None and item.end.reason in OVER else None
        if item.end is not None and reason is None:
            reason = finished_as(choice)
        elif item.end is not None and item.end.generated_tokens < len(choice.delivered):
            choice.keep = item.end.generated_tokens  # its client had cut it
        if reason is not None:
            if item.end is not None and item.end.generated_tokens < len(choice.delivered):
                choice.keep = item.end.generated_tokens  # it was cut before its router was lost
            carrier.end(choice, reason, None, missing, extras, cached)
            return journey.leg
        if choice.body.opened and (missing or cached is not None):
            carrier.effects.append(Delivered(choice.body.body, choice.index, missing, extras, cached, None))
        if item.end is None:
            self._resume(choice, journey)
        return journey.leg

    def _make_wait(self, choice: RoutedChoice, item: HeldChoice) -> None:
        carrier = self._carrier
        # Not at once: another instance may be about to tell that it is further with it.
        soon_us = carrier.now_us + carrier.config.backoff_us_max
        if choice.state is ChoiceState.ABSENT:
            choice.submission = _asked(choice.body, item.submission)
            choice.attempts = 2 if len(item.submission.generated) else 1
            carrier.move(choice, ChoiceMove.FIND)
            carrier.room.enter(choice, soon_us)
        elif choice.state is not ChoiceState.WAITING:
            carrier.call_back([choice])
            carrier.leave(choice)
            carrier.move(choice, ChoiceMove.LOSE)
            carrier.room.enter(choice, soon_us)

    def _resume(self, choice: RoutedChoice, journey: Attempt) -> None:
        """It was not lost after all."""
        carrier = self._carrier
        journey.taken = True
        carrier.move(choice, ChoiceMove.RESUME)
        carrier.board(choice, journey, 0)
        choice.losses, choice.fruitless = max(0, choice.losses - 1), max(0, choice.fruitless - 1)
        choice.turned_down_by = None
        carrier.note(choice, Stage.RESUMED, journey.member.name)

    def _announce(self, body: RoutedRequest, extras: dict[int, tuple[object, ...]]) -> None:
        choices, body.opened = body.choices, True
        self._carrier.effects.append(
            Orphan(
                body.body,
                body.origin,
                tuple(None if choice.state is ChoiceState.ABSENT else tuple(choice.delivered) for choice in choices),
                tuple(extras.get(choice.index, ()) for choice in choices),
                tuple(choice.cached_tokens for choice in choices),
                tuple(choice.outcome for choice in choices),
            )
        )

    # ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def claimed(self, event: Claimed) -> None:
        carrier, body = self._carrier, self._pending.get(event.body)
        if body is None or not body.orphan:
            carrier.counts.late += 1
            return
        body.orphan = False
        if len(event.group) == len(body.choices):
            self._ask_again(body, event)
        if not body.open_choices:
            carrier.close_body(body)
        self._sift()

    def _ask_again(self, body: RoutedRequest, event: Claimed) -> None:
        """What no instance has told of begins anew: its tokens depend on nothing but its submission."""
        carrier = self._carrier
        limits = {len(c.submission.prompt): c.submission.max_tokens for c in body.choices if c.submission is not None}
        for choice, asked in zip(body.choices, event.group, strict=True):
            if choice.state is ChoiceState.ABSENT:
                limit = limits.get(len(asked.prompt)) if asked.max_tokens is None else asked.max_tokens
                choice.submission = _asked(body, replace(asked, max_tokens=limit))
                carrier.move(choice, ChoiceMove.FIND)
                carrier.room.enter(choice, max(carrier.now_us, body.arrived_us + carrier.config.backoff_us_max))
        carrier.stirred = True

    def expire(self) -> None:
        """An orphan that nobody wants is dropped; of one that somebody wants, the missing choices end."""
        carrier = self._carrier
        self._sift()
        for body in [b for b in self._pending.values() if b.grace_us is not None and b.grace_us <= carrier.now_us]:
            del self._pending[body.body]
            if body.orphan:
                carrier.drop(body)
                continue
            fault = PdFault(
                PdCode.NOT_DELIVERED, PdStage.DECODE, "the instance that had it was lost together with its router"
            )
            for choice in body.choices:
                if choice.state is ChoiceState.ABSENT:
                    carrier.end(choice, FinishReason.RESCHEDULE, fault)

    def _sift(self) -> None:
        self._pending = {
            number: body
            for number, body in self._pending.items()
            if number in self._carrier.bodies and (body.orphan or any(c.state is ChoiceState.ABSENT for c in body.choices))
        }


def _asked(body: RoutedRequest, submission: Submission) -> Submission:
    """As the client asked for it. Who led it was another on each leg: whoever is known with the same prompt does now."""
    known = (choice.submission for choice in body.choices if choice.submission is not None)
    leader = next((leads(other) for other in known if np.array_equal(other.prompt, submission.prompt)), None)
    return replace(submission, leader=leader, generated=NO_TOKENS, prefill_at="")


def _history(item: HeldChoice) -> list[int]:
    return [*item.submission.generated.tolist(), *item.tokens]


def _furthest(held: Sequence[HeldChoice]) -> set[int]:
    """Of each choice the serial with the longest history; of equals, one that has ended, then one that still runs."""
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
    if choice.state in (ChoiceState.ABSENT, ChoiceState.WAITING):
        return True
    # Elsewhere somebody works on it by now. One of ours stays there; of an orphan it may be the shorter of two histories.
    return choice.body.orphan and choice.state in (ChoiceState.SENT, ChoiceState.OPEN) and len(history) > len(delivered)
