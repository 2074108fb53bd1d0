"""A tool call written as a JSON object, {"name": …, "arguments": …}, in a text that comes in pieces.

The arguments are passed on as they come where the name stands before them; a call in another order is passed on when it is
complete. What turns out not to be a call is given back as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from baton.api.parsers.json_values import WHITE, JsonValue, call_of
from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun, writable

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')

HEAD_CHARS_MAX = 1024
"""Characters in which the name must stand before the arguments; otherwise a call is read when it is complete."""


class JsonCall:
    """Reads one object, or finds that there is none.

    `is_over` is set behind the object's last brace, or where another character stands in place of an object. `text` has all
    that was read until a call has begun.
    """

    def __init__(self, number: int, is_tool: Callable[[str], bool] = lambda _name: True) -> None:
        self.is_over = False
        self.has_begun = False
        self.text = ""
        self._number = number
        self._is_tool = is_tool
        self._object = JsonValue()
        self._arguments = JsonValue()
        self._is_string = False
        self._quoted = ""
        """Arguments written as a string that has the JSON, as far as they have come."""

    @property
    def in_string(self) -> bool:
        return self._object.in_string

    def push(self, text: str) -> tuple[list[AnswerPart], str]:
        """Parts, and what is left over behind the object."""
        if not self._object.has_begun:
            begun = text.lstrip(WHITE)
            self.text += text[: len(text) - len(begun)]
            self.is_over, text = bool(begun) and begun[0] != "{", begun
            if self.is_over:
                return [], text
        own, rest = self._object.push(text)
        self.is_over = self._object.is_done
        if self.has_begun:
            return self._argument_parts(own), rest
        has_looked = len(self.text) >= HEAD_CHARS_MAX
        self.text += own
        head = None if has_looked else _HEAD.match(self.text, 0, HEAD_CHARS_MAX)
        name = None if head is None else _text_of(head[1])
        if head is not None and name is not None and self._is_tool(name):
            self.has_begun, self._is_string = True, self.text[head.end()] == '"'
            return [CallBegun(self._number, name), *self._argument_parts(self.text[head.end() :])], rest
        return self._whole() if self.is_over else [], rest

    def _argument_parts(self, text: str) -> list[AnswerPart]:
        if self._arguments.is_done:
            return []
        own, _ = self._arguments.push(text)
        if self._is_string:
            self._quoted += own
            own = _unquoted(self._quoted) if self._arguments.is_done else ""
        return [CallArguments(self._number, own)] if own else []

    def _whole(self) -> list[AnswerPart]:
        call = call_of(self.text)
        if call is None or not self._is_tool(call[0]):
            return []
        self.has_begun = True
        return [CallBegun(self._number, call[0]), CallArguments(self._number, call[1])]


def _unquoted(text: str) -> str:
    value = _text_of(text)
    return text if value is None else value


def _text_of(quoted: str) -> str | None:
    """The value of a JSON string; None: it is none."""
    try:
        return writable(str(json.loads(quoted)))
    except ValueError:
        return None
