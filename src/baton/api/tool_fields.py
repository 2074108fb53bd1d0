"""Fields of requests with tools: the tools, the choice among them, and the calls in earlier messages."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.api.errors import invalid

TOOLS_MAX = 128
TOOLS_BYTES_MAX = 256 << 10
"""Of all tools of a request, as JSON: templates indent them, which makes a text many times as long."""
DEPTH_MAX = 32
"""Levels of objects and lists in the parameters of a tool, and in arguments that a template gets as a value."""
CALLS_MAX = 128
"""Calls in one message."""


class ToolField(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionTool(ToolField):
    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(ToolField):
    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, object]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class NamedFunction(ToolField):
    name: str


class NamedTool(ToolField):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(ToolField):
    name: Annotated[str, Field(max_length=256)]
    arguments: str


class MadeCall(ToolField):
    """A call that the model made in an earlier message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self, as_text: bool) -> dict[str, object]:
        """Most templates write the arguments as JSON, and want a value; to others they are text."""
        text = self.function.arguments
        arguments = text if as_text else _value_of(text or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool] | None, Field(max_length=TOOLS_MAX)]
MadeCalls = Annotated[list[MadeCall] | None, Field(max_length=CALLS_MAX)]


def offered_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> list[Tool]:
    """The tools that the model is told of; raises a 400 for what cannot be kept."""
    if is_forced(choice) and not tools:
        raise invalid("tool_choice", "'tool_choice' asks for a call, and there are no 'tools'")
    if not tools or choice == "none":
        return []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "'tools' has two of the same name")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid("tool_choice", f"'tool_choice' names '{choice.function.name[:128]}', which is none of the 'tools'")
    if any(not is_flat(tool.function.parameters) for tool in tools):
        raise invalid("tools", f"'tools' has parameters of more than {DEPTH_MAX} levels")
    if sum(len(tool.model_dump_json()) for tool in tools) > TOOLS_BYTES_MAX:
        raise invalid("tools", f"'tools' has more than {TOOLS_BYTES_MAX} bytes", "request_too_large")
    return tools


def is_forced(choice: ToolChoice | None) -> bool:
    """Whether the answer must be a call."""
    return choice is not None and choice not in ("none", "auto")


def is_flat(value: object, levels: int = DEPTH_MAX) -> bool:
    """Whether a JSON value has at most so many levels of objects and lists."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_flat(item, levels - 1) for item in inner)


def _value_of(text: str) -> object:
    """The value of a JSON text; the text itself where it is none, or one that no prompt can carry."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a character is a ValueError too
        return text
    return value if is_flat(value) else text
