"""Parts that chat and completion responses share: usage, whole choices, server-sent events.

Events are put together from bytes that are made once per answer and the few values that change; a model object for
each chunk would cost more than everything else in the front end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from io import StringIO
from itertools import chain
from typing import Protocol

import msgspec

from baton.api.errors import ApiError, shortened
from baton.api.logprob_columns import LogprobColumns
from baton.api.parsers.parts import WholeAnswerParts
from baton.api.prompt_logprobs import PromptLine, PromptTable
from baton.api.text_reader import ChoiceReader, RescheduledAttempt, TextDelta
from baton.core.engine.ended import Bill
from baton.core.engine.request import FinishReason

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
NULL = b"null"
TOOL_CALLS = b'"tool_calls"'
"""The finish reason of an answer with calls."""
FINISH = {None: NULL} | {reason: encode(reason.value) for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """Fields repeated in every chunk of a response."""

    id: str
    created_s: int
    model: str
    include_usage: bool
    return_token_ids: bool
    prompt_ids: Sequence[Sequence[int]]
    n: int
    continuous_usage: bool = False
    """Whether every chunk has the usage so far."""
    has_short_call_ids: bool = False
    """Whether ids of tool calls are nine letters and digits, as some templates want them."""

    def prompt_ids_of(self, index: int) -> Sequence[int]:
        return self.prompt_ids[index // self.n]


Piece = Callable[[int], bytes]
"""The bytes of a token."""
TOKENS_A_PIECE = 64
"""Tokens whose log-probabilities are encoded in one go; with twenty alternatives each it takes about two milliseconds."""
IDS_A_PIECE = 4096
CHARACTERS_A_PIECE = 32 << 10


def _ints() -> array[int]:
    return array("i")


@dataclass(slots=True)
class WholeChoice:
    """A choice collected for a response that is not streamed."""

    text: StringIO = field(default_factory=StringIO)
    tokens: array[int] = field(default_factory=_ints)
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    offsets: array[int] = field(default_factory=_ints)
    finish: FinishReason | None = None
    rescheduled: RescheduledAttempt | None = None
    parts: WholeAnswerParts | None = None
    """None: the text is all content."""
    has_calls: bool = False
    stop_string: str | None = None

    def add(self, delta: TextDelta) -> None:
        self.has_calls = delta.has_calls
        if delta.parts is not None:
            self.parts = self.parts or WholeAnswerParts()
            self.parts.add(delta.parts)
        self.text.write(delta.text)
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        self.offsets.extend(delta.offsets)
        self.finish = delta.finish
        self.stop_string = delta.stop_string
        self.rescheduled = delta.rescheduled

    def shown(self, echo: str = "") -> str:
        """Empty for a rescheduled attempt: its token ids are continued elsewhere, and the text is produced there."""
        return echo + self.text.getvalue() if self.rescheduled is None else ""


def encoded_list(
    size: int, part: Callable[[slice], Iterable[object]], items_a_piece: int = TOKENS_A_PIECE
) -> Iterator[bytes]:
    """A JSON list in pieces. `part` makes the items of a range of places."""
    yield b"["
    for start in range(0, size, items_a_piece):
        items = encode(list(part(slice(start, start + items_a_piece))))
        yield (b"," if start else b"") + items[1:-1]
    yield b"]"


def encoded_ids(ids: Sequence[int]) -> Iterator[bytes]:
    """Token ids, or other small numbers, as a JSON list in pieces."""
    return encoded_list(len(ids), lambda part: ids[part], IDS_A_PIECE)


def encoded_text(*texts: str) -> Iterator[bytes]:
    """The texts as one JSON string in pieces."""
    yield b'"'
    for text in texts:
        for start in range(0, len(text), CHARACTERS_A_PIECE):
            yield encode(text[start : start + CHARACTERS_A_PIECE])[1:-1]
    yield b'"'


@dataclass(frozen=True, slots=True)
class LargeEvent:
    """An event that repeats a prompt, in pieces, each made when it is asked for, in a few milliseconds."""

    pieces: Iterator[bytes]


Event = bytes | LargeEvent


def joined(first: Event, second: Event) -> Event:
    if isinstance(first, bytes) and isinstance(second, bytes):
        return first + second
    return LargeEvent(chain(_pieces(first), _pieces(second)))


def _pieces(event: Event) -> Iterator[bytes]:
    return iter((event,)) if isinstance(event, bytes) else event.pieces


def encoded_answer(
    top: Mapping[str, object], choices: Iterable[Iterator[bytes]], rest: Mapping[str, object], more: Iterable[bytes] = ()
) -> Iterator[bytes]:
    """A response in pieces: the fields before `choices`, the choices, the fields after; `more` are fields between these,
    each after a comma."""
    yield encode(top)[:-1] + b',"choices":['
    for number, choice in enumerate(choices):
        if number:
            yield b","
        yield from choice
    yield b"]"
    yield from more
    yield b"," + encode(rest)[1:]


def prompt_lines(table: PromptTable, alternatives: int, piece: Piece) -> Iterator[bytes]:
    """`prompt_logprobs` in pieces: by position, by token id, as vLLM writes them. The prompt's own token comes first."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": logprob, "rank": rank, "decoded_token": readable(piece(token))}

    def line_of(line: PromptLine | None) -> dict[str, object] | None:
        if line is None:
            return None
        entries = {str(line.token): entry(line.token, line.logprob, line.rank)}
        for rank, (token, logprob) in enumerate(line.top[:alternatives], start=1):
            entries.setdefault(str(token), entry(token, logprob, rank))
        return dict(entries)

    return encoded_list(len(table), lambda places: map(line_of, table.lines(places)))


class ResponseWriter(Protocol):
    """Formats one kind of response. An empty event is not sent."""

    @property
    def is_numbered(self) -> bool:
        """Whether each delta makes at most one event, so that events get ids and a stream resumes after any of them.

        Other streams are resumed from their beginning, and cannot tell of an attempt that is to be continued elsewhere:
        where that has to be told, the answer ends with an error.
        """

    @property
    def done(self) -> bytes:
        """The last event of every complete stream."""

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a broken stream."""

    def opening(self, delta: TextDelta) -> Event:
        """An event sent before the first delta of a choice."""

    def event(self, delta: TextDelta) -> Event: ...

    def usage_event(self, usage: Mapping[str, object]) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> Iterator[bytes]:
        """The response in pieces, each made when it is asked for, in a few milliseconds."""


class OpenAiEvents:
    """How the chunks of chats and completions end, and their streams."""

    is_numbered = True
    done = DONE

    def __init__(self, heading: ResponseHeader) -> None:
        self._prompt_tokens = sum(len(ids) for ids in heading.prompt_ids) if heading.continuous_usage else None
        self._tokens_so_far = 0
        self._plain_tail = b'}],"usage":null}\n\n' if heading.include_usage else b"}]}\n\n"

    def _tail(self) -> bytes:
        prompt, made = self._prompt_tokens, self._tokens_so_far
        if prompt is None:
            return self._plain_tail
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (prompt, made, prompt + made)
        return b'}],"usage":' + usage + b"}\n\n"

    def error_event(self, error: ApiError) -> bytes:
        return sse(error.body())


def usage_of(prompt_ids: Sequence[Sequence[int]], readers: Sequence[ChoiceReader]) -> dict[str, object]:
    """Usage of a request. A prompt counts once for all its choices; cached tokens are those of its first choice."""
    n = len(readers) // len(prompt_ids)
    prompt = sum(len(ids) for ids in prompt_ids)
    completion = sum(reader.tokens for reader in readers)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(reader.cached_tokens for reader in readers[::n])},
    }
    reasoning = [reader.reasoning_tokens for reader in readers if reader.reasoning_tokens is not None]
    return usage | {"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}} if reasoning else usage


def bill_of(readers: Sequence[ChoiceReader]) -> Bill | None:
    """The bill of a request: counts are summed over choices, times are the maximum, since choices run concurrently.

    None when a choice has no bill because the engine stopped first, since the sum would be wrong.
    """
    bills = [reader.bill for reader in readers if reader.bill is not None]
    if len(bills) < len(readers):
        return None
    return Bill(
        cached_tokens=sum(bill.cached_tokens for bill in bills),
        computed_tokens=sum(bill.computed_tokens for bill in bills),
        recomputed_tokens=sum(bill.recomputed_tokens for bill in bills),
        restored_tokens=sum(bill.restored_tokens for bill in bills),
        preemptions=sum(bill.preemptions for bill in bills),
        attempts=sum(bill.attempts for bill in bills),
        queue_us=max(bill.queue_us for bill in bills),
        prefill_us=max(bill.prefill_us for bill in bills),
        transfer_us=max(bill.transfer_us for bill in bills),
        decode_us=max(bill.decode_us for bill in bills),
    )


def bill_fields(bill: Bill | None) -> dict[str, object] | None:
    """The fields of `usage.baton`."""
    if bill is None:
        return None
    counts = ("cached_tokens", "computed_tokens", "recomputed_tokens", "restored_tokens", "preemptions", "attempts")
    times_ms = {
        "queue_ms": bill.queue_us / 1000,
        "prefill_ms": bill.prefill_us / 1000,
        "transfer_ms": bill.transfer_us / 1000,
        "decode_ms": bill.decode_us / 1000,
    }
    return {name: getattr(bill, name) for name in counts} | times_ms


def places_of(readers: Sequence[ChoiceReader]) -> list[tuple[str, ...]]:
    """By choice: names of the instances that ran it, in order."""
    return [reader.places for reader in readers]


def rescheduled_fields(rescheduled: RescheduledAttempt) -> dict[str, object]:
    """Further fields of a choice whose attempt was rescheduled."""
    fault, ids = rescheduled.fault, rescheduled.token_ids
    error = {
        "message": shortened(fault.message),
        "code": int(fault.code),
        "stage": fault.stage.value,
        "retryable": True,
        "generated_token_ids": ids,
    }
    return {"completion_token_ids": ids, "error": error}


def rescheduled_bytes(rescheduled: RescheduledAttempt | None) -> bytes:
    """The same as JSON bytes, appended after the last field of a choice."""
    return b"" if rescheduled is None else b"," + encode(rescheduled_fields(rescheduled))[1:-1]


def sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def readable(piece: bytes) -> str:
    """A token as text; one that is not a whole character is written as `bytes:\\x…`, as OpenAI does."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def digest_of(heading: ResponseHeader, index: int, number: int) -> str:
    """Of a part of a response. Equal for every process that answers this request: an answer may be continued by another."""
    named = f"{heading.id}/{heading.created_s}/{index}/{number}".encode()
    return blake2b(named, digest_size=12).hexdigest()


def call_id(heading: ResponseHeader, index: int, number: int, prefix: str = "call_") -> str:
    digest = digest_of(heading, index, number)
    return digest[:9] if heading.has_short_call_ids else prefix + digest
