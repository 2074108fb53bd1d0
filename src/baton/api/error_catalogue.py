"""What each error code means to a client: the statuses that it comes with, and whether the same request may be sent again.

Nothing that serves reads this. It is the source of docs/reference/errors.md; tests/surface/test_error_catalogue.py
compares it with the codes and statuses in the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from baton.api.errors import refused
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.faults import PdCode


class Again(StrEnum):
    """Whether the same request may be sent again."""

    NO = "no"
    LATER = "yes, later"
    ELSEWHERE = "at another address"


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """`code` as in the error object; a number is the code of a hand-over."""

    code: str
    statuses: tuple[int, ...]
    again: Again
    meaning: str


_BY_REQUEST = {
    "invalid_value": "A field or header has a value that is not allowed; `param` names it.",
    "missing_required_parameter": "A field that is needed is missing; `param` names it.",
    "unsupported_parameter": "The field asks for something that this server does not do, or only a router may set it.",
    "tls_to_plain_http": "The port speaks plain HTTP, not TLS: use http://.",
    "plain_http_to_tls": "The port speaks TLS, not plain HTTP: use https://.",
    "invalid_json": "The body is not JSON, or not an object.",
    "bad_cluster_proof": "The proof of a router's cluster key does not hold; the message says why.",
    "request_too_costly": "Choices × tokens × log-probabilities exceed `--max-request-cost`.",
    "unsupported_constraint": "It cannot be enforced exactly; the message names the field and the place inside it.",
    "constraint_too_complex": "Compiling the constraint exceeds its limits of size, time or memory.",
    "bad_request": "What came is not HTTP.",
}
_OTHERS = (
    ErrorEntry(
        "request_too_large", (400, 413), Again.NO, "The body, the tools or the text to tokenise exceed their limit of size."
    ),
    ErrorEntry("invalid_api_key", (401,), Again.NO, "The API key or admin key is missing or unknown."),
    ErrorEntry("admin_key_needed", (403,), Again.NO, "Only the router's admin key may do this."),
    ErrorEntry("metrics_key_needed", (403,), Again.NO, "Only the metrics key or the admin key may read the metrics."),
    ErrorEntry(
        "forbidden", (403,), Again.NO, "The dashboard's button works from the router's own page on this machine alone."
    ),
    ErrorEntry("not_for_pages", (403,), Again.NO, "A page in a browser may not drain instances."),
    ErrorEntry(
        "router_only", (403,), Again.ELSEWHERE, "This instance has no API keys and its router has: send it to the router."
    ),
    ErrorEntry("not_found", (404,), Again.NO, "No such path, open request or instance."),
    ErrorEntry("model_not_found", (404,), Again.NO, "`model` names none that is served."),
    ErrorEntry("method_not_allowed", (405,), Again.NO, "The path is there, but not with this method."),
    ErrorEntry("header_timeout", (408,), Again.LATER, "The header of the request took too long to come."),
    ErrorEntry("body_timeout", (408,), Again.LATER, "The body of the request took too long to come."),
    ErrorEntry("still_read", (409,), Again.LATER, "Another connection still reads this stream; resume once that is closed."),
    ErrorEntry(
        "idempotency_too_large", (409,), Again.NO, "The answer under this `Idempotency-Key` was too large to be given twice."
    ),
    ErrorEntry(
        "cannot_resume", (410,), Again.NO, "The stream cannot be continued: log-probabilities were lost with an instance."
    ),
    ErrorEntry("url_too_long", (414,), Again.NO, "The URL exceeds 8 KiB."),
    ErrorEntry("unsupported_media_type", (415,), Again.NO, "The body is not `application/json`."),
    ErrorEntry(
        "host_not_allowed", (421,), Again.NO, "Without API keys only loopback names and `--allowed-hosts` are answered."
    ),
    ErrorEntry("idempotency_mismatch", (422,), Again.NO, "The `Idempotency-Key` was used with another body."),
    ErrorEntry("constraint_failed", (422,), Again.NO, "The matcher of the constraint gave up in the middle of the answer."),
    ErrorEntry("idempotency_busy", (429,), Again.LATER, "Too much is being read again by `Idempotency-Key` at once."),
    ErrorEntry(
        "too_many_from_address",
        (429, 503),
        Again.LATER,
        "One address has `--max-connections-per-address` connections, or requests behind a proxy.",
    ),
    ErrorEntry("header_too_large", (431,), Again.NO, "The header exceeds 32 KiB or 100 fields."),
    ErrorEntry("internal_error", (500,), Again.LATER, "A bug; the log has the traceback under the request's id."),
    ErrorEntry("engine_dead", (503,), Again.LATER, "The engine process ended or stalled; its supervisor starts it again."),
    ErrorEntry(
        "request_failed",
        (503,),
        Again.LATER,
        "Scheduler and executor disagreed about this request; others are not affected.",
    ),
    ErrorEntry("busy", (503,), Again.LATER, "Too much text, too many constraints or unfinished bodies wait, over all keys."),
    ErrorEntry("unavailable", (503,), Again.LATER, "No process that compiles constraints could be had in time."),
    ErrorEntry(
        "router_not_reached",
        (503,),
        Again.LATER,
        "This instance has not reached its router yet, so it does not know its keys.",
    ),
    ErrorEntry("too_many_connections", (503,), Again.LATER, "All connections are at work and none of them gives way."),
)
_REFUSALS = {
    RefusalCode.EMPTY_PROMPT: "The prompt has no tokens.",
    RefusalCode.CONTEXT_EXCEEDED: "Prompt and answer exceed the model's context or `--max-model-len`.",
    RefusalCode.POOL_EXCEEDED: "The request needs more KV blocks than the whole pool has; it could never run.",
    RefusalCode.NOT_IN_VOCABULARY: "A token id is outside the model's vocabulary.",
    RefusalCode.QUEUE_FULL: "The queue has `--max-waiting` requests.",
    RefusalCode.GROUP_TOO_LARGE: "One body has more choices, or more bytes, than the queue or a message may hold.",
    RefusalCode.TOO_MANY_CHOICES: "The body has more choices than its key may ever have open.",
    RefusalCode.DUPLICATE_ID: "Another open request has this `X-Request-Id`.",
    RefusalCode.DRAINING: "The server finishes what it has and accepts nothing new.",
    RefusalCode.WRONG_ROLE: "This instance only prefills for others.",
    RefusalCode.NOTHING_LEFT: "The tokens to continue from are already a complete answer.",
    RefusalCode.NO_INSTANCE: "The router has no instance that could serve it.",
    RefusalCode.NO_BACKEND: "The instance lacks the backend that could enforce the constraint.",
    RefusalCode.OTHER_BACKEND_VERSION: "The answer began under a version of the backend that allows other tokens here.",
    RefusalCode.RATE_LIMITED: "A limit of this key is reached: requests, tokens a minute, open cost, or bytes that wait.",
}
_HAND_OVERS = {
    PdCode.REFUSED: "No instance had room for the request.",
    PdCode.NOT_DELIVERED: "The KV did not arrive, did not verify, or its instance was lost.",
    PdCode.PREEMPTED: "The instance needed the request's KV blocks for others, and it could not be moved.",
    PdCode.TIMEOUT: "The prefill never arrived, or no instance accepted the request within `--request-timeout`.",
}


def error_entries() -> Iterator[ErrorEntry]:
    """Every code that a client can get, those of hand-overs last."""
    entries = [ErrorEntry(code, (400,), Again.NO, meaning) for code, meaning in _BY_REQUEST.items()]
    entries += [*_OTHERS, *(_refusal(code, meaning) for code, meaning in _REFUSALS.items())]
    yield from sorted(entries, key=lambda entry: (entry.statuses, entry.code))
    for code, meaning in _HAND_OVERS.items():
        yield ErrorEntry(str(int(code)), (503,), Again.LATER, meaning)


def _refusal(code: RefusalCode, meaning: str) -> ErrorEntry:
    status = refused(Refusal(code, ""), None).status
    again = {421: Again.ELSEWHERE, 400: Again.NO}.get(status, Again.LATER)
    return ErrorEntry(code.value, (status,), again, meaning)
