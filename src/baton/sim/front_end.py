"""The front end of a simulated cluster without a router: a production RequestTable per instance and session, in rotation.

Owns which request is open at which instance. Instances are used in turn, skipping those that do not serve; if none does, the
submission fails at once. Events are passed to submitters. There are no retries and no choice by load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from baton.core.engine.ended import EndedRequest
from baton.core.engine.orders import Accepted, Cancel, Drain
from baton.core.engine.request import PromptLogprobs, Submission
from baton.core.errors import Refusal
from baton.sim.law_names import ENDS_AT_ONCE, LawBroken
from baton.sim.lines import LineEndpoint
from baton.wire.engine_messages import FromEngine, LogprobLine, ToEngine, decode_from_engine, encode_to_engine
from baton.wire.request_table import (
    EngineFailed,
    EngineReady,
    GroupAccepted,
    GroupDeclined,
    LostEntry,
    RequestTable,
    StepColumns,
)


class Submitter(Protocol):
    """Made a submission and gets its events. `place` is the index of a choice in the group."""

    def opened(self) -> None: ...

    def declined(self, refusal: Refusal) -> None: ...

    def progress(
        self,
        place: int,
        tokens: list[int],
        begin: int,
        end: int,
        cached_tokens: int | None,
        ended: EndedRequest | None,
        logprobs: Sequence[LogprobLine] | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        """`tokens[begin:end]` are new tokens of this choice; `logprobs` has a line for each where they were asked for."""

    def lost(self, place: int | None, end: LostEntry) -> None:
        """The instance is lost; `place` is None when it had not accepted the submission yet."""


class SubmittedGroup:
    """A submitted group, for its submitter. It belongs to one session and has no effect after that."""

    def __init__(self, instance_table: InstanceTable, ticket: int) -> None:
        self.instance = instance_table.number
        self._instance_table = instance_table
        self._request_table = instance_table.request_table
        self._ticket = ticket
        self.serials: tuple[int, ...] | None = None
        """None until the instance has accepted the group."""

    @property
    def where(self) -> str:
        return str(self.instance)

    @property
    def is_early(self) -> bool:
        """Whether the instance has not answered yet."""
        return self.serials is None

    def leave(self) -> bool:
        """Cancel: the submitter is gone. Returns whether it gets no further events."""
        if self.serials is None:
            self._instance_table.forget(self._ticket, self._request_table)
            return True
        for serial in self.serials:
            self._instance_table.order(self._request_table.cancel(serial))
        return False

    def stop(self, place: int, keep: int) -> None:
        if self.serials is not None:
            self._instance_table.order(self._request_table.stop(self.serials[place], keep))


class InstanceTable:
    """The front end's side of one instance: a new RequestTable for each session."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.request_table = RequestTable()
        self.serves = False
        """Whether the instance has reported ready in a session that is not lost."""
        self.line: LineEndpoint | None = None
        self.former_tables: list[RequestTable] = []
        """Tables of lost sessions."""
        self._pending: dict[int, tuple[Submitter, SubmittedGroup]] = {}
        self._callers: dict[int, tuple[Submitter, int]] = {}
        self._outbox: deque[bytes] = deque()
        self._abandoned: list[int] = []
        """Tickets whose submitters left before the answer."""

    def submit(self, group: Sequence[Submission], caller: Submitter) -> SubmittedGroup:
        message = self.request_table.submit(group)
        booking = SubmittedGroup(self, message.ticket)
        self._pending[message.ticket] = (caller, booking)
        self.order(message)
        return booking

    def forget(self, ticket: int, request_table: RequestTable) -> None:
        """The submitter left before the answer."""
        request_table.abandon(ticket)
        if request_table is self.request_table:
            self._abandoned.append(ticket)
            self._pending.pop(ticket, None)

    def drain(self) -> None:
        self.order(Drain())

    @property
    def can_take(self) -> bool:
        """Whether a new request may be sent to the instance now."""
        return self.serves and not self._outbox and self.line is not None and not self.line.is_full

    def order(self, message: ToEngine | None) -> None:
        """Send a message; it waits in the outbox while the line is full."""
        if message is not None:
            self._outbox.append(encode_to_engine(message))
            self._post()

    def _post(self) -> None:
        while self._outbox and self.line is not None and not self.line.is_full:
            self.line.send(self._outbox.popleft())

    # ── from the line ────────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> None:
        """The session is open; the instance serves once it reports ready."""

    def lost(self, reason: str) -> None:
        """The session is lost: every open request of it ends as lost."""
        self.serves = False
        self._outbox.clear()
        self._abandoned.clear()
        gone, self.request_table = self.request_table, RequestTable()
        pending, self._pending = self._pending, {}
        callers, self._callers = self._callers, {}
        for end in gone.lose(reason):
            if end.ticket is not None:
                pending[end.ticket][0].lost(None, end)
            elif end.serial is not None:
                caller, place = callers[end.serial]
                caller.lost(place, end)
        self.former_tables.append(gone)

    def took(self, frames: list[bytes]) -> None:
        self._post()
        for frame in frames:
            message = decode_from_engine(frame)
            took = self.request_table.take(message)
            self._check_the_abandoned(message, took.orders)
            for order in took.orders:
                self.order(order)
            if took.step is not None:
                self._deliver(took.step)
            for news in took.news:
                match news:
                    case GroupAccepted(ticket, serials):
                        caller, booking = self._pending.pop(ticket)
                        self._callers.update({serial: (caller, place) for place, serial in enumerate(serials)})
                        booking.serials = serials
                        caller.opened()
                    case GroupDeclined(ticket, refusal):
                        self._pending.pop(ticket)[0].declined(refusal)
                    case EngineReady():
                        self.serves = True
                    case EngineFailed(reason):
                        self.lost(reason)

    def _check_the_abandoned(self, message: FromEngine, orders: list[ToEngine]) -> None:
        """Check that every choice accepted for a client that had left is cancelled."""
        if isinstance(message, Accepted) and message.ticket in self._abandoned:
            self._abandoned.remove(message.ticket)
            if orders != [Cancel(serial) for serial in message.serials]:
                raise LawBroken(ENDS_AT_ONCE, f"{message} came for a client that had left, and only {orders} went back")

    def _deliver(self, step: StepColumns) -> None:
        """Pass each submitter the range of its tokens in the step's list, without copies."""
        callers, ended, tokens = self._callers, dict(step.ended), step.tokens
        for row, (serial, begin, end) in enumerate(zip(step.serials, step.begins, step.ends, strict=True)):
            over = ended.pop(serial, None) if ended else None
            caller, place = callers.pop(serial) if over is not None else callers[serial]
            lines, prompt = step.logprobs.get(row), step.prompt_logprobs.get(row)
            parts = () if prompt is None else (prompt,)
            caller.progress(place, tokens, begin, end, step.cached.get(serial), over, lines, parts)
        for serial, over in ended.items():
            caller, place = callers.pop(serial)
            caller.progress(place, tokens, 0, 0, None, over)


class FrontEnd:
    """Spreads requests over the serving instances in turn."""

    def __init__(self, instance_tables: Sequence[InstanceTable], serving: Sequence[int] | None = None) -> None:
        """`serving`: numbers of the instances that take requests of clients; None: all."""
        self.instance_tables = instance_tables
        self.serving_tables = instance_tables if serving is None else [instance_tables[number] for number in serving]
        self._turn = 0

    def submit(self, group: Sequence[Submission], caller: Submitter) -> SubmittedGroup | None:
        """None if no instance can take it."""
        for _ in self.serving_tables:
            instance_table = self.serving_tables[self._turn % len(self.serving_tables)]
            self._turn += 1
            if instance_table.can_take:
                return instance_table.submit(group, caller)
        return None

    def serving(self) -> dict[int, bool]:
        return {instance_table.number: instance_table.serves for instance_table in self.serving_tables}

    @property
    def open_requests(self) -> int:
        return sum(instance_table.request_table.open_requests for instance_table in self.instance_tables)
