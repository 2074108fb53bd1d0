"""Answers in the form of the Responses API: one response object, or events whose last one carries it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.api.errors import ApiError, shortened
from baton.api.parsers.parts import AnswerPart, Content
from baton.api.responses import ResponseHeader, WholeChoice, encode
from baton.api.responses_api.body import ResponsesBody, ResponsesTool
from baton.api.responses_api.output_items import (
    ItemChange,
    ItemClosed,
    ItemOpened,
    MessageOutput,
    OutputItem,
    OutputItems,
    TextAdded,
)
from baton.api.text_reader import TextDelta
from baton.api.tool_fields import NamedTool, ToolChoice
from baton.core.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """How an answer ended, in the words of the Responses API."""

    status: str
    event: str
    """Type of the last event of a stream."""
    incomplete: str | None = None
    error: str | None = None

    def fields(self) -> dict[str, object]:
        return {
            "status": self.status,
            "error": None if self.error is None else {"code": "server_error", "message": shortened(self.error)},
            "incomplete_details": None if self.incomplete is None else {"reason": self.incomplete},
        }


IN_PROGRESS = ResponseEnd("in_progress", "response.in_progress")
_ENDS = {
    FinishReason.STOP: ResponseEnd("completed", "response.completed"),
    FinishReason.LENGTH: ResponseEnd("incomplete", "response.incomplete", incomplete="max_output_tokens"),
    FinishReason.ABORT: ResponseEnd("cancelled", "response.incomplete"),
}


FAILED = ResponseEnd("failed", "response.failed", error="The answer ended early; try again")
"""Any other finish: what there is of the answer must not look complete."""


class ResponsesWriter:
    """Writes one answer, whole or as events. Events are numbered from 0."""

    is_numbered = False
    done = b""

    def __init__(self, body: ResponsesBody, heading: ResponseHeader) -> None:
        self._body = body
        self._heading = heading
        self._items = OutputItems(heading)
        self._end = IN_PROGRESS
        self._events = 0
        self._delta_head = b""
        """Of the open item: its delta events up to the text."""

    def opening(self, delta: TextDelta) -> bytes:  # noqa: ARG002
        response = self._response([], None)
        created = self._event("response.created", {"response": response})
        return created + self._event("response.in_progress", {"response": response})

    def event(self, delta: TextDelta) -> bytes:
        events = [self._of_change(change) for part in _parts(delta) for change in self._items.add(part)]
        if delta.finish is not None:
            self._end = _ENDS.get(delta.finish, FAILED)
            events += [self._of_change(change) for change in self._closing(delta.has_calls)]
        return b"".join(events)

    def usage_event(self, usage: Mapping[str, object]) -> bytes:
        """The last event, with the whole response."""
        return self._event(self._end.event, {"response": self._response(self._items.shown(), usage)})

    def error_event(self, error: ApiError) -> bytes:
        return self._event("error", {"code": error.code, "message": shortened(error.message), "param": error.param})

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> Iterator[bytes]:
        (choice,) = choices
        self._end = FAILED if choice.finish is None else _ENDS.get(choice.finish, FAILED)
        for part in _parts_of_choice(choice):
            _drain(self._items.add(part))
        _drain(self._closing(choice.has_calls))
        yield encode(self._response(self._items.shown(), usage))

    def _closing(self, has_calls: bool) -> Iterator[ItemChange]:
        return self._items.end(self._end.status == "completed", has_calls, self._end is FAILED)

    def _response(self, output: list[dict[str, object]], usage: Mapping[str, object] | None) -> dict[str, object]:
        body = self._body
        return {
            "id": self._heading.id,
            "object": "response",
            "created_at": self._heading.created_s,
            **self._end.fields(),
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._heading.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if body.text_format is None else body.text_format.fields()},
            "tool_choice": _choice_fields(body.tool_choice),
            "tools": [_tool_fields(tool) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_fields(usage),
            "user": None,
        }

    def _of_change(self, change: ItemChange) -> bytes:
        match change:
            case TextAdded(_, text):
                return self._delta(text)
            case ItemOpened(item):
                return self._opened(item)
            case ItemClosed(item):
                return self._closed(item)

    def _opened(self, item: OutputItem) -> bytes:
        added = self._event("response.output_item.added", {"output_index": item.place, "item": item.shown()})
        kind = f"{item.event}.delta"
        fields = encode({"type": kind, **_place(item), **_logprobs(item)})
        self._delta_head = b"event: %b\ndata: %b" % (kind.encode(), fields[:-1])
        if not item.has_parts:
            return added
        return added + self._event("response.content_part.added", {**_place(item), "part": item.part("")})

    def _delta(self, text: str) -> bytes:
        """Put together from bytes that the item's deltas share, since there is one for each token."""
        return self._delta_head + b',"delta":%b,"sequence_number":%d}\n\n' % (encode(text), self._next_number())

    def _closed(self, item: OutputItem) -> bytes:
        text = item.text.getvalue()
        done = self._event(f"{item.event}.done", {**_place(item), **_logprobs(item), item.text_field: text})
        if item.has_parts:
            done += self._event("response.content_part.done", {**_place(item), "part": item.part(text)})
        return done + self._event("response.output_item.done", {"output_index": item.place, "item": item.shown()})

    def _event(self, kind: str, fields: Mapping[str, object]) -> bytes:
        data = encode({"type": kind, **fields, "sequence_number": self._next_number()})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _next_number(self) -> int:
        self._events += 1
        return self._events - 1


def _parts(delta: TextDelta) -> Sequence[AnswerPart]:
    """Without a parser, the text is all content."""
    return (Content(delta.text),) if delta.parts is None and delta.text else delta.parts or ()


def _parts_of_choice(choice: WholeChoice) -> Iterable[AnswerPart]:
    return (Content(choice.shown()),) if choice.parts is None else choice.parts.ordered()


def _drain(changes: Iterable[ItemChange]) -> None:
    """Make the changes; nobody is told of them."""
    deque(changes, maxlen=0)


def _place(item: OutputItem) -> dict[str, object]:
    place: dict[str, object] = {"item_id": item.id, "output_index": item.place}
    return place | {"content_index": 0} if item.has_parts else place


def _logprobs(item: OutputItem) -> dict[str, object]:
    """Clients expect the field in events of messages."""
    return {"logprobs": []} if isinstance(item, MessageOutput) else {}


def _choice_fields(choice: ToolChoice | None) -> object:
    match choice:
        case NamedTool(function=function):
            return {"type": "function", "name": function.name}
        case _:
            return choice or "auto"


def _tool_fields(tool: ResponsesTool) -> dict[str, object]:
    fields: dict[str, object] = {"type": "function", "name": tool.name, "description": tool.description}
    return {**fields, "parameters": tool.parameters, "strict": bool(tool.strict)}


def _usage_fields(usage: Mapping[str, object]) -> dict[str, object]:
    fields: dict[str, object] = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
    return fields | {"baton": usage["baton"]} if "baton" in usage else fields
