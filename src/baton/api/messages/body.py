"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chats that they ask for.

A turn of the user may carry results of tools: they become messages of role `tool`, before the text of that turn. Earlier
thinking is given to the chat template, which decides whether to repeat it. If the last turn is the assistant's, the answer
goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, WithJsonSchema

from baton.api.constraint_fields import NamedSchema, ResponseFormat, Schema
from baton.api.errors import from_validation, invalid, unsupported
from baton.api.schema import (
    CONSTRAINTS,
    ITEMS_MAX,
    ChatBody,
    ChatMessage,
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
    CALLS_MAX,
    TOOLS_MAX,
    CalledFunction,
    FunctionTool,
    MadeCall,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
)

ID_CHARS_MAX = 256
BILLING_LINE = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that Claude Code changes from request to request. It tells the model nothing, and
would keep KV of earlier requests from being used."""
_INT32_MAX = 2**31 - 1
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ToolUse:
    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    tool_use_id: str
    text: str


@dataclass(frozen=True, slots=True)
class EarlierThinking:
    text: str


Block = str | ToolUse | ToolResult | EarlierThinking
"""A string is a text block."""


def _blocks(value: object) -> tuple[Block, ...]:
    """A string is one block of text."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise bad_value("must be a string or a list of content blocks")
    if len(value) > ITEMS_MAX:
        raise bad_value(f"at most {ITEMS_MAX} blocks")
    blocks = [_block(i, item) for i, item in enumerate(value)]
    if sum(isinstance(block, ToolUse) for block in blocks) > CALLS_MAX:
        raise bad_value(f"at most {CALLS_MAX} blocks of type 'tool_use'")
    return tuple(blocks)


def _block(i: int, item: object) -> Block:
    if not isinstance(item, dict):
        raise bad_value(f"block {i} must be an object")
    kind = item.get("type")
    if kind == "text":
        return _string(i, item, "text")
    if kind == "tool_use":
        arguments = item.get("input", {})
        if not isinstance(arguments, dict):
            raise bad_value(f"block {i} needs an 'input' object")
        return ToolUse(_name(i, item, "id"), _name(i, item, "name"), _encode(arguments).decode())
    if kind == "tool_result":
        text = _result_text(i, item.get("content"))
        if item.get("is_error"):
            text = f"Error: {text}" if text else "Error"
        return ToolResult(_name(i, item, "tool_use_id"), text)
    if kind == "thinking":
        return EarlierThinking(_string(i, item, "thinking"))
    if kind == "redacted_thinking":
        return EarlierThinking("")
    shown = str(kind)[:40]
    raise bad_value(f"block {i} is of type {shown!r}; text, tool_use, tool_result and thinking are supported (no images)")


def _string(i: int, item: Mapping[str, object], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_value(f"block {i} needs a {name!r} string")
    return value


def _name(i: int, item: Mapping[str, object], name: str) -> str:
    value = _string(i, item, name)
    if not 1 <= len(value) <= ID_CHARS_MAX:
        raise bad_value(f"{name!r} of block {i} must have 1 to {ID_CHARS_MAX} characters")
    return value


def _result_text(i: int, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_value(f"the content of block {i} must be a string or a list of text blocks")
    return "\n".join(_result_part(i, part) for part in content)


def _result_part(i: int, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise bad_value(f"the content of block {i} has a part that is no text; only text is supported (no images)")
    text: str = part["text"]
    return text


def _system(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_value("must be a string or a list of text blocks")
    texts = [_result_part(i, part) for i, part in enumerate(value)]
    return "\n".join(text for text in texts if not text.startswith(BILLING_LINE))


_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXTS: dict[str, object] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}
_ID: dict[str, object] = {"type": "string", "minLength": 1, "maxLength": ID_CHARS_MAX}


def _described(kind: str, optional: Mapping[str, object] | None = None, **fields: object) -> dict[str, object]:
    properties = {"type": {"const": kind}, **fields, **(optional or {})}
    return {"type": "object", "properties": properties, "required": ["type", *fields]}


_BLOCKS = {
    "anyOf": [
        _TEXT_BLOCK,
        _described("tool_use", {"input": {"type": "object"}}, id=_ID, name=_ID),
        _described("tool_result", {"content": {"anyOf": [_TEXTS, {"type": "null"}]}}, tool_use_id=_ID),
        _described("thinking", thinking={"type": "string"}),
        _described("redacted_thinking"),
    ]
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCKS}]}
Blocks = Annotated[tuple[Block, ...], PlainValidator(_blocks), WithJsonSchema(_CONTENT)]
System = Annotated[str | None, PlainValidator(_system), WithJsonSchema({"anyOf": [_TEXTS, {"type": "null"}]})]


class Turn(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    def foreign_block(self) -> str | None:
        """The type of a block that turns of this role do not have."""
        allowed: tuple[type, ...] = (str, ToolUse, EarlierThinking) if self.role == "assistant" else (str, ToolResult)
        names = {ToolUse: "tool_use", ToolResult: "tool_result", EarlierThinking: "thinking"}
        return next((names[type(block)] for block in self.content if not isinstance(block, allowed)), None)

    def as_chat(self) -> list[ChatMessage]:
        text = "\n".join(block for block in self.content if isinstance(block, str))
        if self.role == "system":
            return [ChatMessage(role="system", content=text)]
        if self.role == "assistant":
            return [self._of_the_assistant(text)]
        results = [
            ChatMessage(role="tool", content=block.text, tool_call_id=block.tool_use_id)
            for block in self.content
            if isinstance(block, ToolResult)
        ]
        return [*results, ChatMessage(role="user", content=text)] if text or not results else results

    def _of_the_assistant(self, text: str) -> ChatMessage:
        calls = [_made_call(block) for block in self.content if isinstance(block, ToolUse)]
        thinking = "\n".join(block.text for block in self.content if isinstance(block, EarlierThinking))
        return ChatMessage(
            role="assistant", content=text or None, tool_calls=calls or None, reasoning_content=thinking or None
        )


def _made_call(block: ToolUse) -> MadeCall:
    return MadeCall(id=block.id, function=CalledFunction(name=block.name, arguments=block.arguments))


class MessagesTool(RequestBody):
    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        function = FunctionTool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class MessagesToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> ToolChoice:
        match self.type:
            case "any":
                return "required"
            case "tool":
                return NamedTool(type="function", function=NamedFunction(name=self.name or ""))
            case "auto" | "none" as choice:
                return choice

    @property
    def allows_several(self) -> bool | None:
        return False if self.disable_parallel_tool_use else None


class Thinking(RequestBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=0, le=_INT32_MAX)] = None


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]

    def as_chat(self) -> ResponseFormat:
        return ResponseFormat(type="json_schema", json_schema=NamedSchema(schema_=self.schema_))


class OutputConfig(RequestBody):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class MessagesChat(ChatBody):
    """The chat of a Messages body."""

    own_names: ClassVar[Mapping[str, str]] = {
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        ".function.parameters": ".input_schema",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "thinking_token_budget": "thinking.budget_tokens",
    }


def _bounded(value: object) -> object:
    """Looked at first: what is too long is not read item by item."""
    if isinstance(value, list) and len(value) > ITEMS_MAX:
        raise bad_value(f"at most {ITEMS_MAX} turns")
    return value


class CountTokensBody(SamplingFields):
    """The part of a body that makes the prompt."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **CONSTRAINTS,
        "container": (None,),
        "mcp_servers": (None, []),
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        ["betas", "cache_control", "context_management", "inference_geo", "metadata", "service_tier"]
    )

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True), BeforeValidator(_bounded)]
    system: System = None
    tools: Annotated[list[MessagesTool] | None, Field(max_length=TOOLS_MAX)] = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The earlier name of `output_config.format`."""
    chat_template_kwargs: Annotated[TemplateKwargs, Field(default_factory=dict)]
    """Of Baton."""

    def as_chat(self) -> ChatBody:
        return self._chat({})

    def _chat(self, fields: Mapping[str, Any]) -> ChatBody:
        """The chat with further fields of it. Raises a 400 for what a chat does not have."""
        self._check()
        messages, kwargs = self._messages(), self.chat_template_kwargs
        last = messages[-1]
        if self.thinking is not None:
            kwargs = {"enable_thinking": self.thinking.type != "disabled"} | kwargs
        try:
            chat = MessagesChat(
                **self.shared_fields(),
                messages=messages,
                continue_final_message=last.role == "assistant" and bool(last.content) and not last.tool_calls,
                tools=None if self.tools is None else [tool.as_chat() for tool in self.tools],
                tool_choice=None if self.tool_choice is None else self.tool_choice.as_chat(),
                parallel_tool_calls=None if self.tool_choice is None else self.tool_choice.allows_several,
                chat_template_kwargs=kwargs,
                response_format=self._response_format(),
                reasoning_effort=None if self.output_config is None else self.output_config.effort,
                thinking_token_budget=self._thinking_budget(),
                **fields,
            )
        except ValidationError as error:
            raise from_validation(error) from None
        check_chat(chat)
        return chat

    def _check(self) -> None:
        for i, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                raise unsupported(f"tools[{i}].type", f"'tools[{i}].type': only tools of type 'custom' are supported")
        for i, turn in enumerate(self.messages):
            if (kind := turn.foreign_block()) is not None:
                name = f"messages[{i}].content"
                raise invalid(name, f"'{name}' has a block of type '{kind}', which turns of role '{turn.role}' do not have")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise invalid("output_format", "'output_format' and 'output_config.format' exclude each other")
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise invalid("tool_choice.name", "'tool_choice.name' is missing", "missing_required_parameter")

    def _response_format(self) -> ResponseFormat | None:
        asked = self.output_format or (None if self.output_config is None else self.output_config.format)
        return None if asked is None else asked.as_chat()

    def _thinking_budget(self) -> int | None:
        thinking = self.thinking
        return None if thinking is None or thinking.type == "disabled" else thinking.budget_tokens

    def _messages(self) -> list[ChatMessage]:
        system = [] if self.system is None else [ChatMessage(role="system", content=self.system)]
        return system + [message for turn in self.messages for message in turn.as_chat()]


class MessagesBody(CountTokensBody):
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)]
    stop_sequences: Stops = ()

    def as_chat(self) -> ChatBody:
        usage = StreamOptions(include_usage=True) if self.stream else None
        stop = list(self.stop_sequences)
        return self._chat({"max_tokens": self.max_tokens, "stop": stop, "stream_options": usage})
