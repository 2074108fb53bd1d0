"""Request bodies, validated field by field.

Types are strict (no "5" for 5, no true for 1); null means absent. What to do with fields that are not ours:

* internal fields, which only a router may set, are refused whatever their value (`INTERNAL`); a router that proved itself
  may set those of `ContinuationFields`;
* features that would change the answer and are not there (beam search, audio …) are refused unless the value asks for
  nothing (`UNSUPPORTED`);
* everything else (`user`, `metadata`, `store`, fields of other servers) is ignored, as the openai client and its users
  expect; each unknown name is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, from_json

from baton.api.constraint_fields import Choices, ConstraintText, ResponseFormat, SchemaOrText, StructuredOutputs
from baton.api.errors import InternalField, from_validation, invalid, unsupported
from baton.api.model_text import TEMPLATE_RESERVED
from baton.api.tool_fields import MadeCalls, ToolChoice, Tools

N_MAX = 16
LOGPROBS_MAX = 20
STOPS_MAX = 16
STOP_BYTES_MAX = 256
BIASES_MAX = 1024
BAD_WORDS_MAX = 256
ALLOWED_IDS_MAX = 1 << 17
BIAS_MAX = 100.0
ITEMS_MAX = 10_000
"""Turns of a Messages body, blocks of one of them, items of a Responses body."""
PROMPTS_MAX = 256
"""Prompts × n in one body."""
STOP_IDS_MAX = 1024
SALT_CHARS_MAX = 256
PRIORITY_MAX = 1000
"""Largest priority value. 0, the default, is the most important: clients can lower their priority, not raise it."""
_INT32_MAX = 2**31 - 1
_LOGGED_MAX = 64
_LOGGED_CHARS_MAX = 80

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
    "documents": (None, []),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "grammar": (None,),
    "guided_whitespace_pattern": (None,),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Unsupported fields, with the values that are accepted because they request nothing."""
CONSTRAINTS: Mapping[str, tuple[object, ...]] = {
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
}
"""Fields of chats and completions, for dialects that have names of their own for them."""
IGNORED = frozenset(
    [
        "chat_template_content_format",
        "frequency_penalty_range",
        "guided_decoding_backend",
        "length_penalty",
        "metadata",
        "moderation",
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


def bad_value(message: str) -> PydanticCustomError:
    """For validators to raise: it becomes a 400 with this message and the path of the value."""
    return PydanticCustomError("value_error", message.replace("{", "{{").replace("}", "}}"))


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_id(item) for item in value):
        raise bad_value("must be a list of token ids (integers from 0 on)")
    return tuple(value)


def _stop_ids(value: object) -> tuple[int, ...]:
    ids = () if value is None else _token_ids(value)
    if len(ids) > STOP_IDS_MAX:
        raise bad_value(f"at most {STOP_IDS_MAX} ids")
    return ids


def _allowed_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = _token_ids(value)
    if not 1 <= len(ids) <= ALLOWED_IDS_MAX:
        raise bad_value(f"must have 1 to {ALLOWED_IDS_MAX} ids")
    return tuple(sorted(frozenset(ids)))


def _bad_words(value: object) -> tuple[str, ...]:
    words = [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.strip() for word in words):
        raise bad_value("must be a list of strings, none of them empty")
    if len(words) > BAD_WORDS_MAX:
        raise bad_value(f"at most {BAD_WORDS_MAX} words")
    if any(len(word.encode(errors="replace")) > STOP_BYTES_MAX for word in words):
        raise bad_value(f"a word has at most {STOP_BYTES_MAX} bytes")
    return tuple(words)


def _stops(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_value("must be a string or a list of strings")
    if len(stops) > STOPS_MAX:
        raise bad_value(f"at most {STOPS_MAX} stop strings")
    for stop in stops:
        if not stop:
            raise bad_value("a stop string may not be empty")
        if len(stop.encode()) > STOP_BYTES_MAX:
            raise bad_value(f"a stop string has at most {STOP_BYTES_MAX} bytes")
    return tuple(stops)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad_value("must be an object from token id to bias")
    if len(value) > BIASES_MAX:
        raise bad_value(f"at most {BIASES_MAX} entries")
    return tuple(sorted((_bias_id(key), _bias(key, bias)) for key, bias in value.items()))


def _bias_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        raise bad_value(f"{key[:40]!r} is not a token id")
    return int(key)


def _bias(key: str, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -BIAS_MAX <= bias <= BIAS_MAX:
        raise bad_value(f"the bias of token {key} must be a number from {-BIAS_MAX:g} to {BIAS_MAX:g}")
    return float(bias)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif not isinstance(value, list) or not value:
        raise bad_value("must be a string, a list of strings, token ids, or a list of lists of token ids; not empty")
    elif isinstance(value[0], int):
        prompts = (_token_ids(value),)
    elif len(value) > PROMPTS_MAX:
        raise bad_value(f"at most {PROMPTS_MAX} prompts")
    elif all(isinstance(item, str) for item in value):
        prompts = tuple(value)
    else:
        prompts = tuple(_token_ids(item) for item in value)
    if not all(prompts):
        raise bad_value("a prompt may not be empty")
    return prompts


def _content(value: object) -> str | None:
    """Text parts are joined by line breaks; parts that are not text are refused."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_value("must be a string or a list of content parts")
    return "\n".join(_part(i, part) for i, part in enumerate(value))


def _part(i: int, part: object) -> str:
    if not isinstance(part, dict):
        raise bad_value(f"part {i} must be an object")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise bad_value(f"part {i} is of type {str(kind)[:40]!r}; only 'text' parts are supported (no images, no audio)")
    if not isinstance(text, str):
        raise bad_value(f"part {i} needs a 'text' string")
    return text


def _no_functions(value: object) -> None:
    if value is not None:
        raise bad_value("is the form before tools, which is not supported; use 'tool_calls'")


def _template_kwargs(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_value("must be an object")
    for name in value:
        if name in TEMPLATE_RESERVED or not name.isidentifier():
            raise bad_value(f"may not set {name[:40]!r}")
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
        raise bad_value("must be a number of characters, or a list of them, one for each choice")
    return tuple(counts)


_ID_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _INT32_MAX}}
_STRING = {"type": "string", "minLength": 1}
_NULL = {"type": "null"}


def _any_of(*schemas: Mapping[str, object]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [dict(schema) for schema in schemas]})


TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids), WithJsonSchema(_ID_LIST)]
StopIds = Annotated[tuple[int, ...], PlainValidator(_stop_ids), _any_of(_ID_LIST | {"maxItems": STOP_IDS_MAX}, _NULL)]
AllowedIds = Annotated[
    tuple[int, ...],
    PlainValidator(_allowed_ids),
    _any_of(_ID_LIST | {"minItems": 1, "maxItems": ALLOWED_IDS_MAX}, _NULL),
]
_STOP = _STRING | {"maxLength": STOP_BYTES_MAX}
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_bad_words),
    _any_of({"type": "array", "items": _STOP | {"pattern": "\\S"}, "maxItems": BAD_WORDS_MAX}, _NULL),
]
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
NoFunctions = Annotated[None, PlainValidator(_no_functions), _any_of(_NULL)]
TemplateKwargs = Annotated[
    dict[str, object],
    PlainValidator(_template_kwargs),
    _any_of({"type": "object", "propertyNames": {"pattern": "^[a-z]{1,9}$"}}, _NULL),
]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
OutputTokens = Annotated[int | None, Field(ge=1, le=_INT32_MAX)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class RequestBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED
    ignored: ClassVar[frozenset[str]] = IGNORED


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far."""


class SamplingFields(RequestBody):
    """Fields that mean the same in every dialect."""

    model: str | None = None
    stream: bool | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=_INT32_MAX)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=1000)] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, Field(ge=0, le=_INT32_MAX)] = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=SALT_CHARS_MAX)] = None
    priority: Annotated[int | None, Field(ge=0, le=PRIORITY_MAX)] = None
    """Lower goes first, and is never preempted for a higher number. Absent is 0."""

    def shared_fields(self) -> dict[str, Any]:
        """For the body of another dialect."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


class GenerateBody(SamplingFields):
    """Fields of both chat and completion bodies."""

    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=N_MAX)] = None
    max_tokens: OutputTokens = None
    logit_bias: Biases = ()
    allowed_token_ids: AllowedIds = ()
    """No other token is drawn; empty: all are."""
    bad_words: BadWords = ()
    """Texts that the answer does not have."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: ConstraintText = None
    guided_choice: Choices | None = None
    guided_grammar: ConstraintText = None
    stop: Stops = ()
    stop_token_ids: StopIds = ()
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=LOGPROBS_MAX)] = None
    """Alternatives to show for each token of the prompt."""
    baton_usage: bool | None = None
    """Adds the bill to the usage as `usage.baton`; a stream then ends with a usage chunk whatever `stream_options` say."""


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Annotated[str | None, Field(max_length=256)] = None
    tool_calls: MadeCalls = None
    """Of the assistant: the calls that it made."""
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None
    """Of a tool: the call that it answers."""
    function_call: NoFunctions = None
    reasoning_content: str | None = None
    """Of the assistant: what it reasoned. The chat template decides whether it is repeated to the model."""


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
"""Validation stops at the first bad message, since a body can have a million of them."""


class ChatBody(GenerateBody):
    prompt_field: ClassVar[str] = "messages"
    """The name in errors of what the prompt is made of."""
    own_names: ClassVar[Mapping[str, str]] = {}
    """Parts of names of fields here → what they are called in the dialect of the client."""
    messages: Messages
    max_completion_tokens: OutputTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=LOGPROBS_MAX)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer goes on with the last message instead of beginning one."""
    chat_template_kwargs: TemplateKwargs = {}
    tools: Tools = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Told to a chat template that asks for it."""
    thinking_token_budget: Annotated[int | None, Field(ge=0, le=_INT32_MAX)] = None
    """Tokens after which reasoning ends, at the latest."""


class CompletionBody(GenerateBody):
    prompt_field: ClassVar[str] = "prompt"
    prompt: Prompts
    max_tokens: Annotated[int | None, Field(ge=0, le=_INT32_MAX)] = None
    """0 only with `echo`: the prompt alone, for its log-probabilities."""
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

    prompt_field: ClassVar[str] = "messages"

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
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
        if name in kind.unsupported and value not in kind.unsupported[name]:
            raise unsupported(name, f"'{name}' is not supported by this server")
        if name == "echo" and value:
            raise unsupported(name, "'echo' is not supported for chat")
        if name not in kind.unsupported and name not in kind.ignored:
            _log_unknown(name)


_logged: dict[str, None] = {}


def _log_unknown(name: str) -> None:
    start = name[:_LOGGED_CHARS_MAX]  # what is remembered is kept for good, and a name may be as long as a body
    if len(_logged) < _LOGGED_MAX and start not in _logged:
        _logged[start] = None
        logger.warning("ignoring the unknown field %r (said once)", start)


def check_stream_options(body: GenerateBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true")


def check_prompt_logprobs(body: GenerateBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "'prompt_logprobs' cannot be given with 'stream': true")


def check_chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    check_messages(body.messages)
    check_continued(body, body.messages)


def check_continued(body: ChatBody | TokenizeBody, messages: list[ChatMessage]) -> None:
    """Whether there is something to continue, where that is asked for."""
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
        raise invalid("continue_final_message", message)
    if not messages or messages[-1].role != "assistant" or not messages[-1].content or messages[-1].tool_calls:
        message = "'continue_final_message' needs a last message of the assistant with content and without calls"
        raise invalid("continue_final_message", message)


def check_messages(messages: list[ChatMessage]) -> None:
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{i}].content", f"'messages[{i}].content' is missing", "missing_required_parameter")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"messages[{i}].tool_calls", f"'messages[{i}].tool_calls' is for messages of the assistant")
        if message.tool_call_id is None and message.role == "tool":
            name = f"messages[{i}].tool_call_id"
            raise invalid(name, f"'{name}' is missing", "missing_required_parameter")


def check_completion(body: CompletionBody) -> None:
    if body.echo and body.logprobs is not None and body.stream and (body.n or 1) > 1:
        message = "'logprobs' together with 'echo' and 'stream': true is for one choice of a prompt; 'n' must be 1"
        raise invalid("n", message)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "'max_tokens' must be at least 1; it may be 0 only with 'echo': true")
    if len(body.prompt) * (body.n or 1) > PROMPTS_MAX:
        raise invalid("n", f"prompts × n is {len(body.prompt) * (body.n or 1)}; at most {PROMPTS_MAX} in one body")


def check_tokenize(body: TokenizeBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either 'prompt' or 'messages'")
    check_messages(body.messages or [])
    check_continued(body, body.messages or [])
