"""One JSON value inside a text that comes in pieces: its text is passed on as it comes, its end is found."""

from __future__ import annotations

import json

from baton.api.parsers.parts import writable

WHITE = " \t\r\n"


class JsonValue:
    """Reads one value. White space before it is skipped; what follows it is left over."""

    def __init__(self) -> None:
        self.is_done = False
        self.has_begun = False
        self._depth = 0
        self.in_string = False
        self._escaped = False

    def push(self, text: str) -> tuple[str, str]:
        """The value's part of the text, and what is left over behind the value."""
        start = 0 if self.has_begun else len(text) - len(text.lstrip(WHITE))
        for at in range(start, len(text)):
            end = self._take(text[at], at)
            if end is not None:
                self.is_done = True
                return text[start:end], text[end:]
        return text[start:], ""

    def _take(self, char: str, at: int) -> int | None:
        """Where the value ends, if it does with this character; a number or word ends before it."""
        is_first, self.has_begun = not self.has_begun, True
        if self.in_string:
            return self._in_quotes(char, at)
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if not self._depth:
                return at
            self._depth -= 1
            return at + 1 if not self._depth else None
        elif not self._depth and not is_first and (char in WHITE or char == ","):
            return at
        return None

    def _in_quotes(self, char: str, at: int) -> int | None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
            return at + 1 if not self._depth else None
        return None


def call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call written as one JSON object; None: it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return writable(value["name"]), writable(arguments) if isinstance(arguments, str) else json.dumps(arguments)
