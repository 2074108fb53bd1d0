"""Llama models told to do so: the answer is a Python list of calls with constant arguments, `[look_up(city="x"), …]`."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun, Content

MARKERS = ()
TEXT_MAX = 1 << 16
"""Characters that are read as Python; Python's own parser takes long for more."""


class PythonicParser:
    """What may be such a list is held back to the end of the answer."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = frozenset(tools)
        self._text = ""
        self._is_plain = False

    def push(self, text: str) -> list[AnswerPart]:
        if not self._is_plain:
            self._text += text
            begun = self._text.lstrip()
            if not begun or (begun[0] == "[" and len(self._text) <= TEXT_MAX):
                return []
            self._is_plain, text, self._text = True, self._text, ""
        return [Content(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        text, self._text = self._text, ""
        calls = self._calls_in(text)
        if calls is None:
            return [Content(text)] if text else []
        parts: list[AnswerPart] = []
        for number, (name, arguments) in enumerate(calls):
            parts += [CallBegun(number, name), CallArguments(number, arguments)]
        return parts

    def _calls_in(self, text: str) -> list[tuple[str, str]] | None:
        """None: it is no list of calls of tools."""
        try:
            written = ast.parse(text.strip(), mode="eval").body
            if not isinstance(written, ast.List) or not written.elts:
                return None
            calls = [_call_of(item) for item in written.elts]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        return calls if all(name in self._tools for name, _ in calls) else None


def _call_of(item: ast.expr) -> tuple[str, str]:
    """Raises ValueError when it is no call with constant arguments by name."""
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError("not a call with arguments by name")
    arguments = {}
    for keyword in item.keywords:
        if keyword.arg is None:
            raise ValueError("arguments in a mapping")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(item.func), json.dumps(arguments, allow_nan=False)
