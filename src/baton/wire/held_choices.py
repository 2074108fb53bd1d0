"""An instance's record of the choices that a router has placed here: their state, their output, how long they are kept.

    ASKED ──── accepted ───▶ OPEN ───── ended ─────▶ ENDED ──┐
      │  └── refused ──▶ gone  │ dropped                     │ dropped
      │ dropped                ▼                             ▼
      └──▶ DROPPED ──acc.──▶ UNWANTED ─── ended ──────────▶ gone

A choice is dropped when the router cancels or forgets it, when the router places the same request id again (the later
attempt counts), when it is too large to report at the start of a session, and when the grace after a lost session is over.
Dropping an open choice cancels it.

Memory is bounded: open choices by CHOICES_MAX and their own limits, ended ones by count and bytes, oldest removed first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.core.engine.ended import EndedRequest
from baton.core.engine.orders import Cancel, Submit
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import PromptLogprobs, Submission
from baton.core.state_machine import FastEnum, StateMachine
from baton.wire.engine_messages import StepOutput, ToEngine, WireError, asked_bytes
from baton.wire.router_messages import (
    HELD_BYTES_MAX,
    HeldChoiceMessage,
    HeldGroup,
    PlaceAttempt,
    held_bytes,
    logprob_bytes,
)
from baton.wire.step_parts import part_of

FIRST_ROUTED_TICKET = 1 << 40
"""Tickets of routed requests start here; those of the front end's own request table are below."""
CHOICES_MAX = 1 << 14
"""Choices that a router may have open here; the engine's own queue is shorter."""
ENDED_CHOICES_MAX = 4096
ENDED_BYTES_MAX = 64 << 20
"""Bytes of ended choices that the router has not told us to forget."""
GROUP_BYTES_MAX = 32 << 20
"""A held group must fit into one frame."""


class HeldState(FastEnum):
    """The state of a choice."""

    ASKED = "asked"
    DROPPED = "dropped"
    """Dropped before the engine answered."""
    OPEN = "open"
    UNWANTED = "unwanted"
    """Cancelled; its output is not kept."""
    ENDED = "ended"
    GONE = "gone"


class HeldMove(FastEnum):
    ACCEPT = "accepted"
    REFUSE = "refused"
    END = "ended"
    DROP = "dropped"


TRANSITIONS: dict[tuple[HeldState, HeldMove], HeldState] = {
    (HeldState.ASKED, HeldMove.ACCEPT): HeldState.OPEN,
    (HeldState.ASKED, HeldMove.REFUSE): HeldState.GONE,
    (HeldState.ASKED, HeldMove.DROP): HeldState.DROPPED,
    (HeldState.DROPPED, HeldMove.ACCEPT): HeldState.UNWANTED,
    (HeldState.DROPPED, HeldMove.REFUSE): HeldState.GONE,
    (HeldState.OPEN, HeldMove.END): HeldState.ENDED,
    (HeldState.OPEN, HeldMove.DROP): HeldState.UNWANTED,
    (HeldState.UNWANTED, HeldMove.END): HeldState.GONE,
    (HeldState.ENDED, HeldMove.DROP): HeldState.GONE,
}

KEPT = (HeldState.OPEN, HeldState.ENDED)


@dataclass(slots=True, eq=False)
class PlacedGroup:
    """One PlaceAttempt of a router."""

    engine_ticket: int
    """This instance's ticket at the engine."""
    place: PlaceAttempt
    session: int
    """The session in which it was placed; the ticket in `place` is the router's in that session."""
    choices: list[PlacedChoice] = field(default_factory=list)
    remaining: int = 0
    """Choices that are not GONE."""


@dataclass(slots=True, eq=False)
class PlacedChoice:
    """One choice and its output so far."""

    group: PlacedGroup
    index: int
    """Its index in the group."""
    session: int
    """The last session in which the router knew of it."""
    state: HeldState = HeldState.ASKED
    serial: int = -1
    """The engine's number for it; -1 until it is accepted."""
    tokens: bytearray = field(default_factory=bytearray)
    counts: array[int] | None = None
    """Tokens of each row; kept only where log-probabilities were asked for, since those are kept by row."""
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    ended: EndedRequest | None = None
    preemptions: int = 0
    """How often it was preempted so far, here and elsewhere, as far as the engine has said."""

    @property
    def submission(self) -> Submission:
        return self.group.place.group[self.index]

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that keeping it takes."""
        logprobs = sum(map(logprob_bytes, self.logprobs)) + sum(map(logprob_bytes, self.prompt_logprobs))
        return len(self.tokens) + logprobs + _place_bytes(self.group.place)

    def note(self, item: Logprobs) -> None:
        if self.counts is not None:
            self.logprobs.append(msgspec.structs.replace(item, row=len(self.counts) - 1))

    def held(self) -> HeldChoiceMessage:
        count = len(self.tokens) // 4
        counts = array("i", [count] if count else []) if self.counts is None else self.counts
        return HeldChoiceMessage(
            self.index,
            self.serial,
            counts.tobytes(),
            bytes(self.tokens),
            tuple(self.logprobs),
            self.cached_tokens,
            self.ended,
            max(self.preemptions, self.submission.preemptions + (self.ended.bill.preemptions if self.ended else 0)),
            tuple(self.prompt_logprobs),
        )


def _place_bytes(place: PlaceAttempt) -> int:
    return len(place.origin) + sum(map(asked_bytes, place.group)) + 512 * len(place.group)


def _held_group(place: PlaceAttempt, kept: list[PlacedChoice]) -> HeldGroup:
    return HeldGroup(place.group, place.choices, place.body_choices, place.origin, tuple(item.held() for item in kept))


class HeldChoices:
    def __init__(self) -> None:
        self.session = 0
        """Number of sessions opened; identifies the latest one."""
        self.unanswered: dict[int, PlacedGroup] = {}
        """By our ticket: groups that the engine has not answered."""
        self.open: dict[int, PlacedChoice] = {}
        """By serial: choices that the engine has not ended, unwanted ones included."""
        self._groups: dict[int, PlacedGroup] = {}
        """By our ticket: groups with a choice that is not GONE."""
        self._ended: dict[int, PlacedChoice] = {}
        """By serial, in the order of their ends."""
        self._ended_bytes = 0
        self._by_request_id: dict[str, PlacedChoice] = {}
        """The latest attempt of each request id."""
        self._unknown = 0
        """Number of `open` choices that the router of this session does not know of."""
        self._next_ticket = FIRST_ROUTED_TICKET
        self._states = StateMachine(TRANSITIONS, "a choice")

    def moves(self) -> dict[tuple[HeldState, HeldMove], int]:
        """Count of each transition taken."""
        return self._states.moves()

    @property
    def open_requests(self) -> int:
        """Choices that the engine has not ended, or not answered."""
        return len(self.open) + sum(len(group.choices) for group in self.unanswered.values())

    @property
    def kept(self) -> int:
        """Choices that will be reported to the next router session."""
        return sum(choice.state in KEPT for choice in self._all())

    @property
    def held(self) -> int:
        """Choices that are not GONE."""
        return len(self._all())

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def has(self, serial: int) -> bool:
        return serial in self.open or serial in self._ended

    def is_wanted(self, serial: int) -> bool:
        choice = self.open.get(serial)
        return choice is not None and choice.state is HeldState.OPEN

    def _all(self) -> list[PlacedChoice]:
        return [choice for group in self._groups.values() for choice in group.choices]

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_session(self) -> tuple[list[HeldGroup], list[ToEngine]]:
        """Begin a session. Returns the groups to report to the router, and cancels for those that are too large to
        report."""
        self.session += 1
        for group in self.unanswered.values():
            self.drop_all(group.choices)
        held, total, orders = list[HeldGroup](), 0, list[ToEngine]()
        for group in list(self._groups.values()):
            kept = [choice for choice in group.choices if choice.state in KEPT]
            if not kept:
                continue
            message = _held_group(group.place, kept)
            size = held_bytes(message)
            if size > GROUP_BYTES_MAX or total + size > HELD_BYTES_MAX:
                orders += self.drop_all(kept)
                continue
            total += size
            held.append(message)
            for choice in kept:
                choice.session = self.session
        self._unknown = sum(choice.session != self.session for choice in self.open.values())
        return held, orders

    # ── orders of the router ─────────────────────────────────────────────────────────────────────────────────────────────

    def is_unanswered(self, ticket: int) -> bool:
        """Whether a ticket of this session's router is unanswered."""
        return any(group.place.ticket == ticket and group.session == self.session for group in self.unanswered.values())

    def place(self, place: PlaceAttempt) -> list[ToEngine]:
        older = [choice for item in place.group if (choice := self._by_request_id.get(item.request_id)) is not None]
        orders = self.drop_all(older)
        group = PlacedGroup(self._next_ticket, place, self.session, remaining=len(place.group))
        self._next_ticket += 1
        for index, item in enumerate(place.group):
            counts = None if item.sampling.logprobs is None else array("i")
            choice = self._by_request_id[item.request_id] = PlacedChoice(group, index, self.session, counts=counts)
            group.choices.append(choice)
        self.unanswered[group.engine_ticket] = self._groups[group.engine_ticket] = group
        return [*orders, Submit(group.engine_ticket, place.group)]

    def drop(self, serials: Iterable[int]) -> list[ToEngine]:
        """Drop the choices with these serials; unknown serials are ignored."""
        choices = (self.open.get(serial) or self._ended.get(serial) for serial in serials)
        return self.drop_all([choice for choice in choices if choice is not None])

    def drop_everything(self) -> list[ToEngine]:
        return self.drop_all(self._all())

    def drop_all(self, choices: Sequence[PlacedChoice]) -> list[ToEngine]:
        """Drop these choices; returns the cancels for those that are open."""
        orders: list[ToEngine] = []
        for choice in choices:
            before = choice.state
            if not self._states.allows(before, HeldMove.DROP):
                continue  # already dropped
            after = self._move(choice, HeldMove.DROP)
            self._forget_request_id(choice)
            if after is HeldState.UNWANTED:
                orders.append(Cancel(choice.serial))
            if before is HeldState.ENDED:
                self._ended_bytes -= self._ended.pop(choice.serial).kept_bytes
            if after is HeldState.GONE:
                self._gone(choice)
        return orders

    # ── messages of the engine ───────────────────────────────────────────────────────────────────────────────────────────

    def answered(self, ticket: int) -> PlacedGroup:
        group = self.unanswered.pop(ticket, None)
        if group is None:
            raise WireError(f"the engine answered ticket {ticket}, which waits for no answer")
        return group

    def accept(self, group: PlacedGroup, serials: tuple[int, ...]) -> list[ToEngine]:
        if len(serials) != len(group.choices):
            raise WireError(f"{len(group.choices)} choices were accepted as {len(serials)} requests")
        orders: list[ToEngine] = []
        for choice, serial in zip(group.choices, serials, strict=True):
            choice.serial = serial
            self.open[serial] = choice
            if self._move(choice, HeldMove.ACCEPT) is HeldState.UNWANTED:
                orders.append(Cancel(serial))
        if group.session != self.session:
            self._unknown += len(group.choices)
        return orders

    def refuse(self, group: PlacedGroup) -> None:
        for choice in group.choices:
            self._move(choice, HeldMove.REFUSE)
            self._forget_request_id(choice)
            self._gone(choice)

    def known_of(self, output: StepOutput, serials: list[int]) -> StepOutput | None:
        """The part of a step's output that belongs to choices known to this session's router."""
        if not self._unknown:
            return output
        choices, session = self.open, self.session
        rows = [choices[serial].session == session for serial in serials]
        ended = [end for end in output.ended if choices[end.serial].session == session]
        return part_of(output, serials, rows, ended) if any(rows) or ended else None

    def record_output(self, output: StepOutput, serials: list[int]) -> None:
        choices, tokens, index = self.open, output.tokens, 0
        counts: list[int] = np.frombuffer(output.counts, dtype="<i4").tolist()
        for serial, count in zip(serials, counts, strict=True):
            choice, upto = choices[serial], index + 4 * count
            choice.tokens += tokens[index:upto]
            index = upto
            if choice.counts is not None:
                choice.counts.append(count)
        for item in output.logprobs:
            choices[serials[item.row]].note(item)
        for prompt in output.prompt_logprobs:
            choices[serials[prompt.row]].prompt_logprobs.append(prompt)
        for start in output.started:
            if start.serial in choices:
                choices[start.serial].cached_tokens = start.cached_tokens
        for end in output.ended:
            self._end(choices.pop(end.serial), end)

    def record_preemptions(self, preempted: Iterable[tuple[int, int]]) -> None:
        """Record how often the engine has preempted these serials so far; those of others are ignored."""
        for serial, count in preempted:
            choice = self.open.get(serial)
            if choice is not None:
                choice.preemptions = count

    def _end(self, choice: PlacedChoice, end: EndedRequest) -> None:
        if choice.session != self.session:
            self._unknown -= 1
        if self._move(choice, HeldMove.END) is HeldState.GONE:
            self._gone(choice)
            return
        choice.ended = end
        self._ended[choice.serial] = choice
        self._ended_bytes += choice.kept_bytes
        while len(self._ended) > ENDED_CHOICES_MAX or self._ended_bytes > ENDED_BYTES_MAX:
            self.drop_all([next(iter(self._ended.values()))])

    def _move(self, choice: PlacedChoice, move: HeldMove) -> HeldState:
        choice.state = self._states.after(choice.state, move)
        return choice.state

    def _forget_request_id(self, choice: PlacedChoice) -> None:
        if self._by_request_id.get(choice.submission.request_id) is choice:
            del self._by_request_id[choice.submission.request_id]

    def _gone(self, choice: PlacedChoice) -> None:
        group = choice.group
        group.remaining -= 1
        if not group.remaining:
            del self._groups[group.engine_ticket]
