"""Items of the output: reasoning, messages and calls, in the order in which the model wrote them.

One item is open at a time: a part of another kind ends it. White space alone, as between two calls, is no message. Whole
and streamed answers are made from the same items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from typing import ClassVar, Literal

from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from baton.api.responses import ResponseHeader, call_id, digest_of

ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class MessageOutput:
    id: str
    place: int
    """Index in `output`."""
    text: StringIO = field(default_factory=StringIO)
    status: ItemStatus = "in_progress"
    event: ClassVar[str] = "response.output_text"
    """What the types of its events begin with."""
    text_field: ClassVar[str] = "text"
    has_parts: ClassVar[bool] = True
    """Whether the text is a content part of the item."""

    def part(self, text: str) -> dict[str, object]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shown(self) -> dict[str, object]:
        content = [] if self.status == "in_progress" else [self.part(self.text.getvalue())]
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}


@dataclass(slots=True)
class ReasoningOutput:
    id: str
    place: int
    text: StringIO = field(default_factory=StringIO)
    status: ItemStatus = "in_progress"
    event: ClassVar[str] = "response.reasoning_text"
    text_field: ClassVar[str] = "text"
    has_parts: ClassVar[bool] = True

    def part(self, text: str) -> dict[str, object]:
        return {"type": "reasoning_text", "text": text}

    def shown(self) -> dict[str, object]:
        content = [] if self.status == "in_progress" else [self.part(self.text.getvalue())]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": self.status}


@dataclass(slots=True)
class CallOutput:
    id: str
    place: int
    number: int
    """Among the calls of the answer."""
    call_id: str
    name: str
    text: StringIO = field(default_factory=StringIO)
    status: ItemStatus = "in_progress"
    event: ClassVar[str] = "response.function_call_arguments"
    text_field: ClassVar[str] = "arguments"
    has_parts: ClassVar[bool] = False

    def part(self, text: str) -> dict[str, object]:
        return {"arguments": text}

    def shown(self) -> dict[str, object]:
        head = {"id": self.id, "type": "function_call", "status": self.status, "call_id": self.call_id, "name": self.name}
        return {**head, "arguments": self.text.getvalue()}


OutputItem = MessageOutput | ReasoningOutput | CallOutput


@dataclass(frozen=True, slots=True)
class ItemOpened:
    item: OutputItem


@dataclass(frozen=True, slots=True)
class TextAdded:
    item: OutputItem
    text: str


@dataclass(frozen=True, slots=True)
class ItemClosed:
    item: OutputItem


ItemChange = ItemOpened | TextAdded | ItemClosed


class OutputItems:
    """Ids depend only on the request and the number of an item, so every process that answers it gives the same."""

    def __init__(self, heading: ResponseHeader) -> None:
        self._heading = heading
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._space: list[str] = []
        """White space that begins a message if text follows."""

    def add(self, part: AnswerPart) -> Iterator[ItemChange]:
        match part:
            case Content(text):
                yield from self._say(text)
            case Reasoning(text):
                if not isinstance(self._open, ReasoningOutput):
                    yield from self._begin(ReasoningOutput(self._id("rs"), len(self._items)))
                yield from self._write(text)
            case CallBegun(number, name):
                named = call_id(self._heading, 0, number)
                yield from self._begin(CallOutput(self._id("fc"), len(self._items), number, named, name))
            case CallArguments(number, text):
                if isinstance(self._open, CallOutput) and self._open.number == number:
                    yield from self._write(text)

    def end(self, is_complete: bool, has_whole_calls: bool, is_failed: bool) -> Iterator[ItemChange]:
        """No part follows. An answer without any item has an empty message, unless it failed.

        `has_whole_calls`: no stop string has cut the answer, within a call perhaps.
        """
        if not self._items and not is_failed:
            space = "".join(self._space)
            yield from self._begin(MessageOutput(self._id("msg"), 0))
            yield from self._write(space)
        is_cut = isinstance(self._open, CallOutput) and not has_whole_calls
        yield from self._close("completed" if is_complete and not is_cut else "incomplete")

    def shown(self) -> list[dict[str, object]]:
        return [item.shown() for item in self._items]

    def _say(self, text: str) -> Iterator[ItemChange]:
        if not isinstance(self._open, MessageOutput):
            if not text.strip():
                self._space.append(text)
                return
            text = "".join(self._space) + text
            yield from self._begin(MessageOutput(self._id("msg"), len(self._items)))
        yield from self._write(text)

    def _begin(self, item: OutputItem) -> Iterator[ItemChange]:
        yield from self._close("completed")
        self._items.append(item)
        self._open, self._space = item, []
        yield ItemOpened(item)

    def _write(self, text: str) -> Iterator[ItemChange]:
        if self._open is not None and text:
            self._open.text.write(text)
            yield TextAdded(self._open, text)

    def _close(self, status: ItemStatus) -> Iterator[ItemChange]:
        if self._open is not None:
            item, self._open = self._open, None
            item.status = status
            yield ItemClosed(item)

    def _id(self, kind: str) -> str:
        return f"{kind}_{digest_of(self._heading, 0, len(self._items))}"
