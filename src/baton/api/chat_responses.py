"""Chat responses: `chat.completion` and streamed `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.api.engine import TokenLogprob
from baton.api.responses import (
    FINISH,
    NULL,
    Piece,
    ResponseHeader,
    WholeChoice,
    encode,
    readable,
    rescheduled_bytes,
    rescheduled_fields,
)
from baton.api.text_reader import TextDelta


class ChatWriter:
    """A choice begins with a chunk that has only the role; the first chunk of the stream has `prompt_token_ids`."""

    def __init__(self, heading: ResponseHeader, piece: Piece, logprobs: bool) -> None:
        self._heading = heading
        self._piece = piece
        self._logprobs = logprobs
        top = encode({"id": heading.id, "object": "chat.completion.chunk"})[:-1]
        top += b',"created":%d,"model":%b' % (heading.created_s, encode(heading.model))
        self._top = b"data: " + top
        self._head = self._top + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if heading.include_usage else b"}]}\n\n"
        self._prompt_is_due = heading.return_token_ids

    def event(self, delta: TextDelta) -> bytes:
        extras = self._logprobs or self._heading.return_token_ids
        if not delta.text and delta.finish is None and not (extras and delta.tokens):
            return b""
        content = b'{"content":%b}' % encode(delta.text) if delta.text or delta.finish is None else b"{}"
        return self._chunk(self._head, delta, content)

    def _chunk(self, head: bytes, delta: TextDelta, content: bytes) -> bytes:
        logprobs = encode({"content": self._entries(delta.logprobs)}) if delta.logprobs else NULL
        ids = b',"token_ids":%b' % encode(delta.tokens) if self._heading.return_token_ids else b""
        fields = b'%d,"delta":%b,"logprobs":%b,"finish_reason":%b' % (delta.index, content, logprobs, FINISH[delta.finish])
        return b"".join((head, fields, ids, rescheduled_bytes(delta.rescheduled), self._tail))

    def opening(self, delta: TextDelta) -> bytes:
        head = self._head
        if self._prompt_is_due:
            self._prompt_is_due = False
            head = self._top + b',"prompt_token_ids":%b,"choices":[{"index":' % encode(self._heading.prompt_ids_of(0))
        bare = TextDelta(delta.index, "", (), (), (), None, first=True)
        return self._chunk(head, bare, b'{"role":"assistant","content":""}')

    def usage_event(self, usage: Mapping[str, object]) -> bytes:
        return self._top + b',"choices":[],"usage":%b}\n\n' % encode(usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> bytes:
        heading = self._heading
        answer: dict[str, object] = {
            "id": heading.id,
            "object": "chat.completion",
            "created": heading.created_s,
            "model": heading.model,
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage,
        }
        if heading.return_token_ids:
            answer["prompt_token_ids"] = heading.prompt_ids_of(0)
        return encode(answer)

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        whole: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.shown(), "refusal": None},
            "logprobs": {"content": self._entries(choice.logprobs), "refusal": None} if self._logprobs else None,
            "finish_reason": choice.finish,
        }
        if self._heading.return_token_ids:
            whole["token_ids"] = choice.tokens
        return whole if choice.rescheduled is None else whole | rescheduled_fields(choice.rescheduled)

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, object]]:
        return [
            self._entry(item.token, item.logprob) | {"top_logprobs": [self._entry(*alternative) for alternative in item.top]}
            for item in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        piece = self._piece(token)
        return {"token": readable(piece), "logprob": logprob, "bytes": list(piece)}
