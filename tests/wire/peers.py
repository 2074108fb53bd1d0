"""Every message between two instances, drawn at random, and when two of them are the same."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from baton.core.bounds import INCARNATION_MAX, INT32_MAX, INT63_MAX, REASON_CHARS_MAX
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import (
    TOKEN_BYTES_MAX,
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
from baton.wire.peer_messages import Register, Registered, Unfit

tokens = st.integers(0, INT32_MAX)
counts = st.integers(0, INT32_MAX)
longs = st.integers(0, INT63_MAX)
reasons = st.text(max_size=REASON_CHARS_MAX)
attempt = {"request": longs, "attempt": st.integers(1, INT32_MAX)}
finite = st.floats(allow_nan=False, allow_infinity=False)

samplings = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 15),
    temperature=st.floats(0, 100),
    top_k=counts,
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=finite,
    frequency_penalty=finite,
    logit_bias=st.lists(st.tuples(tokens, finite), max_size=4).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=4).map(tuple),
    min_tokens=counts,
    logprobs=st.none() | st.integers(0, 20),
)
submissions = st.builds(
    Submission,
    request_id=st.text(max_size=40).map(RequestId),
    prompt=st.lists(tokens, min_size=1, max_size=50).map(frozen_tokens),
    sampling=samplings,
    max_tokens=st.none() | longs,
    salt=st.binary(max_size=64),
    priority=st.integers(-1000, 1000),
    generated=st.lists(tokens, max_size=50).map(frozen_tokens),
    prefill_at=st.text(max_size=80),
)


def _line(chosen: float, top: list[tuple[int, float]]) -> Logprobs:
    return Logprobs(
        0,
        np.array([chosen], dtype=np.float32),
        np.array([[token for token, _ in top]], dtype=np.int32),
        np.array([[value for _, value in top]], dtype=np.float32),
    )


logprobs = st.builds(_line, st.floats(width=32), st.lists(st.tuples(tokens, st.floats(width=32)), max_size=20))

to_giver: dict[type, st.SearchStrategy[PeerMessage]] = {
    Ask: st.builds(Ask, **attempt, submission=submissions),
    Grant: st.builds(
        Grant, **attempt, cached_tokens=counts, lease_us=longs, token=st.binary(min_size=1, max_size=TOKEN_BYTES_MAX)
    ),
    Refuse: st.builds(Refuse, **attempt, reason=reasons),
    Adopted: st.builds(Adopted, **attempt),
    Release: st.builds(Release, **attempt, reason=reasons),
}
to_taker: dict[type, st.SearchStrategy[PeerMessage]] = {
    Offer: st.builds(Offer, **attempt, prompt_tokens=counts),
    Renew: st.builds(Renew, **attempt),
    Commit: st.builds(
        Commit,
        **attempt,
        token=tokens,
        logprobs=st.none() | logprobs,
        cached_tokens=counts,
        queue_us=longs,
        prefill_us=longs,
        prompt_digest=st.binary(max_size=64),
        checks=st.binary(max_size=200),
    ),
    Decline: st.builds(Decline, **attempt, code=st.sampled_from(PdCode), reason=reasons),
}
names = st.text(min_size=1, max_size=128)
registrations = st.one_of(
    st.builds(
        Register,
        name=names,
        incarnation=st.integers(1, INCARNATION_MAX),
        role=names,
        fingerprint=st.binary(max_size=64),
        dtype=names,
        block_size=st.integers(1, INT32_MAX),
        layer_bytes=st.lists(longs, max_size=40).map(tuple),
        transfers=st.lists(st.text(max_size=60), max_size=8).map(tuple),
    ),
    st.builds(Registered),
    st.builds(Unfit, reason=reasons),
)


def plain(value: object) -> object:
    """The same for messages that say the same; arrays are compared byte by byte, so NaN is NaN."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Ask | Commit | Submission | Logprobs):
        return (type(value), *(plain(getattr(value, field)) for field in value.__struct_fields__))
    return value
