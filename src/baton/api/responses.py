"""What chat and completion answers have in common on the wire: usage, whole choices, server-sent events.

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
    """What every chunk of an answer repeats."""

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
    """A choice gathered to be sent whole."""

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
        """Half an answer is not shown as text: whoever goes on from its token ids will show it whole."""
        return echo + "".join(self.text) if self.rescheduled is None else ""


class ResponseWriter(Protocol):
    """How one kind of answer looks. An event may be empty: then nothing is sent."""

    def opening(self, delta: TextDelta) -> bytes:
        """An event of its own before the first delta of a choice."""

    def event(self, delta: TextDelta) -> bytes: ...

    def usage_event(self, usage: Mapping[str, object]) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Mapping[str, object]) -> bytes: ...


def usage_of(prompt_ids: Sequence[Sequence[int]], readers: Sequence[ChoiceReader]) -> dict[str, object]:
    """A prompt counts once however many choices it has; what the cache had of it is its first choice's."""
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
    """What a body cost: counts are summed over its choices; of each time the longest, since choices run side by side.

    None where the engine did not tell a choice's bill, because it died first: a sum without it would be wrong.
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
    """A bill as `usage.baton` shows it."""
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
    """By choice: the instances that had it, one after the other."""
    return [reader.places for reader in readers]


def rescheduled_fields(rescheduled: RescheduledAttempt) -> dict[str, object]:
    """What a choice has beside the usual when its attempt ended early."""
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
    """The same, to be put behind the last field of a choice."""
    return b"" if rescheduled is None else b"," + encode(rescheduled_fields(rescheduled))[1:-1]


def sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def readable(piece: bytes) -> str:
    """A token as text; as OpenAI does, one that is not a whole character is spelled in bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


Piece = Callable[[int], bytes]
