"""The front end's table of what is open at one engine: tickets it waits for, serials whose tokens it hears.

    message = table.submit(group)      what travels to the engine
    took    = table.take(message)      what a message from it means: news for the clients, orders to send back
    lost    = table.lose(reason)       the engine is gone: everything open ends here

A ticket is the table's number for a submitted group. The engine answers it once; accepted, it becomes one serial for each
submission of the group. Each entry is in one state, and what can happen to it is one table:

    tickets                                           serials
    SUBMITTED ───────────────── accepted ───────────▶ OPEN ── let go ──▶ STOPPING
      │    └── refused, lost ──▶ gone                   └── ended, lost ──┴──▶ gone
      │ abandoned
      ▼
    ABANDONED ───────────────── accepted ───────────▶ UNWANTED ── ended, lost ──▶ gone
           └── refused, lost ──▶ gone

Promises: whoever submitted hears of each ticket and of each serial exactly one end and nothing after it, and nothing at all
of what it abandoned; every serial of an abandoned ticket is cancelled. It has no clock, socket or task in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import msgspec

from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import PeerTraffic, StoreTraffic
from baton.core.engine.orders import Accepted, Cancel, StopAt, Submit
from baton.core.engine.request import Submission
from baton.core.errors import BatonError, Refusal
from baton.core.state_machine import StateMachine
from baton.wire.engine_messages import (
    DecodedRows,
    FailedMessage,
    FromEngine,
    LogprobLine,
    Pulse,
    ReadyMessage,
    RefusedMessage,
    StepOutput,
    ToEngine,
    WireError,
    refusal_of,
)


class RequestTableClosed(BatonError):
    """The engine behind this table is gone; the message says why."""


class EntryState(Enum):
    SUBMITTED = "submitted"
    ABANDONED = "abandoned"
    """Nobody waits for the answer any more."""
    OPEN = "open"
    STOPPING = "stopping"
    """The engine was told to end it; tokens and the end still come."""
    UNWANTED = "unwanted"
    """Accepted after it was abandoned: cancelled, and nobody hears of it."""
    GONE = "gone"


class EntryMove(Enum):
    ABANDON = "abandoned"
    ACCEPT = "accepted"
    REFUSE = "refused"
    LET_GO = "let go"
    END = "ended"
    LOSE = "lost"


TRANSITIONS: dict[tuple[EntryState, EntryMove], EntryState] = {
    (EntryState.SUBMITTED, EntryMove.ACCEPT): EntryState.OPEN,
    (EntryState.SUBMITTED, EntryMove.REFUSE): EntryState.GONE,
    (EntryState.SUBMITTED, EntryMove.ABANDON): EntryState.ABANDONED,
    (EntryState.SUBMITTED, EntryMove.LOSE): EntryState.GONE,
    (EntryState.ABANDONED, EntryMove.ACCEPT): EntryState.UNWANTED,
    (EntryState.ABANDONED, EntryMove.REFUSE): EntryState.GONE,
    (EntryState.ABANDONED, EntryMove.LOSE): EntryState.GONE,
    (EntryState.OPEN, EntryMove.LET_GO): EntryState.STOPPING,
    (EntryState.OPEN, EntryMove.END): EntryState.GONE,
    (EntryState.OPEN, EntryMove.LOSE): EntryState.GONE,
    (EntryState.STOPPING, EntryMove.END): EntryState.GONE,
    (EntryState.STOPPING, EntryMove.LOSE): EntryState.GONE,
    (EntryState.UNWANTED, EntryMove.END): EntryState.GONE,
    (EntryState.UNWANTED, EntryMove.LOSE): EntryState.GONE,
}
"""Accepting moves a ticket into the state that its serials begin in."""

HEARD = (EntryState.OPEN, EntryState.STOPPING, EntryState.SUBMITTED)
"""States of what somebody waits for. The commonest comes first: this is looked up once a row."""


# ── what `take` and `lose` say ───────────────────────────────────────────────────────────────────────────────────────────


class GroupAccepted(msgspec.Struct, frozen=True):
    ticket: int
    serials: tuple[int, ...]
    """One for each submission of the group, in its order."""


class GroupDeclined(msgspec.Struct, frozen=True):
    ticket: int
    refusal: Refusal


class RequestProgress(msgspec.Struct, frozen=True):
    """What a step brought to one request. `ended` comes with the last news of a serial, which may have no token."""

    serial: int
    tokens: list[int]
    logprobs: list[LogprobLine] | None
    """One for each token where they were asked for."""
    cached_tokens: int | None
    """Prompt tokens that the prefix cache had; known from the first token on and said with it."""
    ended: EndedRequest | None


class EngineReady(msgspec.Struct, frozen=True):
    """The engine serves."""

    ready: ReadyMessage


class EngineFailed(msgspec.Struct, frozen=True):
    """The engine's last words. What is open stays so until `lose`."""

    reason: str


News = GroupAccepted | GroupDeclined | EngineReady | EngineFailed


class StepColumns(msgspec.Struct, frozen=True):
    """What a step brought to those who hear of it, as columns: no object is made for a token.

    Row i is for `serials[i]` and has the tokens from `begins[i]` to `ends[i]`. A request may also end without a row.
    """

    serials: list[int]
    begins: list[int]
    ends: list[int]
    tokens: list[int]
    logprobs: dict[int, list[LogprobLine]]
    """By row, where they were asked for."""
    cached: dict[int, int]
    """By serial, with its first token."""
    ended: dict[int, EndedRequest]
    """By serial."""

    def rows(self) -> Iterator[RequestProgress]:
        """The same, request by request; ends without a row come last."""
        over = dict(self.ended)
        for row, (serial, begin, end) in enumerate(zip(self.serials, self.begins, self.ends, strict=True)):
            tokens, cached = self.tokens[begin:end], self.cached.get(serial)
            yield RequestProgress(serial, tokens, self.logprobs.get(row), cached, over.pop(serial, None))
        for serial, ended in over.items():
            yield RequestProgress(serial, [], None, None, ended)


class TableNews(msgspec.Struct, frozen=True):
    news: list[News]
    """In the order in which it happened."""
    orders: list[ToEngine]
    """To be sent to the engine."""
    step: StepColumns | None = None


@dataclass(frozen=True, slots=True)
class LostEntry:
    """The end of what was open at an engine that is gone: a ticket before its answer, a serial after it."""

    ticket: int | None
    serial: int | None
    reason: str
    retryable: bool = True
    """Nothing was wrong with the request: another engine may be asked."""


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RequestTable:
    def __init__(self) -> None:
        self._next_ticket = 0
        self._tickets: dict[int, EntryState] = {}
        self._serials: dict[int, EntryState] = {}
        self._states = StateMachine(TRANSITIONS, "an entry")
        self._first_serial: int | None = None
        """Engines number requests upwards: what is below was accepted in an earlier conversation and is nobody's here."""
        self._lost: str | None = None
        self.late = 0
        """Rows that came for a request of which nobody hears any more, and messages that came after the loss."""

    @property
    def open_tickets(self) -> int:
        """Groups that the engine has not answered, abandoned ones included."""
        return len(self._tickets)

    @property
    def open_serials(self) -> int:
        """Requests that the engine has not ended, stopping and unwanted ones included."""
        return len(self._serials)

    @property
    def open_requests(self) -> int:
        return len(self._tickets) + len(self._serials)

    def moves(self) -> dict[tuple[EntryState, EntryMove], int]:
        """How often each transition was taken."""
        return self._states.moves()

    def submit(self, group: Sequence[Submission]) -> Submit:
        if self._lost is not None:
            raise RequestTableClosed(f"the engine is gone: {self._lost}")
        message = Submit(self._next_ticket, tuple(group))
        self._tickets[message.ticket] = EntryState.SUBMITTED
        self._next_ticket += 1
        return message

    def adopt(self, serial: int, wanted: bool = True) -> Cancel | None:
        """A request that the engine took in an earlier conversation; the order that ends it where nobody wants it."""
        if serial in self._serials:
            raise WireError(f"serial {serial} is open already")
        self._serials[serial] = EntryState.OPEN if wanted else EntryState.UNWANTED
        self._first_serial = serial if self._first_serial is None else min(self._first_serial, serial)
        return None if wanted else Cancel(serial)

    def abandon(self, ticket: int) -> None:
        """The client left before the answer. Does nothing after the answer: then there are serials to cancel."""
        if self._tickets.get(ticket) is EntryState.SUBMITTED:
            self._move(self._tickets, ticket, EntryMove.ABANDON)

    def cancel(self, serial: int) -> Cancel | None:
        """The order that ends a request whose client left; None when it has ended or was told to."""
        return Cancel(serial) if self._let_go(serial) else None

    def stop(self, serial: int, keep: int) -> StopAt | None:
        """The order that ends a request after `keep` tokens; None when it has ended or was told to."""
        return StopAt(serial, keep) if self._let_go(serial) else None

    def _let_go(self, serial: int) -> bool:
        if self._serials.get(serial) is not EntryState.OPEN:
            return False
        self._move(self._serials, serial, EntryMove.LET_GO)
        return True

    def take(self, message: FromEngine) -> TableNews:
        """A WireError means that the engine broke the rules of the conversation; nothing has changed then."""
        if self._lost is not None:
            self.late += 1
            return TableNews([], [])
        match message:
            case StepOutput():
                return self._step(message)
            case Accepted(ticket, serials):
                return self._accepted(ticket, serials)
            case RefusedMessage(ticket):
                heard = self._state_of(ticket) in HEARD
                self._move(self._tickets, ticket, EntryMove.REFUSE)
                return TableNews([GroupDeclined(ticket, refusal_of(message))] if heard else [], [])
            case ReadyMessage():
                return TableNews([EngineReady(message)], [])
            case FailedMessage(reason):
                return TableNews([EngineFailed(reason)], [])
            case PeerTraffic() | StoreTraffic() | Pulse():
                return TableNews([], [])

    def lose(self, reason: str) -> list[LostEntry]:
        """The engine is gone. Every ticket and serial that somebody hears of ends here; a second loss ends nothing."""
        if self._lost is not None:
            return []
        self._lost = reason
        ends = [LostEntry(ticket, None, reason) for ticket in _heard(self._tickets)]
        ends += [LostEntry(None, serial, reason) for serial in _heard(self._serials)]
        for book in (self._tickets, self._serials):
            for key in list(book):
                self._move(book, key, EntryMove.LOSE)
        return ends

    def _state_of(self, ticket: int) -> EntryState:
        state = self._tickets.get(ticket)
        if state is None:
            raise WireError(f"an answer to ticket {ticket}, which waits for none")
        return state

    def _accepted(self, ticket: int, serials: tuple[int, ...]) -> TableNews:
        before, known = self._state_of(ticket), [serial for serial in serials if serial in self._serials]
        if known or len(frozenset(serials)) != len(serials):
            raise WireError(
                f"ticket {ticket} was accepted as {serials}, of which {known} are open already or some are equal"
            )
        state = self._states.after(before, EntryMove.ACCEPT)
        del self._tickets[ticket]
        self._serials.update(dict.fromkeys(serials, state))
        if self._first_serial is None:
            self._first_serial = min(serials, default=None)
        if state is EntryState.UNWANTED:
            return TableNews([], [Cancel(serial) for serial in serials])
        return TableNews([GroupAccepted(ticket, serials)], [])

    def _step(self, output: StepOutput) -> TableNews:
        rows, serials = DecodedRows(output), self._serials
        unheard = [row for row, serial in enumerate(rows.serials) if serials.get(serial) not in HEARD]
        for row in unheard:
            serial = rows.serials[row]
            if serial not in serials and not self._is_of_before(serial):
                raise WireError(f"tokens for serial {serial}, which is not open")
        ended = self._ends(output.ended)
        self.late += len(unheard)
        cached: dict[int, int] = {start.serial: start.cached_tokens for start in output.started}
        step = _columns(rows, unheard, cached, {key: end for key, end in ended.items() if serials[key] in HEARD})
        for serial in ended:
            self._move(serials, serial, EntryMove.END)
        return TableNews([], [], step if step.serials or step.ended else None)

    def _is_of_before(self, serial: int) -> bool:
        """Whether a request was accepted in an earlier conversation with this engine."""
        return self._first_serial is None or serial < self._first_serial

    def _move(self, book: dict[int, EntryState], key: int, move: EntryMove) -> None:
        after = self._states.after(book[key], move)
        if after is EntryState.GONE:
            del book[key]
        else:
            book[key] = after

    def _ends(self, ended: tuple[EndedRequest, ...]) -> dict[int, EndedRequest]:
        by_serial: dict[int, EndedRequest] = {}
        for end in ended:
            if self._is_of_before(end.serial):
                self.late += 1
                continue
            if end.serial not in self._serials or end.serial in by_serial:
                raise WireError(f"an end of serial {end.serial}, which is not open")
            by_serial[end.serial] = end
        return by_serial


def _columns(rows: DecodedRows, unheard: list[int], cached: dict[int, int], ended: dict[int, EndedRequest]) -> StepColumns:
    ends = list(accumulate(rows.counts))
    begins = [end - count for end, count in zip(ends, rows.counts, strict=True)]
    if not unheard:  # almost always
        return StepColumns(rows.serials, begins, ends, rows.tokens, rows.logprobs, cached, ended)
    left_out = set(unheard)
    kept = [row for row in range(len(rows.serials)) if row not in left_out]
    return StepColumns(
        [rows.serials[row] for row in kept],
        [begins[row] for row in kept],
        [ends[row] for row in kept],
        rows.tokens,
        {place: rows.logprobs[row] for place, row in enumerate(kept) if row in rows.logprobs},
        cached,
        ended,
    )


def _heard(book: dict[int, EntryState]) -> list[int]:
    return [key for key, state in book.items() if state in HEARD]
