"""From a finished request to spans: one for the server, one for each attempt, one for each interval.

Attributes have the names of OpenTelemetry's semantic conventions for HTTP and generative AI where these have one, else names
that begin with `baton.`. None has text of a prompt or an answer. Pure but for the ids of spans, which are drawn here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.api.tracing.attempts import TracedAttempt, attempts_of
from baton.api.tracing.request_trace import SERVER_ERRORS, FinishedTrace, RequestTrace
from baton.api.tracing.trace_context import TraceContext

AttributeValue = str | bool | int | float | Sequence[str]
CHOICES_MAX = 16
"""Choices whose attempts are shown; more are only counted."""
CLIENT_ERRORS = 400
LOST = "lost"


@dataclass(frozen=True, slots=True)
class SpanLink:
    to: TraceContext
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    name: str
    context: TraceContext
    parent_id: str
    began_ns: int
    """Unix time."""
    ended_ns: int
    attributes: Mapping[str, AttributeValue]
    links: tuple[SpanLink, ...] = ()
    is_server: bool = False
    failure: str = ""
    """Not empty: the status of the span is an error."""


def spans_of(finished: FinishedTrace) -> list[FinishedSpan]:
    """The server's span first; each attempt comes before its intervals."""
    trace = finished.trace
    scale = _Scale(finished)
    links = tuple(SpanLink(link) for link in trace.links)
    failure = _error_of(trace) if trace.failed or trace.status >= SERVER_ERRORS else ""
    server = FinishedSpan(
        _server_name(trace), trace.context, trace.parent_id, scale.ns(trace.began_us), scale.ns(trace.ended_us),
        server_attributes(trace), links, is_server=True, failure=failure,
    )  # fmt: skip
    return [server, *_spans_of_choices(finished, scale)]


class _Scale:
    def __init__(self, finished: FinishedTrace) -> None:
        self._offset_us = finished.unix_offset_us

    def ns(self, at_us: int) -> int:
        return (at_us + self._offset_us) * 1000


def _spans_of_choices(finished: FinishedTrace, scale: _Scale) -> Iterator[FinishedSpan]:
    trace, answer = finished.trace, finished.trace.answer
    if answer is None:
        return
    began_us = max(trace.submitted_us, trace.began_us)
    for choice, (notes, bill) in enumerate(zip(finished.notes[:CHOICES_MAX], answer.bills, strict=False)):
        if trace.resumed and not notes:
            continue  # it had ended before it was resumed: the bill is of another time
        attempts = attempts_of(notes, began_us, trace.ended_us, bill)
        yield from _spans_of_choice(trace, choice, attempts, scale)


def _spans_of_choice(
    trace: RequestTrace, choice: int, attempts: Sequence[TracedAttempt], scale: _Scale
) -> Iterator[FinishedSpan]:
    before: TraceContext | None = None
    for number, attempt in enumerate(attempts, 1):
        context = _child_of(trace)
        came_from = attempts[number - 2]
        links = () if before is None else (SpanLink(before, {"baton.move.cause": came_from.cause}),)
        failure = attempt.cause if attempt.cause == LOST else ""
        attributes = _attempt_attributes(choice, number, attempt)
        began_ns, ended_ns = scale.ns(attempt.began_us), scale.ns(attempt.ended_us)
        yield FinishedSpan("attempt", context, trace.context.span_id, began_ns, ended_ns, attributes, links, failure=failure)
        for interval in attempt.intervals:
            attributes = _present({"baton.choice": choice, "baton.instance": interval.where or None})
            began_ns, ended_ns = scale.ns(interval.began_us), scale.ns(interval.ended_us)
            yield FinishedSpan(interval.name, _child_of(trace), context.span_id, began_ns, ended_ns, attributes)
        before = context


def _child_of(trace: RequestTrace) -> TraceContext:
    return TraceContext(trace.context.trace_id, new_span_id(), trace.context.sampled)


def new_span_id() -> str:
    return f"{secrets.randbits(64) or 1:016x}"


def new_trace_id() -> str:
    return f"{secrets.randbits(128) or 1:032x}"


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _server_name(trace: RequestTrace) -> str:
    asked = trace.asked
    return f"{trace.method} {trace.path}" if asked is None else f"{asked.operation} {asked.response_model}"


def _error_of(trace: RequestTrace) -> str:
    return trace.error or (str(trace.status) if trace.status >= CLIENT_ERRORS else "")


def server_attributes(trace: RequestTrace) -> dict[str, AttributeValue]:
    given: dict[str, AttributeValue | None] = {
        "http.request.method": trace.method,
        "http.route": trace.path,
        "url.path": trace.path,
        "http.response.status_code": trace.status,
        "baton.request.id": trace.request_id,
        "baton.tenant": trace.tenant or None,
        "baton.resumed": trace.resumed or None,
        "error.type": _error_of(trace) or None,
    }
    return _present(given | _asked_attributes(trace) | _answer_attributes(trace))


def _asked_attributes(trace: RequestTrace) -> dict[str, AttributeValue | None]:
    asked = trace.asked
    if asked is None:
        return {}
    return {
        "gen_ai.operation.name": asked.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": asked.model or asked.response_model,
        "gen_ai.response.model": asked.response_model,
        "gen_ai.response.id": asked.response_id,
        "gen_ai.request.stream": asked.stream,
        "gen_ai.request.choice.count": asked.choices if asked.choices != 1 else None,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.top_k": asked.top_k,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.presence_penalty": asked.presence_penalty,
        "gen_ai.request.frequency_penalty": asked.frequency_penalty,
        "gen_ai.request.seed": asked.seed,
    }


def _answer_attributes(trace: RequestTrace) -> dict[str, AttributeValue | None]:
    answer = trace.answer
    if answer is None:
        return {}
    given: dict[str, AttributeValue | None] = {
        "gen_ai.response.finish_reasons": tuple(answer.finishes),
        "gen_ai.usage.input_tokens": answer.prompt_tokens,
        "gen_ai.usage.output_tokens": answer.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.cached_tokens,
    }
    bill = answer.bill
    if bill is None:
        return given
    return given | {
        "baton.tokens.computed": bill.computed_tokens,
        "baton.tokens.recomputed": bill.recomputed_tokens,
        "baton.tokens.restored": bill.restored_tokens,
        "baton.preemptions": bill.preemptions,
    }


def _attempt_attributes(choice: int, number: int, attempt: TracedAttempt) -> dict[str, AttributeValue]:
    return _present(
        {
            "baton.choice": choice,
            "baton.attempt": number,
            "baton.instance": attempt.where or None,
            "baton.move.cause": attempt.cause or None,
            "baton.move.reason": attempt.reason or None,
            "error.type": attempt.cause if attempt.cause == LOST else None,
        }
    )


def _present(given: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in given.items() if value is not None}
