"""What is gathered of one HTTP request for its trace, while it is served. Values; no decisions, no text of a client's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.api.tracing.stage_notes import ChoiceHistory, StageNote
from baton.api.tracing.trace_context import CarriedTrace, TraceContext
from baton.core.engine.ended import Bill

SERVER_ERRORS = 500


@dataclass(frozen=True, slots=True)
class AskedParameters:
    """Parameters of a body, as the client gave them; None where it gave none."""

    operation: str
    """As GenAI's conventions name it: `chat` or `text_completion`."""
    model: str | None
    response_id: str
    response_model: str
    stream: bool
    choices: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What an accepted request came to."""

    finishes: Sequence[str]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    bill: Bill | None
    """Of all choices. None where it was not reported for one."""
    bills: Sequence[Bill | None]
    """By choice."""
    histories: Sequence[ChoiceHistory | None]
    """By choice."""


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The server span of one HTTP request, and what is known of it so far."""

    context: TraceContext
    """Of the server span."""
    parent_id: str
    """Empty for a root."""
    method: str
    path: str
    began_us: int
    request_id: str = ""
    tenant: str = ""
    """The beginning of a hash of the API key, as in the access log."""
    status: int = 0
    """HTTP status; 0 while the request is served."""
    error: str = ""
    """Code of the error that ended it."""
    failed: bool = False
    """The server could not do what was asked, whatever the HTTP status is: an answer may fail after its first bytes."""
    ended_us: int = 0
    submitted_us: int = 0
    asked: AskedParameters | None = None
    answer: AnswerFacts | None = None
    links: list[TraceContext] = field(default_factory=list)
    """Server spans of routers that had the request before, and the span of who resumes it, if that is another trace."""
    resumed: bool = False
    holders: int = 1
    """Parts of the server that have yet to add what they know."""

    def fail(self, error: str, status: int) -> None:
        """`status`: the HTTP status that the error has, whether or not it was sent."""
        self.error, self.failed = error, status >= SERVER_ERRORS

    @property
    def carried(self) -> str:
        return CarriedTrace(self.context, self.parent_id).encode()

    def join(self, carried: CarriedTrace) -> None:
        """This request resumes another one: its span belongs into that one's trace."""
        if self.parent_id and self.context.trace_id != carried.server.trace_id:
            self.links.append(TraceContext(self.context.trace_id, self.parent_id, self.context.sampled))
        self.links.append(carried.server)
        self.context = TraceContext(carried.server.trace_id, self.context.span_id, carried.server.sampled)
        self.parent_id, self.resumed = carried.parent_id, True


@dataclass(frozen=True, slots=True)
class FinishedTrace:
    """A request that has ended, with the notes of its choices as they were then."""

    trace: RequestTrace
    notes: tuple[tuple[StageNote, ...], ...]
    """By choice."""
    unix_offset_us: int
    """Unix time minus the time of the clock that notes have."""
