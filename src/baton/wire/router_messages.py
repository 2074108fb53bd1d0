"""What a router and an instance say to each other, as bytes.

    instance                                          router
      Join, HeldGroup …, Settled         ───────▶       admits it, or turns it away
                                         ◀───────       Welcome | TurnedAway
      Beat every 200 ms                  ───────▶
                                         ◀───────       Place, Cancel, StopAt, Forget, Neighbours, Drain
      AcceptedAs, RefusedWith, StepOutput ──────▶       as a front end hears them from its engine
      Leaving                            ───────▶       it takes nothing new

Owns the shape and the bounds of all of it. Both sides hold the cluster key but may be of another version, broken or taken
over, so everything is checked here: what does not pass is a WireError and never another exception.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.core.engine.prefix import KEY_BYTES
from baton.core.engine.request import Submission, Tokens, frozen_tokens
from baton.wire.bounds import (
    INT32_MAX,
    INT63_MAX,
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
    AcceptedAs,
    Cancel,
    Drain,
    RefusedWith,
    StepOutput,
    StopAt,
    Submit,
    WireEnded,
    WireError,
    WireGauges,
    WireLogprobs,
    WireSubmission,
    decoded,
    submissions,
)
from baton.wire.peer_messages import check_sampling

MEMBERSHIP_VERSION = 1
ORIGIN_BYTES_MAX = 8 << 20
KEYS_A_BEAT_MAX = 4096
NOTES_A_BEAT_MAX = 1024
GROUP_MAX = 256
"""Choices of a body: as many as the API makes of one."""
HELD_BYTES_MAX = 96 << 20
"""All that an instance says of held groups as it joins, by `held_bytes`: it is written in one go, so it must be well below
what a line may have unread."""
HELD_GROUPS_MAX = 1 << 15
CHOICE_BYTES = 512
"""What a router spends on a choice of a body that it hears of, whether or not anything of it is held."""
PLACE_BYTES_MAX = 24 << 20
"""Origin, prompts and outputs of a group: with its history it must be able to travel back as one frame."""
ADDRESSES_MAX = 256
REFUSAL_CHARS_MAX = 4096

Choices = Annotated[int, Meta(ge=1, le=GROUP_MAX)]
Keys = Annotated[bytes, Meta(max_length=KEY_BYTES * KEYS_A_BEAT_MAX)]
"""Block keys end to end."""


class UnknownToken(WireError):
    """It has an id that the model has no token for. That need not be a router's fault: before anybody has joined, it knows
    the tokenizer's vocabulary only."""


# ── instance to router ───────────────────────────────────────────────────────────────────────────────────────────────────


class Join(Said, tag="join", frozen=True):
    """The first frame of a session."""

    name: Name
    incarnation: Incarnation
    role: Name
    fingerprint: Fingerprint
    url: Address
    peer_address: Address
    slots: Positive
    blocks: Positive
    block_size: Positive
    context_tokens: Positive
    vocabulary: Positive
    pid: Count
    draining: bool
    version: int = MEMBERSHIP_VERSION


class _Versioned(msgspec.Struct, tag="join", frozen=True):
    """As much of a Join as every version has."""

    version: int


class HeldLine(Said, array_like=True, frozen=True):
    """What an instance has of one choice of a held group, after what the submission says was generated before."""

    place: Count
    serial: Long
    counts: bytes
    """Tokens came in rows; how many in each."""
    tokens: bytes
    logprobs: tuple[WireLogprobs, ...]
    """By row, where they were asked for."""
    cached_tokens: int | None
    ended: WireEnded | None


class HeldGroup(Said, tag="held", frozen=True):
    """A group that a router submitted in an earlier session, and that is still kept."""

    group: Annotated[tuple[WireSubmission, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    choices: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    """Which choices of their body these are; one for each of the group."""
    body_choices: Choices
    origin: Annotated[bytes, Meta(max_length=ORIGIN_BYTES_MAX)]
    lines: Annotated[tuple[HeldLine, ...], Meta(max_length=GROUP_MAX)]
    """One for each choice that is still kept."""


class Settled(Said, tag="settled", frozen=True):
    """Everything that is held was said."""


class Beat(Said, tag="beat", frozen=True):
    gauges: WireGauges
    engine_silent_us: Long
    computing: bool
    fresh: bool
    named: Keys
    forgotten: Keys
    notes: Annotated[tuple[tuple[Long, Name, Long], ...], Meta(max_length=NOTES_A_BEAT_MAX)]
    """(serial, phase, how long ago in microseconds)"""


class Leaving(Said, tag="leaving", frozen=True):
    """It was told to stop: nothing new, please; what is open goes on for a while."""


FromInstance = Join | HeldGroup | Settled | Beat | Leaving | AcceptedAs | RefusedWith | StepOutput


# ── router to instance ───────────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(Said, tag="welcome", frozen=True):
    router: Name
    beat_us: Positive
    orphan_grace_us: Long


class TurnedAway(Said, tag="turned_away", frozen=True):
    reason: Reason
    fenced: bool


class Place(Said, tag="place", frozen=True):
    """A leg: submit these choices."""

    ticket: Long
    group: Annotated[tuple[WireSubmission, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    choices: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=GROUP_MAX)]
    """Which choices of their body these are; one for each of the group."""
    body_choices: Choices
    origin: Annotated[bytes, Meta(max_length=ORIGIN_BYTES_MAX)]


class Forget(Said, tag="forget", frozen=True):
    """The body is over: what is kept of these serials may go."""

    serials: tuple[Long, ...]


class Neighbours(Said, tag="neighbours", frozen=True):
    """Who prefills for this instance from now on."""

    addresses: Annotated[tuple[Address, ...], Meta(max_length=ADDRESSES_MAX)]


FromRouter = Welcome | TurnedAway | Place | Cancel | StopAt | Forget | Neighbours | Drain

_encoder = msgspec.msgpack.Encoder()
_from_instance: msgspec.msgpack.Decoder[FromInstance] = msgspec.msgpack.Decoder(FromInstance)
_versioned: msgspec.msgpack.Decoder[_Versioned] = msgspec.msgpack.Decoder(_Versioned)
_from_router: msgspec.msgpack.Decoder[FromRouter] = msgspec.msgpack.Decoder(FromRouter)


def encode_membership(message: FromInstance | FromRouter) -> bytes:
    return _encoder.encode(message)


def decode_from_instance(frame: bytes) -> FromInstance:
    try:
        message = decoded(_from_instance, frame, "a message from an instance")
    except WireError:
        _check_version(frame)
        raise
    match message:
        case StepOutput():
            pass  # looked at row by row, by whoever knows the requests
        case Beat():
            for keys in (message.named, message.forgotten):
                if len(keys) % KEY_BYTES:
                    raise WireError(f"{len(keys)} bytes are not whole keys of {KEY_BYTES}")
        case AcceptedAs(ticket, serials):
            _check_numbers((ticket, *serials))
            if len(serials) > GROUP_MAX:
                raise WireError(f"a group of {len(serials)} was accepted")
        case RefusedWith(ticket, _, text):
            _check_numbers((ticket,))
            if len(text) > REFUSAL_CHARS_MAX:
                raise WireError(f"a refusal of {len(text)} characters")
        case Join():
            _check_version(frame)
        case HeldGroup(group, choices, body_choices):
            _check_choices(group, choices, body_choices)
        case _:
            pass
    return message


def decode_from_router(frame: bytes) -> FromRouter:
    message = decoded(_from_router, frame, "a message from a router")
    match message:
        case Place(_, group, choices, body_choices):
            _check_choices(group, choices, body_choices)
        case Cancel(serial):
            _check_numbers((serial,))
        case StopAt(serial, keep):
            _check_numbers((serial, keep))
        case _:
            pass
    return message


def _check_version(frame: bytes) -> None:
    """Another version may have other fields, so it is looked for in whatever calls itself a Join."""
    try:
        spoken = decoded(_versioned, frame, "a join").version
    except WireError:
        return  # it is something else
    if spoken != MEMBERSHIP_VERSION:
        raise WireError(f"it speaks version {spoken} of the membership, this router {MEMBERSHIP_VERSION}")


def _check_numbers(numbers: tuple[int, ...]) -> None:
    if not all(0 <= number <= INT63_MAX for number in numbers):
        raise WireError(f"{numbers[:8]} are not all numbers of requests")


def _check_choices(group: tuple[WireSubmission, ...], choices: tuple[int, ...], of: int) -> None:
    if len(group) != len(choices):
        raise WireError(f"{len(group)} submissions are said to be the {len(choices)} choices {choices[:8]}")
    if len(frozenset(choices)) != len(choices) or max(choices) >= of:
        raise WireError(f"{choices[:8]} are not different choices of {of}")


def checked_group(group: tuple[WireSubmission, ...], vocabulary: int) -> tuple[Submission, ...]:
    """What a group asks for; a WireError where it is more or other than an engine can be asked for."""
    for item in group:
        _demand(len(item.request_id) <= REQUEST_ID_CHARS_MAX, f"a request id of {len(item.request_id)} characters")
        _demand(len(item.salt) <= SALT_BYTES_MAX, f"a salt of {len(item.salt)} bytes")
        _demand(abs(item.priority) <= INT32_MAX, f"a priority of {item.priority}")
        _demand(item.max_tokens is None or 0 <= item.max_tokens <= INT63_MAX, f"at most {item.max_tokens} tokens")
        _demand(len(item.prefill_at) <= 512, f"an address of {len(item.prefill_at)} characters")
        check_sampling(item.sampling)
    made = submissions(Submit(0, group))
    for submission in made:
        check_tokens(submission.prompt, vocabulary)
        check_tokens(submission.generated, vocabulary)
        sampling = submission.sampling
        check_tokens(frozen_tokens([*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)]), vocabulary)
        had, most = len(submission.generated), submission.max_tokens
        _demand(not had or most is None or had < most, f"{had} outputs of at most {most}, and more to come")
    return made


def held_bytes(held: HeldGroup) -> int:
    """What a held group weighs, for both sides: no less than its bytes on the wire and what a router makes of them."""
    asked, lines = sum(map(_asked_bytes, held.group)), sum(map(_line_bytes, held.lines))
    return 64 + len(held.origin) + CHOICE_BYTES * held.body_choices + asked + lines


def _asked_bytes(item: WireSubmission) -> int:
    texts = len(item.request_id) + len(item.leader or "") + len(item.prefill_at)
    listed = len(item.sampling.logit_bias) + len(item.sampling.stop_token_ids)
    return 512 + len(item.prompt or b"") + len(item.generated) + len(item.salt) + 4 * texts + 32 * listed


def _line_bytes(line: HeldLine) -> int:
    logprobs = sum(32 + len(item.chosen) + len(item.top_ids) + len(item.top) for item in line.logprobs)
    reason = 0 if line.ended is None or line.ended.fault is None else 4 * len(line.ended.fault.reason)
    return 256 + len(line.counts) + len(line.tokens) + logprobs + reason


def check_tokens(tokens: Tokens, vocabulary: int) -> None:
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise UnknownToken(f"a token that is none of a vocabulary of {vocabulary}")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WireError(f"not a request for an engine: {otherwise}")
