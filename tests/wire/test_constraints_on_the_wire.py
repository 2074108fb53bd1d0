"""Constraints in messages and recordings: sent once a group, bounded, and not readable in a recording."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from baton.core.bounds import CONSTRAINT_CHARS_MAX
from baton.core.content_hashes import ContentHashes
from baton.core.engine.orders import Submit
from baton.core.engine.request import Constraint, RequestId, Sampling, Submission, frozen_tokens, named_tokens
from baton.wire.engine_messages import (
    CONSTRAINT_OF_LEADER,
    WireError,
    asked_bytes,
    decode_to_engine,
    encode_to_engine,
)
from baton.wire.recording_mask import RecordingMask
from baton.wire.snapshot import GraphEncoder, restore

CONSTRAINT = Constraint("llguidance", "1.9.1", "start: /secret/" + "x" * 5_000)
SAMPLING = Sampling(seed=1, stop_token_ids=(4,), constraint=CONSTRAINT, allowed_token_ids=(1, 2), bad_words=((1, 2), (3,)))


def group(choices: int, **changed: object) -> tuple[Submission, ...]:
    prompt = frozen_tokens([1, 2, 3])
    return tuple(
        Submission(
            RequestId(str(choice)), prompt, replace(SAMPLING, choice=choice, **changed), 5,
            leader=RequestId("0") if choice else None,
        )
        for choice in range(choices)
    )  # fmt: skip


def test_a_group_sends_its_constraint_once_and_every_choice_gets_it() -> None:
    one, many = (encode_to_engine(Submit(1, group(choices))) for choices in (1, 16))
    assert len(many) < len(one) + 16 * 200
    decoded = decode_to_engine(many)
    assert isinstance(decoded, Submit)
    assert [item.sampling for item in decoded.group] == [item.sampling for item in group(16)]
    assert len(many) <= sum(map(asked_bytes, group(16))) + 512 * 16


def test_a_follower_may_have_a_constraint_of_its_own_or_none() -> None:
    leader, second, third = group(3)
    other = replace(second, sampling=replace(second.sampling, constraint=replace(CONSTRAINT, source="start: /b/")))
    free = replace(third, sampling=replace(third.sampling, constraint=None))
    decoded = decode_to_engine(encode_to_engine(Submit(1, (leader, other, free))))
    assert isinstance(decoded, Submit)
    assert [item.sampling for item in decoded.group] == [leader.sampling, other.sampling, free.sampling]


def test_a_leader_without_a_constraint_of_its_own_is_malformed() -> None:
    with pytest.raises(WireError, match="constraint of its leader"):
        decode_to_engine(encode_to_engine(Submit(1, group(1, constraint=CONSTRAINT_OF_LEADER))))


def test_a_constraint_that_is_too_long_does_not_cross_the_border() -> None:
    longest = replace(CONSTRAINT, source="x" * CONSTRAINT_CHARS_MAX)
    decode_to_engine(encode_to_engine(Submit(1, group(1, constraint=longest))))
    with pytest.raises(WireError):
        decode_to_engine(encode_to_engine(Submit(1, group(1, constraint=replace(longest, source=longest.source + "x")))))


def test_every_token_id_that_sampling_names_is_checked_against_the_vocabulary() -> None:
    assert sorted(named_tokens(replace(SAMPLING, logit_bias=((9, 1.0),)))) == [1, 1, 2, 2, 3, 4, 9]


def recorded(value: object) -> object:
    return restore(GraphEncoder(RecordingMask(b"key")).encode(value), ContentHashes(b""))


def test_a_recording_has_a_hash_in_place_of_the_grammar_and_other_tokens() -> None:
    masked = recorded(SAMPLING)
    assert isinstance(masked, Sampling)
    assert masked.constraint is not None
    again = recorded(SAMPLING)
    assert masked == again, "equal constraints stay equal"
    assert "secret" not in msgspec.json.encode(masked).decode()
    assert (masked.constraint.backend, masked.constraint.version) == ("llguidance", "1.9.1"), "decisions read these"
    assert masked.bad_words != SAMPLING.bad_words
    assert masked.allowed_token_ids != SAMPLING.allowed_token_ids
    assert masked.bad_words[0] == masked.allowed_token_ids, "the same tokens become the same"
