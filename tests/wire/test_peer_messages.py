"""Peer messages: decoding gives back what was encoded; every other frame is a WireError and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.bounds import ALTERNATIVES_MAX, LISTED_MAX, REASON_CHARS_MAX, REQUEST_ID_CHARS_MAX, SALT_BYTES_MAX
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import (
    CHECKS_BYTES_MAX,
    Adopted,
    Ask,
    Commit,
    Decline,
    Grant,
    Offer,
    PeerMessage,
    Refuse,
    Release,
    Renew,
)
from baton.wire import engine_messages as messages
from baton.wire import peer_messages as peering
from baton.wire.engine_messages import WireError
from baton.wire.peer_messages import (
    PEERING_VERSION,
    Register,
    Registered,
    Registration,
    Unfit,
    decode_registration,
    decode_to_decode_side,
    decode_to_prefill_side,
    encode_peer,
    encode_registration,
)
from tests.wire.peers import plain, registrations, to_giver, to_taker

ASK = Ask(1, 1, Submission(RequestId("r"), frozen_tokens([1, 2, 3]), Sampling(seed=0)))
GRANT = Grant(1, 1, 0, 1_000, b"t" * 16)
COMMIT = Commit(1, 1, 7, None, 0, 0, 0, b"d" * 16, b"c" * 8)
REGISTER = Register("d0", 5, "decode", b"f" * 16, "float32", 16, (4096,) * 4, ("tcp:127.0.0.1:4711",))


def _line(lines: int = 1, alternatives: int = 2, first: int = 3) -> Logprobs:
    shape = (lines, alternatives)
    return Logprobs(0, np.zeros(lines, np.float32), np.full(shape, first, np.int32), np.zeros(shape, np.float32))


# ── what is meant arrives ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", to_giver, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_to_a_giver_survives_the_wire(kind: type, data: st.DataObject) -> None:
    message = data.draw(to_giver[kind])
    assert plain(decode_to_prefill_side(encode_peer(message))) == plain(message)


@pytest.mark.parametrize("kind", to_taker, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_to_a_taker_survives_the_wire(kind: type, data: st.DataObject) -> None:
    message = data.draw(to_taker[kind])
    assert plain(decode_to_decode_side(encode_peer(message))) == plain(message)


@given(registrations)
def test_a_registration_survives_the_wire(message: Registration) -> None:
    assert decode_registration(encode_registration(message)) == message


def test_what_is_decoded_cannot_be_written() -> None:
    back = decode_to_prefill_side(encode_peer(ASK))
    assert isinstance(back, Ask)
    assert not back.submission.prompt.flags.writeable


@pytest.mark.parametrize(
    "make", [lambda r: Refuse(1, 1, r), lambda r: Release(1, 1, r), lambda r: Decline(1, 1, PdCode.TIMEOUT, r)]
)
@pytest.mark.parametrize("reason", ["x" * 10_000, "\udc80" * 600], ids=["long", "no text"])
def test_a_reason_that_is_too_long_or_no_text_is_cut_and_still_understood(
    make: Callable[[str], PeerMessage], reason: str
) -> None:
    message = make(reason)
    decode = decode_to_decode_side if isinstance(message, Decline) else decode_to_prefill_side
    back = decode(encode_peer(message))
    assert isinstance(back, Refuse | Release | Decline)
    assert len(back.reason) == REASON_CHARS_MAX
    unfit = decode_registration(encode_registration(Unfit(reason)))
    assert isinstance(unfit, Unfit)
    assert len(unfit.reason) == REASON_CHARS_MAX


def test_a_follower_is_not_asked_for() -> None:
    follower = replace(ASK.submission, leader=RequestId("leader"))
    with pytest.raises(WireError, match="only leaders"):
        encode_peer(replace(ASK, submission=follower))


# ── what is not ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_direction_has_its_own_messages() -> None:
    for_giver: list[PeerMessage] = [ASK, GRANT, Refuse(1, 1, ""), Adopted(1, 1), Release(1, 1, "")]
    for_taker: list[PeerMessage] = [Offer(1, 1, 3), Renew(1, 1), COMMIT, Decline(1, 1, PdCode.TIMEOUT, "")]
    others: list[tuple[list[PeerMessage], Callable[[bytes], object]]] = [
        (for_giver, decode_to_decode_side), (for_giver, decode_registration),
        (for_taker, decode_to_prefill_side), (for_taker, decode_registration),
    ]  # fmt: skip
    for said, decode in others:
        for message in said:
            with pytest.raises(WireError):
                decode(encode_peer(message))
    with pytest.raises(WireError):
        decode_to_prefill_side(encode_registration(REGISTER))


@pytest.mark.parametrize(
    "message",
    [
        Grant(-1, 1, 0, 0, b"t"),
        Grant(2**63, 1, 0, 0, b"t"),
        Grant(1, 0, 0, 0, b"t"),
        Grant(1, 2**31, 0, 0, b"t"),
        Grant(1, 1, -1, 0, b"t"),
        Grant(1, 1, 0, -1, b"t"),
        Grant(1, 1, 0, 0, bytes(65)),
        Grant(1, 1, 0, 0, b""),
        Offer(1, 1, -1),
        Offer(1, 1, 2**31),
        Decline(1, 1, 200, ""),  # type: ignore[arg-type]
        replace(COMMIT, token=-1),
        replace(COMMIT, token=2**31),
        replace(COMMIT, cached_tokens=-1),
        replace(COMMIT, queue_us=-1),
        replace(COMMIT, prefill_us=-1),
        replace(COMMIT, prompt_digest=bytes(65)),
        replace(COMMIT, checks=bytes(CHECKS_BYTES_MAX + 1)),
        replace(COMMIT, logprobs=_line(lines=2)),
        replace(COMMIT, logprobs=_line(lines=0)),
        replace(COMMIT, logprobs=_line(alternatives=ALTERNATIVES_MAX + 1)),
        replace(COMMIT, logprobs=_line(first=-1)),
        replace(COMMIT, logprobs=replace(_line(), top=np.zeros((1, 3), np.float32))),
        replace(COMMIT, logprobs=replace(_line(), chosen=np.zeros(3, np.int8))),
    ],
)  # fmt: skip
def test_numbers_and_sizes_out_of_bounds_are_refused(message: PeerMessage) -> None:
    decode = decode_to_decode_side if isinstance(message, Offer | Commit | Decline) else decode_to_prefill_side
    with pytest.raises(WireError):
        decode(encode_peer(message))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": frozen_tokens([])},
        {"prompt": frozen_tokens([1, -1])},
        {"request_id": "r" * (REQUEST_ID_CHARS_MAX + 1)},
        {"salt": bytes(SALT_BYTES_MAX + 1)},
        {"priority": 2**40},
        {"max_tokens": -1},
        {"max_tokens": 2**63},
    ],
    ids=str,
)
def test_a_submission_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        decode_to_prefill_side(encode_peer(replace(ASK, submission=replace(ASK.submission, **changes))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"choice": -1}, {"top_k": -1}, {"top_k": 2**31}, {"min_tokens": -1}, {"logprobs": -1}, {"logprobs": 2**20},
        {"temperature": -0.1}, {"temperature": float("inf")}, {"temperature": float("nan")}, {"repetition_penalty": 0.0},
        {"top_p": 1.1}, {"top_p": float("nan")}, {"min_p": -0.1}, {"presence_penalty": float("nan")},
        {"frequency_penalty": float("-inf")}, {"logit_bias": ((1, float("nan")),)}, {"logit_bias": ((-1, 0.0),)},
        {"logit_bias": ((2**31, 0.0),)}, {"stop_token_ids": (-1,)}, {"stop_token_ids": (2**31,)},
        {"stop_token_ids": (1,) * (LISTED_MAX + 1)}, {"logit_bias": ((1, 0.0),) * (LISTED_MAX + 1)},
    ],
    ids=lambda changes: str(changes)[:40],
)  # fmt: skip
def test_sampling_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    sampling = replace(ASK.submission.sampling, **changes)  # type: ignore[arg-type]
    with pytest.raises(WireError):
        decode_to_prefill_side(encode_peer(replace(ASK, submission=replace(ASK.submission, sampling=sampling))))


def _edited(message: PeerMessage, **changes: object) -> bytes:
    """The message with fields changed below the types of ours."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode_peer(message)), **changes})


def test_a_prompt_that_is_not_whole_numbers_or_not_there_is_refused() -> None:
    submission = msgspec.msgpack.decode(encode_peer(ASK))["submission"]
    for prompt in (b"\1\0\0", None, [1, 2]):
        with pytest.raises(WireError):
            decode_to_prefill_side(_edited(ASK, submission=[submission[0], prompt, *submission[2:]]))
    with pytest.raises(WireError):
        decode_to_prefill_side(_edited(ASK, submission=[*submission, "more"]))
    with pytest.raises(WireError, match="prompt of its own"):
        decode_to_prefill_side(_edited(ASK, submission=[*submission[:6], "leader"]))


@pytest.mark.parametrize(
    "changes", [{"request": "1"}, {"request": 1.5}, {"token": "text"}, {"more": 1}, {"type": "give"}], ids=str
)
def test_other_types_and_fields_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        decode_to_prefill_side(_edited(GRANT, **changes))


@pytest.mark.parametrize(
    "decode", [decode_to_prefill_side, decode_to_decode_side, decode_registration, messages.decode_to_engine]
)
def test_a_frame_nested_without_end_is_refused(decode: Callable[[bytes], object]) -> None:
    for kind in (b"ask", b"renew", b"register", b"drain"):
        frame = b"\x82\xa4type" + bytes([0xA0 + len(kind)]) + kind + b"\xa1x" + b"\x91" * 100_000
        with pytest.raises(WireError):
            decode(frame)


def test_a_frame_over_the_limit_is_refused_by_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode_peer(ASK)
    monkeypatch.setattr(messages, "FRAME_BYTES_MAX", 10)
    monkeypatch.setattr(peering, "FRAME_BYTES_MAX", 10)
    with pytest.raises(WireError, match="over the limit of 10"):
        decode_to_prefill_side(frame)
    with pytest.raises(WireError, match="over the limit of 10"):
        encode_peer(ASK)


# ── registration ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_version_is_refused_with_both_named_whatever_its_fields() -> None:
    named = f"version 9 of the peer messages, this one {PEERING_VERSION}"
    with pytest.raises(WireError, match=named):
        decode_registration(encode_registration(msgspec.structs.replace(REGISTER, version=9)))
    with pytest.raises(WireError, match=named):
        decode_registration(msgspec.msgpack.encode({"type": "register", "version": 9, "shape": "unheard of"}))
    with pytest.raises(WireError, match="not a registration"):
        decode_registration(msgspec.msgpack.encode({"type": "register", "version": PEERING_VERSION}))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""}, {"name": "n" * 129}, {"incarnation": 0}, {"incarnation": 2**63}, {"role": ""},
        {"fingerprint": bytes(65)}, {"dtype": "d" * 129}, {"block_size": 0}, {"layer_bytes": (-1,)},
        {"layer_bytes": (1,) * 1025}, {"transfers": ("a",) * 9}, {"transfers": ("a" * 513,)},
    ],
    ids=lambda changes: str(changes)[:40],
)  # fmt: skip
def test_a_registration_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        decode_registration(encode_registration(msgspec.structs.replace(REGISTER, **changes)))


def test_a_registration_without_addresses_is_one() -> None:
    bare = msgspec.structs.replace(REGISTER, transfers=())
    assert decode_registration(encode_registration(bare)) == bare
    assert decode_registration(encode_registration(Registered())) == Registered()
