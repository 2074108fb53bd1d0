"""Markers in a text that comes in pieces, and white space around tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from baton.api.parsers.parts import AnswerPart, Content


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the markers begins, and which it is; of two at one place the longer."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def settled_length(text: str, markers: Sequence[str]) -> int:
    """Number of characters at the beginning that no marker can be part of, whatever follows."""
    longest = max(len(marker) for marker in markers)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


class ContentAroundCalls:
    """Content of an answer with tool calls: white space beside a call is not shown.

    An answer without calls is shown to the letter.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        """White space at the end of the content so far."""
        self._is_after_call = False
        self._has_calls = False

    def push(self, text: str) -> list[AnswerPart]:
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        kept = text.rstrip()
        if not kept:
            self._held.append(text)
            return []
        shown, self._held = "".join(self._held) + kept, [text[len(kept) :]]
        return [Content(shown)]

    def call(self) -> None:
        """A call begins."""
        self._held, self._is_after_call, self._has_calls = [], True, True

    def finish(self) -> list[AnswerPart]:
        held, self._held = "".join(self._held), []
        return [Content(held)] if held and not self._has_calls else []
