"""The messages between two peer instances as bytes: a registration each way at the start of a session, then peer messages.

Owns the registration, and the checks that the types of `core.handover.messages` cannot express. A peer holds the cluster key
but may be of another version, faulty or compromised, so everything received is checked here before the core sees it. What
does not pass raises a WireError and never another exception. Whether a message fits the state of a hand-over is checked by
`core.handover`; whether token ids are in the vocabulary and the layout fits, by the driver, which knows the model.
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

PEERING_VERSION = 7
LAYERS_MAX = 1024
TRANSFERS_MAX = 8


# ── the start of a session ───────────────────────────────────────────────────────────────────────────────────────────────


class Register(WireMessage, tag="register", frozen=True):
    """The first frame of a session, from either side: the sender's identity and its KV block layout."""

    name: Name
    incarnation: Incarnation
    role: Name
    fingerprint: Fingerprint
    dtype: Name
    block_size: Positive
    layer_bytes: Annotated[tuple[Long, ...], Meta(max_length=LAYERS_MAX)]
    transfers: Annotated[tuple[Address, ...], Meta(max_length=TRANSFERS_MAX)] = ()
    """Addresses where this side receives KV; each is understood only by a sender of its kind."""
    version: int = PEERING_VERSION


class Registered(WireMessage, tag="registered", frozen=True):
    """The registration is accepted; peer messages may follow."""


class Unfit(WireMessage, tag="unfit", frozen=True):
    """The registration is rejected; the session ends. The reason names both values that differ."""

    reason: Reason


Registration = Register | Registered | Unfit


class _Versioned(msgspec.Struct, tag="register", frozen=True):
    """The fields of a registration that every version has."""

    version: int


_encoder = msgspec.msgpack.Encoder(enc_hook=encoded_array)
_registration: msgspec.msgpack.Decoder[Registration] = msgspec.msgpack.Decoder(Registration)
_versioned: msgspec.msgpack.Decoder[_Versioned] = msgspec.msgpack.Decoder(_Versioned)
_to_prefill_side: msgspec.msgpack.Decoder[ToPrefillSide] = msgspec.msgpack.Decoder(ToPrefillSide, dec_hook=decoded_array)
_to_decode_side: msgspec.msgpack.Decoder[ToDecodeSide] = msgspec.msgpack.Decoder(ToDecodeSide, dec_hook=decoded_array)


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_registration(message: Registration) -> bytes:
    return _bounded(Unfit(_cut(message.reason)) if isinstance(message, Unfit) else message)


def encode_peer(message: PeerMessage) -> bytes:
    """Encode a message; long reasons are cut. Raises WireError where the frame is over the limit."""
    return _bounded(_sendable(message))


def _sendable(message: PeerMessage) -> PeerMessage:
    if isinstance(message, Ask) and message.submission.leader is not None:
        submission = message.submission
        raise WireError(f"{submission.request_id!r} follows {submission.leader!r}; only leaders are asked for")
    if isinstance(message, Refuse | Release | Decline):
        return msgspec.structs.replace(message, reason=_cut(message.reason))
    return message


def _cut(reason: str) -> str:
    """Reasons may quote an exception, and that may contain characters that UTF-8 cannot encode."""
    return reason.encode(errors="replace").decode()[:REASON_CHARS_MAX]


def _bounded(message: msgspec.Struct) -> bytes:
    frame = _encoder.encode(message)
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return frame


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """Other versions may have other fields, so the version is read from any frame tagged as a registration."""
    version = decoded(_versioned, frame, "a registration").version
    if version != PEERING_VERSION:
        raise WireError(f"the other side speaks version {version} of the peer messages, this one {PEERING_VERSION}")


def decode_to_prefill_side(frame: bytes) -> ToPrefillSide:
    message = decoded(_to_prefill_side, frame, "a message to a giver")
    if isinstance(message, Ask):
        _check_submission(message.submission)
    return message


def decode_to_decode_side(frame: bytes) -> ToDecodeSide:
    message = decoded(_to_decode_side, frame, "a message to a taker")
    if isinstance(message, Commit) and message.logprobs is not None:
        return msgspec.structs.replace(message, logprobs=_first_logprobs(message.logprobs))
    return message


def _first_logprobs(item: Logprobs) -> Logprobs:
    """Check the log-probabilities of one token: one line, a bounded number of alternatives."""
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
