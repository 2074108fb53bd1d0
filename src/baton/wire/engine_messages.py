"""Messages between the front end and its engine, and their encoding: msgpack through msgspec, tagged, versioned, bounded.

Values of core are encoded as they are; here are the messages that contain them, and the encoding of arrays.

Token ids and serials are encoded as little-endian arrays in byte strings, so that a step with a thousand tokens is one
message and not a thousand objects. Decoding checks types, sizes and that array lengths agree; bytes that do not pass raise
a WireError.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.bounds import Long
from baton.core.engine.change_journal import EngineChanges
from baton.core.engine.ended import EndedRequest, StartedRequest
from baton.core.engine.gauges import DraftGauges, KvEventTraffic, PeerTraffic, SchedulerGauges, StepSizes, StoreTraffic
from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, StopAt, Submit
from baton.core.engine.plan import Logprobs
from baton.core.engine.progress_watch import EngineBeat
from baton.core.engine.records import Settled
from baton.core.engine.request import NO_TOKENS, Constraint, Prompt, PromptLogprobs, Submission, Tokens
from baton.core.errors import BatonError, Refusal, RefusalCode

_Number = TypeVar("_Number", bound=np.generic)
_Message = TypeVar("_Message")

WIRE_VERSION = 9
QUEUED_MESSAGES_MAX = 1000
"""In each direction. A step is one message, so the engine is at most this many steps ahead of the front end."""
FRAME_BYTES_MAX = 64 << 20


class WireError(BatonError):
    """Bytes that are not a message of this version."""


class PrefillPeerAddresses(msgspec.Struct, tag="peers", frozen=True, gc=False):
    """The prefill peers of this instance from now on: connect to these, and disconnect from all others."""

    addresses: tuple[str, ...]


ToWorker = Submit | Cancel | StopAt | Drain | ReportChanges
ToEngine = ToWorker | PrefillPeerAddresses


class ReadyMessage(msgspec.Struct, tag="ready", frozen=True, gc=False):
    version: int
    context_tokens: int
    vocabulary: int
    slots: int
    blocks: int
    block_size: int
    details: str
    """For the operator: dtype, kernels and sizes of the executor."""
    gauges: SchedulerGauges
    fingerprint: bytes = b""
    """The model's fingerprint."""
    peer_address: str = ""
    """HOST:PORT where peers ask this instance to prefill; empty where none can."""
    tried_step_us: Long = 0
    """The longest step, as tried at the start; 0: none was tried."""


class FailedMessage(msgspec.Struct, tag="failed", frozen=True, gc=False):
    """The engine cannot continue; this is its last message."""

    reason: str
    by_setup: bool = False
    """What was asked for cannot be had (`core.errors.SetupError`): another start ends in the same way."""


class RefusedMessage(msgspec.Struct, tag="refused", frozen=True, gc=False):
    ticket: Long
    code: RefusalCode
    message: str
    retry_after_s: int | None


class StepOutput(msgspec.Struct, tag="step", frozen=True, omit_defaults=True, gc=False):
    """The output of one step. Row i belongs to `serials[i]` and has the next `counts[i]` of `tokens`."""

    serials: bytes
    counts: bytes
    tokens: bytes
    logprobs: tuple[Logprobs, ...]
    started: tuple[StartedRequest, ...]
    ended: tuple[EndedRequest, ...]
    gauges: SchedulerGauges
    draft_tokens: int = 0
    """Of all steps since the start. Not sent to a router."""
    accepted_draft_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """By row, of the tokens after `begin` in its prompt. A row without tokens has some."""


class Pulse(msgspec.Struct, tag="pulse", frozen=True, gc=False):
    """Sent periodically, also while a step computes and while the engine is idle: the gauges, and changes since the last
    pulse."""

    gauges: SchedulerGauges
    computing: bool
    """Whether steps are in flight."""
    fresh: bool
    """Whether all keys reported before are void."""
    named: bytes
    """Keys of blocks added to the prefix cache, concatenated."""
    forgotten: bytes
    """Keys of blocks removed from the prefix cache, concatenated."""
    notes: tuple[tuple[int, str, int], ...]
    """(serial, phase entered, microseconds ago)"""
    preempted: tuple[tuple[int, int], ...] = ()
    """(serial, preemptions so far, here and elsewhere)"""


class DrainBegun(msgspec.Struct, tag="draining", frozen=True, gc=False):
    """The answer to Drain: what was open then, and nothing is begun any more."""

    gauges: SchedulerGauges


Traffic = PeerTraffic | StoreTraffic | KvEventTraffic
"""Counts of what an engine exchanges with others; sent when they have changed."""


class StartStage(msgspec.Struct, tag="stage", frozen=True, gc=False):
    """What the engine does next until it is ready. Only before its ReadyMessage."""

    name: str


FromEngine = ReadyMessage | FailedMessage | Accepted | RefusedMessage | StepOutput | Traffic | StepSizes | Pulse | DrainBegun
FromStartingEngine = FromEngine | StartStage


# ── arrays and prompts in messages ─────────────────────────────────────────────────────────────────────────────────────

PROMPT_OF_LEADER: Tokens = NO_TOKENS.copy()
"""Placeholder for the prompt of each follower in an encoded group: the prompt is sent once, with the leader."""
CONSTRAINT_OF_LEADER = Constraint("=", "=", "")
"""Placeholder for the constraint of a follower, where it is the leader's."""
_DTYPES_OF_KINDS: dict[str, np.dtype[np.generic]] = {"i": np.dtype("<i4"), "f": np.dtype("<f4")}


def encoded_array(value: object) -> bytes | None:
    """Encode an array of a message; None for PROMPT_OF_LEADER."""
    if not isinstance(value, np.ndarray):
        raise WireError(f"a {type(value).__name__} in a message")
    if value is PROMPT_OF_LEADER:
        return None
    return value.astype(_DTYPES_OF_KINDS[value.dtype.kind], copy=False).tobytes()


def decoded_array(kind: type, value: object) -> object:
    """Decode an array of a message. Arrays of log-probabilities are flat; `shaped` makes them two-dimensional."""
    if value is None and kind == Prompt:
        return PROMPT_OF_LEADER
    if not isinstance(value, bytes):
        raise WireError(f"a {type(value).__name__} where an array should be")
    return array_of(value, _dtype_of(kind))


@cache
def _dtype_of(kind: type) -> np.dtype[np.generic]:
    """Read the number format off an array's type. The alias in the field may differ: numpy 2.5 resolves NDArray later."""
    _, dtype = get_args(kind)
    return _DTYPES_OF_KINDS[np.dtype(get_args(dtype)[0]).kind]


def array_of(data: bytes, dtype: np.dtype[_Number]) -> npt.NDArray[_Number]:
    """View the bytes as a read-only array."""
    if len(data) % dtype.itemsize:
        raise WireError(f"{len(data)} bytes are not whole numbers of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype=dtype)


def without_shared_prompts(group: tuple[Submission, ...]) -> tuple[Submission, ...]:
    """Replace the prompts of followers by PROMPT_OF_LEADER, and their leader's constraint by CONSTRAINT_OF_LEADER."""
    leaders = {item.request_id: item for item in group}
    return tuple(item if item.leader is None else _without_shared(item, leaders.get(item.leader)) for item in group)


def _without_shared(item: Submission, leader: Submission | None) -> Submission:
    constraint = item.sampling.constraint
    if leader is None or constraint is None or constraint != leader.sampling.constraint:
        return msgspec.structs.replace(item, prompt=PROMPT_OF_LEADER)
    sampling = msgspec.structs.replace(item.sampling, constraint=CONSTRAINT_OF_LEADER)
    return msgspec.structs.replace(item, prompt=PROMPT_OF_LEADER, sampling=sampling)


def with_shared_prompts(group: tuple[Submission, ...]) -> tuple[Submission, ...]:
    """Give followers the prompt and the constraint of their leader. Raises WireError where one is missing, or a prompt comes
    with a follower."""
    leaders: dict[str, Submission] = {}
    made = []
    for item in group:
        if item.leader is None and item.prompt is not PROMPT_OF_LEADER:
            if item.sampling.constraint == CONSTRAINT_OF_LEADER:
                raise WireError(f"submission {item.request_id!r} has the constraint of its leader, and has none")
            leaders[item.request_id] = item
            made.append(item)
        elif item.leader in leaders and item.prompt is PROMPT_OF_LEADER:
            made.append(_with_shared(item, leaders[item.leader]))
        else:
            raise WireError(f"submission {item.request_id!r} has no prompt, and neither has its leader {item.leader!r}")
    return tuple(made)


def _with_shared(item: Submission, leader: Submission) -> Submission:
    if item.sampling.constraint != CONSTRAINT_OF_LEADER:
        return msgspec.structs.replace(item, prompt=leader.prompt)
    sampling = msgspec.structs.replace(item.sampling, constraint=leader.sampling.constraint)
    return msgspec.structs.replace(item, prompt=leader.prompt, sampling=sampling)


def asked_bytes(item: Submission) -> int:
    """Encoded bytes of its prompt, outputs, constraint and lists of tokens, at most. A follower's prompt and constraint are
    its leader's, and are sent once."""
    sampling = item.sampling
    words = sum(1 + len(word) for word in sampling.bad_words)
    listed = 16 * len(sampling.logit_bias) + 8 * (len(sampling.stop_token_ids) + len(sampling.allowed_token_ids) + words)
    constraint = 0 if sampling.constraint is None else 4 * len(sampling.constraint.source)
    return item.generated.nbytes + listed + (item.prompt.nbytes + constraint if item.leader is None else 0)


_encoder = msgspec.msgpack.Encoder(enc_hook=encoded_array)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=decoded_array)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, dec_hook=decoded_array)
_from_starting: msgspec.msgpack.Decoder[FromStartingEngine] = msgspec.msgpack.Decoder(
    FromStartingEngine, dec_hook=decoded_array
)
_beat: msgspec.msgpack.Decoder[EngineBeat] = msgspec.msgpack.Decoder(EngineBeat)


def encode_to_engine(message: ToEngine) -> bytes:
    if isinstance(message, Submit):
        message = Submit(message.ticket, without_shared_prompts(message.group))
    return _encoder.encode(message)


def encode_from_engine(message: FromStartingEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    message = decoded(_to_engine, frame, "a message to an engine")
    if isinstance(message, Submit):
        return Submit(message.ticket, with_shared_prompts(message.group))
    return message


def decode_from_engine(frame: bytes) -> FromEngine:
    return decoded(_from_engine, frame, "a message from an engine")


def decode_from_starting_engine(frame: bytes) -> FromStartingEngine:
    """Of an engine that is not ready."""
    return decoded(_from_starting, frame, "a message from an engine that starts")


def encode_beat(beat: EngineBeat) -> bytes:
    """Beats have a socket of their own: the thread that sends them is not the one that sends messages."""
    return _encoder.encode(beat)


def decode_beat(frame: bytes) -> EngineBeat:
    return decoded(_beat, frame, "a beat of an engine")


def decoded(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes, what: str) -> _Message:
    """Decode a message. Raises WireError for every malformed frame: too long, invalid UTF-8, nested too deeply."""
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
        settled.prompt_logprobs,
    )


def ended_output(ended: EndedRequest, gauges: SchedulerGauges, drafts: DraftGauges) -> StepOutput:
    """The end of a request that was still waiting, as a step without tokens."""
    return StepOutput(b"", b"", b"", (), (), (ended,), gauges, drafts.fed, drafts.accepted)


def gauges_output(gauges: SchedulerGauges, drafts: DraftGauges) -> StepOutput:
    """The gauges alone, as a step without tokens."""
    return StepOutput(b"", b"", b"", (), (), (), gauges, drafts.fed, drafts.accepted)


def pulse(gauges: SchedulerGauges, computing: bool, changes: EngineChanges) -> Pulse:
    named, forgotten = b"".join(changes.names.named), b"".join(changes.names.forgotten)
    notes = tuple((note.serial, note.phase.name, note.ago_us) for note in changes.notes)
    return Pulse(gauges, computing, changes.names.fresh, named, forgotten, notes, changes.preempted)


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
        self.prompt_logprobs = {item.row: shaped_prompt(item) for item in output.prompt_logprobs}


LogprobLine = tuple[float, tuple[tuple[int, float], ...]]
"""The chosen token's log-probability, then (id, log-probability) of the alternatives."""


def logprob_lines(item: Logprobs) -> list[LogprobLine]:
    made = shaped(item)
    lines = zip(made.chosen.tolist(), made.top_ids.tolist(), made.top.tolist(), strict=True)
    return [(value, tuple(zip(ids, top, strict=True))) for value, ids, top in lines]


def shaped(item: Logprobs) -> Logprobs:
    """Reshape decoded log-probabilities to one line per token. Raises WireError where the sizes do not fit."""
    tokens, ids, values = len(item.chosen), item.top_ids.size, item.top.size
    if not tokens or ids != values or ids % tokens:
        raise WireError(f"log-probabilities of {tokens} tokens with {ids} ids and {values} values")
    lines = (tokens, ids // tokens)
    return Logprobs(item.row, item.chosen, item.top_ids.reshape(lines), item.top.reshape(lines))


def shaped_prompt(item: PromptLogprobs) -> PromptLogprobs:
    """The same for a prompt."""
    tokens, ids, values = len(item.chosen), item.top_ids.size, item.top.size
    if not tokens or len(item.ranks) != tokens or ids != values or ids % tokens or item.begin < 1:
        text = f"{len(item.ranks)} ranks, {ids} ids and {values} values"
        raise WireError(f"log-probabilities of {tokens} prompt tokens from {item.begin} on with {text}")
    lines = (tokens, ids // tokens)
    return PromptLogprobs(
        item.row, item.begin, item.chosen, item.ranks, item.top_ids.reshape(lines), item.top.reshape(lines)
    )


def numbers(data: bytes) -> list[int]:
    made: list[int] = array_of(data, np.dtype("<i4")).tolist()
    return made


def tokens_of(data: bytes) -> Tokens:
    return array_of(data, np.dtype("<i4"))
