"""What the text of an answer is made of: content, reasoning and tool calls, found in pieces as the text comes.

A parser gets the text in pieces of any size. However it is cut, the parts, joined, are those of the whole text: every
decision depends on the text alone, and what may still become a marker is held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Tool calls of an answer are numbered from 0."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    number: int
    text: str


AnswerPart = Content | Reasoning | CallBegun | CallArguments


class AnswerParser(Protocol):
    """Finds the parts of one answer."""

    def push(self, text: str) -> list[AnswerPart]: ...

    def finish(self) -> list[AnswerPart]:
        """The parts held back at the end of the answer. No push follows."""


class PlainParser:
    """All of the text is content."""

    def push(self, text: str) -> list[AnswerPart]:
        return [Content(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


@dataclass(slots=True)
class ToolCall:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class _JoinedPart:
    """Neighbouring parts of one kind, or a call with its arguments."""

    kind: Content | Reasoning | CallBegun
    """The first of them."""
    text: StringIO = field(default_factory=StringIO)


class WholeAnswerParts:  # noqa: PLW1641  it grows, and has no hash
    """The parts of an answer in their order, neighbours of one kind joined."""

    def __init__(self, parts: Iterable[AnswerPart] = ()) -> None:
        self._joined: list[_JoinedPart] = []
        self._calls: dict[int, _JoinedPart] = {}
        self.add(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WholeAnswerParts) and list(self.ordered()) == list(other.ordered())

    def __repr__(self) -> str:
        return f"WholeAnswerParts({list(self.ordered())})"

    def add(self, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            match part:
                case Content(text) | Reasoning(text):
                    self._add_text(part, text)
                case CallBegun(number):
                    self._calls[number] = _JoinedPart(part)
                    self._joined.append(self._calls[number])
                case CallArguments(number, text) if number in self._calls:  # its beginning may have been sent elsewhere
                    self._calls[number].text.write(text)
                case _:
                    pass

    def _add_text(self, part: Content | Reasoning, text: str) -> None:
        if not text:
            return
        if not self._joined or type(self._joined[-1].kind) is not type(part):
            self._joined.append(_JoinedPart(part))
        self._joined[-1].text.write(text)

    def ordered(self) -> Iterator[AnswerPart]:
        """Parts that make the same answer, as few as possible."""
        for joined in self._joined:
            text = joined.text.getvalue()
            match joined.kind:
                case Content():
                    yield Content(text)
                case Reasoning():
                    yield Reasoning(text)
                case CallBegun(number):
                    yield joined.kind
                    yield CallArguments(number, text)

    @property
    def content(self) -> str:
        """All of it, calls left out."""
        return "".join(part.text for part in self.ordered() if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.ordered() if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[ToolCall]:
        return [ToolCall(one.kind.name, one.text.getvalue()) for one in self._joined if isinstance(one.kind, CallBegun)]


def writable(text: str) -> str:
    """Without halves of characters, which escapes in JSON can spell and no answer can carry."""
    return text.encode("utf-8", "replace").decode()


def parsed(parser: AnswerParser, pieces: Sequence[str]) -> WholeAnswerParts:
    whole = WholeAnswerParts()
    for piece in pieces:
        whole.add(parser.push(piece))
    whole.add(parser.finish())
    return whole
