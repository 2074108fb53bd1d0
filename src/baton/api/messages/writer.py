"""Answers in the form of the Messages API: whole messages, and streams of typed events.

A message is a list of blocks (thinking, text, tool_use). In a stream a block is opened when its first piece comes, and
closed when a piece of another block comes or the answer ends. White space alone, as between two calls, is no block. The
arguments of a call come in one piece, when they are complete: clients fail on what is no JSON object, and models write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic_core import from_json

from baton.api.errors import ApiError
from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning, WholeAnswerParts
from baton.api.responses import ResponseHeader, WholeChoice, call_id, encode
from baton.api.text_reader import TextDelta
from baton.api.tool_fields import is_flat
from baton.core.engine.request import FinishReason

_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", FinishReason.ABORT: "abort"}


class MessagesWriter:
    is_numbered = False

    def __init__(self, heading: ResponseHeader) -> None:
        self.done = _event("message_stop", {})
        self._heading = heading
        self._open: str | None = None
        """What the open block is of; None: no block is open."""
        self._blocks = 0
        """Blocks begun so far."""
        self._space: list[str] = []
        """White space that begins a block of text if text follows."""
        self._arguments: list[str] = []
        """Of the open call."""
        self._stop: dict[str, object] = {}

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def opening(self, delta: TextDelta) -> bytes:  # noqa: ARG002
        usage = {"input_tokens": len(self._heading.prompt_ids_of(0)), "output_tokens": 0}
        return _event("message_start", {"message": self._message([], _NOT_STOPPED, usage)})

    def event(self, delta: TextDelta) -> bytes:
        parts = [Content(delta.text)] if delta.parts is None and delta.text else delta.parts or ()
        events = [self._piece(part) for part in parts]
        if delta.finish is not None:
            events.append(self._closing())
            self._stop = _stop_fields(delta.finish, delta.has_calls, delta.stop_string)
        return b"".join(events)

    def usage_event(self, usage: Mapping[str, object]) -> bytes:
        return _event("message_delta", {"delta": self._stop, "usage": _usage(usage)})

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.messages_body() + b"\n\n"

    def _piece(self, part: AnswerPart) -> bytes:
        match part:
            case Content(text):
                return self._text(text)
            case Reasoning(text):
                opened = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegun(number, name):
                return self._block(f"call {number}", self._tool_use(number, name, {}))
            case CallArguments(number, text):
                if self._open == f"call {number}":
                    self._arguments.append(text)
                return b""

    def _text(self, text: str) -> bytes:
        if self._open != "text" and not text.strip():
            self._space.append(text)
            return b""
        text = "".join(self._space) + text
        opened = self._block("text", {"type": "text", "text": ""})
        self._space = []
        return opened + self._delta({"type": "text_delta", "text": text})

    def _block(self, kind: str, block: Mapping[str, object]) -> bytes:
        """Have a block of this kind open."""
        if self._open == kind:
            return b""
        closing = self._closing()
        self._open, self._space = kind, []
        self._blocks += 1
        return closing + _event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _closing(self) -> bytes:
        if self._open is None:
            return b""
        arguments, self._arguments, self._open = "".join(self._arguments), [], None
        piece = b""
        if arguments:
            piece = self._delta({"type": "input_json_delta", "partial_json": encode(_object(arguments)).decode()})
        return piece + _event("content_block_stop", {"index": self._blocks - 1})

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    # ── a whole message ──────────────────────────────────────────────────────────────────────────────────────────────────

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> Iterator[bytes]:
        (choice,) = choices
        parts = choice.parts or WholeAnswerParts([Content(choice.shown())])
        stop = _stop_fields(choice.finish, choice.has_calls, choice.stop_string)
        yield encode(self._message(list(self._content(parts)), stop, _usage(usage)))

    def _content(self, parts: WholeAnswerParts) -> Iterable[Mapping[str, object]]:
        """Blocks in the order in which the model wrote them, as a stream has them."""
        begun = CallBegun(0, "")
        for part in parts.ordered():
            match part:
                case Reasoning(text):
                    yield {"type": "thinking", "thinking": text, "signature": ""}
                case Content(text) if text.strip():
                    yield {"type": "text", "text": text}
                case CallBegun():
                    begun = part
                case CallArguments(number, text):
                    yield self._tool_use(number, begun.name, _object(text))
                case _:  # white space alone is no block
                    pass

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _message(
        self, content: list[Mapping[str, object]], stop: Mapping[str, object], usage: Mapping[str, object]
    ) -> dict[str, object]:
        heading = self._heading
        named = {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model}
        return {**named, "content": content, **stop, "usage": usage}

    def _tool_use(self, number: int, name: str, arguments: object) -> dict[str, object]:
        return {
            "type": "tool_use",
            "id": call_id(self._heading, 0, number, "toolu_"),
            "name": name,
            "input": arguments,
        }


_NOT_STOPPED: Mapping[str, object] = {"stop_reason": None, "stop_sequence": None}


def _event(kind: str, fields: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def _stop_fields(finish: FinishReason | None, has_calls: bool, stop_string: str | None) -> dict[str, object]:
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    if has_calls and finish is FinishReason.STOP:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": None if finish is None else _STOP_REASONS[finish], "stop_sequence": None}


def _usage(usage: Mapping[str, object]) -> dict[str, object]:
    """Input tokens are those that were not cached; both together are the prompt."""
    details = usage["prompt_tokens_details"]
    prompt, cached = usage["prompt_tokens"], details["cached_tokens"] if isinstance(details, dict) else 0
    if not isinstance(prompt, int) or not isinstance(cached, int):
        raise TypeError("the counts of a usage are numbers")
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _object(arguments: str) -> object:
    """The arguments of a call as an object; those of a call that was cut short as far as they are complete.

    Of a model that wrote something else, its text is kept under `arguments`.
    """
    if arguments.strip() in ("", "null"):
        return {}
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) and is_flat(value) else {"arguments": arguments}
