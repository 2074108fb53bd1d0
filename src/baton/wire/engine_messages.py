"""Messages between the front end and its engine, and their bytes: msgpack through msgspec, tagged, versioned, bounded.

Values of core travel as they are; here are the messages that pack them, and the encoding of their arrays.

Numbers that come by the thousand (token ids, serials) travel as little-endian arrays in byte strings, so that a step
with a thousand tokens is one message and not a thousand objects. Decoding checks types, sizes and that array lengths
agree; anything else is a WireError, never a half-understood message.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.bounds import Long
from baton.core.engine.change_journal import EngineChanges
from baton.core.engine.ended import EndedRequest, StartedRequest
from baton.core.engine.gauges import DraftGauges, PeerTraffic, SchedulerGauges, StoreTraffic
from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, StopAt, Submit
from baton.core.engine.plan import Float32s, Int32s, Logprobs
from baton.core.engine.records import Settled
from baton.core.engine.request import NO_TOKENS, Prompt, Submission, Tokens
from baton.core.errors import BatonError, Refusal, RefusalCode

_Number = TypeVar("_Number", bound=np.generic)
_Message = TypeVar("_Message")

WIRE_VERSION = 4
FRAME_BYTES_MAX = 64 << 20


class WireError(BatonError):
    """Bytes that are not a message of this version."""


class PrefillPeerAddresses(msgspec.Struct, tag="peers", frozen=True):
    """Who prefills for this instance from now on: call these, and hang up on all others."""

    addresses: tuple[str, ...]


ToWorker = Submit | Cancel | StopAt | Drain | ReportChanges
ToEngine = ToWorker | PrefillPeerAddresses


class ReadyMessage(msgspec.Struct, tag="ready", frozen=True):
    version: int
    context_tokens: int
    vocabulary: int
    slots: int
    blocks: int
    block_size: int
    details: str
    """What the operator should know of the executor: dtype, kernels, sizes."""
    gauges: SchedulerGauges
    fingerprint: bytes = b""
    """Of the model."""
    peer_address: str = ""
    """HOST:PORT where peers ask this instance to prefill; empty where none can."""


class FailedMessage(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot go on; this is its last message."""

    reason: str


class RefusedMessage(msgspec.Struct, tag="refused", frozen=True):
    ticket: Long
    code: RefusalCode
    message: str
    retry_after_s: int | None


class StepOutput(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """What a step brought. Row i of `serials` yields `counts[i]` of `tokens`, row after row."""

    serials: bytes
    counts: bytes
    tokens: bytes
    logprobs: tuple[Logprobs, ...]
    started: tuple[StartedRequest, ...]
    ended: tuple[EndedRequest, ...]
    gauges: SchedulerGauges
    draft_tokens: int = 0
    """Of all steps since the start. For the instance itself: a router is not told."""
    accepted_draft_tokens: int = 0


class Pulse(msgspec.Struct, tag="pulse", frozen=True):
    """A sign of life, also while a step computes and while nothing happens, with what changed since the last one."""

    gauges: SchedulerGauges
    computing: bool
    """Steps are in flight."""
    fresh: bool
    """Names that were told before are void."""
    named: bytes
    """Keys of blocks that can be found in the prefix cache now, end to end."""
    forgotten: bytes
    """Keys of those that no longer can."""
    notes: tuple[tuple[int, str, int], ...]
    """(serial, the phase that it entered, microseconds ago)"""


FromEngine = ReadyMessage | FailedMessage | Accepted | RefusedMessage | StepOutput | PeerTraffic | StoreTraffic | Pulse


# ── arrays and prompts in messages ─────────────────────────────────────────────────────────────────────────────────────

PROMPT_OF_LEADER: Tokens = NO_TOKENS.copy()
"""In an encoded group, the prompt of each follower: it travels once, with the leader."""
_DTYPES: dict[object, np.dtype[np.generic]] = {Prompt: np.dtype("<i4"), Int32s: np.dtype("<i4"), Float32s: np.dtype("<f4")}
_DTYPES_OF_KINDS: dict[str, np.dtype[np.generic]] = {"i": np.dtype("<i4"), "f": np.dtype("<f4")}


def encoded_array(value: object) -> bytes | None:
    """An array of a message, as bytes."""
    if not isinstance(value, np.ndarray):
        raise WireError(f"a {type(value).__name__} in a message")
    if value is PROMPT_OF_LEADER:
        return None
    return value.astype(_DTYPES_OF_KINDS[value.dtype.kind], copy=False).tobytes()


def decoded_array(kind: type, value: object) -> object:
    """An array of a message; those of log-probabilities come flat, and `shaped` gives them their lines."""
    if value is None and kind == Prompt:
        return PROMPT_OF_LEADER
    if not isinstance(value, bytes):
        raise WireError(f"a {type(value).__name__} where an array should be")
    return array_of(value, _DTYPES[kind])


def array_of(data: bytes, dtype: np.dtype[_Number]) -> npt.NDArray[_Number]:
    """The numbers in these bytes; read-only."""
    if len(data) % dtype.itemsize:
        raise WireError(f"{len(data)} bytes are not whole numbers of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype=dtype)


def without_shared_prompts(group: tuple[Submission, ...]) -> tuple[Submission, ...]:
    """The group as it is encoded."""
    return tuple(item if item.leader is None else msgspec.structs.replace(item, prompt=PROMPT_OF_LEADER) for item in group)


def with_shared_prompts(group: tuple[Submission, ...]) -> tuple[Submission, ...]:
    """The group as it was before it was encoded; a WireError where a prompt is missing, or comes with a follower."""
    prompts: dict[str, Prompt] = {}
    made = []
    for item in group:
        if item.leader is None and item.prompt is not PROMPT_OF_LEADER:
            prompts[item.request_id] = item.prompt
            made.append(item)
        elif item.leader in prompts and item.prompt is PROMPT_OF_LEADER:
            made.append(msgspec.structs.replace(item, prompt=prompts[item.leader]))
        else:
            raise WireError(f"submission {item.request_id!r} has no prompt, and neither has its leader {item.leader!r}")
    return tuple(made)


_encoder = msgspec.msgpack.Encoder(enc_hook=encoded_array)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=decoded_array)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, dec_hook=decoded_array)


def encode_to_engine(message: ToEngine) -> bytes:
    if isinstance(message, Submit):
        message = Submit(message.ticket, without_shared_prompts(message.group))
    return _encoder.encode(message)


def encode_from_engine(message: FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    message = decoded(_to_engine, frame, "a message to an engine")
    if isinstance(message, Submit):
        return Submit(message.ticket, with_shared_prompts(message.group))
    return message


def decode_from_engine(frame: bytes) -> FromEngine:
    return decoded(_from_engine, frame, "a message from an engine")


def decoded(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes, what: str) -> _Message:
    """The message, or a WireError whatever the bytes are: too many, not text where text should be, nested without end."""
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not {what}: {error}") from None


# ── between core values and messages ───────────────────────────────────────────────────────────────────────────────


def refused(ticket: int, refusal: Refusal) -> RefusedMessage:
    return RefusedMessage(ticket, refusal.code, refusal.message, refusal.retry_after_s)


def refusal_of(message: RefusedMessage) -> Refusal:
    return Refusal(message.code, message.message, message.retry_after_s)


def step_output(settled: Settled, gauges: SchedulerGauges, drafts: DraftGauges) -> StepOutput:
    return StepOutput(
        settled.serials.tobytes(),
        settled.counts.tobytes(),
        settled.tokens.tobytes(),
        settled.logprobs,
        settled.started,
        settled.ended,
        gauges,
        drafts.fed,
        drafts.accepted,
    )


def ended_output(ended: EndedRequest, gauges: SchedulerGauges, drafts: DraftGauges) -> StepOutput:
    """The end of a request that waited, in the shape of a step that yielded nothing."""
    return StepOutput(b"", b"", b"", (), (), (ended,), gauges, drafts.fed, drafts.accepted)


def gauges_output(gauges: SchedulerGauges, drafts: DraftGauges) -> StepOutput:
    """The gauges alone, in the shape of a step that brought nothing."""
    return StepOutput(b"", b"", b"", (), (), (), gauges, drafts.fed, drafts.accepted)


def pulse(gauges: SchedulerGauges, computing: bool, changes: EngineChanges) -> Pulse:
    named, forgotten = b"".join(changes.names.named), b"".join(changes.names.forgotten)
    notes = tuple((note.serial, note.phase.name, note.ago_us) for note in changes.notes)
    return Pulse(gauges, computing, changes.names.fresh, named, forgotten, notes)


class DecodedRows:
    """The rows of a StepOutput as plain lists, lengths checked."""

    def __init__(self, output: StepOutput) -> None:
        self.serials: list[int] = array_of(output.serials, np.dtype("<i8")).tolist()
        self.counts: list[int] = numbers(output.counts)
        self.tokens: list[int] = numbers(output.tokens)
        if len(self.serials) != len(self.counts) or sum(self.counts) != len(self.tokens):
            raise WireError(
                f"{len(self.serials)} rows, {len(self.counts)} counts and {len(self.tokens)} tokens do not agree"
            )
        self.logprobs = {item.row: logprob_lines(item) for item in output.logprobs}


LogprobLine = tuple[float, tuple[tuple[int, float], ...]]
"""The chosen token's log-probability, then (id, log-probability) of the alternatives."""


def logprob_lines(item: Logprobs) -> list[LogprobLine]:
    made = shaped(item)
    lines = zip(made.chosen.tolist(), made.top_ids.tolist(), made.top.tolist(), strict=True)
    return [(value, tuple(zip(ids, top, strict=True))) for value, ids, top in lines]


def shaped(item: Logprobs) -> Logprobs:
    """Decoded log-probabilities with one line a token; a WireError where the numbers do not make lines."""
    tokens, ids, values = len(item.chosen), item.top_ids.size, item.top.size
    if not tokens or ids != values or ids % tokens:
        raise WireError(f"log-probabilities of {tokens} tokens with {ids} ids and {values} values")
    lines = (tokens, ids // tokens)
    return Logprobs(item.row, item.chosen, item.top_ids.reshape(lines), item.top.reshape(lines))


def numbers(data: bytes) -> list[int]:
    made: list[int] = array_of(data, np.dtype("<i4")).tolist()
    return made


def tokens_of(data: bytes) -> Tokens:
    return array_of(data, np.dtype("<i4"))
