"""The machine of a sealed connection: whatever happens to its bytes, no wrong frame comes out, and no wait is endless."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import BadConfig
from baton.core.errors import IllegalTransition
from baton.wire.engine_messages import WireError
from baton.wire.seal import NONCE_BYTES, OVERHEAD_BYTES, SealFault, SealSide
from baton.wire.sealed_stream import (
    STREAM_TRANSITIONS,
    AcceptedStreams,
    ConnectionEnd,
    ConnectionFault,
    ConnectionStage,
    Received,
    SealedStream,
    StreamConfig,
    StreamMove,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
CONFIG = StreamConfig(
    handshake_us=1_000, heartbeat_us=100, silent_us=500, frame_bytes_max=200, unread_bytes_max=1_000, unread_us=50
)


def stream(
    side: SealSide, *, key: bytes = KEY, name: str = "", nonce: int = 1, config: StreamConfig = CONFIG
) -> SealedStream:
    made = SealedStream(side, key, name or side.name, bytes([nonce + side.value]) * NONCE_BYTES, config)
    made.begin(0)
    return made


@dataclass
class Side:
    """A stream, and all that came of it."""

    stream: SealedStream
    opened: int = 0
    frames: list[bytes] = field(default_factory=list)
    end: ConnectionEnd | None = None

    def take(self, data: bytes, now_us: int = 0) -> bytes:
        received = self.stream.receive(data, now_us)
        assert not (received.opened and self.opened)
        self.opened += received.opened
        self.frames += received.frames
        assert self.end is None or received == Received(False, [], None)
        self.end = self.end or received.end
        return self.stream.output()


def pair(config: StreamConfig = CONFIG) -> tuple[Side, Side]:
    """Two streams that have opened."""
    here, there = Side(stream(SealSide.CONNECTOR, config=config)), Side(stream(SealSide.ACCEPTOR, config=config))
    to_there = here.stream.output()
    while to_there:
        to_there = here.take(there.take(to_there))
    assert here.opened == there.opened == 1
    assert (here.stream.peer, there.stream.peer) == ("ACCEPTOR", "CONNECTOR")
    return here, there


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(at)]


frames_of_any_size = st.lists(st.binary(min_size=1, max_size=120), max_size=8)
cuts_anywhere = st.lists(st.integers(0, 2_000), max_size=12)


@given(sent=frames_of_any_size, handshake=cuts_anywhere, cuts=cuts_anywhere)
def test_frames_arrive_whole_in_order_and_once_however_the_bytes_are_cut(
    sent: list[bytes], handshake: list[int], cuts: list[int]
) -> None:
    here, there = Side(stream(SealSide.CONNECTOR)), Side(stream(SealSide.ACCEPTOR))
    to_there = here.stream.output()
    while to_there:
        to_here = b"".join(there.take(piece) for piece in pieces(to_there, handshake))
        to_there = b"".join(here.take(piece) for piece in pieces(to_here, handshake))
    here.stream.send(sent, 0)
    for piece in pieces(here.stream.output(), cuts):
        there.take(piece)
    assert there.frames == sent
    assert here.end is there.end is None


@given(sent=frames_of_any_size, bit=st.integers(0, 10_000), cuts=cuts_anywhere, in_handshake=st.booleans())
def test_a_flipped_bit_never_makes_a_frame_and_ends_the_stream_in_time(
    sent: list[bytes], bit: int, cuts: list[int], in_handshake: bool
) -> None:
    if in_handshake:
        here, there = Side(stream(SealSide.CONNECTOR)), Side(stream(SealSide.ACCEPTOR))
        data = here.stream.output()
    else:
        here, there = pair()
        here.stream.send([*sent, b"one more"], 0)
        data = here.stream.output()
    spoilt = bytearray(data)
    spoilt[bit // 8 % len(data)] ^= 1 << bit % 8
    answer = b"".join(there.take(piece) for piece in pieces(bytes(spoilt), cuts))
    there.take(here.take(answer))
    assert there.frames == [*sent, b"one more"][: len(there.frames)]
    assert in_handshake or len(there.frames) <= len(sent)
    assert not (in_handshake and (here.opened or there.opened))
    wait_out(there)
    assert there.end is not None


@given(sent=frames_of_any_size, at=st.integers(0, 2_000), cuts=cuts_anywhere)
def test_a_stream_that_is_cut_off_delivers_what_came_whole_and_no_half_frame(
    sent: list[bytes], at: int, cuts: list[int]
) -> None:
    here, there = pair()
    here.stream.send(sent, 0)
    data = here.stream.output()[:at]
    for piece in pieces(data, cuts):
        there.take(piece)
    whole, room = 0, len(data)
    while whole < len(sent) and room >= len(sent[whole]) + OVERHEAD_BYTES:
        room -= len(sent[whole]) + OVERHEAD_BYTES
        whole += 1
    assert there.frames == sent[:whole]
    end = there.stream.end_of_stream("reset")
    assert end is not None
    assert "reset" in end.reason


def wait_out(side: Side) -> None:
    """Let time pass until the stream has ended by itself; its deadlines must come to an end."""
    for _ in range(50):
        deadline_us = side.stream.next_deadline()
        if side.end is not None or deadline_us is None:
            return
        side.end = side.stream.tick(deadline_us)
        side.stream.output()


@given(noise=st.binary(max_size=400), cuts=cuts_anywhere, side=st.sampled_from(SealSide))
def test_noise_opens_nothing_and_ends_in_time(noise: bytes, cuts: list[int], side: SealSide) -> None:
    listening = Side(stream(side))
    for piece in pieces(noise, cuts):
        listening.take(piece)
    wait_out(listening)
    assert not listening.opened
    assert not listening.frames
    assert listening.end is not None
    assert listening.end.was is ConnectionStage.UNPROVED


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"key": OTHER_KEY}, SealFault.WRONG_KEY),
        ({"name": "ACCEPTOR"}, SealFault.SAME_NAME),
    ],
)
def test_another_key_and_our_own_name_are_refused(change: dict[str, bytes], fault: SealFault) -> None:
    here, there = Side(stream(SealSide.CONNECTOR, **change)), Side(stream(SealSide.ACCEPTOR))  # type: ignore[arg-type]
    there.take(here.take(there.take(here.stream.output())))
    assert there.end is not None
    assert there.end.fault == fault
    assert not here.opened


def test_a_recorded_connection_opens_nothing() -> None:
    here, there = Side(stream(SealSide.CONNECTOR)), Side(stream(SealSide.ACCEPTOR))
    hello = here.stream.output()
    proof = here.take(there.take(hello))
    there.take(proof)
    here.stream.send([b"pay me"], 0)
    fresh = Side(stream(SealSide.ACCEPTOR, nonce=7))
    fresh.take(hello + proof + here.stream.output())
    assert (fresh.opened, fresh.frames) == (0, [])
    assert fresh.end is not None
    assert fresh.end.fault == SealFault.WRONG_KEY


def test_what_comes_with_the_last_of_the_handshake_is_not_lost_and_an_end_comes_after_it() -> None:
    here, there = Side(stream(SealSide.CONNECTOR)), Side(stream(SealSide.ACCEPTOR))
    answer = there.take(here.take(there.take(here.stream.output())))
    there.stream.send([b"first", b"second"], 0)
    spoilt = bytearray(answer + there.stream.output())
    spoilt[-1] ^= 1
    here.take(bytes(spoilt))
    assert (here.opened, here.frames) == (1, [b"first"])
    assert here.end is not None
    assert (here.end.was, here.end.fault) == (ConnectionStage.OPEN, SealFault.FORGED)
    assert here.stream.peer == "ACCEPTOR"
    assert here.take(b"more") == b""


def test_who_does_not_prove_itself_is_too_late() -> None:
    waiting = stream(SealSide.ACCEPTOR)
    assert waiting.next_deadline() == 1_000
    assert waiting.tick(999) is None
    end = waiting.tick(1_000)
    assert end is not None
    assert (end.was, end.fault) == (ConnectionStage.UNPROVED, ConnectionFault.TOO_LATE)
    assert waiting.next_deadline() is None


def test_the_time_of_the_handshake_runs_from_the_connection() -> None:
    early = SealedStream(SealSide.CONNECTOR, KEY, "x", bytes(NONCE_BYTES), CONFIG)
    assert early.next_deadline() is None
    assert early.tick(1 << 40) is None
    early.begin(5_000)
    assert early.next_deadline() == 6_000


def test_an_idle_side_gives_signs_of_life_that_nobody_sees_as_frames() -> None:
    here, there = pair()
    for now_us in range(0, 5_000, 50):
        for one, other in ((here, there), (there, here)):
            deadline_us = one.stream.next_deadline()
            if deadline_us is not None and deadline_us <= now_us:
                assert one.stream.tick(now_us) is None
                other.take(one.stream.output(), now_us)
    assert here.frames == there.frames == []
    assert here.end is there.end is None
    silent = there.stream.tick(6_000)
    assert silent is not None
    assert (silent.fault, silent.reason) == (None, "silent for 1 ms")


def test_a_frame_that_was_taken_out_on_the_way_is_noticed_at_the_next_sign_of_life() -> None:
    """Without one, the other side would wait for as long as nothing else is sent."""
    here, there = pair(StreamConfig(heartbeat_us=100))
    here.stream.send([b"a request"], 10)
    assert here.stream.output(), "it was written, and is taken out"
    assert here.stream.next_deadline() == 110
    assert here.stream.tick(110) is None
    there.take(here.stream.output(), 110)
    assert there.frames == []
    assert there.end is not None
    assert there.end.fault == SealFault.OUT_OF_SEQUENCE


def test_without_heartbeat_and_silence_an_open_stream_waits_for_ever() -> None:
    here, _ = pair(StreamConfig())
    assert here.stream.next_deadline() is None
    assert here.stream.tick(1 << 50) is None


def test_who_does_not_read_is_given_up_in_time() -> None:
    here, _ = pair()
    assert here.stream.unread(1_000 + OVERHEAD_BYTES, 0) is None
    assert here.stream.unread(1_001 + OVERHEAD_BYTES, 10) is None
    assert here.stream.next_deadline() == 10 + CONFIG.unread_us
    assert here.stream.unread(5_000, 9 + CONFIG.unread_us) is None
    end = here.stream.unread(5_000, 10 + CONFIG.unread_us)
    assert end is not None
    assert end.fault == ConnectionFault.NOT_READING
    here.stream.send([b"late"], 0)
    assert here.stream.output() == b""


def test_a_burst_over_the_limit_that_is_being_read_ends_nothing() -> None:
    here, _ = pair()
    waiting, now_us = 100_000, 0
    while waiting > 1_000:
        assert here.stream.unread(waiting, now_us) is None
        waiting, now_us = waiting - 1_000, now_us + CONFIG.unread_us - 1
    assert here.stream.unread(500, now_us) is None
    assert here.stream.next_deadline() == pair()[0].stream.next_deadline(), "nothing is due for it any more"


def test_a_frame_that_is_too_large_or_empty_is_not_sent_and_neither_are_its_neighbours() -> None:
    here, there = pair()
    for frames in ([b"small", bytes(201)], [b"small", b""]):
        with pytest.raises(WireError, match="within 1"):
            here.stream.send(frames, 0)
    assert here.stream.output() == b""
    here.stream.send([b"after"], 0)
    there.take(here.stream.output())
    assert there.frames == [b"after"]


def test_an_end_comes_once_and_says_what_it_was() -> None:
    here, there = pair()
    assert here.stream.end(None, "enough") == ConnectionEnd(ConnectionStage.OPEN, None, "enough")
    assert here.stream.end("again", "enough") is None
    assert here.stream.end_of_stream() is None
    early = stream(SealSide.CONNECTOR).end_of_stream()
    assert early is not None
    assert "cluster key" in early.reason
    moves = [move for (_, move), times in here.stream.moves().items() if times]
    assert moves == [StreamMove.PROVE, StreamMove.END]
    assert sum(there.stream.moves().values()) == 1


def test_every_other_move_is_refused() -> None:
    for stage in ConnectionStage:
        for move in StreamMove:
            one = stream(SealSide.CONNECTOR)
            one._stage = stage
            if (stage, move) not in STREAM_TRANSITIONS:
                with pytest.raises(IllegalTransition, match=f"{stage.name} cannot take the move {move.name}"):
                    one._move(move)


@pytest.mark.parametrize("wrong", [{"handshake_us": 0}, {"heartbeat_us": 9, "silent_us": 8}, {"unread_bytes_max": -1}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadConfig, match=next(iter(wrong))):
        StreamConfig(**wrong)


def test_unproved_connections_make_room_for_others_and_open_ones_do_not() -> None:
    accepted: AcceptedStreams[str] = AcceptedStreams(unproved_max=2, connections_max=2)
    assert [accepted.accept(name) for name in "abc"] == [None, None, "a"]
    assert not accepted.ended("a")
    assert accepted.opened("b")
    assert accepted.opened("c")
    assert accepted.accept("d") is None
    assert not accepted.opened("d")
    assert accepted.ended("b")
    assert accepted.opened("d")
    assert list(accepted) == ["c", "d"]
