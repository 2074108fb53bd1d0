"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call, text before them."""

from __future__ import annotations

from collections.abc import Collection

from baton.api.parsers.json_calls import JsonCall
from baton.api.parsers.markers import ContentAroundCalls, find_marker, settled_length
from baton.api.parsers.parts import AnswerPart

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE)


class HermesParser:
    def __init__(self, tools: Collection[str]) -> None:  # noqa: ARG002  a name that is no tool's is the client's to judge
        self._content = ContentAroundCalls()
        self._calls = 0
        self._call: JsonCall | None = None
        self._text = ""
        """Not settled yet."""

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while True:
            before = len(self._text), self._call
            parts += self._outside() if self._call is None else self._inside(self._call)
            if (len(self._text), self._call) == before:
                return parts

    def _outside(self) -> list[AnswerPart]:
        found = find_marker(self._text, (OPEN,))
        end = settled_length(self._text, (OPEN,)) if found is None else found[0]
        text, self._text = self._text[:end], self._text[end:]
        parts = self._content.push(text)
        if found is not None:
            self._text = self._text[len(OPEN) :]
            self._call = JsonCall(self._calls)
        return parts

    def _inside(self, call: JsonCall) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if not call.is_over:
            parts = self._read(call)
        if not call.is_over and not self._text.startswith(CLOSE):
            return parts
        found = find_marker(self._text, MARKERS)
        if found is None:
            self._pass_over(call, settled_length(self._text, MARKERS))
            return parts
        at, marker = found
        self._pass_over(call, at)
        if marker == CLOSE:
            self._text = self._text[len(CLOSE) :]
        return parts + self._ended(call, marker if marker == CLOSE else "")

    def _read(self, call: JsonCall) -> list[AnswerPart]:
        """Up to the end of the object, or to a closing marker outside its strings: a brace may be missing."""
        at = self._text.find(CLOSE)
        end = settled_length(self._text, (CLOSE,)) if at < 0 else at
        parts, rest = call.push(self._text[:end])
        self._text = rest + self._text[end:]
        if at >= 0 and not call.is_over and call.in_string:
            more, rest = call.push(CLOSE)
            parts, self._text = parts + more, rest + self._text[len(CLOSE) :]
        return parts

    def _pass_over(self, call: JsonCall, size: int) -> None:
        """Text behind the object, or in place of one: a call has none, what is no call is content."""
        text, self._text = self._text[:size], self._text[size:]
        if not call.has_begun:
            call.text += text

    def _ended(self, call: JsonCall, close: str) -> list[AnswerPart]:
        self._call = None
        if not call.has_begun:
            return self._content.push(OPEN + call.text + close)
        self._calls += 1
        self._content.call()
        return []

    def finish(self) -> list[AnswerPart]:
        is_call = self._call is not None and self._call.has_begun
        parts = self._ended(self._call, "") if self._call is not None else []
        text, self._text = self._text, ""
        if is_call and CLOSE.startswith(text):  # a closing marker that was cut short
            text = ""
        return [*parts, *self._content.push(text), *self._content.finish()]
