"""The state of every ticket and every request that is open at one engine.

    message = table.submit(group)      the message to send to the engine
    took    = table.take(message)      the effects of a message from it: news for the clients, orders to send back
    lost    = table.lose(reason)       the engine is gone: everything open ends

A ticket is the table's number for a submitted group. The engine answers it once; when accepted, it becomes one serial for
each submission of the group. Each entry is in one state:

    tickets                                           serials
    SUBMITTED ───────────────── accepted ───────────▶ OPEN ── let go ──▶ STOPPING
      │    └── refused, lost ──▶ gone                   └── ended, lost ──┴──▶ gone
      │ abandoned
      ▼
    ABANDONED ───────────────── accepted ───────────▶ UNWANTED ── ended, lost ──▶ gone
           └── refused, lost ──▶ gone

Promises: each ticket and each serial is reported ended exactly once, with nothing after it; abandoned ones are never
reported; every serial of an abandoned ticket is cancelled. Pure: no clock, socket or task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import KvEventTraffic, PeerTraffic, StepSizes, StoreTraffic
from baton.core.engine.orders import Accepted, Cancel, StopAt, Submit
from baton.core.engine.request import PromptLogprobs, Submission
from baton.core.errors import BatonError, Refusal
from baton.core.state_machine import FastEnum, StateMachine
from baton.wire.engine_messages import (
    DecodedRows,
    DrainBegun,
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
    """The engine of this table is gone; the message says why."""


class EntryState(FastEnum):
    SUBMITTED = "submitted"
    ABANDONED = "abandoned"
    """The submitter no longer waits for the answer."""
    OPEN = "open"
    STOPPING = "stopping"
    """A stop or cancel was sent; tokens and the end still come."""
    UNWANTED = "unwanted"
    """Accepted after it was abandoned: cancelled, and not reported."""
    GONE = "gone"


class EntryMove(FastEnum):
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
"""ACCEPT moves a ticket into the first state of its serials."""

REPORTED = (EntryState.OPEN, EntryState.STOPPING, EntryState.SUBMITTED)
"""States whose progress is reported. The most common comes first: this is looked up once per row."""


# ── results of `take` and `lose` ─────────────────────────────────────────────────────────────────────────────────────────


class GroupAccepted(msgspec.Struct, frozen=True):
    ticket: int
    serials: tuple[int, ...]
    """One for each submission, in the order of the group."""


class GroupDeclined(msgspec.Struct, frozen=True):
    ticket: int
    refusal: Refusal


class RequestProgress(msgspec.Struct, frozen=True):
    """The output of one step for one request. `ended` is set in the last one of a serial, which may have no token."""

    serial: int
    tokens: list[int]
    logprobs: list[LogprobLine] | None
    """One for each token, where asked for."""
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; set with the first token."""
    ended: EndedRequest | None
    prompt_logprobs: PromptLogprobs | None = None


class EngineReady(msgspec.Struct, frozen=True):
    """The engine is ready to serve."""

    ready: ReadyMessage


class EngineFailed(msgspec.Struct, frozen=True):
    """The engine reported its failure. Open entries stay open until `lose`."""

    reason: str
    by_setup: bool = False
    """Another start ends in the same way."""


News = GroupAccepted | GroupDeclined | EngineReady | EngineFailed


class StepColumns(msgspec.Struct, frozen=True):
    """The reported output of one step, as columns: no object is made per token.

    Row i belongs to `serials[i]` and has the tokens from `begins[i]` to `ends[i]`. A request may also end without a row.
    """

    serials: list[int]
    begins: list[int]
    ends: list[int]
    tokens: list[int]
    logprobs: dict[int, list[LogprobLine]]
    """By row, where asked for."""
    cached: dict[int, int]
    """By serial: prompt tokens found in the prefix cache, with its first token."""
    ended: dict[int, EndedRequest]
    """By serial."""
    prompt_logprobs: dict[int, PromptLogprobs]
    """By row, where asked for."""

    def rows(self) -> Iterator[RequestProgress]:
        """The same, one object per request; ends without a row come last."""
        over = dict(self.ended)
        for row, (serial, begin, end) in enumerate(zip(self.serials, self.begins, self.ends, strict=True)):
            tokens, cached = self.tokens[begin:end], self.cached.get(serial)
            prompt = self.prompt_logprobs.get(row)
            yield RequestProgress(serial, tokens, self.logprobs.get(row), cached, over.pop(serial, None), prompt)
        for serial, ended in over.items():
            yield RequestProgress(serial, [], None, None, ended)


class TableNews(msgspec.Struct, frozen=True):
    news: list[News]
    """In order of occurrence."""
    orders: list[ToEngine]
    """To send to the engine."""
    step: StepColumns | None = None


@dataclass(frozen=True, slots=True)
class LostEntry:
    """An entry that was open when the engine was lost: a ticket before its answer, a serial after it."""

    ticket: int | None
    serial: int | None
    reason: str
    retryable: bool = True
    """Whether another engine may be asked: the request itself was not at fault."""


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RequestTable:
    def __init__(self) -> None:
        self._next_ticket = 0
        self._tickets: dict[int, EntryState] = {}
        self._serials: dict[int, EntryState] = {}
        self._states = StateMachine(TRANSITIONS, "an entry")
        self._first_serial: int | None = None
        """Engines number requests upwards: a lower serial was accepted in an earlier session and is ignored here."""
        self._loss: str | None = None
        self.late = 0
        """Rows of requests that are no longer reported, and messages received after the loss."""

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
        """Count of each transition taken."""
        return self._states.moves()

    def submit(self, group: Sequence[Submission]) -> Submit:
        if self._loss is not None:
            raise RequestTableClosed(f"the engine is gone: {self._loss}")
        message = Submit(self._next_ticket, tuple(group))
        self._tickets[message.ticket] = EntryState.SUBMITTED
        self._next_ticket += 1
        return message

    def adopt(self, serial: int, wanted: bool = True) -> Cancel | None:
        """Add a request that the engine accepted in an earlier session. Returns its cancel where it is not wanted."""
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
        """The cancel for a request; None when it has ended or was stopped or cancelled before."""
        return Cancel(serial) if self._stop_open(serial) else None

    def stop(self, serial: int, keep: int) -> StopAt | None:
        """The order that ends a request after `keep` tokens; None when it has ended or was stopped or cancelled before."""
        return StopAt(serial, keep) if self._stop_open(serial) else None

    def _stop_open(self, serial: int) -> bool:
        if self._serials.get(serial) is not EntryState.OPEN:
            return False
        self._move(self._serials, serial, EntryMove.LET_GO)
        return True

    def take(self, message: FromEngine) -> TableNews:
        """Raises WireError where the engine broke the protocol; nothing has changed then."""
        if self._loss is not None:
            self.late += 1
            return TableNews([], [])
        match message:
            case StepOutput():
                return self._step(message)
            case Accepted(ticket, serials):
                return self._accepted(ticket, serials)
            case RefusedMessage(ticket):
                is_reported = self._state_of(ticket) in REPORTED
                self._move(self._tickets, ticket, EntryMove.REFUSE)
                return TableNews([GroupDeclined(ticket, refusal_of(message))] if is_reported else [], [])
            case ReadyMessage():
                return TableNews([EngineReady(message)], [])
            case FailedMessage(reason, by_setup):
                return TableNews([EngineFailed(reason, by_setup)], [])
            case PeerTraffic() | StoreTraffic() | KvEventTraffic() | StepSizes() | Pulse() | DrainBegun():
                return TableNews([], [])

    def lose(self, reason: str) -> list[LostEntry]:
        """The engine is gone: end every ticket and serial, and return those that are reported. A second call returns
        nothing."""
        if self._loss is not None:
            return []
        self._loss = reason
        ends = [LostEntry(ticket, None, reason) for ticket in _reported(self._tickets)]
        ends += [LostEntry(None, serial, reason) for serial in _reported(self._serials)]
        for entries in (self._tickets, self._serials):
            for key in list(entries):
                self._move(entries, key, EntryMove.LOSE)
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
        unreported = [row for row, serial in enumerate(rows.serials) if serials.get(serial) not in REPORTED]
        for row in unreported:
            serial = rows.serials[row]
            if serial not in serials and not self._is_of_earlier_session(serial):
                raise WireError(f"tokens for serial {serial}, which is not open")
        ended = self._ends(output.ended)
        self.late += len(unreported)
        cached: dict[int, int] = {start.serial: start.cached_tokens for start in output.started}
        step = _columns(rows, unreported, cached, {key: end for key, end in ended.items() if serials[key] in REPORTED})
        for serial in ended:
            self._move(serials, serial, EntryMove.END)
        return TableNews([], [], step if step.serials or step.ended else None)

    def _is_of_earlier_session(self, serial: int) -> bool:
        """Whether the request was accepted in an earlier session with this engine."""
        return self._first_serial is None or serial < self._first_serial

    def _move(self, entries: dict[int, EntryState], key: int, move: EntryMove) -> None:
        after = self._states.after(entries[key], move)
        if after is EntryState.GONE:
            del entries[key]
        else:
            entries[key] = after

    def _ends(self, ended: tuple[EndedRequest, ...]) -> dict[int, EndedRequest]:
        by_serial: dict[int, EndedRequest] = {}
        for end in ended:
            if self._is_of_earlier_session(end.serial):
                self.late += 1
                continue
            if end.serial not in self._serials or end.serial in by_serial:
                raise WireError(f"an end of serial {end.serial}, which is not open")
            by_serial[end.serial] = end
        return by_serial


def _columns(
    rows: DecodedRows, unreported: list[int], cached: dict[int, int], ended: dict[int, EndedRequest]
) -> StepColumns:
    ends = list(accumulate(rows.counts))
    begins = [end - count for end, count in zip(ends, rows.counts, strict=True)]
    if not unreported:  # the usual case
        return StepColumns(
            rows.serials, begins, ends, rows.tokens, rows.logprobs, cached, ended, rows.prompt_logprobs
        )  # fmt: skip
    left_out = set(unreported)
    kept = [row for row in range(len(rows.serials)) if row not in left_out]
    return StepColumns(
        [rows.serials[row] for row in kept],
        [begins[row] for row in kept],
        [ends[row] for row in kept],
        rows.tokens,
        {place: rows.logprobs[row] for place, row in enumerate(kept) if row in rows.logprobs},
        cached,
        ended,
        {place: rows.prompt_logprobs[row] for place, row in enumerate(kept) if row in rows.prompt_logprobs},
    )


def _reported(entries: dict[int, EntryState]) -> list[int]:
    return [key for key, state in entries.items() if state in REPORTED]
