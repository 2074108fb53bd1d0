"""Completion responses: `text_completion`, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.api.logprob_columns import TokenLogprob
from baton.api.prompt_logprobs import PromptTable
from baton.api.responses import (
    FINISH,
    NULL,
    Event,
    LargeEvent,
    OpenAiEvents,
    Piece,
    ResponseHeader,
    WholeChoice,
    encode,
    encoded_answer,
    encoded_ids,
    encoded_list,
    encoded_text,
    prompt_lines,
    readable,
    rescheduled_bytes,
)
from baton.api.text_reader import TextDelta


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """What answers show of one prompt."""

    echo: str
    """Its text, where answers begin with it."""
    table: PromptTable | None = None
    """Its log-probabilities, where they are asked for."""
    echoed: int | None = None
    """Alternatives for each of its tokens in the lists of an answer that begins with it; None: these are not in them."""
    offsets: Sequence[int] = ()
    """Text offset of each of its tokens in these lists."""
    listed: int | None = None
    """Alternatives in `prompt_logprobs`; None: not asked for."""


NOT_SHOWN = ShownPrompt("")


class CompletionWriter(OpenAiEvents):
    """With `echo`, a choice's text begins with its prompt, and its log-probabilities with those of the prompt."""

    def __init__(self, heading: ResponseHeader, piece: Piece, logprobs: bool, prompts: Sequence[ShownPrompt]) -> None:
        super().__init__(heading)
        self._heading = heading
        self._piece = piece
        self._logprobs = logprobs
        self._prompts = prompts
        top = encode({"id": heading.id, "object": "text_completion"})[:-1]
        self._top = b"data: " + top + b',"created":%d,"model":%b' % (heading.created_s, encode(heading.model))
        self._head = self._top + b',"choices":[{"index":'

    def opening(self, delta: TextDelta) -> bytes:  # noqa: ARG002
        return b""

    def event(self, delta: TextDelta) -> Event:
        self._tokens_so_far += len(delta.tokens)
        echoes = delta.first and delta.rescheduled is None
        prompt = self._prompts[delta.index // self._heading.n] if echoes else NOT_SHOWN
        with_ids = self._heading.return_token_ids
        has_text = bool(prompt.echo or delta.text)
        if not has_text and delta.finish is None and not ((self._logprobs or with_ids) and delta.tokens):
            return b""
        if prompt.echo or prompt.echoed is not None or (with_ids and delta.first):
            return LargeEvent(self._first_event(prompt, delta, self._tail()))
        logprobs = b"".join(self._lists(NOT_SHOWN, delta.logprobs, delta.offsets)) if delta.logprobs else NULL
        ids = b',"token_ids":%b' % encode(delta.tokens) if with_ids else b""
        fields = b'%d,"text":%b,"logprobs":%b,"finish_reason":%b' % (
            delta.index,
            encode(delta.text),
            logprobs,
            FINISH[delta.finish],
        )
        return b"".join((self._head, fields, ids, rescheduled_bytes(delta.rescheduled), self._tail()))

    def _first_event(self, prompt: ShownPrompt, delta: TextDelta, tail: bytes) -> Iterator[bytes]:
        """An event that repeats a prompt, in pieces."""
        yield self._head + b'%d,"text":' % delta.index
        yield from encoded_text(prompt.echo, delta.text)
        yield b',"logprobs":'
        if delta.logprobs or prompt.echoed is not None:
            yield from self._lists(prompt, delta.logprobs, delta.offsets)
        else:
            yield NULL
        yield b',"finish_reason":%b' % FINISH[delta.finish]
        if self._heading.return_token_ids:
            yield b',"token_ids":%b' % encode(delta.tokens)
            if delta.first:
                yield b',"prompt_token_ids":'
                yield from encoded_ids(self._heading.prompt_ids_of(delta.index))
        yield rescheduled_bytes(delta.rescheduled) + tail

    def usage_event(self, usage: Mapping[str, object]) -> bytes:
        return self._top + b',"choices":[],"usage":%b}\n\n' % encode(usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> Iterator[bytes]:
        heading = self._heading
        top = {"id": heading.id, "object": "text_completion", "created": heading.created_s, "model": heading.model}
        return encoded_answer(top, (self._choice(i, choice) for i, choice in enumerate(choices)), {"usage": usage})

    def _choice(self, index: int, choice: WholeChoice) -> Iterator[bytes]:
        prompt = self._prompts[index // self._heading.n]
        yield b'{"index":%d,"text":' % index
        yield from encoded_text(prompt.echo if choice.rescheduled is None else "", choice.shown())
        yield b',"logprobs":'
        if self._logprobs:
            yield from self._lists(prompt if choice.rescheduled is None else NOT_SHOWN, choice.logprobs, choice.offsets)
        else:
            yield NULL
        if prompt.table is not None and prompt.listed is not None:
            yield b',"prompt_logprobs":'
            yield from prompt_lines(prompt.table, prompt.listed, self._piece)
        yield b',"finish_reason":%b' % FINISH[choice.finish]
        if self._heading.return_token_ids:
            yield b',"token_ids":'
            yield from encoded_ids(choice.tokens)
            yield b',"prompt_token_ids":'
            yield from encoded_ids(self._heading.prompt_ids_of(index))
        yield rescheduled_bytes(choice.rescheduled) + b"}"

    def _lists(self, prompt: ShownPrompt, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> Iterator[bytes]:
        """The lists of a choice in pieces."""
        lists = _JoinedLists(prompt.table if prompt.echoed is not None else None, prompt.echoed, logprobs)
        yield b'{"tokens":'
        yield from encoded_list(len(lists), lambda part: map(self._text, lists.tokens(part)))
        yield b',"token_logprobs":'
        yield from encoded_list(len(lists), lists.logprobs)
        yield b',"top_logprobs":'
        yield from encoded_list(len(lists), lambda part: (item and self._alternatives(item) for item in lists.lines(part)))
        yield b',"text_offset":'
        yield from encoded_ids([*prompt.offsets, *offsets] if prompt.offsets else offsets)
        yield b"}"

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """Top log-probabilities by token text; the chosen token is always included."""
        return {self._text(token): logprob for token, logprob in (*item.top, (item.token, item.logprob))}

    def _text(self, token: int) -> str:
        return readable(self._piece(token))


class _JoinedLists:
    """Log-probabilities of a prompt, where an answer begins with it, and then of the answer, by ranges of places.

    The first token of a prompt has no log-probability.
    """

    def __init__(self, prompt: PromptTable | None, alternatives: int | None, answer: Sequence[TokenLogprob]) -> None:
        """`alternatives`: shown for each token of the prompt."""
        self._prompt = PromptTable(()) if prompt is None else prompt
        self._alternatives = alternatives
        self._answer = answer

    def __len__(self) -> int:
        return len(self._prompt) + len(self._answer)

    def tokens(self, part: slice) -> Iterator[int]:
        yield from self._prompt.tokens(part)
        for item in self._of_answer(part):
            yield item.token

    def logprobs(self, part: slice) -> Iterator[float | None]:
        yield from self._prompt.logprobs(part)
        for item in self._of_answer(part):
            yield item.logprob

    def lines(self, part: slice) -> Iterator[TokenLogprob | None]:
        for line in self._prompt.lines(part):
            yield None if line is None else TokenLogprob(line.token, line.logprob, line.top[: self._alternatives])
        yield from self._of_answer(part)

    def _of_answer(self, part: slice) -> Sequence[TokenLogprob]:
        before = len(self._prompt)
        return self._answer[max(0, part.start - before) : max(0, part.stop - before)]
