"""The OpenAPI document. Bodies are parsed by `schema.parse`, not by FastAPI, so their schemas are added here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from baton.api.auth import OPEN_PATHS
from baton.api.messages.body import CountTokensBody, MessagesBody
from baton.api.responses_api.body import ResponsesBody
from baton.api.schema import ChatBody, CompletionBody, DetokenizeBody, RequestBody, TokenizeBody

_REF = "#/components/schemas/{model}"
Json = dict[str, Any]
"""JSON schema is free-form by nature."""

_BODIES: tuple[type[RequestBody], ...] = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    TokenizeBody,
    DetokenizeBody,
)

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERROR_REF: Json = {"$ref": _REF.format(model="Error")}
_MEANINGS = {
    400: "The request is not valid; `param` names the field",
    401: "No API key, or not one that is known",
    403: "This instance serves a router whose clients need an API key; send it to the router",
    404: "No such model, request or path",
    405: "The path does not take this method",
    409: "The request id is in use",
    410: "What it would go on with was lost",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "This instance only prefills for others; send it to one of the role decode or mixed",
    422: "The constraint and `bad_words` leave no token, or the constraint became too complex in mid-answer",
    429: "The queue is full; see Retry-After",
    503: "The engine is dead or draining, or the router of this instance has not been reached",
}


_MESSAGES_ERROR: Json = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def _errors(*statuses: int, shape: Json = _ERROR_REF) -> dict[int | str, Json]:
    content = {"application/json": {"schema": shape}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in (401, 405, *statuses)}


def _answer(required: tuple[str, ...], properties: Mapping[str, Json]) -> Json:
    return {"type": "object", "required": list(required), "properties": dict(properties)}


_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_IDS: Json = {"type": "array", "items": _COUNT}
_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
_MS: Json = {"type": "number", "minimum": 0}
_BILL_COUNTS = ("cached_tokens", "computed_tokens", "recomputed_tokens", "restored_tokens", "preemptions", "attempts")
_BILL_TIMES = ("queue_ms", "prefill_ms", "transfer_ms", "decode_ms")
_BILL = _answer(_BILL_COUNTS + _BILL_TIMES, dict.fromkeys(_BILL_COUNTS, _COUNT) | dict.fromkeys(_BILL_TIMES, _MS)) | {
    "type": ["object", "null"],
    "description": (
        "What the answer cost, where `baton_usage` asked for it. Over several choices counts are summed, and of each time "
        "the longest is given. Null where the engine died before it could tell."
    ),
}
_USAGE = _answer(
    ("prompt_tokens", "completion_tokens", "total_tokens"),
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT, "baton": _BILL},
)
_FINISH: Json = {
    "enum": ["stop", "length", "abort", "pd_reschedule"],
    "description": (
        "`pd_reschedule`: the attempt ended before the answer did; the text is empty, `completion_token_ids` has everything "
        "that was generated, `error` says why."
    ),
}
_PD_ERROR = _answer(
    ("message", "code", "stage", "retryable", "generated_token_ids"),
    {
        "message": _TEXT | {"pattern": "^PD Error"},
        "code": {"type": "integer"},
        "stage": _TEXT,
        "retryable": {"const": True},
        "generated_token_ids": _IDS,
    },
)
_CHOICE: dict[str, Json] = {
    "index": _COUNT,
    "finish_reason": _FINISH,
    "completion_token_ids": _IDS,
    "error": _PD_ERROR,
}


def _generated(kind: str, choice: Json) -> Json:
    choices = {"type": "array", "items": choice, "minItems": 1}
    fields = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT}
    return _answer(("id", "object", "created", "model", "choices", "usage"), fields | {"choices": choices, "usage": _USAGE})


_MESSAGE = _answer(("role", "content"), {"role": {"const": "assistant"}, "content": _TEXT})
_CHAT_ANSWER = _generated(
    "chat.completion",
    _answer(("index", "message", "finish_reason"), _CHOICE | {"message": _MESSAGE}),
)
_COMPLETION_ANSWER = _generated(
    "text_completion",
    _answer(("index", "text", "finish_reason"), _CHOICE | {"text": _TEXT}),
)
_RESPONSES_ANSWER = _answer(
    ("id", "object", "status", "output", "usage"), {"id": _TEXT, "object": {"const": "response"}, "status": _TEXT}
)
_MESSAGES_ANSWER = _answer(
    ("id", "type", "role", "content", "stop_reason", "usage"), {"id": _TEXT, "type": {"const": "message"}}
)
_MODEL_ANSWER = _answer(("id", "object", "created", "owned_by"), {"id": _TEXT, "object": {"const": "model"}})


@dataclass(frozen=True)
class RouteDescription:
    """One route: its responses, and its body where it has one."""

    summary: str
    responses: dict[int | str, Json]
    extra: Json = field(default_factory=dict)


def _described(
    summary: str,
    answer: Json,
    errors: tuple[int, ...] = (),
    body: type[RequestBody] | None = None,
    streams: bool = False,
    error_shape: Json = _ERROR_REF,
    parameters: tuple[Json, ...] = (),
) -> RouteDescription:
    content: Json = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": _answer(("data",), {"data": _TEXT})}
    extra: Json = {}
    if parameters:
        extra["parameters"] = list(parameters)
    if body is not None:
        schema = {"$ref": _REF.format(model=body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return RouteDescription(
        summary, {200: {"description": "Done", "content": content}, **_errors(*errors, shape=error_shape)}, extra
    )


_GENERATE_ERRORS = (400, 403, 404, 409, 413, 415, 421, 422, 429, 503)
CHAT = _described("Continue a chat (OpenAI)", _CHAT_ANSWER, _GENERATE_ERRORS, ChatBody, streams=True)
RESPONSES = _described(
    "Continue a chat (OpenAI's Responses)", _RESPONSES_ANSWER, _GENERATE_ERRORS, ResponsesBody, streams=True
)
MESSAGES = _described(
    "Continue a chat (Anthropic's Messages)",
    _MESSAGES_ANSWER,
    _GENERATE_ERRORS,
    MessagesBody,
    streams=True,
    error_shape=_MESSAGES_ERROR,
)
COUNT_TOKENS = _described(
    "Count the tokens of a Messages body",
    _answer(("input_tokens",), {"input_tokens": _COUNT}),
    (400, 403, 404, 413, 415, 503),
    CountTokensBody,
    error_shape=_MESSAGES_ERROR,
)
COMPLETION = _described("Continue a text (OpenAI)", _COMPLETION_ANSWER, _GENERATE_ERRORS, CompletionBody, streams=True)
MODELS = _described("What is served", _answer(("object", "data"), {"data": {"type": "array", "items": _MODEL_ANSWER}}))
MODEL = _described("One model", _MODEL_ANSWER, (404,))
CANCEL = _described(
    "Cancel a request by its X-Request-Id",
    _answer(("id", "object", "cancelled"), {"id": _TEXT, "cancelled": {"const": True}}),
    (404,),
)
RESUME = _described(
    "Go on reading an answer after its router was lost",
    {"anyOf": [_CHAT_ANSWER, _COMPLETION_ANSWER, _RESPONSES_ANSWER, _MESSAGES_ANSWER]},
    (400, 404, 409, 410, 503),
    streams=True,
    parameters=tuple(
        {"name": name, "in": place, "required": False, "schema": _TEXT, "description": "The last event id that was read"}
        for name, place in (("Last-Event-ID", "header"), ("last_event_id", "query"))
    ),
)
TOKENIZE = _described(
    "Token ids of a text or a chat",
    _answer(("count", "tokens", "max_model_len"), {"count": _COUNT, "tokens": _IDS, "max_model_len": _COUNT}),
    (400, 403, 404, 413, 415, 503),
    TokenizeBody,
)
DETOKENIZE = _described(
    "Text of token ids", _answer(("prompt",), {"prompt": _TEXT}), (400, 403, 404, 413, 415, 503), DetokenizeBody
)
ABOUT = _described(
    "What this is",
    _answer(("name", "about", "paths"), {"name": _TEXT, "about": _TEXT, "paths": {"type": "object"}}),
)
VERSION = _described("The version", _answer(("version",), {"version": _TEXT}))
INSTANCES = _described(
    "The instances of this router, and the latest events",
    _answer(("object", "data", "events"), {"object": {"const": "list"}, **dict.fromkeys(("data", "events"), _OBJECTS)}),
)
DRAIN = _described(
    "Give an instance nothing new; it ends when it is empty",
    _answer(("name", "object", "draining"), {"name": _TEXT, "draining": {"const": True}, "warning": _TEXT}),
    (404,),
)
HEALTH = _described("Whether the engine makes progress", _answer(("status",), {"status": _TEXT}), (503,))
READY = _described("Whether requests are taken", _answer(("status",), {"status": _TEXT}), (503,))
METRICS = RouteDescription(
    "Metrics for Prometheus",
    {200: {"description": "Prometheus text format", "content": {"text/plain": {"schema": _TEXT}}}, **_errors()},
)


def install(app: FastAPI, secured: bool) -> None:
    """Replace the app's OpenAPI document; built once, on first use."""

    def describe() -> Json:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _without_unused_errors(schema)
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(_components())
            if secured:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
                for path in OPEN_PATHS & schema["paths"].keys():
                    for operation in schema["paths"][path].values():
                        operation["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _without_unused_errors(schema: Json) -> None:
    """FastAPI describes a 422 of its own for each parameter; ours are texts, and a bad one is a 400."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)


def _components() -> Json:
    found: Json = {"Error": _ERROR}
    for body in _BODIES:
        schema = body.model_json_schema(ref_template=_REF)
        found.update(schema.pop("$defs", {}))
        found[body.__name__] = schema
    return found
