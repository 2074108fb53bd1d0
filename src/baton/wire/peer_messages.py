"""What two instances say to each other, as bytes: a registration each way at the start of a session, then peer messages.

Owns the registration, and the checks that the types of `core.handover.messages` cannot say. A peer holds the cluster key but
may be of another version, broken or taken over, so everything that comes is checked here before the core sees it. What
does not pass is a WireError and never another exception. Whether a message makes sense now is for `core.handover`; whether
token ids are in the vocabulary and a layout fits ours, for the one who knows the model.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from baton.core.bounds import (
    ALTERNATIVES_MAX,
    REASON_CHARS_MAX,
    Address,
    Fingerprint,
    Incarnation,
    Long,
    Name,
    Positive,
    Reason,
    WireMessage,
)
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import Submission
from baton.core.handover.messages import Ask, Commit, Decline, PeerMessage, Refuse, Release, ToDecodeSide, ToPrefillSide
from baton.wire.engine_messages import (
    FRAME_BYTES_MAX,
    PROMPT_OF_LEADER,
    WireError,
    decoded,
    decoded_array,
    encoded_array,
    shaped,
)

PEERING_VERSION = 4
LAYERS_MAX = 1024
TRANSFERS_MAX = 8


# ── the start of a session ───────────────────────────────────────────────────────────────────────────────────────────────


class Register(WireMessage, tag="register", frozen=True):
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


class Registered(WireMessage, tag="registered", frozen=True):
    """We fit; peer messages may follow."""


class Unfit(WireMessage, tag="unfit", frozen=True):
    """We do not; the session ends. The reason names both values of what differs."""

    reason: Reason


Registration = Register | Registered | Unfit


class _Versioned(msgspec.Struct, tag="register", frozen=True):
    """As much of a registration as every version has."""

    version: int


_encoder = msgspec.msgpack.Encoder(enc_hook=encoded_array)
_registration: msgspec.msgpack.Decoder[Registration] = msgspec.msgpack.Decoder(Registration)
_versioned: msgspec.msgpack.Decoder[_Versioned] = msgspec.msgpack.Decoder(_Versioned)
_to_giver: msgspec.msgpack.Decoder[ToPrefillSide] = msgspec.msgpack.Decoder(ToPrefillSide, dec_hook=decoded_array)
_to_taker: msgspec.msgpack.Decoder[ToDecodeSide] = msgspec.msgpack.Decoder(ToDecodeSide, dec_hook=decoded_array)


# ── bytes of ours ────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_registration(message: Registration) -> bytes:
    return _bounded(Unfit(_cut(message.reason)) if isinstance(message, Unfit) else message)


def encode_peer(message: PeerMessage) -> bytes:
    """Long reasons are cut; what the other side would refuse for its size is a WireError here."""
    return _bounded(_sayable(message))


def _sayable(message: PeerMessage) -> PeerMessage:
    if isinstance(message, Ask) and message.submission.leader is not None:
        submission = message.submission
        raise WireError(f"{submission.request_id!r} follows {submission.leader!r}; only leaders are asked for")
    if isinstance(message, Refuse | Release | Decline):
        return msgspec.structs.replace(message, reason=_cut(message.reason))
    return message


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


def decode_to_giver(frame: bytes) -> ToPrefillSide:
    message = decoded(_to_giver, frame, "a message to a giver")
    if isinstance(message, Ask):
        _check_submission(message.submission)
    return message


def decode_to_taker(frame: bytes) -> ToDecodeSide:
    message = decoded(_to_taker, frame, "a message to a taker")
    if isinstance(message, Commit) and message.logprobs is not None:
        return msgspec.structs.replace(message, logprobs=_first_logprobs(message.logprobs))
    return message


def _first_logprobs(item: Logprobs) -> Logprobs:
    """Of one token: one line, and not more alternatives than anybody asks for."""
    made = shaped(item)
    lines, alternatives = made.top_ids.shape
    _demand(lines == 1, f"log-probabilities of {lines} tokens, of the first output")
    _demand(alternatives <= ALTERNATIVES_MAX, f"{alternatives} alternatives to one token")
    _demand(not np.any(made.top_ids < 0), "an alternative with a negative token id")
    return made


def _check_submission(item: Submission) -> None:
    if item.prompt is PROMPT_OF_LEADER or item.leader is not None:
        raise WireError("only a request with a prompt of its own can be asked for")
    _demand(len(item.prompt) > 0, "an empty prompt")
    _demand(int(item.known.min(initial=0)) >= 0, "a prompt with a negative token id")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WireError(f"refused from a peer: {otherwise}")
