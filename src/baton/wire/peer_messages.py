"""What two instances say to each other, as bytes: a registration each way at the start of a session, then peer messages.

Owns the shape and the bounds of what a peer may say. A peer holds the cluster key but may be of another version, broken or
taken over, so everything that comes is checked here before the core sees it: types, signs, sizes, lengths that must agree.
What does not pass is a WireError and never another exception. Whether a message makes sense now is for `core.handover`;
whether token ids are in the vocabulary and a layout fits ours, for whoever knows the model.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from baton.core.engine.plan import Logprobs
from baton.core.engine.request import Submission
from baton.core.handover.messages import (
    Adopted,
    Ask,
    Commit,
    Decline,
    Grant,
    Offer,
    PdCode,
    PeerMessage,
    Refuse,
    Release,
    Renew,
    ToGiver,
    ToTaker,
)
from baton.wire.bounds import (
    ADDRESS_CHARS_MAX,
    DIGEST_BYTES_MAX,
    INT32_MAX,
    INT63_MAX,
    REASON_CHARS_MAX,
    REQUEST_ID_CHARS_MAX,
    SALT_BYTES_MAX,
    Address,
    Count,
    Fingerprint,
    Incarnation,
    Long,
    Name,
    Positive,
    Reason,
    Said,
)
from baton.wire.engine_messages import (
    FRAME_BYTES_MAX,
    WireError,
    WireLogprobs,
    WireSampling,
    WireSubmission,
    decoded,
    logprobs_of,
    submission_of,
    tokens_of,
    wire_logprobs,
    wire_submission,
)

PEERING_VERSION = 3
TOKEN_BYTES_MAX = 64
CHECKS_BYTES_MAX = 8 << 20
"""A million blocks."""
LAYERS_MAX = 1024
TRANSFERS_MAX = 8
LISTED_MAX = 4096
"""Biases or stop tokens of one request."""
ALTERNATIVES_MAX = 1024


# ── the start of a session ───────────────────────────────────────────────────────────────────────────────────────────────


class Register(Said, tag="register", frozen=True):
    """The first frame of a session, from either side: who I am, and what a block of mine looks like."""

    name: Name
    incarnation: Incarnation
    role: Name
    fingerprint: Fingerprint
    dtype: Name
    block_size: Positive
    layer_bytes: Annotated[tuple[Long, ...], Meta(max_length=LAYERS_MAX)]
    transfers: Annotated[tuple[Address, ...], Meta(max_length=TRANSFERS_MAX)] = ()
    """Where this side takes KV in; each address is understood by a sender of its kind only."""
    version: int = PEERING_VERSION


class Registered(Said, tag="registered", frozen=True):
    """We fit; peer messages may follow."""


class Unfit(Said, tag="unfit", frozen=True):
    """We do not; the session ends. The reason names both values of what differs."""

    reason: Reason


Registration = Register | Registered | Unfit


class _Versioned(msgspec.Struct, tag="register", frozen=True):
    """As much of a registration as every version has."""

    version: int


# ── peer messages, field by field as in core.peers ───────────────────────────────────────────────────────────────────────


class WireAsk(Said, tag="ask", frozen=True):
    request: Long
    attempt: Positive
    submission: WireSubmission


class WireOffer(Said, tag="offer", frozen=True):
    request: Long
    attempt: Positive
    prompt_tokens: Count
    queued_tokens: Long


class WireGrant(Said, tag="grant", frozen=True):
    request: Long
    attempt: Positive
    cached_tokens: Count
    lease_us: Long
    token: Annotated[bytes, Meta(min_length=1, max_length=TOKEN_BYTES_MAX)]


class WireRefuse(Said, tag="refuse", frozen=True):
    request: Long
    attempt: Positive
    reason: Reason
    retry_after_us: Long


class WireRenew(Said, tag="renew", frozen=True):
    request: Long
    attempt: Positive


class WireCommit(Said, tag="commit", frozen=True):
    request: Long
    attempt: Positive
    token: Count
    logprobs: WireLogprobs | None
    cached_tokens: Count
    queue_us: Long
    prefill_us: Long
    prompt_digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
    checks: Annotated[bytes, Meta(max_length=CHECKS_BYTES_MAX)]
    queued_tokens: Long
    restored_tokens: Count


class WireAdopted(Said, tag="adopted", frozen=True):
    request: Long
    attempt: Positive


class WireRelease(Said, tag="release", frozen=True):
    request: Long
    attempt: Positive
    reason: Reason


class WireDecline(Said, tag="decline", frozen=True):
    request: Long
    attempt: Positive
    code: PdCode
    reason: Reason


_WireToGiver = WireAsk | WireGrant | WireRefuse | WireAdopted | WireRelease
_WireToTaker = WireOffer | WireRenew | WireCommit | WireDecline

_encoder = msgspec.msgpack.Encoder()
_registration: msgspec.msgpack.Decoder[Registration] = msgspec.msgpack.Decoder(Registration)
_versioned: msgspec.msgpack.Decoder[_Versioned] = msgspec.msgpack.Decoder(_Versioned)
_to_giver: msgspec.msgpack.Decoder[_WireToGiver] = msgspec.msgpack.Decoder(_WireToGiver)
_to_taker: msgspec.msgpack.Decoder[_WireToTaker] = msgspec.msgpack.Decoder(_WireToTaker)


# ── bytes of ours ────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_registration(message: Registration) -> bytes:
    return _bounded(Unfit(_cut(message.reason)) if isinstance(message, Unfit) else message)


def encode_peer(message: PeerMessage) -> bytes:
    """Long reasons are cut; what the other side would refuse for its size is a WireError here."""
    return _bounded(_wire_of(message))


def _wire_of(message: PeerMessage) -> _WireToGiver | _WireToTaker:
    match message:
        case Ask(request, attempt, submission):
            if submission.leader is not None:
                raise WireError(f"{submission.request_id!r} follows {submission.leader!r}; only leaders are asked for")
            return WireAsk(request, attempt, wire_submission(submission))
        case Offer(request, attempt, prompt_tokens, queued_tokens):
            return WireOffer(request, attempt, prompt_tokens, queued_tokens)
        case Grant(request, attempt, cached_tokens, lease_us, token):
            return WireGrant(request, attempt, cached_tokens, lease_us, token)
        case Refuse(request, attempt, reason, retry_after_us):
            return WireRefuse(request, attempt, _cut(reason), retry_after_us)
        case Renew(request, attempt):
            return WireRenew(request, attempt)
        case Commit():
            return _wire_commit(message)
        case Adopted(request, attempt):
            return WireAdopted(request, attempt)
        case Release(request, attempt, reason):
            return WireRelease(request, attempt, _cut(reason))
        case Decline(request, attempt, code, reason):
            return WireDecline(request, attempt, code, _cut(reason))


def _wire_commit(message: Commit) -> WireCommit:
    return WireCommit(
        request=message.request,
        attempt=message.attempt,
        token=message.token,
        logprobs=None if message.logprobs is None else wire_logprobs(message.logprobs),
        cached_tokens=message.cached_tokens,
        queue_us=message.queue_us,
        prefill_us=message.prefill_us,
        prompt_digest=message.prompt_digest,
        checks=message.checks,
        queued_tokens=message.queued_tokens,
        restored_tokens=message.restored_tokens,
    )


def _cut(reason: str) -> str:
    """Reasons come from exceptions too, and those may quote bytes that are no text."""
    return reason.encode(errors="replace").decode()[:REASON_CHARS_MAX]


def _bounded(message: msgspec.Struct) -> bytes:
    frame = _encoder.encode(message)
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return frame


# ── bytes of theirs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_registration(frame: bytes) -> Registration:
    try:
        message = decoded(_registration, frame, "a registration")
    except WireError:
        _check_version(frame)
        raise
    if isinstance(message, Register):
        _check_version(frame)
    return message


def _check_version(frame: bytes) -> None:
    """Another version may have other fields, so it is looked for in whatever calls itself a registration."""
    spoken = decoded(_versioned, frame, "a registration").version
    if spoken != PEERING_VERSION:
        raise WireError(f"the other side speaks version {spoken} of the peer messages, this one {PEERING_VERSION}")


def decode_to_giver(frame: bytes) -> ToGiver:
    match decoded(_to_giver, frame, "a message to a giver"):
        case WireAsk(request, attempt, submission):
            return Ask(request, attempt, _checked_submission(submission))
        case WireGrant(request, attempt, cached_tokens, lease_us, token):
            return Grant(request, attempt, cached_tokens, lease_us, token)
        case WireRefuse(request, attempt, reason, retry_after_us):
            return Refuse(request, attempt, reason, retry_after_us)
        case WireAdopted(request, attempt):
            return Adopted(request, attempt)
        case WireRelease(request, attempt, reason):
            return Release(request, attempt, reason)


def decode_to_taker(frame: bytes) -> ToTaker:
    match decoded(_to_taker, frame, "a message to a taker"):
        case WireOffer(request, attempt, prompt_tokens, queued_tokens):
            return Offer(request, attempt, prompt_tokens, queued_tokens)
        case WireRenew(request, attempt):
            return Renew(request, attempt)
        case WireCommit() as commit:
            return _commit_of(commit)
        case WireDecline(request, attempt, code, reason):
            return Decline(request, attempt, code, reason)


def _commit_of(commit: WireCommit) -> Commit:
    return Commit(
        request=commit.request,
        attempt=commit.attempt,
        token=commit.token,
        logprobs=None if commit.logprobs is None else _first_logprobs(commit.logprobs),
        cached_tokens=commit.cached_tokens,
        queue_us=commit.queue_us,
        prefill_us=commit.prefill_us,
        prompt_digest=commit.prompt_digest,
        checks=commit.checks,
        queued_tokens=commit.queued_tokens,
        restored_tokens=commit.restored_tokens,
    )


def _first_logprobs(item: WireLogprobs) -> Logprobs:
    """Of one token: one line, and not more alternatives than anybody asks for."""
    made = logprobs_of(item)
    lines, alternatives = made.top_ids.shape
    _demand(lines == 1, f"log-probabilities of {lines} tokens, of the first output")
    _demand(alternatives <= ALTERNATIVES_MAX, f"{alternatives} alternatives to one token")
    _demand(not np.any(made.top_ids < 0), "an alternative with a negative token id")
    return made


def _checked_submission(item: WireSubmission) -> Submission:
    if item.prompt is None or item.leader is not None:
        raise WireError("only a request with a prompt of its own can be asked for")
    _demand(len(item.request_id) <= REQUEST_ID_CHARS_MAX, f"a request id of {len(item.request_id)} characters")
    _demand(len(item.salt) <= SALT_BYTES_MAX, f"a salt of {len(item.salt)} bytes")
    _demand(abs(item.priority) <= INT32_MAX, f"a priority of {item.priority}")
    _demand(item.max_tokens is None or 0 <= item.max_tokens <= INT63_MAX, f"at most {item.max_tokens} tokens")
    _demand(len(item.prefill_at) <= ADDRESS_CHARS_MAX, f"an address of {len(item.prefill_at)} characters")
    check_sampling(item.sampling)
    submission = submission_of(item, tokens_of(item.prompt))
    _demand(len(submission.prompt) > 0, "an empty prompt")
    _demand(int(submission.known.min(initial=0)) >= 0, "a prompt with a negative token id")
    return submission


def check_sampling(item: WireSampling) -> None:
    """Whether an executor can work with it; a WireError where not."""
    for name, value in (("choice", item.choice), ("top_k", item.top_k), ("min_tokens", item.min_tokens)):
        _demand(0 <= value <= INT32_MAX, f"{name} of {value}")
    _demand(item.logprobs is None or 0 <= item.logprobs <= ALTERNATIVES_MAX, f"{item.logprobs} log-probabilities")
    _demand(item.temperature >= 0, f"a temperature of {item.temperature}")
    _demand(item.repetition_penalty > 0, f"a repetition penalty of {item.repetition_penalty}")
    for name, share in (("top_p", item.top_p), ("min_p", item.min_p)):
        _demand(0 <= share <= 1, f"{name} of {share}")
    biases = [bias for _, bias in item.logit_bias]
    for real in (item.temperature, item.repetition_penalty, item.presence_penalty, item.frequency_penalty, *biases):
        _demand(math.isfinite(real), f"{real} is not a number to sample with")
    for listed in (item.stop_token_ids, [token for token, _ in item.logit_bias]):
        _demand(len(listed) <= LISTED_MAX, f"{len(listed)} stop tokens or biases")
        _demand(all(0 <= token <= INT32_MAX for token in listed), "a stop token or a bias whose token id is none")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WireError(f"refused from a peer: {otherwise}")
