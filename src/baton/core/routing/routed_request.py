"""The life of a choice at a router: from leg to leg until it has ended, once.

              ┌───────── refused, lost ─────────┐
              ▼                                 │
    ABSENT ─▶ WAITING ──place──▶ SENT ──take──▶ OPEN ──cut──▶ CUT
      (found)  ▲  └──── resume: found where it was ──▶ │        │
               └───────── lost, yields, moves ─────────┘        │
    every one of them ──end──▶ ENDED ◀──────────────────────────┘

    ABSENT   of a body of an earlier router: no instance has told of it yet
    WAITING  for a place, or until its next try is due
    SENT     on its way; the instance has not answered
    OPEN     an instance works on it
    CUT      the client has everything it will get; only the instance's bill is missing

What a choice has been given is `delivered`: every leg after the first goes on after it. Owns the table, the records and what
follows from one record alone. Where a choice goes, and who hears of it, is decided elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.core.engine.records import Bill
from baton.core.engine.request import FinishReason, RequestId, Submission, frozen_tokens
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.messages import PdCode, PdFault, PdStage
from baton.core.routing.events import ChoiceEnd, Instance, Leg, Outcome, RequestNumber, RouterConfig
from baton.core.routing.fleet_members import FleetMember


class ChoiceState(Enum):
    ABSENT = "absent"
    WAITING = "waiting"
    SENT = "sent"
    OPEN = "open"
    CUT = "cut"
    ENDED = "ended"


class ChoiceMove(Enum):
    FIND = "an instance has told of it"
    PLACE = "place"
    TAKE = "taken"
    REFUSE = "refused"
    LOSE = "its instance was lost, or failed it"
    YIELD = "its instance had no room for it"
    MOVE = "its instance drains"
    RESUME = "found where it was"
    CUT = "cut"
    END = "end"


TRANSITIONS: dict[tuple[ChoiceState, ChoiceMove], ChoiceState] = {
    (ChoiceState.ABSENT, ChoiceMove.FIND): ChoiceState.WAITING,
    (ChoiceState.ABSENT, ChoiceMove.END): ChoiceState.ENDED,
    (ChoiceState.WAITING, ChoiceMove.PLACE): ChoiceState.SENT,
    (ChoiceState.WAITING, ChoiceMove.RESUME): ChoiceState.OPEN,
    (ChoiceState.WAITING, ChoiceMove.END): ChoiceState.ENDED,
    (ChoiceState.SENT, ChoiceMove.TAKE): ChoiceState.OPEN,
    (ChoiceState.SENT, ChoiceMove.REFUSE): ChoiceState.WAITING,
    (ChoiceState.SENT, ChoiceMove.LOSE): ChoiceState.WAITING,
    (ChoiceState.SENT, ChoiceMove.END): ChoiceState.ENDED,
    (ChoiceState.OPEN, ChoiceMove.LOSE): ChoiceState.WAITING,
    (ChoiceState.OPEN, ChoiceMove.YIELD): ChoiceState.WAITING,
    (ChoiceState.OPEN, ChoiceMove.MOVE): ChoiceState.WAITING,
    (ChoiceState.OPEN, ChoiceMove.CUT): ChoiceState.CUT,
    (ChoiceState.OPEN, ChoiceMove.END): ChoiceState.ENDED,
    (ChoiceState.CUT, ChoiceMove.END): ChoiceState.ENDED,
}

ABOUT_THE_INSTANCE = (RefusalCode.DRAINING, RefusalCode.QUEUE_FULL, RefusalCode.WRONG_ROLE, RefusalCode.DUPLICATE_ID)
"""Refusals that another instance, or the same one a little later, need not share."""
NO_ROOM = (PdCode.REFUSED, PdCode.PREEMPTED)


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class RoutedChoice:
    body: RoutedRequest
    index: int
    submission: Submission | None
    """As the client asked; None while ABSENT."""
    state: ChoiceState = ChoiceState.WAITING
    delivered: list[int] = field(default_factory=list)
    """Everything that the client was given."""
    leg: Attempt | None = None
    """Where it is: while SENT, OPEN or CUT."""
    place: int = 0
    due_us: int = 0
    """While WAITING: not before."""
    entry: int = 0
    """While WAITING: its number in the waiting room."""
    losses: int = 0
    fruitless: int = 0
    """Of the losses, the last ones between which no token came."""
    lost_with: int = -1
    """How many tokens it had at the last loss."""
    preemptions: int = 0
    refusals: int = 0
    """In a row."""
    attempts: int = 0
    avoid: list[Instance] = field(default_factory=list)
    """Those who had no room for it."""
    turned_down_by: Instance | None = None
    """Who refused it last, or was lost with it."""
    keep: int | None = None
    """While CUT: how many tokens count."""
    cached_tokens: int | None = None
    bill: Bill = field(default_factory=Bill)
    began_with: int = 0
    """Tokens that its last leg started with."""
    keys: list[bytes] | None = None
    """While WAITING with tokens: the block keys of all that is known."""
    outcome: Outcome | None = None
    prefill: tuple[FleetMember, int] | None = None
    """Who was chosen to prefill it and how many tokens, until the first token comes."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A leg."""

    leg: Leg
    member: FleetMember
    body: RoutedRequest
    choices: list[RoutedChoice]
    taken: bool = False
    began: list[int] = field(default_factory=list)
    """Places that the instance has begun with."""
    givers: dict[int, Instance] = field(default_factory=dict)
    """By place: who was chosen to prefill it."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A body, until all of its choices have ended."""

    body: RequestNumber
    tenant: str | None
    """None: nobody's limits apply."""
    digest: bytes
    """Of its origin."""
    origin: bytes
    order: int
    """Of arrival."""
    arrived_us: int
    deadline_us: int
    priority: int = 0
    choices: list[RoutedChoice] = field(default_factory=list)
    legs: list[Attempt] = field(default_factory=list)
    opened: bool = False
    """An instance has taken it, and the client was told."""
    orphan: bool = False
    """Of an earlier router, and nobody has claimed it."""
    grace_us: int | None = None
    """Of an earlier router: by when it must be claimed, and all of its choices found."""
    open_choices: int = 0
    """Not ended."""
    keys: dict[RequestId, list[bytes]] = field(default_factory=dict)
    """By the choice that leads: the block keys of its prompt."""


# ── what follows from one record ─────────────────────────────────────────────────────────────────────────────────────────


def finished_as(choice: RoutedChoice) -> FinishReason | None:
    """How it has ended although nobody said so: the last token came, and its instance was lost before the end did."""
    submission, count = choice.submission, len(choice.delivered)
    if choice.keep is not None:
        return FinishReason.STOP
    if submission is None or not count:
        return None
    sampling = submission.sampling
    if choice.delivered[-1] in sampling.stop_token_ids and count > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if submission.max_tokens is not None and count >= submission.max_tokens else None


def jittered_us(config: RouterConfig, seed: int, body: RequestNumber, nth: int) -> int:
    """The nth back-off. All choices of a body have the same, so that what left together goes on together."""
    full_us = min(config.backoff_us << min(nth - 1, 32), config.backoff_us_max)
    digest = hashlib.blake2b(f"{seed}/{body}/{nth}".encode(), digest_size=4).digest()
    return full_us - full_us * int.from_bytes(digest, "little") // (2 << 32)


def is_preemption(end: ChoiceEnd) -> bool:
    return end.fault is not None and end.fault.code in NO_ROOM


def fault_of(end: ChoiceEnd, where: Instance) -> PdFault:
    if end.fault is not None:
        return end.fault
    return PdFault(PdCode.NOT_DELIVERED, PdStage.DECODE, f"{where} ended it with {end.reason.value!r}")


def loss_of(choice: RoutedChoice, why: str) -> PdFault:
    stage = PdStage.DECODE if choice.delivered else PdStage.PREFILL
    return PdFault(PdCode.NOT_DELIVERED, stage, why)


def fault_of_refusal(refusal: Refusal) -> PdFault:
    return PdFault(PdCode.REFUSED, PdStage.OFFER, refusal.message)


def add_bill(choice: RoutedChoice, bill: Bill) -> None:
    """A leg's bill onto that of the whole. What a later leg computes of what was known before it is computed again."""
    sum_, first = choice.bill, choice.attempts <= 1
    again = 0 if first else min(bill.computed_tokens, max(0, choice.began_with - bill.cached_tokens))
    choice.bill = Bill(
        cached_tokens=bill.cached_tokens if first else sum_.cached_tokens,
        computed_tokens=sum_.computed_tokens + bill.computed_tokens - again,
        recomputed_tokens=sum_.recomputed_tokens + bill.recomputed_tokens + again,
        restored_tokens=sum_.restored_tokens + bill.restored_tokens,
        preemptions=sum_.preemptions + bill.preemptions,
        queue_us=sum_.queue_us + bill.queue_us,
        prefill_us=sum_.prefill_us + bill.prefill_us,
        transfer_us=sum_.transfer_us + bill.transfer_us,
        decode_us=sum_.decode_us + bill.decode_us,
    )


def outcome_of(choice: RoutedChoice, reason: FinishReason, fault: PdFault | None) -> Outcome:
    generated = len(choice.delivered) if choice.keep is None else choice.keep
    # What the client was told with its first token, whatever a leg before that had found.
    cached = choice.bill.cached_tokens if choice.cached_tokens is None else choice.cached_tokens
    return Outcome(reason, generated, replace(choice.bill, attempts=choice.attempts, cached_tokens=cached), fault)


def leads(submission: Submission) -> RequestId:
    """Who of its body has the same prompt and came first."""
    return submission.leader if submission.leader is not None else submission.request_id


def group_of(choices: Sequence[tuple[RoutedChoice, Submission]], prefill_at: dict[RequestId, str]) -> tuple[Submission, ...]:
    """The choices of one body as one group that goes on where each of them stopped.

    Who led them at first may have ended or be elsewhere: the first one here that has its prompt leads the others.
    """
    leaders: dict[RequestId, RequestId] = {}
    group = []
    for choice, submission in choices:
        prompt = leads(submission)
        leader = leaders.get(prompt)
        leaders.setdefault(prompt, submission.request_id)
        generated = frozen_tokens(choice.delivered)
        group.append(replace(submission, leader=leader, generated=generated, prefill_at=prefill_at.get(prompt, "")))
    return tuple(group)
