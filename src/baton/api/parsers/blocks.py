"""Calls between an opening and a closing marker that are passed on when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.api.parsers.markers import ContentAroundCalls, find_marker, settled_length
from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun

ReadBlock = Callable[[str], tuple[str, str] | None]
"""Name and arguments of the call in a block; None: it is none."""


class BlockParser:
    """`ignored`: markers around the blocks, which are not shown."""

    def __init__(self, opening: str, closing: str, read: ReadBlock, ignored: Sequence[str] = ()) -> None:
        self._opening = opening
        self._closing = closing
        self._read = read
        self._outside_markers = (opening, *ignored)
        self._content = ContentAroundCalls()
        self._calls = 0
        self._is_inside = False
        self._text = ""
        self._searched = 0
        """Characters of a block in which its end was looked for."""

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while True:
            before = len(self._text), self._is_inside
            parts += self._inside() if self._is_inside else self._outside()
            if (len(self._text), self._is_inside) == before:
                return parts

    def _outside(self) -> list[AnswerPart]:
        found = find_marker(self._text, self._outside_markers)
        end = settled_length(self._text, self._outside_markers) if found is None else found[0]
        text, self._text = self._text[:end], self._text[end:]
        parts = self._content.push(text)
        if found is not None:
            self._text = self._text[len(found[1]) :]
            self._is_inside = found[1] == self._opening
        return parts

    def _is_end(self, at: int) -> bool | None:  # noqa: ARG002
        """Whether the closing marker at this place ends the block; None: what follows will tell."""
        return True

    def _inside(self) -> list[AnswerPart]:
        at = self._text.find(self._closing, self._searched)
        while at >= 0 and (is_end := self._is_end(at)) is not True:
            if is_end is None:
                self._searched = at
                return []
            at = self._text.find(self._closing, at + len(self._closing))
        if at < 0:
            self._searched = max(self._searched, len(self._text) - len(self._closing) + 1)
            return []
        block, self._text = self._text[:at], self._text[at + len(self._closing) :]
        self._is_inside, self._searched = False, 0
        return self._parts_of(block, self._closing)

    def _parts_of(self, block: str, closing: str) -> list[AnswerPart]:
        call = self._read(block)
        if call is None:
            return self._content.push(self._opening + block + closing)
        number, self._calls = self._calls, self._calls + 1
        self._content.call()
        return [CallBegun(number, call[0]), CallArguments(number, call[1])]

    def finish(self) -> list[AnswerPart]:
        """A call that was cut short is passed on if it can be read; its text is content otherwise."""
        text, self._text = self._text, ""
        parts = self._parts_of(text, "") if self._is_inside else self._content.push(text)
        return [*parts, *self._content.finish()]
