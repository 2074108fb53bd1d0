"""The messages between a router and an instance, as bytes.

    instance                                          router
      Join, HeldGroup …, AllHeldSaid     ───────▶       admits or rejects it
                                         ◀───────       Welcome | TurnedAway
      HeartbeatMessage every 200 ms      ───────▶
                                         ◀───────       PlaceAttempt, Cancel, StopAt, ForgetSerials, Drain,
                                                         PrefillPeersChanged
      Accepted, RefusedMessage, StepOutput ──────▶      the same as from an engine to its front end
      Leaving                            ───────▶       takes no new requests

Owns these messages but for `Join` and those shared with the engine's front end, which are values of core. Both sides hold
the cluster key but may be of another version, faulty or compromised, so everything is checked here: what does not pass
raises a WireError and never another exception.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from baton.core.bounds import (
    INCARNATION_MAX,
    Address,
    Count,
    Long,
    Name,
    Positive,
    Reason,
    WireMessage,
)
from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.orders import Accepted, Cancel, Drain, StopAt
from baton.core.engine.plan import Logprobs
from baton.core.engine.prefix import KEY_BYTES
from baton.core.engine.request import PromptLogprobs, Submission, Tokens, named_tokens
from baton.core.routing.events import MEMBERSHIP_VERSION, Join
from baton.wire.engine_messages import (
    RefusedMessage,
    StepOutput,
    WireError,
    asked_bytes,
    decoded,
    decoded_array,
    encoded_array,
    with_shared_prompts,
    without_shared_prompts,
)

ORIGIN_BYTES_MAX = 8 << 20
KEYS_A_BEAT_MAX = 4096
NOTES_A_BEAT_MAX = 1024
GROUP_MAX = 256
"""Choices of one request; the API allows as many."""
HELD_BYTES_MAX = 96 << 20
"""Bound on all held groups that an instance reports as it joins, by `held_bytes`: they are written at once, so the total
must be well below what a connection may have unread."""
HELD_GROUPS_MAX = 1 << 15
CHOICE_BYTES = 512
"""Bytes that a router spends on each choice of a reported request, held or not."""
PLACE_BYTES_MAX = 24 << 20
"""Origin, prompts and outputs of a group: with its output it must be able to travel back as one frame."""
ADDRESSES_MAX = 256
REFUSAL_CHARS_MAX = 4096

Choices = Annotated[int, Meta(ge=1, le=GROUP_MAX)]
Keys = Annotated[bytes, Meta(max_length=KEY_BYTES * KEYS_A_BEAT_MAX)]
"""Concatenated block keys."""


class UnknownToken(WireError):
    """A token id is not in the model's vocabulary. The router may not be at fault: before an instance has joined, it knows
    only the tokenizer's vocabulary."""

    def __init__(self) -> None:
        super().__init__("a token that is not in the vocabulary")


# ── from instance to router ──────────────────────────────────────────────────────────────────────────────────────────────


class _Versioned(msgspec.Struct, tag="join", frozen=True):
    """The fields of a Join that every version has."""

    version: int


class HeldChoiceMessage(WireMessage, array_like=True, frozen=True):
    """The output an instance has of one choice of a held group, after the tokens that its submission already contains."""

    place: Count
    serial: Long
    counts: bytes
    """Tokens of each row."""
    tokens: bytes
    logprobs: tuple[Logprobs, ...]
    """By row, where asked for."""
    cached_tokens: Count | None
    ended: EndedRequest | None
    preemptions: Long = 0
    """How often it was preempted so far, here and before it came here."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """As they came, in order of position; `row` means nothing."""


class HeldGroup(WireMessage, tag="held", frozen=True):
    """A group that a router placed in an earlier session and that is still kept."""

    group: Annotated[tuple[Submission, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    choices: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    """The index of each choice of the group in its request."""
    body_choices: Choices
    origin: Annotated[bytes, Meta(max_length=ORIGIN_BYTES_MAX)]
    lines: Annotated[tuple[HeldChoiceMessage, ...], Meta(max_length=GROUP_MAX)]
    """One for each choice that is still kept."""


class AllHeldSaid(WireMessage, tag="settled", frozen=True):
    """All held groups have been sent."""


class HeartbeatMessage(WireMessage, tag="beat", frozen=True):
    gauges: SchedulerGauges
    engine_silent_us: Long
    computing: bool
    fresh: bool
    named: Keys
    forgotten: Keys
    notes: Annotated[tuple[tuple[Long, Name, Long], ...], Meta(max_length=NOTES_A_BEAT_MAX)]
    """(serial, phase, microseconds ago)"""
    preempted: Annotated[tuple[tuple[Long, Long], ...], Meta(max_length=NOTES_A_BEAT_MAX)] = ()
    """(serial, preemptions so far, here and before it came here)"""
    engine_runs: bool = True
    """Whether the process of a silent engine uses a CPU or waits for one."""
    step_limit_us: Long = 60_000_000
    """Time after which a step that has not ended is a stall."""
    router_silent_us: Long = 0
    """Time since anything of the router came here: it learns from it that its direction is silent."""


class Leaving(WireMessage, tag="leaving", frozen=True):
    """The instance takes no new requests; open ones continue for a while."""


FromInstance = Join | HeldGroup | AllHeldSaid | HeartbeatMessage | Leaving | Accepted | RefusedMessage | StepOutput


# ── from router to instance ──────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(WireMessage, tag="welcome", frozen=True):
    router: Name
    beat_us: Positive
    orphan_grace_us: Long
    keyed: bool = False
    """Whether clients of the router need an API key."""


class TurnedAway(WireMessage, tag="turned_away", frozen=True):
    reason: Reason
    fenced: bool
    known_incarnation: Annotated[int, Meta(ge=0, le=INCARNATION_MAX)] = 0
    """Where fenced: the later incarnation of this name that the router knows."""


class PlaceAttempt(WireMessage, tag="place", frozen=True):
    """One attempt: submit these choices."""

    ticket: Long
    group: Annotated[tuple[Submission, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    choices: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    """The index of each choice of the group in its request."""
    body_choices: Choices
    origin: Annotated[bytes, Meta(max_length=ORIGIN_BYTES_MAX)]


class ForgetSerials(WireMessage, tag="forget", frozen=True):
    """The requests are over: the instance may forget these serials."""

    serials: tuple[Long, ...]


class PrefillPeersChanged(WireMessage, tag="neighbours", frozen=True):
    """The prefill peers of this instance from now on."""

    addresses: Annotated[tuple[Address, ...], Meta(max_length=ADDRESSES_MAX)]


FromRouter = Welcome | TurnedAway | PlaceAttempt | Cancel | StopAt | ForgetSerials | PrefillPeersChanged | Drain

_encoder = msgspec.msgpack.Encoder(enc_hook=encoded_array)
_from_instance: msgspec.msgpack.Decoder[FromInstance] = msgspec.msgpack.Decoder(FromInstance, dec_hook=decoded_array)
_versioned: msgspec.msgpack.Decoder[_Versioned] = msgspec.msgpack.Decoder(_Versioned)
_from_router: msgspec.msgpack.Decoder[FromRouter] = msgspec.msgpack.Decoder(FromRouter, dec_hook=decoded_array)


def encode_membership(message: FromInstance | FromRouter) -> bytes:
    if isinstance(message, PlaceAttempt | HeldGroup):
        message = msgspec.structs.replace(message, group=without_shared_prompts(message.group))
    return _encoder.encode(message)


def decode_from_instance(frame: bytes) -> FromInstance:
    try:
        message = decoded(_from_instance, frame, "a message from an instance")
    except WireError:
        _check_version(frame)
        raise
    match message:
        case StepOutput():
            pass  # checked row by row by RouterSessions
        case HeartbeatMessage():
            for keys in (message.named, message.forgotten):
                if len(keys) % KEY_BYTES:
                    raise WireError(f"{len(keys)} bytes are not whole keys of {KEY_BYTES}")
        case Accepted(_, serials):
            if len(serials) > GROUP_MAX:
                raise WireError(f"a group of {len(serials)} was accepted")
        case RefusedMessage(_, _, text):
            if len(text) > REFUSAL_CHARS_MAX:
                raise WireError(f"a refusal of {len(text)} characters")
        case Join():
            _check_version(frame)
            _check_printable(message)
        case HeldGroup(group, choices, body_choices):
            _check_choices(group, choices, body_choices)
            return msgspec.structs.replace(message, group=with_shared_prompts(group))
        case _:
            pass
    return message


def decode_from_router(frame: bytes) -> FromRouter:
    message = decoded(_from_router, frame, "a message from a router")
    if isinstance(message, PlaceAttempt):
        _check_choices(message.group, message.choices, message.body_choices)
        return msgspec.structs.replace(message, group=with_shared_prompts(message.group))
    return message


def _check_version(frame: bytes) -> None:
    """Other versions may have other fields, so the version is read from any frame tagged as a Join."""
    try:
        version = decoded(_versioned, frame, "a join").version
    except WireError:
        return  # another message
    if version != MEMBERSHIP_VERSION:
        raise WireError(f"it speaks version {version} of the membership, this router {MEMBERSHIP_VERSION}")


def _check_printable(join: Join) -> None:
    """Names are logged and shown: one with control characters could forge lines of a log or hide another."""
    for field in ("name", "role", "url", "peer_address"):
        text = str(msgspec.structs.asdict(join)[field])
        if not (text.isascii() and text.isprintable()):
            raise WireError(f"the {field} of its join is not of printable ASCII characters: {text!a}")


def _check_choices(group: tuple[Submission, ...], choices: tuple[int, ...], of: int) -> None:
    if len(group) != len(choices):
        raise WireError(f"{len(group)} submissions are said to be the {len(choices)} choices {choices[:8]}")
    if len(frozenset(choices)) != len(choices) or max(choices) >= of:
        raise WireError(f"{choices[:8]} are not different choices of {of}")


def check_group(group: tuple[Submission, ...], vocabulary: int) -> None:
    """Raise WireError where the group exceeds the limits of an engine."""
    for submission in group:
        check_tokens(submission.prompt, vocabulary)
        check_tokens(submission.generated, vocabulary)
        sampling = submission.sampling
        if any(not 0 <= token < vocabulary for token in named_tokens(sampling)):
            raise UnknownToken
        had, most = len(submission.generated), submission.max_tokens
        if had and most is not None and had >= most:
            raise WireError(f"not a request for an engine: {had} outputs of at most {most}, and more to come")


def held_bytes(held: HeldGroup) -> int:
    """Size of a held group as both sides count it: at least its bytes on the wire and in the router's memory."""
    asked, lines = sum(map(_asked_bytes, held.group)), sum(map(_line_bytes, held.lines))
    return 64 + len(held.origin) + CHOICE_BYTES * held.body_choices + asked + lines


def _asked_bytes(item: Submission) -> int:
    texts = len(item.request_id) + len(item.leader or "") + len(item.prefill_at)
    return 512 + asked_bytes(item) + len(item.salt) + 4 * texts


def logprob_bytes(item: Logprobs | PromptLogprobs) -> int:
    ranks = item.ranks.nbytes if isinstance(item, PromptLogprobs) else 0
    return item.chosen.nbytes + ranks + item.top_ids.nbytes + item.top.nbytes


def _line_bytes(line: HeldChoiceMessage) -> int:
    logprobs = sum(32 + logprob_bytes(item) for item in line.logprobs)
    logprobs += sum(40 + logprob_bytes(item) for item in line.prompt_logprobs)
    reason = 0 if line.ended is None or line.ended.fault is None else 4 * len(line.ended.fault.reason)
    return 256 + len(line.counts) + len(line.tokens) + logprobs + reason


def check_tokens(tokens: Tokens, vocabulary: int) -> None:
    # As unsigned numbers, negative ones are larger than any vocabulary.
    if len(tokens) and not int(tokens.view(np.uint32).max()) < vocabulary:
        raise UnknownToken


def keys_of(data: bytes) -> tuple[bytes, ...]:
    """Split concatenated block keys."""
    return tuple(data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))
