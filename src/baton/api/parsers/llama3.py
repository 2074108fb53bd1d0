"""Llama 3: the whole answer is one JSON object with "name" and "parameters", or several with `;` between them.

`<|python_tag|>` may stand before it. An object that names none of the tools is content.
"""

from __future__ import annotations

from collections.abc import Collection

from baton.api.parsers.json_calls import JsonCall
from baton.api.parsers.json_values import WHITE
from baton.api.parsers.markers import ContentAroundCalls
from baton.api.parsers.parts import AnswerPart

TAG = "<|python_tag|>"
MARKERS = (TAG,)


class Llama3Parser:
    def __init__(self, tools: Collection[str]) -> None:
        self._is_tool = frozenset(tools).__contains__
        self._content = ContentAroundCalls()
        self._calls = 0
        self._call: JsonCall | None = None
        self._text = ""
        self._before = ""
        """What stands before the object of `_call`."""
        self._is_plain = False
        """No more calls come."""

    def push(self, text: str) -> list[AnswerPart]:
        if self._is_plain:
            return self._content.push(text)
        self._text += text
        parts: list[AnswerPart] = []
        while self._text and (self._call is not None or self._begin()):
            if self._call is not None:
                parts += self._read(self._call)
            else:  # no call begins here
                plain, self._text = self._text, ""
                return parts + self._content.push(plain)
        return parts

    def _begin(self) -> bool:
        """Whether the next character is known to begin a call, or not to."""
        begun = self._text.lstrip(WHITE + ";") if self._calls else self._text.lstrip(WHITE)
        if TAG.startswith(begun[: len(TAG)]) and len(begun) < len(TAG):
            return False  # nothing, or a part of the tag
        start = begun.removeprefix(TAG)
        if begun.startswith(TAG) and not start.lstrip(WHITE):
            return False
        if start.lstrip(WHITE).startswith("{"):
            self._before = self._text[: len(self._text) - len(start)]
            self._text, self._call = start, JsonCall(self._calls, self._is_tool)
        else:
            self._is_plain = True
        return True

    def _read(self, call: JsonCall) -> list[AnswerPart]:
        parts, self._text = call.push(self._text)
        if call.is_over:
            self._call = None
            if call.has_begun:
                self._calls += 1
                self._content.call()
            else:
                self._text = self._before + call.text + self._text
                self._is_plain = True
                parts, self._text = self._content.push(self._text), ""
        return parts

    def finish(self) -> list[AnswerPart]:
        call, self._call = self._call, None
        if call is not None and call.has_begun:
            self._content.call()
            return self._content.finish()
        held = self._text if call is None else self._before + call.text + self._text
        if self._calls:
            held = held.lstrip(WHITE + ";")
        return [*self._content.push(held), *self._content.finish()]
