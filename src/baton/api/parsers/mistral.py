"""Mistral: `[TOOL_CALLS]` and a JSON list of calls, or, from 2025 on, `[TOOL_CALLS]name[ARGS]{…}` once for each call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.api.parsers.json_calls import JsonCall
from baton.api.parsers.json_values import WHITE, JsonValue
from baton.api.parsers.markers import ContentAroundCalls, find_marker, settled_length
from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun

CALLS, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
MARKERS = (CALLS, ARGUMENTS)
_BETWEEN = WHITE + ",["


class MistralParser:
    def __init__(self, tools: Collection[str]) -> None:  # noqa: ARG002  a name that is no tool's is the client's to judge
        self._content = ContentAroundCalls()
        self._calls = 0
        self._text = ""
        self._reader: _Outside | _ListOfCalls | _NamedCall = _Outside()

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while True:
            before = len(self._text), self._reader
            parts += self._step()
            if (len(self._text), self._reader) == before:
                return parts

    def _step(self) -> list[AnswerPart]:
        match self._reader:
            case _Outside():
                return self._outside()
            case _ListOfCalls():
                return self._list(self._reader)
            case _NamedCall():
                return self._named(self._reader)

    def _outside(self) -> list[AnswerPart]:
        found = find_marker(self._text, (CALLS,))
        if found is None:
            end = settled_length(self._text, (CALLS,))
            text, self._text = self._text[:end], self._text[end:]
            return self._content.push(text)
        text, self._text = self._text[: found[0]], self._text[found[0] :]
        parts = self._content.push(text)
        if behind := self._text[len(CALLS) :].lstrip(WHITE):
            self._text = behind
            self._content.call()
            self._reader = _ListOfCalls() if behind[0] == "[" else _NamedCall()
        return parts

    def _list(self, reader: _ListOfCalls) -> list[AnswerPart]:
        if reader.call is None:
            self._text = self._text.lstrip(_BETWEEN)
            if not self._text.startswith("{"):
                if self._text:
                    self._text, self._reader = self._text.removeprefix("]"), _Outside()
                return []
            reader.call = JsonCall(self._calls)
        parts, self._text = reader.call.push(self._text)
        if reader.call.is_over:
            if reader.call.has_begun:
                self._calls += 1
            else:
                parts += self._content.push(reader.call.text)
            reader.call = None
        return parts

    def _named(self, reader: _NamedCall) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if reader.arguments is None:
            found = find_marker(self._text, (ARGUMENTS, "{"))
            if found is None:
                return []
            name = self._text[: found[0]].strip()
            if not name:
                self._reader = _Outside()
                return self._content.push(CALLS)
            self._text = self._text[found[0] :].removeprefix(ARGUMENTS)
            reader.arguments = JsonValue()
            parts = [CallBegun(self._calls, name)]
        own, self._text = reader.arguments.push(self._text)
        if own:
            parts.append(CallArguments(self._calls, own))
        if reader.arguments.is_done:
            self._calls += 1
            self._reader = _Outside()
        return parts

    def finish(self) -> list[AnswerPart]:
        return [*self._content.push(self._left_over()), *self._content.finish()]

    def _left_over(self) -> str:
        """Text that turned out to be no call, since the answer ended in it."""
        match self._reader:
            case _ListOfCalls(call):
                return "" if call is None or call.has_begun else call.text
            case _NamedCall(arguments):
                return CALLS + self._text if arguments is None else ""
            case _Outside():
                return self._text


@dataclass(slots=True, eq=False)
class _Outside:
    """Reads content."""


@dataclass(slots=True, eq=False)
class _ListOfCalls:
    call: JsonCall | None = None


@dataclass(slots=True, eq=False)
class _NamedCall:
    arguments: JsonValue | None = None
