"""The items of `input`, and the messages of a chat that they stand for.

Calls behind each other, and a message of the assistant right before them, are one message of the chat. Items of reasoning
are passed over. Reading stops at the first bad item, and the error names its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema

from baton.api.errors import ApiError, from_validation, invalid, unsupported
from baton.api.schema import ITEMS_MAX, ChatMessage, RequestBody, bad_value
from baton.api.tool_fields import CALLS_MAX, CalledFunction, MadeCall

NO_STATE = "this server keeps no state; send the whole conversation in 'input'"
_ID_CHARS_MAX = 256
_TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Part type → the field that has its text."""


def _items(value: object) -> str | list[object]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise bad_value("must be a string or a list of items; not empty")
    if len(value) > ITEMS_MAX:
        raise bad_value(f"at most {ITEMS_MAX} items")
    return value


def _object_of(kind: dict[str, object], **fields: object) -> dict[str, object]:
    return {"type": "object", "properties": {"type": kind, **fields}, "required": [*fields]}


_TEXT = {"type": "string"}
_ID = {"type": "string", "maxLength": _ID_CHARS_MAX}
_CONTENT = {
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "items": {
                "anyOf": [
                    _object_of({"enum": ["input_text", "output_text", "text"]}, text=_TEXT),
                    _object_of({"const": "refusal"}, refusal=_TEXT),
                ]
            },
        },
    ]
}
_ROLE = {"enum": ["system", "developer", "user", "assistant"]}
_ITEM = {
    "anyOf": [
        _object_of({"enum": ["message", None]}, role=_ROLE, content=_CONTENT),
        _object_of({"const": "function_call"}, call_id=_ID, name=_ID, arguments=_TEXT),
        _object_of({"const": "function_call_output"}, call_id=_ID, output=_CONTENT),
        _object_of({"const": "reasoning"}),
    ]
}
InputItems = Annotated[
    str | list[object],
    PlainValidator(_items),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _ITEM, "minItems": 1}]}),
]
"""Items are read by `messages_of`."""


class InputMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: object


class InputCall(RequestBody):
    """A call that the model made in an earlier turn."""

    call_id: Annotated[str, Field(max_length=_ID_CHARS_MAX)]
    name: Annotated[str, Field(max_length=_ID_CHARS_MAX)]
    arguments: str

    def as_made(self) -> MadeCall:
        return MadeCall(id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments))


class InputCallOutput(RequestBody):
    call_id: Annotated[str, Field(max_length=_ID_CHARS_MAX)]
    output: object


def messages_of(items: str | list[object]) -> list[ChatMessage]:
    """At least one message; raises an ApiError that names the first bad item."""
    if isinstance(items, str):
        return [ChatMessage(role="user", content=items)]
    history = _ChatHistory()
    for place, item in enumerate(items):
        _read(history, item, f"input[{place}]")
    messages = history.ended()
    if not messages:
        raise invalid("input", "'input' has no message")
    return messages


class _ChatHistory:
    """The messages of a chat. A turn of the assistant is open while calls may join it."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._said: str | None = None
        self._reasoned: str | None = None
        self._calls: list[MadeCall] = []

    def add(self, message: ChatMessage) -> None:
        self._end_turn()
        self._messages.append(message)

    def reason(self, text: str) -> None:
        """The assistant reasons, before what it says and calls or between."""
        self._reasoned = text if self._reasoned is None else f"{self._reasoned}\n{text}"

    def say(self, text: str) -> None:
        """A message of the assistant. Behind calls whose results have not come it is a part of their turn."""
        if self._calls:
            self._said = text if self._said is None else f"{self._said}\n{text}"
            return
        if self._said is not None:
            self._end_turn()
        self._said = text

    def call(self, call: MadeCall, path: str) -> None:
        if len(self._calls) == CALLS_MAX:
            raise invalid(path, f"'{path}': at most {CALLS_MAX} calls behind each other")
        self._calls.append(call)

    def ended(self) -> list[ChatMessage]:
        self._end_turn()
        return self._messages

    def _end_turn(self) -> None:
        if self._said is None and not self._calls:
            self._reasoned = None
            return
        self._messages.append(
            ChatMessage(
                role="assistant",
                content=self._said,
                tool_calls=self._calls or None,
                reasoning_content=self._reasoned,
            )
        )
        self._said, self._reasoned, self._calls = None, None, []


def _read(history: _ChatHistory, item: object, path: str) -> None:
    if not isinstance(item, dict):
        raise invalid(path, f"'{path}' must be an object")
    match item.get("type"):
        case None | "message":
            message = _validated(InputMessage, item, path)
            text = _text_of(message.content, f"{path}.content")
            if message.role == "assistant":
                history.say(text)
            else:
                history.add(ChatMessage(role=message.role, content=text))
        case "function_call":
            history.call(_validated(InputCall, item, path).as_made(), path)
        case "function_call_output":
            result = _validated(InputCallOutput, item, path)
            text = _text_of(result.output, f"{path}.output")
            history.add(ChatMessage(role="tool", content=text, tool_call_id=result.call_id))
        case "reasoning":
            history.reason(_reasoning_of(item))
        case "item_reference":
            raise unsupported(path, f"'{path}' refers to an item of an earlier response, and {NO_STATE}")
        case other:
            name = f"{path}.type"
            raise unsupported(name, f"'{name}' is {str(other)[:40]!r}, which is not supported by this server")


def _reasoning_of(item: Mapping[str, object]) -> str:
    """Encrypted reasoning has no text here."""
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _text_of(content: object, path: str) -> str:
    """Text parts are joined by line breaks, as in chats."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, f"'{path}' must be a string or a list of content parts")
    return "\n".join([_part_text(part, f"{path}[{place}]") for place, part in enumerate(content)])


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(path, f"'{path}' must be an object")
    kind = part.get("type")
    name = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise unsupported(
            path, f"'{path}' is of type {str(kind)[:40]!r}; only text is supported (no images, files or audio)"
        )
    text = part.get(name)
    if not isinstance(text, str):
        raise invalid(f"{path}.{name}", f"'{path}.{name}' must be a string")
    return text


Item = TypeVar("Item", bound=RequestBody)


def _validated(kind: type[Item], item: dict[str, object], path: str) -> Item:
    try:
        return kind.model_validate(item)
    except ValidationError as error:
        raise _inside(path, from_validation(error)) from None


def _inside(path: str, refusal: ApiError) -> ApiError:
    """The refusal of a field of an item, named from the top of the body."""
    param = f"{path}.{refusal.param}"
    return invalid(param, refusal.message.replace(f"'{refusal.param}'", f"'{param}'", 1), refusal.code)
