"""Requests and choices at a router: a choice goes from attempt to attempt until it has ended, once.

              ┌───────── refused, lost ─────────┐
              ▼                                 │
    ABSENT ─▶ WAITING ──place──▶ SENT ──take──▶ OPEN ──cut──▶ CUT
      (found)  ▲  └──── resume: found where it was ──▶ │        │
               └───────── lost, yields, moves ─────────┘        │
    every one of them ──end──▶ ENDED ◀──────────────────────────┘

    ABSENT   of a request of an earlier router: no instance has reported it yet
    WAITING  for a place, or until its next try is due
    SENT     sent to an instance that has not answered
    OPEN     an instance runs it
    CUT      the client has everything it will get; only the instance's bill is missing

Every attempt after the first continues after the tokens in `delivered`. Has the table, the records and what follows from one
record alone; where a choice goes, and what the client gets, is decided elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.request import FinishReason, MaskReference, RequestId, Sampling, Submission, frozen_tokens
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import ChoiceOutcome, Instance
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.identity import AttemptId, ChoiceAttempt, RequestNumber
from baton.core.state_machine import FastEnum


class ChoiceState(FastEnum):
    ABSENT = "absent"
    WAITING = "waiting"
    SENT = "sent"
    OPEN = "open"
    CUT = "cut"
    ENDED = "ended"


class ChoiceMove(FastEnum):
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

ABOUT_THE_INSTANCE = (
    RefusalCode.DRAINING,
    RefusalCode.QUEUE_FULL,
    RefusalCode.WRONG_ROLE,
    RefusalCode.DUPLICATE_ID,
    RefusalCode.OTHER_BACKEND_VERSION,
)
"""Refusals that another instance, or the same one a little later, need not repeat."""
OVER = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONSTRAINT_FAILED)
"""Ends of the answer itself, which would be the same elsewhere; others end an attempt."""
NO_ROOM = (PdCode.REFUSED, PdCode.PREEMPTED, PdCode.TIMEOUT)
"""Ends for want of blocks, or of a prefilling peer with time for it. None of them is the fault of the request."""
NO_KV = (PdCode.NOT_DELIVERED, PdCode.TIMEOUT)
"""Ends because the KV of its prefilling peer did not come, or not in time."""
FAILED_HANDOVERS_MAX = 2
"""After so many of them a choice is prefilled where it decodes: its prefill may take longer than a peer is given."""


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class RoutedChoice:
    request: RoutedRequest
    index: int
    submission: Submission | None
    """As the client submitted it; None while ABSENT."""
    state: ChoiceState = ChoiceState.WAITING
    delivered: list[int] = field(default_factory=list)
    """Every token that was delivered to the client."""
    attempt: Attempt | None = None
    """Its current attempt, while SENT, OPEN or CUT."""
    due_us: int = 0
    """While WAITING: not placed before this time."""
    entry: int = 0
    """While WAITING: its number in the placement queue."""
    retry_reserved: bool = False
    """While WAITING: a retry of the router's budget is reserved for it."""
    losses: int = 0
    fruitless: int = 0
    """Losses in a row without a token between them."""
    lost_with: int = -1
    """Number of tokens it had at the last loss."""
    yields: int = 0
    """Times that an instance had no room for it: they bound its moves."""
    failed_handovers: int = 0
    """Attempts that ended because a peer that was to prefill it did not deliver."""
    preemptions: int = 0
    """Times that it was preempted anywhere, as far as instances have said; it travels with every attempt."""
    sent_preemptions: int = 0
    """The count that its last attempt was sent with."""
    goes_alone: bool = False
    """Its group was too large for an instance: it is sent without the other choices of its request."""
    resumes_in_place: bool = False
    """Its last attempt was sent to stay: it does not end for want of blocks."""
    refusals: int = 0
    """Refusals in a row."""
    attempts: int = 0
    """Number of attempts so far, for the bill."""
    yielded_at: list[Instance] = field(default_factory=list)
    """Instances that had no room for it; at the last of them most of its KV may still be cached."""
    unfit_at: list[Instance] = field(default_factory=list)
    """Instances that refused it because of itself, after it had run elsewhere."""
    mask: MaskReference | None = None
    """After a refusal for the version of its constraint: the mask that an instance must have to continue it. None: not asked
    for, or not known yet."""
    mask_wanted: int = 0
    """Number of its tokens when that mask was asked for."""
    sent_mask: MaskReference | None = None
    """The `mask` that its last attempt was sent with."""
    mask_refused_by: list[Instance] = field(default_factory=list)
    """Instances that refused it with this `mask`."""
    version_missing_us: int | None = None
    """Since when no instance that is there permits what was delivered; one that does may come back."""
    turned_down_by: Instance | None = None
    """The instance that refused it last, or was lost with it."""
    keep: int | None = None
    """While CUT: the number of tokens that count."""
    cached_tokens: int | None = None
    bill: Bill = field(default_factory=Bill)
    billed: set[tuple[Instance, int, int]] = field(default_factory=set)
    """Attempts that ended without ending it and are in its bill, as `attempt_key` tells them apart: their instances keep
    such an end, and report it again when they connect again."""
    began_with: int = 0
    """Tokens that its last attempt started with."""
    keys: list[bytes] | None = None
    """While WAITING with tokens: the block keys of all known tokens."""
    outcome: ChoiceOutcome | None = None
    prefill: tuple[FleetMember, int] | None = None
    """The instance chosen to prefill it and the number of tokens, until the first token comes."""
    yielded_us: int | None = None
    """Time of its preemption, until the first token after it; None if it was not preempted, or has resumed."""

    @property
    def prefills_in_place(self) -> bool:
        """After failed hand-overs, and where log-probabilities of the prompt are asked for: no hand-over carries them."""
        scores_prompt = self.submission is not None and self.submission.sampling.prompt_logprobs is not None
        return scores_prompt or self.failed_handovers >= FAILED_HANDOVERS_MAX

    @property
    def where(self) -> Instance | None:
        """The instance it is at."""
        return None if self.attempt is None else self.attempt.member.name


@dataclass(slots=True, eq=False)
class Attempt:
    """Choices of one request at one instance, from their sending until the request is over."""

    id: AttemptId
    member: FleetMember
    request: RoutedRequest
    choices: list[RoutedChoice]
    accepted: bool = False
    began: list[int] = field(default_factory=list)
    """Choices that the instance has started."""
    prefillers: dict[int, Instance] = field(default_factory=dict)
    """Choice → the instance chosen to prefill it, if it is another one."""

    def of(self, choice: RoutedChoice) -> ChoiceAttempt:
        return ChoiceAttempt(self.id.request, choice.index, self.id.attempt)

    def board(self, choice: RoutedChoice) -> None:
        """The choice is at the instance of this attempt from now on."""
        choice.attempt = self
        self.member.choices[choice.request.number, choice.index] = choice


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One HTTP request of a client, until all of its choices have ended."""

    number: RequestNumber
    tenant: str | None
    """None: no tenant's limits apply."""
    digest: bytes
    """Digest of its origin."""
    origin: bytes
    order: int
    """Order of arrival."""
    arrived_us: int
    deadline_us: int
    """By this time an instance must have accepted it."""
    waits_since_us: int
    """Time of its arrival, or since which an instance that had accepted it does not have it any more."""
    asked_us: int = 0
    """Unix time at which its first front end took it (`Submission.arrived_us`), whichever router that was."""
    priority: int = 0
    choices: list[RoutedChoice] = field(default_factory=list)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """By number, in order; without refused ones, which need no cancel."""
    attempts_made: int = 0
    opened: bool = False
    """An instance has accepted it, and the client was told."""
    orphan: bool = False
    """Of an earlier router, and not claimed by a client."""
    grace_us: int | None = None
    """Of an earlier router: the time by which it must be claimed and all of its choices found."""
    open_choices: int = 0
    """Number of choices that have not ended."""
    keys: dict[RequestId, list[bytes]] = field(default_factory=dict)
    """By the leading choice: the block keys of its prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once, however many choices share it."""
        prompts = {leads(c.submission): len(c.submission.prompt) for c in self.choices if c.submission is not None}
        return sum(prompts.values())

    def attempt_at(self, member: FleetMember, choices: list[RoutedChoice]) -> Attempt:
        """Create the next attempt, of these choices."""
        self.attempts_made += 1
        attempt = Attempt(AttemptId(self.number, self.attempts_made), member, self, choices)
        self.attempts[self.attempts_made] = attempt
        return attempt


# ── functions of one record ──────────────────────────────────────────────────────────────────────────────────────────────


def finished_as(choice: RoutedChoice) -> FinishReason | None:
    """Its end, if the last token came and its instance was lost before it reported the end."""
    submission, count = choice.submission, len(choice.delivered)
    if choice.keep is not None:
        return FinishReason.STOP
    if submission is None or not count:
        return None
    sampling = submission.sampling
    if choice.delivered[-1] in sampling.stop_token_ids and count > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if submission.max_tokens is not None and count >= submission.max_tokens else None


def jittered_us(config: RouterConfig, seed: int, request: RequestNumber, nth: int) -> int:
    """The nth back-off. All choices of a request have the same, so that those that left together continue together."""
    full_us = min(config.backoff_us << min(nth - 1, 32), config.backoff_us_max)
    digest = hashlib.blake2b(f"{seed}/{request}/{nth}".encode(), digest_size=4).digest()
    return full_us - full_us * int.from_bytes(digest, "little") // (2 << 32)


def is_preemption(end: EndedRequest) -> bool:
    return end.fault is not None and end.fault.code in NO_ROOM


def fault_of(end: EndedRequest, where: Instance) -> PdFault:
    if end.fault is not None:
        return end.fault
    return PdFault(PdCode.NOT_DELIVERED, PdStage.DECODE, f"{where} ended it with {end.reason.value!r}")


def loss_of(choice: RoutedChoice, why: str) -> PdFault:
    stage = PdStage.DECODE if choice.delivered else PdStage.PREFILL
    return PdFault(PdCode.NOT_DELIVERED, stage, why)


def fault_of_refusal(refusal: Refusal) -> PdFault:
    return PdFault(PdCode.REFUSED, PdStage.OFFER, refusal.message)


def attempt_key(member: FleetMember, end: EndedRequest) -> tuple[Instance, int, int]:
    """A life of an instance never gives a serial twice."""
    return member.name, member.facts.incarnation, end.serial


def add_bill(choice: RoutedChoice, bill: Bill) -> None:
    """Add an attempt's bill. Tokens known before an attempt that it computes count as recomputed."""
    choice.preemptions = max(choice.preemptions, choice.sent_preemptions + bill.preemptions)
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


def outcome_of(choice: RoutedChoice, reason: FinishReason, fault: PdFault | None) -> ChoiceOutcome:
    generated = len(choice.delivered) if choice.keep is None else choice.keep
    # Keep what the client was told with its first token, whatever an earlier attempt had found.
    cached = choice.bill.cached_tokens if choice.cached_tokens is None else choice.cached_tokens
    return ChoiceOutcome(reason, generated, replace(choice.bill, attempts=choice.attempts, cached_tokens=cached), fault)


def leads(submission: Submission) -> RequestId:
    """The first choice of its request with the same prompt."""
    return submission.leader if submission.leader is not None else submission.request_id


def group_of(
    choices: Sequence[tuple[RoutedChoice, Submission]], prefill_at: dict[RequestId, str], move_us_per_token: float | None
) -> tuple[Submission, ...]:
    """The choices of one request as one group that continues where each of them stopped, no younger than they are.

    Their former leader may have ended or be elsewhere: the first choice of the group with the same prompt leads the others.
    """
    leaders: dict[RequestId, RequestId] = {}
    group = []
    prefills_in_place = any(choice.prefills_in_place for choice, _ in choices)
    for choice, submission in choices:
        prompt = leads(submission)
        leader = leaders.get(prompt)
        leaders.setdefault(prompt, submission.request_id)
        group.append(
            replace(
                submission,
                sampling=_sampling_of(choice, submission),
                leader=leader,
                generated=frozen_tokens(choice.delivered),
                prefill_at=prefill_at.get(prompt, ""),
                preemptions=choice.preemptions,
                resumes_in_place=choice.resumes_in_place,
                prefills_in_place=prefills_in_place,
                move_us_per_token=move_us_per_token,
            )
        )
    return tuple(group)


def _sampling_of(choice: RoutedChoice, submission: Submission) -> Sampling:
    """With the mask to compare, if one is known for the tokens that it has now."""
    sampling, mask = submission.sampling, choice.mask
    if sampling.constraint is None or mask is None or mask.outputs != len(choice.delivered):
        return sampling
    return replace(sampling, constraint=replace(sampling.constraint, version=mask))
