"""Request bodies, validated field by field.

Types are strict (no "5" for 5, no true for 1); null means absent. What to do with fields that are not ours:

* internal fields, which only a router may set, are refused whatever their value (`INTERNAL`); a router that proved itself
  may set those of `ContinuationFields`;
* features that would change the answer and are not there (tools, schemas, beam search …) are refused unless the value
  asks for nothing (`UNSUPPORTED`);
* everything else (`user`, `metadata`, `store`, fields of other servers) is ignored, as the openai client and its users
  expect; each unknown name is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, from_json

from baton.api.errors import InternalField, from_validation, invalid, unsupported
from baton.api.model_text import TEMPLATE_RESERVED

N_MAX = 16
LOGPROBS_MAX = 20
STOPS_MAX = 16
STOP_BYTES_MAX = 256
BIASES_MAX = 1024
BIAS_MAX = 100.0
PROMPTS_MAX = 256
"""Prompts × n in one body."""
STOP_IDS_MAX = 1024
SALT_CHARS_MAX = 256
PRIORITY_MAX = 1000
"""Largest priority value. 0, the default, is the most important: clients can lower their priority, not raise it."""
_INT32_MAX = 2**31 - 1
_LOGGED_MAX = 64

logger = logging.getLogger("baton.api")

Prompt = str | tuple[int, ...]

INTERNAL = frozenset(
    [
        "attempt",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "completion_token_ids",
        "decode_instance",
        "disaggregated_params",
        "epoch",
        "generated_token_ids",
        "kv_transfer_params",
        "lease",
        "origin",
        "prefill_at",
        "prefill_instance",
        "sent_characters",
        "transfer_address",
        "transfer_params",
    ]
)
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "grammar": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Unsupported fields, with the values that are accepted because they request nothing."""
IGNORED = frozenset(
    [
        "chat_template_content_format",
        "frequency_penalty_range",
        "length_penalty",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    ]
)


def _bad(message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", message.replace("{", "{{").replace("}", "}}"))


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_id(item) for item in value):
        raise _bad("must be a list of token ids (integers from 0 on)")
    return tuple(value)


def _stop_ids(value: object) -> tuple[int, ...]:
    ids = () if value is None else _token_ids(value)
    if len(ids) > STOP_IDS_MAX:
        raise _bad(f"at most {STOP_IDS_MAX} ids")
    return ids


def _stops(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _bad("must be a string or a list of strings")
    if len(stops) > STOPS_MAX:
        raise _bad(f"at most {STOPS_MAX} stop strings")
    for stop in stops:
        if not stop:
            raise _bad("a stop string may not be empty")
        if len(stop.encode()) > STOP_BYTES_MAX:
            raise _bad(f"a stop string has at most {STOP_BYTES_MAX} bytes")
    return tuple(stops)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _bad("must be an object from token id to bias")
    if len(value) > BIASES_MAX:
        raise _bad(f"at most {BIASES_MAX} entries")
    return tuple(sorted((_bias_id(key), _bias(key, bias)) for key, bias in value.items()))


def _bias_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        raise _bad(f"{key[:40]!r} is not a token id")
    return int(key)


def _bias(key: str, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -BIAS_MAX <= bias <= BIAS_MAX:
        raise _bad(f"the bias of token {key} must be a number from {-BIAS_MAX:g} to {BIAS_MAX:g}")
    return float(bias)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif not isinstance(value, list) or not value:
        raise _bad("must be a string, a list of strings, token ids, or a list of lists of token ids; not empty")
    elif isinstance(value[0], int):
        prompts = (_token_ids(value),)
    elif len(value) > PROMPTS_MAX:
        raise _bad(f"at most {PROMPTS_MAX} prompts")
    elif all(isinstance(item, str) for item in value):
        prompts = tuple(value)
    else:
        prompts = tuple(_token_ids(item) for item in value)
    if not all(prompts):
        raise _bad("a prompt may not be empty")
    return prompts


def _content(value: object) -> str | None:
    """Text parts are joined by line breaks; parts that are not text are refused."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _bad("must be a string or a list of content parts")
    return "\n".join(_part(i, part) for i, part in enumerate(value))


def _part(i: int, part: object) -> str:
    if not isinstance(part, dict):
        raise _bad(f"part {i} must be an object")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise _bad(f"part {i} is of type {str(kind)[:40]!r}; only 'text' parts are supported (no images, no audio)")
    if not isinstance(text, str):
        raise _bad(f"part {i} needs a 'text' string")
    return text


def _no_tools(value: object) -> None:
    if value is not None and value != []:
        raise _bad("tools are not supported")


def _template_kwargs(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _bad("must be an object")
    for name in value:
        if name in TEMPLATE_RESERVED or not name.isidentifier():
            raise _bad(f"may not set {name[:40]!r}")
    return value


def _generated(value: object) -> tuple[tuple[int, ...], ...] | None:
    """By choice; a single list of ids is that of a single choice."""
    if value is None:
        return None
    if isinstance(value, list) and value and isinstance(value[0], list):
        return tuple(_token_ids(item) for item in value)
    return (_token_ids(value),)


def _sent(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    counts = value if isinstance(value, list) else [value]
    if not counts or not all(_is_id(count) for count in counts):
        raise _bad("must be a number of characters, or a list of them, one for each choice")
    return tuple(counts)


_ID_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _INT32_MAX}}
_STRING = {"type": "string", "minLength": 1}
_NULL = {"type": "null"}


def _any_of(*schemas: Mapping[str, object]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [dict(schema) for schema in schemas]})


TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids), WithJsonSchema(_ID_LIST)]
StopIds = Annotated[tuple[int, ...], PlainValidator(_stop_ids), _any_of(_ID_LIST | {"maxItems": STOP_IDS_MAX}, _NULL)]
_STOP = _STRING | {"maxLength": STOP_BYTES_MAX}
Stops = Annotated[
    tuple[str, ...], PlainValidator(_stops), _any_of(_STOP, {"type": "array", "items": _STOP, "maxItems": STOPS_MAX}, _NULL)
]
Biases = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_logit_bias),
    _any_of(
        {
            "type": "object",
            "maxProperties": BIASES_MAX,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -BIAS_MAX, "maximum": BIAS_MAX},
        },
        _NULL,
    ),
]
_MANY = {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX}
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts),
    _any_of(
        _STRING,
        _MANY | {"items": _STRING},
        _ID_LIST | {"minItems": 1},
        _MANY | {"items": _ID_LIST | {"minItems": 1}},
    ),
]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str | None, PlainValidator(_content), _any_of({"type": "string"}, {"type": "array", "items": _PART}, _NULL)
]
NoTools = Annotated[None, PlainValidator(_no_tools), _any_of({"type": "array", "maxItems": 0}, _NULL)]
TemplateKwargs = Annotated[
    dict[str, object],
    PlainValidator(_template_kwargs),
    _any_of({"type": "object", "propertyNames": {"pattern": "^[a-z]{1,9}$"}}, _NULL),
]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
OutputTokens = Annotated[int | None, Field(ge=1, le=_INT32_MAX)]


class RequestBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


class StreamOptions(RequestBody):
    include_usage: bool | None = None


class GenerateBody(RequestBody):
    """Fields of both chat and completion bodies."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=N_MAX)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    max_tokens: OutputTokens = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=_INT32_MAX)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=1000)] = None
    logit_bias: Biases = ()
    stop: Stops = ()
    stop_token_ids: StopIds = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, Field(ge=0, le=_INT32_MAX)] = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=SALT_CHARS_MAX)] = None
    return_token_ids: bool | None = None
    priority: Annotated[int | None, Field(ge=0, le=PRIORITY_MAX)] = None
    """Lower goes first, and is never preempted for a higher number. Absent is 0."""
    baton_usage: bool | None = None
    """Adds the bill to the usage as `usage.baton`; a stream then ends with a usage chunk whatever `stream_options` say."""


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None
    name: Annotated[str | None, Field(max_length=256)] = None
    tool_calls: NoTools = None
    function_call: NoTools = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
"""Validation stops at the first bad message, since a body can have a million of them."""


class ChatBody(GenerateBody):
    messages: Messages
    max_completion_tokens: OutputTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=LOGPROBS_MAX)] = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs = {}


class CompletionBody(GenerateBody):
    prompt: Prompts
    logprobs: Annotated[int | None, Field(ge=0, le=LOGPROBS_MAX)] = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ContinuationFields(RequestBody):
    """What a router that proved itself adds to a body to continue it; by choice, prompt by prompt as in the answer."""

    generated_token_ids: Annotated[tuple[tuple[int, ...], ...] | None, PlainValidator(_generated)] = None
    """All tokens generated so far, on whichever instances."""
    sent_characters: Annotated[tuple[int, ...] | None, PlainValidator(_sent)] = None
    """Characters (code points) of the answer that the client has, without an echoed prompt."""


class ContinuedChatBody(ChatBody, ContinuationFields):
    """A chat body of a router."""


class ContinuedCompletionBody(CompletionBody, ContinuationFields):
    """A completion body of a router."""


class TokenizeBody(RequestBody):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs = {}
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: TokenIds


B = TypeVar("B", bound=RequestBody)


def parse(raw: bytes, kind: type[B], rules: tuple[Callable[[B], None], ...] = ()) -> B:
    """The validated body; raises an ApiError that names the invalid field."""
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(None, "The body must be a JSON object", "invalid_json")
    _check_names(fields, kind)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None
    for rule in rules:
        rule(body)
    return body


def _check_names(fields: Mapping[str, object], kind: type[RequestBody]) -> None:
    for name, value in fields.items():
        if name in kind.model_fields:
            continue
        if name in INTERNAL:
            raise InternalField(name)
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise unsupported(name, f"'{name}' is not supported by this server")
        if name == "echo" and value:
            raise unsupported(name, "'echo' is not supported for chat")
        if name not in UNSUPPORTED and name not in IGNORED:
            _log_unknown(name)


_logged: dict[str, None] = {}


def _log_unknown(name: str) -> None:
    if len(_logged) < _LOGGED_MAX and name not in _logged:
        _logged[name] = None
        logger.warning("ignoring the unknown field %r (said once)", name[:80])


def check_stream_options(body: GenerateBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true")


def check_chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    check_messages(body.messages)


def check_messages(messages: list[ChatMessage]) -> None:
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{i}].content", f"'messages[{i}].content' is missing", "missing_required_parameter")


def check_completion(body: CompletionBody) -> None:
    if body.echo and body.logprobs is not None:
        raise invalid("logprobs", "'logprobs' together with 'echo' is not supported", "unsupported_parameter")
    if len(body.prompt) * (body.n or 1) > PROMPTS_MAX:
        raise invalid("n", f"prompts × n is {len(body.prompt) * (body.n or 1)}; at most {PROMPTS_MAX} in one body")


def check_tokenize(body: TokenizeBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either 'prompt' or 'messages'")
    check_messages(body.messages or [])
