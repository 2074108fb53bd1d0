"""DeepSeek, Qwen and others: reasoning between `<think>` and `</think>` at the beginning of an answer, then the answer."""

from __future__ import annotations

from baton.api.parsers.markers import settled_length
from baton.api.parsers.parts import AnswerParser, AnswerPart, Reasoning

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)
SEPARATOR = "\n\n"
"""Stands between reasoning and an answer whose own white space at its beginning counts."""


class ThinkingParser:
    """White space around the reasoning is not shown. What follows it goes to `inner`.

    `begins_inside`: the prompt ended with the opening marker. `keeps_space`: of the white space behind the reasoning, only
    the separator is not shown.
    """

    def __init__(self, inner: AnswerParser, begins_inside: bool, keeps_space: bool = False) -> None:
        self._inner = inner
        self._keeps_space = keeps_space
        self._text = ""
        self._is_inside = begins_inside
        self._is_answer = False
        self._is_first = True
        """Nothing of the reasoning, or of the answer behind it, was passed on yet."""
        self._space: list[str] = []
        """White space behind the reasoning so far; shown if more follows."""

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        if not self._is_inside and not self._is_answer:
            self._begin()
        if self._is_inside:
            parts += self._reasoning()
        if self._is_answer:
            parts += self._answer()
        return parts

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(OPEN):
            self._text, self._is_inside = begun[len(OPEN) :], True
        elif not OPEN.startswith(begun):
            self._is_answer, self._is_first = True, False  # there is no reasoning: shown to the letter

    def _reasoning(self) -> list[AnswerPart]:
        text, closing, rest = self._text.partition(CLOSE)
        end = len(text) if closing else settled_length(text, (CLOSE,))
        kept = text[:end].rstrip()
        shown, space = ("".join(self._space) + kept, []) if kept else ("", self._space)
        space.append(text[len(kept) : end])
        if closing:
            self._is_inside, self._is_answer = False, True
        self._space, self._text = space, rest if closing else text[end:]
        if self._is_first:
            shown = shown.lstrip()
        self._is_first = bool(closing) or (self._is_first and not shown)
        return [Reasoning(shown)] if shown else []

    def _answer(self) -> list[AnswerPart]:
        if self._is_first and self._keeps_space and len(self._text) < len(SEPARATOR) and SEPARATOR.startswith(self._text):
            return []
        text, self._text = self._text, ""
        if self._is_first and self._keeps_space:
            text, self._is_first = text.removeprefix(SEPARATOR), False
        elif self._is_first:
            text = text.lstrip()
            self._is_first = not text
        return self._inner.push(text) if text else []

    def finish(self) -> list[AnswerPart]:
        """An answer that was cut short while it reasoned has no content."""
        text, self._text = self._text, ""
        if self._is_inside:
            text = "".join(self._space) + text
            shown = (text.lstrip() if self._is_first else text).rstrip()
            return [Reasoning(shown)] if shown else []
        if self._is_answer and self._is_first:
            text = ""  # a part of the separator
        return [*(self._inner.push(text) if text else []), *self._inner.finish()]
