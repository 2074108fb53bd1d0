"""Two holders of a key exchange frames; nobody without it is accepted, whatever is recorded, cut or repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import BadConfig
from baton.wire.engine_messages import WireError
from baton.wire.seal import (
    HANDSHAKE_BYTES_MAX,
    KEY_BYTES_MIN,
    NAME_BYTES_MAX,
    NONCE_BYTES,
    OVERHEAD_BYTES,
    PROOF_BYTES,
    Seal,
    SealBroken,
    SealClosed,
    SealFault,
    SealState,
)

KEY = b"the key of the cluster"
OTHER_KEY = b"the key of another one"
LIMIT = 1000
HELLO_BYTES = 39 + len("d")
VERSION_AT = 4
NAME_BYTES_AT = 6


def _connector(key: bytes = KEY, nonce: bytes = b"c" * NONCE_BYTES, name: str = "d") -> Seal:
    return Seal.connect(key, name, nonce, LIMIT)


def _acceptor(key: bytes = KEY, nonce: bytes = b"a" * NONCE_BYTES, name: str = "p") -> Seal:
    return Seal.accept(key, name, nonce, LIMIT)


def _shake(connector: Seal, acceptor: Seal) -> tuple[bytes, bytes]:
    """Exchange handshake bytes until neither side has more; returns the bytes of each."""
    said = {connector: b"", acceptor: b""}
    while True:
        before = dict(said)
        for speaker, hearer in ((connector, acceptor), (acceptor, connector)):
            part = speaker.outgoing()
            said[speaker] += part
            assert hearer.take(part) == []
        if said == before:
            return said[connector], said[acceptor]


def _opened() -> tuple[Seal, Seal]:
    connector, acceptor = _connector(), _acceptor()
    _shake(connector, acceptor)
    assert connector.is_open
    assert acceptor.is_open
    return connector, acceptor


def _fault(seal: Seal, data: bytes) -> SealFault:
    """The fault of these bytes; after it the connection is dead."""
    with pytest.raises(SealBroken) as broken:
        seal.take(data)
    assert seal.state is SealState.BROKEN
    assert seal.outgoing() == b""
    with pytest.raises(SealClosed):
        seal.seal(b"")
    with pytest.raises(SealBroken) as again:
        seal.take(b"")
    assert again.value.fault is broken.value.fault
    return broken.value.fault


# ── both sides hold the key ────────────────────────────────────────────────────────────────────────────────────────


def test_both_sides_open_and_know_each_other_by_name() -> None:
    connector, acceptor = _opened()
    assert (connector.peer_name, acceptor.peer_name) == ("p", "d")


def test_frames_pass_both_ways_in_the_order_of_sealing() -> None:
    ends = _opened()
    for sender, receiver in (ends, ends[::-1]):
        frames = [b"", b"a", b"a", b"x" * LIMIT]
        assert receiver.take(b"".join(sender.seal(frame) for frame in frames)) == frames


def _parts(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted(cut % (len(data) + 1) for cut in cuts)
    return [data[begin:end] for begin, end in zip([0, *at], [*at, len(data)], strict=True)]


@settings(max_examples=200, deadline=None)
@given(
    frames=st.lists(st.binary(max_size=60), max_size=6),
    cuts=st.lists(st.integers(0, 2**16), max_size=40),
    names=st.lists(
        st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20), min_size=2, max_size=2, unique=True
    ),
)
def test_it_does_not_matter_how_the_stream_is_cut(frames: list[bytes], cuts: list[int], names: list[str]) -> None:
    connector, acceptor = _connector(name=names[0]), _acceptor(name=names[1])
    for _ in range(2):
        for part in _parts(connector.outgoing(), cuts):
            assert acceptor.take(part) == []
        stream = acceptor.outgoing()
        if acceptor.is_open:  # its first frames may follow its proof at once
            stream += b"".join(acceptor.seal(frame) for frame in frames)
        heard = [frame for part in _parts(stream, cuts) for frame in connector.take(part)]
    assert heard == frames
    back = b"".join(connector.seal(frame) for frame in frames)
    assert [frame for part in _parts(back, cuts) for frame in acceptor.take(part)] == frames


def test_the_keys_of_two_connections_differ_when_one_nonce_does() -> None:
    said = set()
    for nonces in ((b"c", b"a"), (b"c", b"b"), (b"e", b"a")):
        connector, acceptor = (
            make(nonce=nonce * NONCE_BYTES) for make, nonce in zip((_connector, _acceptor), nonces, strict=True)
        )
        _shake(connector, acceptor)
        said |= {connector.seal(b"x"), acceptor.seal(b"x")}
    assert len(said) == 6


# ── before the proof ───────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_sealed_and_nobody_is_named_before_the_proof() -> None:
    connector, acceptor = _connector(), _acceptor()
    for _ in range(2):
        for seal in (connector, acceptor):
            assert not seal.is_open
            with pytest.raises(SealClosed):
                seal.seal(b"x")
            with pytest.raises(SealClosed):
                _ = seal.peer_name
        acceptor.take(connector.outgoing()[:HELLO_BYTES])


def test_an_acceptor_says_nothing_to_a_stranger_and_nothing_of_the_key_to_one_who_says_hello() -> None:
    stranger = _acceptor()
    assert stranger.outgoing() == b""
    assert _fault(stranger, b"GET / HTTP/1.1\r\n") is SealFault.MALFORMED
    answers = set()
    for key in (KEY, OTHER_KEY):
        acceptor = _acceptor(key)
        acceptor.take(_connector().outgoing())
        answers.add(acceptor.outgoing())
        assert _fault(acceptor, bytes(PROOF_BYTES)) is SealFault.WRONG_KEY
    assert len(answers) == 1


def test_a_stranger_is_refused_at_the_first_wrong_byte() -> None:
    assert _fault(_acceptor(), b"G") is SealFault.MALFORMED
    assert _fault(_connector(), b"S") is SealFault.MALFORMED


def test_a_wrong_key_is_refused_by_either_side() -> None:
    connector, acceptor = _connector(OTHER_KEY), _acceptor()
    acceptor.take(connector.outgoing())
    connector.take(acceptor.outgoing())
    assert _fault(acceptor, connector.outgoing()) is SealFault.WRONG_KEY

    connector = _connector()
    liar = _acceptor(OTHER_KEY)
    liar.take(connector.outgoing())
    connector.take(liar.outgoing())
    assert _fault(connector, b"?" * PROOF_BYTES) is SealFault.WRONG_KEY


def test_another_version_is_refused_by_name_even_when_its_hello_is_shorter() -> None:
    hello = bytearray(_connector().outgoing())
    hello[VERSION_AT] = 9
    with pytest.raises(SealBroken, match="version 9 of the seal, this one 2") as broken:
        _acceptor().take(bytes(hello[: VERSION_AT + 1]))
    assert broken.value.fault is SealFault.VERSION


def test_a_long_name_is_refused_before_it_has_come() -> None:
    hello = bytearray(_connector(name="n" * NAME_BYTES_MAX).outgoing())
    assert len(hello) + PROOF_BYTES == HANDSHAKE_BYTES_MAX < 512
    hello[NAME_BYTES_AT] = NAME_BYTES_MAX + 1
    assert _fault(_acceptor(), bytes(hello)) is SealFault.OVERSIZED


@pytest.mark.parametrize("name", [b"", b"\xff\xff", b"a\nb"], ids=["empty", "no text", "two lines"])
def test_a_name_that_is_none_is_refused(name: bytes) -> None:
    hello = bytearray(_connector().outgoing()[: HELLO_BYTES - 1])
    hello[NAME_BYTES_AT] = len(name)
    assert _fault(_acceptor(), bytes(hello) + name) is SealFault.MALFORMED


def test_two_sides_of_the_same_name_are_refused() -> None:
    assert _fault(_acceptor(name="d"), _connector(name="d").outgoing()) is SealFault.SAME_NAME


@pytest.mark.parametrize(
    "make",
    [
        lambda: Seal.connect(b"k" * (KEY_BYTES_MIN - 1), "d", bytes(NONCE_BYTES)),
        lambda: Seal.connect(KEY, "d", bytes(NONCE_BYTES - 1)),
        lambda: Seal.accept(KEY, "", bytes(NONCE_BYTES)),
        lambda: Seal.accept(KEY, "n" * (NAME_BYTES_MAX + 1), bytes(NONCE_BYTES)),
        lambda: Seal.accept(KEY, "a\nb", bytes(NONCE_BYTES)),
        lambda: Seal.accept(KEY, "\udc80", bytes(NONCE_BYTES)),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Seal]) -> None:
    with pytest.raises(BadConfig):
        make()


# ── in the way: reflected, recorded, repeated, cut ─────────────────────────────────────────────────────────────────


def test_our_own_hello_sent_back_is_refused() -> None:
    connector = _connector()
    assert _fault(connector, connector.outgoing()) is SealFault.MALFORMED
    acceptor = _acceptor()
    acceptor.take(_connector().outgoing())
    assert _fault(_acceptor(), acceptor.outgoing()) is SealFault.MALFORMED


def test_our_own_proof_sent_back_is_refused() -> None:
    connector, acceptor = _connector(), _acceptor()
    acceptor.take(connector.outgoing())
    connector.take(acceptor.outgoing())
    assert _fault(connector, connector.outgoing()) is SealFault.WRONG_KEY


def test_our_own_frame_sent_back_is_refused() -> None:
    for seal in _opened():
        assert _fault(seal, seal.seal(b"x")) is SealFault.FORGED


def test_a_recorded_session_means_nothing_to_a_fresh_acceptor_or_connector() -> None:
    connector, acceptor = _connector(), _acceptor()
    from_connector, from_acceptor = _shake(connector, acceptor)
    from_connector += connector.seal(b"frame")
    from_acceptor += acceptor.seal(b"frame")
    assert _fault(_acceptor(nonce=b"f" * NONCE_BYTES), from_connector) is SealFault.WRONG_KEY
    assert _fault(_connector(nonce=b"f" * NONCE_BYTES), from_acceptor) is SealFault.WRONG_KEY
    assert _acceptor().take(from_connector) == [b"frame"], "the recording is sound: only the nonce refuses it"


def test_a_repeated_a_missing_and_a_moved_frame_are_refused() -> None:
    for order in ((0, 0), (0, 1, 0), (1,), (0, 2), (1, 0)):
        connector, acceptor = _opened()
        sealed = [connector.seal(b"%d" % at) for at in range(3)]
        true = next(at for at, number in enumerate(order) if number != at)
        assert acceptor.take(b"".join(sealed[at] for at in order[:true])) == [b"%d" % at for at in order[:true]]
        assert _fault(acceptor, sealed[order[true]]) is SealFault.OUT_OF_SEQUENCE


def test_the_parts_of_two_frames_do_not_make_a_third() -> None:
    connector, acceptor = _opened()
    first, second = connector.seal(b"aaaa"), connector.seal(b"bbbb")
    head = OVERHEAD_BYTES - 16
    assert _fault(acceptor, first[:head] + second[head:]) is SealFault.FORGED


def test_a_frame_over_the_limit_is_refused_at_its_head_and_by_its_sender() -> None:
    connector, acceptor = Seal.connect(KEY, "d", b"c" * NONCE_BYTES, LIMIT + 1), _acceptor()
    _shake(connector, acceptor)
    assert _fault(acceptor, connector.seal(bytes(LIMIT + 1))[: OVERHEAD_BYTES - 16]) is SealFault.OVERSIZED
    with pytest.raises(WireError, match="over the limit of 1001"):
        connector.seal(bytes(LIMIT + 2))


def test_every_flipped_bit_of_a_frame_is_found_as_soon_as_its_part_has_come() -> None:
    connector, acceptor = _connector(), _acceptor()
    shaken, _ = _shake(connector, acceptor)
    sealed = connector.seal(b"payload") + connector.seal(b"next")
    for bit in range(8 * len(sealed)):
        spoilt = bytearray(sealed)
        spoilt[bit // 8] ^= 1 << bit % 8
        fresh = _acceptor()
        assert fresh.take(shaken) == []
        assert _fault(fresh, bytes(spoilt)) is SealFault.FORGED


def test_every_flipped_bit_of_the_handshake_keeps_the_sides_apart() -> None:
    from_connector, from_acceptor = _shake(_connector(), _acceptor())
    for flipped, bits in enumerate((8 * len(from_connector), 8 * len(from_acceptor))):
        for bit in range(bits):
            assert not _opens_with_a_flip(flipped, bit), (flipped, bit)


def _opens_with_a_flip(flipped: int, bit: int) -> bool:
    """Whether a side accepts the other's proof after a bit was flipped."""
    ends = (_connector(), _acceptor())
    at = [0, 0]
    for turn in range(4):
        speaker, hearer = turn % 2, 1 - turn % 2
        part = bytearray(ends[speaker].outgoing())
        if speaker == flipped and at[speaker] <= bit // 8 < at[speaker] + len(part):
            part[bit // 8 - at[speaker]] ^= 1 << bit % 8
        at[speaker] += len(part)
        try:
            ends[hearer].take(bytes(part))
        except SealBroken:
            return False
    return ends[1 - flipped].is_open


@given(st.data())
def test_a_stream_that_is_cut_gives_only_whole_frames(data: st.DataObject) -> None:
    connector, acceptor = _opened()
    frames = [b"one", b"two", b"three"]
    stream = b"".join(connector.seal(frame) for frame in frames)
    got = acceptor.take(stream[: data.draw(st.integers(0, len(stream) - 1))])
    assert got == frames[: len(got)]
    assert len(got) < 3
