"""The body of `/v1/responses`, and the chat that it asks for.

Stateless: nothing of an answer is kept, so what refers to an earlier response is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, WithJsonSchema

from baton.api.constraint_fields import NamedSchema, ResponseFormat
from baton.api.errors import ApiError, from_validation, invalid, unsupported
from baton.api.responses_api.input_items import NO_STATE, InputItems, messages_of
from baton.api.schema import (
    CONSTRAINTS,
    IGNORED,
    UNSUPPORTED,
    ChatBody,
    ChatMessage,
    OutputTokens,
    ReasoningEffort,
    RequestBody,
    SamplingFields,
    Stops,
    StreamOptions,
    TemplateKwargs,
    bad_value,
    check_chat,
)
from baton.api.tool_fields import (
    TOOLS_BYTES_MAX,
    TOOLS_MAX,
    FunctionTool,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolField,
    ToolName,
)

METADATA_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
LOGPROBS_MAX = 20
_NULL = {"type": "null"}
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "stream_options": "stream"}
"""Field of a chat body → the field of this body that it comes from, where the names differ."""


def _function_type(value: object) -> object:
    if isinstance(value, str) and value != "function":
        raise bad_value(f"tools of type {value[:40]!r} are not supported by this server, only 'function'")
    return value


class ResponsesTool(ToolField):
    """A function, in the flat form of the Responses API. The type is looked at first: other tools have no name."""

    type: Annotated[Literal["function"], BeforeValidator(_function_type)]
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        return Tool(type="function", function=FunctionTool(**self.model_dump(exclude={"type"})))


class TextFormat(RequestBody):
    """A schema is enforced whether or not it says `strict`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, object] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def as_chat(self) -> ResponseFormat:
        schema = None if self.schema_ is None else NamedSchema(name=self.name, schema_=self.schema_, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)

    def fields(self) -> dict[str, object]:
        """As the answer repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        named: dict[str, object] = {"type": self.type, "name": self.name or "", "description": self.description}
        return {**named, "schema": self.schema_, "strict": self.strict is not False}


class ReasoningOptions(RequestBody):
    """Summaries are not made: the reasoning itself is in the answer."""

    effort: ReasoningEffort | None = None


class TextOptions(RequestBody):
    format: TextFormat | None = None


def _tool_choice(value: object) -> ToolChoice | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            choice: Literal["none", "auto", "required"] = value
            return choice
        case {"type": "function", "name": str(name)}:
            return NamedTool(type="function", function=NamedFunction(name=name))
    raise bad_value("must be 'auto', 'none', 'required' or {'type': 'function', 'name': …}")


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise bad_value("must be an object from string to string")
    if len(value) > METADATA_MAX:
        raise bad_value(f"at most {METADATA_MAX} entries")
    if any(len(key) > METADATA_KEY_CHARS_MAX or len(text) > METADATA_VALUE_CHARS_MAX for key, text in value.items()):
        raise bad_value(f"a key has at most {METADATA_KEY_CHARS_MAX} characters, a value {METADATA_VALUE_CHARS_MAX}")
    return value


_NAMED_FUNCTION = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_METADATA = {
    "type": "object",
    "maxProperties": METADATA_MAX,
    "propertyNames": {"maxLength": METADATA_KEY_CHARS_MAX},
    "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE_CHARS_MAX},
}
ChosenTool = Annotated[
    ToolChoice | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_FUNCTION]}),
]
Metadata = Annotated[dict[str, str] | None, PlainValidator(_metadata), WithJsonSchema({"anyOf": [_METADATA, _NULL]})]
Absent = Annotated[object, WithJsonSchema(_NULL)]
"""A field that is refused, with a message of its own, whatever its value."""


class ItemChat(ChatBody):
    """The chat of a Responses body, whose prompt is made of its items."""

    prompt_field: ClassVar[str] = "input"
    own_names: ClassVar[Mapping[str, str]] = {
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
        ".function.parameters": ".parameters",
    }


class ResponsesBody(SamplingFields):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED,
        **CONSTRAINTS,
        "logprobs": (None, False),
        "max_completion_tokens": (None,),
        "max_tokens": (None,),
        "messages": (None,),
        "n": (None, 1),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED | {"include", "max_tool_calls", "stream_options"}

    input: InputItems
    instructions: str | None = None
    max_output_tokens: OutputTokens = None
    tools: Annotated[list[ResponsesTool] | None, Field(max_length=TOOLS_MAX)] = None
    tool_choice: ChosenTool = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=LOGPROBS_MAX)] = None
    truncation: Literal["disabled", "auto"] | None = None
    background: bool | None = None
    previous_response_id: Absent = None
    conversation: Absent = None
    prompt: Absent = None
    metadata: Metadata = None
    """Sent back in the answer."""
    stop: Stops = ()
    chat_template_kwargs: Annotated[TemplateKwargs, Field(default_factory=dict)]
    baton_usage: bool | None = None
    """Adds the bill to the usage as `usage.baton`."""

    def as_chat(self) -> ChatBody:
        """The chat that is answered; raises an ApiError that names a field of this body."""
        self._check_state()
        self._check_features()
        messages = messages_of(self.input)
        if self.instructions is not None:
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        try:
            chat = self._chat(messages)
        except ValidationError as error:
            raise _renamed(from_validation(error)) from None
        check_chat(chat)
        return chat

    def _chat(self, messages: list[ChatMessage]) -> ChatBody:
        return ItemChat(
            **self.shared_fields(),
            messages=messages,
            stream_options=StreamOptions(include_usage=True) if self.stream else None,
            max_completion_tokens=self.max_output_tokens,
            stop=list(self.stop),  # type: ignore[arg-type]  # as in JSON
            chat_template_kwargs=self.chat_template_kwargs,
            baton_usage=self.baton_usage,
            tools=None if self.tools is None else [tool.as_chat() for tool in self.tools],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if self.text_format is None else self.text_format.as_chat(),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )

    @property
    def text_format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format

    def _check_state(self) -> None:
        kept = {
            "previous_response_id": self.previous_response_id,
            "conversation": self.conversation,
            "prompt": self.prompt,
            "background": self.background or None,
        }
        for name, value in kept.items():
            if value is not None:
                raise unsupported(name, f"'{name}' is not supported: {NO_STATE}")

    def _check_features(self) -> None:
        if self.text_format is not None and self.text_format.type == "json_schema" and self.text_format.schema_ is None:
            raise invalid("text.format.schema", "'text.format.schema' is missing", "missing_required_parameter")
        if self.top_logprobs:
            raise unsupported("top_logprobs", "'top_logprobs' is not supported by this server")
        if self.truncation == "auto":
            raise unsupported("truncation", "'truncation': 'auto' is not supported by this server, only 'disabled'")
        # Also of tools that are not offered, since the answer repeats them all.
        if sum(len(tool.model_dump_json()) for tool in self.tools or ()) > TOOLS_BYTES_MAX:
            raise invalid("tools", f"'tools' has more than {TOOLS_BYTES_MAX} bytes", "request_too_large")


def _renamed(refusal: ApiError) -> ApiError:
    """A refusal of a chat body that names the field of this body."""
    param = refusal.param or "input"
    for name, own in _NAMES.items():
        if param.startswith(name):
            param = own
    return invalid(param, refusal.message.replace(f"'{refusal.param}'", f"'{param}'", 1), refusal.code)
