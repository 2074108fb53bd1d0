"""The session of peers as a machine: nothing is passed on before both have accepted each other."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from baton.core.handover.messages import Adopted, Ask, PeerId, PeerLost, PeerOpened, Renew
from baton.wire.engine_messages import WireError
from baton.wire.peer_messages import Register, Unfit, encode_peer, encode_registration
from baton.wire.peer_session import KnownSessions, PeerSession, SessionStage, unfit_reason
from baton.wire.sealed_stream import ConnectionFault
from tests.support.driver import submission

DECODE = Register("d", 1, "decode", b"model", "float32", 16, (64, 64))
PREFILL = msgspec.structs.replace(DECODE, name="p", role="prefill")


def pair() -> tuple[PeerSession, PeerSession]:
    return tuple(PeerSession(gives=gives, vocabulary=100, now_us=0, register_us=50) for gives in (False, True))  # type: ignore[return-value]


def fits(_register: Register) -> str | None:
    return None


def open_pair() -> tuple[PeerSession, PeerSession]:
    decode, prefill = pair()
    from_decode, from_prefill = [decode.opened(DECODE)], [prefill.opened(PREFILL)]
    opened = [False, False]
    while from_decode or from_prefill:
        for index, (session, incoming, outgoing) in enumerate(
            ((prefill, from_decode, from_prefill), (decode, from_prefill, from_decode))
        ):
            while incoming:
                step = session.receive(incoming.pop(0), fits)
                outgoing.extend(step.frames)
                opened[index] |= step.opened
                assert step.unfit is None
    assert opened == [True, True]
    return decode, prefill


def test_both_register_and_then_messages_go_both_ways() -> None:
    decode, prefill = open_pair()
    assert decode.stage is prefill.stage is SessionStage.OPEN
    said, answered = decode.frame_of(Adopted(7, 1)), prefill.frame_of(Renew(7, 1))
    assert said is not None
    assert answered is not None
    assert prefill.receive(said, fits).message == Adopted(7, 1)
    assert decode.receive(answered, fits).message == Renew(7, 1)
    assert decode.next_deadline() is decode.late(1 << 40) is None


def test_nothing_is_said_or_heard_before_both_have_accepted() -> None:
    decode, prefill = pair()
    assert decode.frame_of(Adopted(1, 1)) is None
    assert prefill.receive(encode_peer(Adopted(1, 1)), fits) == ((), False, None, None)  # the stream is not open
    prefill.opened(PREFILL)
    with pytest.raises(WireError):
        prefill.receive(encode_peer(Adopted(1, 1)), fits)
    accepted = prefill.receive(decode.opened(DECODE), fits)
    assert (len(accepted.frames), accepted.opened) == (1, False)
    assert prefill.frame_of(Renew(1, 1)) is None


def test_who_does_not_fit_is_told_why_and_hung_up() -> None:
    decode, prefill = pair()
    prefill.opened(PREFILL)
    step = prefill.receive(decode.opened(DECODE), lambda _register: "block_size: 16 here, 8 there")
    assert (step.unfit, step.opened) == ("block_size: 16 here, 8 there", False)
    assert decode.receive(step.frames[0], fits).unfit == "the other side says: block_size: 16 here, 8 there"
    assert encode_registration(Unfit("block_size: 16 here, 8 there")) == step.frames[0]


def test_who_does_not_register_in_time_is_too_late() -> None:
    decode, _ = pair()
    assert decode.next_deadline() == 50
    assert decode.late(49) is None
    assert decode.late(50) == (ConnectionFault.TOO_LATE, "it did not register within 5e-05 s")
    decode.opened(DECODE)
    assert decode.late(50) is not None
    end = decode.end(None, "too late")
    assert (end.was, decode.stage) == (SessionStage.REGISTERING, SessionStage.OVER)
    assert decode.next_deadline() is None


def test_a_token_outside_of_the_vocabulary_is_no_message() -> None:
    _, prefill = open_pair()
    with pytest.raises(WireError, match="vocabulary of 100"):
        prefill.receive(encode_peer(Ask(1, 1, submission([1, 100]))), fits)


def test_a_layout_that_differs_is_named_with_both_values() -> None:
    assert unfit_reason(DECODE, PREFILL) is None
    for ours, theirs in product((DECODE, PREFILL), repeat=2):
        if ours.role == theirs.role:
            assert "one must prefill and the other decode" in (unfit_reason(ours, theirs) or "")
    other = msgspec.structs.replace(PREFILL, dtype="float16", block_size=8, layer_bytes=(64, 32))
    assert unfit_reason(DECODE, other) == (
        "dtype: float32 here, float16 there; block_size: 16 here, 8 there; bytes of layer 1: 64 here, 32 there"
    )
    assert unfit_reason(DECODE, msgspec.structs.replace(PREFILL, layer_bytes=(64,))) == "layers: 2 here, 1 there"


def test_what_the_worker_says_belongs_to_the_session_that_it_knows() -> None:
    peer, known = PeerId("p"), KnownSessions()
    assert known.of(peer) is None
    known.began(1)
    assert known.of(peer) is None
    known.ended()
    known.began(2)
    known.handles(PeerOpened(peer))
    assert known.of(peer) == 1  # though it is over, and another one has begun
    known.handles(PeerLost(peer, "gone"))
    assert known.of(peer) is None
    known.handles(PeerOpened(peer))
    assert known.of(peer) == 2
