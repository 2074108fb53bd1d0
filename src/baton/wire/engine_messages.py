"""Messages between the front end and its engine, and their bytes: msgpack through msgspec, tagged, versioned, bounded.

Numbers that come by the thousand (token ids, serials) travel as little-endian arrays in byte strings, so that a step
with a thousand tokens is one message and not a thousand objects. Decoding checks types, sizes and that array lengths
agree; anything else is a WireError, never a half-understood message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.engine.change_journal import Changes
from baton.core.engine.plan import Logprobs
from baton.core.engine.records import Bill, EndedRequest, HandoverGauges, SchedulerGauges, Settled, StorageGauges
from baton.core.engine.request import NO_TOKENS, FinishReason, RequestId, Sampling, Submission, Tokens, frozen_tokens
from baton.core.errors import BatonError, Refusal, RefusalCode
from baton.core.handover.messages import PdCode, PdFault, PdStage

_Number = TypeVar("_Number", bound=np.generic)
_Message = TypeVar("_Message")

WIRE_VERSION = 4
FRAME_BYTES_MAX = 64 << 20


class WireError(BatonError):
    """Bytes that are not a message of this version."""


class WireSampling(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    logprobs: int | None


class WireSubmission(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    request_id: str
    prompt: bytes | None
    """None: the leader's, which travels once for all its followers."""
    sampling: WireSampling
    max_tokens: int | None
    salt: bytes
    priority: int
    leader: str | None
    generated: bytes = b""
    """Outputs that the client has from elsewhere."""
    prefill_at: str = ""


class Submit(msgspec.Struct, tag="submit", frozen=True):
    ticket: int
    group: tuple[WireSubmission, ...]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    serial: int


class StopAt(msgspec.Struct, tag="stop", frozen=True):
    serial: int
    keep: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    pass


class TellNames(msgspec.Struct, tag="tell_names", frozen=True):
    """From now on send a Pulse ten times a second; the first of them begins with all names anew."""


class Peers(msgspec.Struct, tag="peers", frozen=True):
    """Who prefills for this instance from now on: call these, and hang up on all others."""

    addresses: tuple[str, ...]


ToWorker = Submit | Cancel | StopAt | Drain | TellNames
ToEngine = ToWorker | Peers


class WireHandovers(msgspec.Struct, array_like=True, frozen=True):
    """Hand-overs with peers, as `HandoverGauges` counts them."""

    peers: int
    open: int
    made: int
    refused: int
    not_delivered: int
    preempted: int
    timed_out: int


class WireStorage(msgspec.Struct, array_like=True, frozen=True):
    """KV outside the pool, as `StorageGauges` counts it."""

    host_rows: int = 0
    host_used: int = 0
    hauls: int = 0
    saved: int = 0
    unsaved: int = 0
    loaded: int = 0
    fetched: int = 0
    stored: int = 0
    unstored: int = 0
    recompute_cheaper: int = 0
    failed: int = 0
    late: int = 0
    breaker_open: int = 0
    breaker_opened: int = 0


class WireGauges(msgspec.Struct, array_like=True, frozen=True):
    running: int
    waiting: int
    free_blocks: int
    evictable_blocks: int
    running_blocks: int
    leased_blocks: int
    receiving_blocks: int
    prefix_queries: int
    prefix_hits: int
    stale_results: int
    steps: int
    preemptions_for_others: int
    preemptions_of_self: int
    recomputed_tokens: int
    chunk_prefill_unsatisfied: int
    reserve_ratio: float
    handovers: WireHandovers
    leaving_blocks: int = 0
    storage: WireStorage = WireStorage()


class Ready(msgspec.Struct, tag="ready", frozen=True):
    version: int
    context_tokens: int
    vocabulary: int
    slots: int
    blocks: int
    block_size: int
    details: str
    """What the operator should know of the executor: dtype, kernels, sizes."""
    gauges: WireGauges
    fingerprint: bytes = b""
    """Of the model."""
    peer_address: str = ""
    """HOST:PORT where peers ask this instance to prefill; empty where none can."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot go on; this is its last message."""

    reason: str


class AcceptedAs(msgspec.Struct, tag="accepted", frozen=True):
    ticket: int
    serials: tuple[int, ...]


class RefusedWith(msgspec.Struct, tag="refused", frozen=True):
    ticket: int
    code: RefusalCode
    message: str
    retry_after_s: int | None


class WireLogprobs(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    row: int
    chosen: bytes
    top_ids: bytes
    top: bytes


class WireBill(msgspec.Struct, array_like=True, frozen=True):
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    restored_tokens: int
    preemptions: int
    queue_us: int
    prefill_us: int
    transfer_us: int
    decode_us: int
    attempts: int


class WireFault(msgspec.Struct, array_like=True, frozen=True):
    code: PdCode
    stage: PdStage
    reason: str


class WireEnded(msgspec.Struct, array_like=True, frozen=True):
    serial: int
    reason: FinishReason
    generated_tokens: int
    bill: WireBill
    fault: WireFault | None
    """What ended the attempt, with the reason RESCHEDULE."""


class StepOutput(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """What a step brought. Row i of `serials` yields `counts[i]` of `tokens`, row after row."""

    serials: bytes
    counts: bytes
    tokens: bytes
    logprobs: tuple[WireLogprobs, ...]
    started: tuple[tuple[int, int], ...]
    """(serial, cached tokens) of each request whose first token this is."""
    ended: tuple[WireEnded, ...]
    gauges: WireGauges
    draft_tokens: int = 0
    """Of all steps since the start. For the instance itself: a router is not told."""
    accepted_draft_tokens: int = 0


class PeerTraffic(msgspec.Struct, tag="peer_traffic", frozen=True):
    """What came of connections with peers since the start; sent when it has changed."""

    refused: dict[str, int]
    """Connections and frames, by reason."""
    arrived_bytes: int
    """Of KV."""


class StoreTraffic(msgspec.Struct, tag="store_traffic", frozen=True):
    """What moved between the pool, host memory and the store since the start; sent when it has changed."""

    saved_bytes: int = 0
    """From the pool to host memory."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    """From host memory to the store."""
    fetched_bytes: int = 0
    missing_blocks: int = 0
    """That the store was asked for and did not have."""
    errors: int = 0
    """Calls of the store that failed."""
    bad_blocks: dict[str, int] = {}
    """Found in the store and not used, by what was wrong with them."""


class Pulse(msgspec.Struct, tag="pulse", frozen=True):
    """A sign of life, also while a step computes and while nothing happens, with what changed since the last one."""

    gauges: WireGauges
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


FromEngine = Ready | Failed | AcceptedAs | RefusedWith | StepOutput | PeerTraffic | StoreTraffic | Pulse

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode_to_engine(message: ToEngine) -> bytes:
    return _encoder.encode(message)


def encode_from_engine(message: FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    return decoded(_to_engine, frame, "a message to an engine")


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


def submit(ticket: int, group: Iterable[Submission]) -> Submit:
    return Submit(ticket, tuple(wire_submission(item) for item in group))


def wire_submission(item: Submission) -> WireSubmission:
    s = item.sampling
    sampling = WireSampling(
        s.seed, s.choice, s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty,
        s.frequency_penalty, s.logit_bias, s.stop_token_ids, s.min_tokens, s.logprobs,
    )  # fmt: skip
    prompt = item.prompt.tobytes() if item.leader is None else None
    return WireSubmission(
        item.request_id, prompt, sampling, item.max_tokens, item.salt, item.priority, item.leader,
        item.generated.tobytes(), item.prefill_at,
    )  # fmt: skip


def submissions(message: Submit) -> tuple[Submission, ...]:
    prompts: dict[str | None, Tokens] = {}
    made = []
    for item in message.group:
        if item.prompt is not None:
            prompts[item.request_id] = tokens_of(item.prompt)
        prompt = prompts.get(item.request_id if item.prompt is not None else item.leader)
        if prompt is None:
            raise WireError(f"submission {item.request_id!r} has no prompt, and neither has its leader {item.leader!r}")
        made.append(submission_of(item, prompt))
    return tuple(made)


def tokens_of(data: bytes) -> Tokens:
    return frozen_tokens(_int32s(data))


def submission_of(item: WireSubmission, prompt: Tokens) -> Submission:
    return Submission(
        request_id=RequestId(item.request_id),
        prompt=prompt,
        sampling=Sampling(**msgspec.structs.asdict(item.sampling)),
        max_tokens=item.max_tokens,
        salt=item.salt,
        priority=item.priority,
        leader=None if item.leader is None else RequestId(item.leader),
        generated=tokens_of(item.generated) if item.generated else NO_TOKENS,
        prefill_at=item.prefill_at,
    )


def refused(ticket: int, refusal: Refusal) -> RefusedWith:
    return RefusedWith(ticket, refusal.code, refusal.message, refusal.retry_after_s)


def refusal_of(message: RefusedWith) -> Refusal:
    return Refusal(message.code, message.message, message.retry_after_s)


def step_output(settled: Settled, gauges: SchedulerGauges) -> StepOutput:
    return StepOutput(
        settled.serials.tobytes(),
        settled.counts.tobytes(),
        settled.tokens.tobytes(),
        tuple(wire_logprobs(item) for item in settled.logprobs),
        tuple((item.serial, item.cached_tokens) for item in settled.started),
        tuple(_wire_ended(item) for item in settled.ended),
        wire_gauges(gauges),
        gauges.draft_tokens,
        gauges.accepted_draft_tokens,
    )


def ended_output(ended: EndedRequest, gauges: SchedulerGauges) -> StepOutput:
    """The end of a request that waited, in the shape of a step that yielded nothing."""
    return msgspec.structs.replace(gauges_output(gauges), ended=(_wire_ended(ended),))


def gauges_output(gauges: SchedulerGauges) -> StepOutput:
    """How the engine stands, in the shape of a step that brought nothing."""
    drafts = (gauges.draft_tokens, gauges.accepted_draft_tokens)
    return StepOutput(b"", b"", b"", (), (), (), wire_gauges(gauges), *drafts)


def pulse(gauges: SchedulerGauges, computing: bool, changes: Changes) -> Pulse:
    named, forgotten = b"".join(changes.names.named), b"".join(changes.names.forgotten)
    notes = tuple((note.serial, note.phase.name, note.ago_us) for note in changes.notes)
    return Pulse(wire_gauges(gauges), computing, changes.names.fresh, named, forgotten, notes)


def wire_logprobs(item: Logprobs) -> WireLogprobs:
    chosen, top = (values.astype("<f4", copy=False).tobytes() for values in (item.chosen, item.top))
    return WireLogprobs(item.row, chosen, item.top_ids.astype("<i4", copy=False).tobytes(), top)


def _wire_ended(item: EndedRequest) -> WireEnded:
    return WireEnded(item.serial, item.reason, item.generated_tokens, _wire_bill(item.bill), _wire_fault(item.fault))


def _wire_fault(fault: PdFault | None) -> WireFault | None:
    return None if fault is None else WireFault(fault.code, fault.stage, fault.reason)


def fault_of(item: WireFault | None) -> PdFault | None:
    return None if item is None else PdFault(item.code, item.stage, item.reason)


def _wire_bill(bill: Bill) -> WireBill:
    return WireBill(
        bill.cached_tokens, bill.computed_tokens, bill.recomputed_tokens, bill.restored_tokens, bill.preemptions,
        bill.queue_us, bill.prefill_us, bill.transfer_us, bill.decode_us, bill.attempts,
    )  # fmt: skip


def wire_gauges(item: SchedulerGauges) -> WireGauges:
    blocks = item.blocks
    return WireGauges(
        item.running, item.waiting, blocks.free, blocks.evictable, blocks.running, blocks.leased, blocks.receiving,
        item.prefix_queries, item.prefix_hits, item.stale_results, item.steps, item.preemptions_for_others,
        item.preemptions_of_self, item.recomputed_tokens, item.chunk_prefill_unsatisfied, item.reserve_ratio,
        _wire_handovers(item.handovers), blocks.leaving, _wire_storage(item.storage),
    )  # fmt: skip


def _wire_handovers(item: HandoverGauges) -> WireHandovers:
    return WireHandovers(item.peers, item.open, item.made, item.refused, item.not_delivered, item.preempted, item.timed_out)


def _wire_storage(item: StorageGauges) -> WireStorage:
    return WireStorage(
        item.host_rows, item.host_used, item.hauls, item.saved, item.unsaved, item.loaded, item.fetched, item.stored,
        item.unstored, item.recompute_cheaper, item.failed, item.late, item.breaker_open, item.breaker_opened,
    )  # fmt: skip


class Rows:
    """The rows of a StepOutput as plain lists, lengths checked."""

    def __init__(self, output: StepOutput) -> None:
        self.serials: list[int] = _array(output.serials, np.dtype("<i8")).tolist()
        self.counts: list[int] = _int32s(output.counts).tolist()
        self.tokens: list[int] = _int32s(output.tokens).tolist()
        if len(self.serials) != len(self.counts) or sum(self.counts) != len(self.tokens):
            raise WireError(
                f"{len(self.serials)} rows, {len(self.counts)} counts and {len(self.tokens)} tokens do not agree"
            )
        self.logprobs = {item.row: logprob_lines(item) for item in output.logprobs}


LogprobLine = tuple[float, tuple[tuple[int, float], ...]]
"""The chosen token's log-probability, then (id, log-probability) of the alternatives."""


def logprob_lines(item: WireLogprobs) -> list[LogprobLine]:
    made = logprobs_of(item)
    lines = zip(made.chosen.tolist(), made.top_ids.tolist(), made.top.tolist(), strict=True)
    return [(value, tuple(zip(ids, top, strict=True))) for value, ids, top in lines]


def logprobs_of(item: WireLogprobs) -> Logprobs:
    chosen = _array(item.chosen, np.dtype("<f4"))
    ids, top = _int32s(item.top_ids), _array(item.top, np.dtype("<f4"))
    if not len(chosen) or len(ids) != len(top) or len(ids) % len(chosen):
        raise WireError(f"log-probabilities of {len(chosen)} tokens with {len(ids)} ids and {len(top)} values")
    lines = (len(chosen), len(ids) // len(chosen))
    return Logprobs(item.row, chosen, ids.reshape(lines), top.reshape(lines))


def numbers(data: bytes) -> list[int]:
    made: list[int] = _int32s(data).tolist()
    return made


def _int32s(data: bytes) -> npt.NDArray[np.int32]:
    return _array(data, np.dtype("<i4"))


def _array(data: bytes, dtype: np.dtype[_Number]) -> npt.NDArray[_Number]:
    if len(data) % dtype.itemsize:
        raise WireError(f"{len(data)} bytes are not whole numbers of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype=dtype)
