"""Answers whose content is constrained: all calls, or all content.

A constraint allows any text in the strings of its content, markers of calls too. The grammar of such an answer lets calls
stand at its beginning only, so what begins with no call has none.
"""

from __future__ import annotations

from baton.api.parsers.parts import AnswerParser, AnswerPart, Content, PlainParser


class CallsOrContentParser:
    """An answer that begins with `trigger`, behind white space, goes to `inner`; any other is content to the letter."""

    def __init__(self, inner: AnswerParser, trigger: str) -> None:
        self._inner = inner
        self._trigger = trigger
        self._chosen: AnswerParser | None = None
        """None: the beginning has not told yet."""
        self._space: list[str] = []
        self._begun = ""
        """Behind the white space: a part of the trigger."""

    def push(self, text: str) -> list[AnswerPart]:
        if self._chosen is not None:
            return self._chosen.push(text)
        if not self._begun:
            begun = text.lstrip()
            self._space.append(text[: len(text) - len(begun)])
            text = begun
        self._begun += text
        if self._trigger.startswith(self._begun) and self._begun != self._trigger:
            return []
        self._chosen = self._inner if self._begun.startswith(self._trigger) else PlainParser()
        return self._chosen.push(self._held())

    def finish(self) -> list[AnswerPart]:
        if self._chosen is not None:
            return self._chosen.finish()
        held = self._held()
        return [Content(held)] if held else []

    def _held(self) -> str:
        return "".join([*self._space, self._begun])
