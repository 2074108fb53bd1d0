"""Completion responses: `text_completion`, whole and streamed."""

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


class CompletionWriter:
    """With `echo`, a choice's text begins with its prompt."""

    def __init__(self, heading: ResponseHeader, piece: Piece, logprobs: bool, echoes: Sequence[str]) -> None:
        self._heading = heading
        self._piece = piece
        self._logprobs = logprobs
        self._echoes = echoes
        top = encode({"id": heading.id, "object": "text_completion"})[:-1]
        self._top = b"data: " + top + b',"created":%d,"model":%b' % (heading.created_s, encode(heading.model))
        self._head = self._top + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if heading.include_usage else b"}]}\n\n"

    def opening(self, delta: TextDelta) -> bytes:  # noqa: ARG002
        return b""

    def event(self, delta: TextDelta) -> bytes:
        echoes = delta.first and delta.rescheduled is None
        text = self._echo(delta.index) + delta.text if echoes else delta.text
        with_ids = self._heading.return_token_ids
        if not text and delta.finish is None and not ((self._logprobs or with_ids) and delta.tokens):
            return b""
        logprobs = encode(self._lists(delta.logprobs, delta.offsets)) if delta.logprobs else NULL
        ids = b',"token_ids":%b' % encode(delta.tokens) if with_ids else b""
        if with_ids and delta.first:
            ids += b',"prompt_token_ids":%b' % encode(self._heading.prompt_ids_of(delta.index))
        fields = b'%d,"text":%b,"logprobs":%b,"finish_reason":%b' % (
            delta.index,
            encode(text),
            logprobs,
            FINISH[delta.finish],
        )
        return b"".join((self._head, fields, ids, rescheduled_bytes(delta.rescheduled), self._tail))

    def usage_event(self, usage: Mapping[str, object]) -> bytes:
        return self._top + b',"choices":[],"usage":%b}\n\n' % encode(usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> bytes:
        heading = self._heading
        return encode(
            {
                "id": heading.id,
                "object": "text_completion",
                "created": heading.created_s,
                "model": heading.model,
                "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
                "usage": usage,
            }
        )

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._heading.n] if self._echoes else ""

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        whole: dict[str, object] = {
            "index": index,
            "text": choice.shown(self._echo(index)),
            "logprobs": self._lists(choice.logprobs, choice.offsets) if self._logprobs else None,
            "finish_reason": choice.finish,
        }
        if self._heading.return_token_ids:
            whole |= {"token_ids": choice.tokens, "prompt_token_ids": self._heading.prompt_ids_of(index)}
        return whole if choice.rescheduled is None else whole | rescheduled_fields(choice.rescheduled)

    def _lists(self, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, object]:
        return {
            "tokens": [self._text(item.token) for item in logprobs],
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [self._alternatives(item) for item in logprobs],
            "text_offset": list(offsets),
        }

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """Top log-probabilities by token text; the chosen token is always included."""
        return {self._text(token): logprob for token, logprob in (*item.top, (item.token, item.logprob))}

    def _text(self, token: int) -> str:
        return readable(self._piece(token))
