"""Parts that chat and completion responses share: usage, whole choices, server-sent events.

Events are put together from bytes that are made once per answer and the few values that change; a model object for
each chunk would cost more than everything else in the front end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.api.engine import TokenLogprob
from baton.api.errors import shortened
from baton.api.text_reader import ChoiceReader, RescheduledAttempt, TextDelta
from baton.core.engine.ended import Bill
from baton.core.engine.request import FinishReason

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
NULL = b"null"
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

    def prompt_ids_of(self, index: int) -> list[int]:
        return list(self.prompt_ids[index // self.n])


@dataclass(slots=True)
class WholeChoice:
    """A choice collected for a response that is not streamed."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    rescheduled: RescheduledAttempt | None = None

    def add(self, delta: TextDelta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.finish = delta.finish
        self.rescheduled = delta.rescheduled

    def shown(self, echo: str = "") -> str:
        """Empty for a rescheduled attempt: its token ids are continued elsewhere, and the text is produced there."""
        return echo + "".join(self.text) if self.rescheduled is None else ""


class ResponseWriter(Protocol):
    """Formats one kind of response. An empty event is not sent."""

    def opening(self, delta: TextDelta) -> bytes:
        """An event sent before the first delta of a choice."""

    def event(self, delta: TextDelta) -> bytes: ...

    def usage_event(self, usage: Mapping[str, object]) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> bytes: ...


def usage_of(prompt_ids: Sequence[Sequence[int]], readers: Sequence[ChoiceReader]) -> dict[str, object]:
    """Usage of a request. A prompt counts once for all its choices; cached tokens are those of its first choice."""
    n = len(readers) // len(prompt_ids)
    prompt = sum(len(ids) for ids in prompt_ids)
    completion = sum(reader.tokens for reader in readers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(reader.cached_tokens for reader in readers[::n])},
    }


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


Piece = Callable[[int], bytes]
