"""GPT-OSS: messages in channels. `analysis` is reasoning, `final` the answer, `commentary to=functions.NAME` a call.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Collection

from baton.api.parsers.markers import find_marker, settled_length
from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
_BEGINNINGS = (CHANNEL, START, "to=functions.")
"""The prompt ends with the role, behind which a header goes on."""
REASONING = f"{CHANNEL}analysis"
ANSWERS = (f"{CHANNEL}final", f"{CHANNEL}commentary", "to=functions.")
"""What follows the reasoning begins with one of these."""
_TOOL = re.compile(r"to=functions\.([^\s<]+)")


class GptOssParser:
    """`ends_in_final`: no message follows one of the channel `final`, so what it spells are no markers."""

    def __init__(self, tools: Collection[str], ends_in_final: bool = False) -> None:
        self._ends_in_final = ends_in_final
        self._has_tools = bool(tools)
        self._text = ""
        self._header: str | None = None
        """Of the message that is being read; None: its header has not ended."""
        self._has_markers = False
        self._calls = 0

    def push(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while True:
            before = len(self._text), self._header
            parts += self._between() if self._header is None else self._message()
            if (len(self._text), self._header) == before:
                return parts

    def _between(self) -> list[AnswerPart]:
        """An answer without any marker is content."""
        if not self._has_markers:
            begun = self._text.lstrip()
            if not begun or any(marker.startswith(begun[: len(marker)]) for marker in _BEGINNINGS):
                self._has_markers = begun.startswith(_BEGINNINGS)
            else:
                self._header = "final"
                return []
        header, marker, rest = self._text.partition(MESSAGE)
        if not self._has_markers or not marker:
            return []
        self._header, self._text = header, rest
        if (tool := self._tool()) is not None:
            self._calls += 1
            return [CallBegun(self._calls - 1, tool)]
        return []

    def _tool(self) -> str | None:
        """The tool that the message is for."""
        found = _TOOL.search(self._header or "") if self._has_tools else None
        return None if found is None else found[1]

    def _message(self) -> list[AnswerPart]:
        if self._ends_in_final and "final" in (self._header or ""):
            text, self._text = self._text, ""
            return self._part(text)
        ends = (*ENDS, START, CHANNEL)
        found = find_marker(self._text, ends)
        end = settled_length(self._text, ends) if found is None else found[0]
        text, self._text = self._text[:end], self._text[end:]
        parts = self._part(text)
        if found is not None:
            self._header, self._has_markers = None, True
            if found[1] in ENDS:
                self._text = self._text[len(found[1]) :]
        return parts

    def _part(self, text: str) -> list[AnswerPart]:
        if not text:
            return []
        if self._tool() is not None:
            return [CallArguments(self._calls - 1, text)]
        return [Reasoning(text)] if "analysis" in (self._header or "") else [Content(text)]

    def finish(self) -> list[AnswerPart]:
        text, self._text = self._text, ""
        if self._header is not None:
            return self._part(text)
        return [Content(text)] if text and not self._has_markers else []
