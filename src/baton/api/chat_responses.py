"""Chat responses: `chat.completion` and streamed `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from baton.api.logprob_columns import TokenLogprob
from baton.api.parsers.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning, WholeAnswerParts
from baton.api.prompt_logprobs import PromptTable
from baton.api.responses import (
    FINISH,
    NULL,
    TOOL_CALLS,
    Event,
    LargeEvent,
    OpenAiEvents,
    Piece,
    ResponseHeader,
    WholeChoice,
    call_id,
    encode,
    encoded_answer,
    encoded_ids,
    encoded_list,
    prompt_lines,
    readable,
    rescheduled_bytes,
)
from baton.api.text_reader import TextDelta
from baton.core.engine.request import FinishReason


class ChatWriter(OpenAiEvents):
    """A choice begins with a chunk that has only the role; the first chunk of the stream has `prompt_token_ids`."""

    def __init__(
        self, heading: ResponseHeader, piece: Piece, logprobs: bool, prompt: tuple[PromptTable, int] | None = None
    ) -> None:
        """`prompt`: its log-probabilities, and how many alternatives are shown."""
        super().__init__(heading)
        self._prompt = prompt
        self._heading = heading
        self._piece = piece
        self._logprobs = logprobs
        top = encode({"id": heading.id, "object": "chat.completion.chunk"})[:-1]
        top += b',"created":%d,"model":%b' % (heading.created_s, encode(heading.model))
        self._top = b"data: " + top
        self._head = self._top + b',"choices":[{"index":'
        self._prompt_is_due = heading.return_token_ids

    def event(self, delta: TextDelta) -> bytes:
        self._tokens_so_far += len(delta.tokens)
        extras = self._logprobs or self._heading.return_token_ids
        if delta.parts is not None:
            fields = self._delta_fields(delta.index, delta.parts)
            if not fields and delta.finish is None and not (extras and delta.tokens):
                return b""
            return self._chunk(self._head, delta, encode(fields))
        if not delta.text and delta.finish is None and not (extras and delta.tokens):
            return b""
        content = b'{"content":%b}' % encode(delta.text) if delta.text or delta.finish is None else b"{}"
        return self._chunk(self._head, delta, content)

    def _chunk(self, head: bytes, delta: TextDelta, content: bytes) -> bytes:
        logprobs = encode({"content": self._entries(delta.logprobs)}) if delta.logprobs else NULL
        ids = b',"token_ids":%b' % encode(delta.tokens) if self._heading.return_token_ids else b""
        finish = _finish(delta.finish, delta.has_calls)
        fields = b'%d,"delta":%b,"logprobs":%b,"finish_reason":%b' % (delta.index, content, logprobs, finish)
        return b"".join((head, fields, ids, rescheduled_bytes(delta.rescheduled), self._tail()))

    def _delta_fields(self, index: int, parts: Iterable[AnswerPart]) -> dict[str, object]:
        """Parts of one burst as one delta. A call is named once; its arguments follow under its number."""
        texts: dict[str, str] = {}
        calls: dict[int, tuple[dict[str, object], dict[str, str]]] = {}
        for part in parts:
            match part:
                case Content(text):
                    texts["content"] = texts.get("content", "") + text
                case Reasoning(text):
                    texts["reasoning_content"] = texts.get("reasoning_content", "") + text
                case CallBegun(number, name):
                    head = {"index": number, "id": call_id(self._heading, index, number), "type": "function"}
                    calls[number] = head, {"name": name, "arguments": ""}
                case CallArguments(number, text):
                    _, function = calls.setdefault(number, ({"index": number}, {"arguments": ""}))
                    function["arguments"] += text
        if not calls:
            return dict(texts)
        return {**texts, "tool_calls": [{**head, "function": function} for head, function in calls.values()]}

    def opening(self, delta: TextDelta) -> Event:
        bare = TextDelta(delta.index, "", (), (), (), None, first=True)
        role = b'{"role":"assistant","content":""}'
        if not self._prompt_is_due:
            return self._chunk(self._head, bare, role)
        self._prompt_is_due = False
        rest = self._chunk(b',"choices":[{"index":', bare, role)
        return LargeEvent(chain((self._top,), self._prompt_ids_field(), (rest,)))

    def usage_event(self, usage: Mapping[str, object]) -> bytes:
        return self._top + b',"choices":[],"usage":%b}\n\n' % encode(usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> Iterator[bytes]:
        heading = self._heading
        top = {"id": heading.id, "object": "chat.completion", "created": heading.created_s, "model": heading.model}
        written = (self._choice(i, choice) for i, choice in enumerate(choices))
        return encoded_answer(top, written, {"usage": usage}, self._prompt_fields())

    def _prompt_fields(self) -> Iterator[bytes]:
        if self._prompt is not None:
            yield b',"prompt_logprobs":'
            yield from prompt_lines(*self._prompt, self._piece)
        if self._heading.return_token_ids:
            yield from self._prompt_ids_field()

    def _prompt_ids_field(self) -> Iterator[bytes]:
        yield b',"prompt_token_ids":'
        yield from encoded_ids(self._heading.prompt_ids_of(0))

    def _choice(self, index: int, choice: WholeChoice) -> Iterator[bytes]:
        parts = choice.parts if choice.rescheduled is None else None
        message: dict[str, object] = {"role": "assistant", "content": choice.shown(), "refusal": None}
        if parts is not None:
            message |= self._parts_of_message(index, parts)
        yield b'{"index":%d,"message":%b,"logprobs":' % (index, encode(message))
        if self._logprobs:
            yield b'{"content":'
            yield from encoded_list(len(choice.logprobs), lambda part: self._entries(choice.logprobs[part]))
            yield b',"refusal":null}'
        else:
            yield NULL
        yield b',"finish_reason":%b' % _finish(choice.finish, choice.has_calls)
        if self._heading.return_token_ids:
            yield b',"token_ids":'
            yield from encoded_ids(choice.tokens)
        yield rescheduled_bytes(choice.rescheduled) + b"}"

    def _parts_of_message(self, index: int, parts: WholeAnswerParts) -> dict[str, object]:
        fields: dict[str, object] = {"content": parts.content or (None if parts.calls else "")}
        if parts.reasoning:
            fields["reasoning_content"] = parts.reasoning
        if parts.calls:
            fields["tool_calls"] = [
                {
                    "id": call_id(self._heading, index, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(parts.calls)
            ]
        return fields

    def _entries(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, object]]:
        return [
            self._entry(item.token, item.logprob) | {"top_logprobs": [self._entry(*alternative) for alternative in item.top]}
            for item in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        piece = self._piece(token)
        return {"token": readable(piece), "logprob": logprob, "bytes": list(piece)}


def _finish(reason: FinishReason | None, has_calls: bool) -> bytes:
    """An answer that ended by itself with calls ended for them."""
    return TOOL_CALLS if has_calls and reason is FinishReason.STOP else FINISH[reason]
