"""Errors as the OpenAI API shapes them: `{"error": {"message", "type", "param", "code"}}`, and which status each one has.

At the paths of the Messages API they have its shape: `{"type": "error", "error": {"type", "message"}}`.

Owns the mapping from refusals and validation failures to statuses. Promises that `param` names the field to blame
wherever there is one. Does not know about routes or streaming; a stream sends the same object as one SSE event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from baton.api.paths import speaks_messages
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.faults import PdFault

_encode = msgspec.json.Encoder().encode

_REFUSAL_STATUS = {
    RefusalCode.QUEUE_FULL: 429,
    RefusalCode.RATE_LIMITED: 429,
    RefusalCode.NO_INSTANCE: 503,
    RefusalCode.DRAINING: 503,
    RefusalCode.DUPLICATE_ID: 409,
    # Misdirected: right request, wrong instance. It will never be served here, so nothing that clients or balancers try
    # again at the same address (429, 503); nothing is wrong with a field of it either (400).
    RefusalCode.WRONG_ROLE: 421,
}
_ADVICE = {RefusalCode.WRONG_ROLE: "send it to an instance of the role decode or mixed"}
_REFUSAL_TYPE = {429: "rate_limit_error", 503: "service_unavailable_error"}
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Of the Messages API."""
_RETRY_AFTER_S = 1
_MESSAGE_CHARS_MAX = 1000
"""Longest error message; a hostile body is never echoed whole."""


@dataclass(eq=False)  # not frozen: Python writes tracebacks into exceptions
class ApiError(Exception):
    """An error response. Raised anywhere below a route, rendered by one handler."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the error object; they override the usual ones."""

    def body(self) -> bytes:
        usual = {"message": shortened(self.message), "type": self.type, "param": self.param, "code": self.code}
        return _encode({"error": {**usual, **self.details}})

    def messages_body(self) -> bytes:
        """The same error in the shape of the Messages API; what its error object lacks stays as further fields."""
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        extra = {"param": self.param, "code": self.code, **self.details}
        further = {name: value for name, value in extra.items() if value is not None}
        return _encode({"type": "error", "error": {"type": kind, "message": shortened(self.message), **further}})

    def response(self, path: str = "") -> Response:
        """`path`: where the client asked, which decides the shape."""
        body = self.messages_body() if speaks_messages(path) else self.body()
        return Response(body, self.status, dict(self.headers), "application/json")


def shortened(message: str) -> str:
    return message if len(message) <= _MESSAGE_CHARS_MAX else message[:_MESSAGE_CHARS_MAX] + "…"


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


class InternalField(ApiError):
    """A client set a field that only a router may send to its instances. Counted in a metric."""

    def __init__(self, name: str) -> None:
        self.field = name
        message = f"'{name}' is internal and cannot be set by a client"
        super().__init__(400, message, param=name, code="unsupported_parameter")

    def unless(self, way: str) -> ApiError:
        """The same, with the way in which it may be set."""
        self.message += f"; {way}"
        return self


def unsupported(param: str, message: str) -> ApiError:
    return invalid(param, message, "unsupported_parameter")


def refused(refusal: Refusal, param: str | None) -> ApiError:
    """The error for an engine's refusal. `param` is the name of the prompt field, unknown to the engine."""
    status = _REFUSAL_STATUS.get(refusal.code, 400)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S if refusal.retry_after_s is None else refusal.retry_after_s)
    if refusal.code is RefusalCode.TOO_MANY_CHOICES:
        param = "n"
    kind = _REFUSAL_TYPE.get(status, "invalid_request_error")
    message = f"{refusal.message}; {_ADVICE[refusal.code]}" if refusal.code in _ADVICE else refusal.message
    return ApiError(status, message, kind, param if status == 400 else None, refusal.code.value, headers)


def engine_dead(reason: str) -> ApiError:
    """Retryable: nothing is wrong with the request, and whoever supervises the instance starts it again."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    details = {"retryable": True}
    return ApiError(
        503, f"The engine is dead: {reason}", "engine_dead", code="engine_dead", headers=headers, details=details
    )


def no_instance_left(fault: PdFault, token_ids: list[list[int]] | None) -> ApiError:
    """No instance could finish the request. `token_ids` by choice, only when the client asked for token ids."""
    details: dict[str, object] = {"code": int(fault.code), "stage": fault.stage.value, "retryable": True}
    if token_ids is not None:
        details["generated_token_ids"] = token_ids
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    return ApiError(503, fault.message, "server_error", code=str(int(fault.code)), headers=headers, details=details)


def from_validation(error: ValidationError) -> ApiError:
    """The error for the first invalid field, named as in the client's JSON."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = field_path(first["loc"])
    where = f"'{param}': " if param else ""
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return invalid(param, f"{where}{first['msg']}", code)


def field_path(loc: Sequence[int | str]) -> str | None:
    """`("messages", 0, "content")` → `messages[0].content`."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path or None
