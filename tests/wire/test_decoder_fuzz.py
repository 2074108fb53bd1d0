"""Bytes that nobody of ours would send, by the thousand: refused by name, never half understood, never another exception.

BATON_TEST_FUZZ_INPUTS sets how many go into each decoder (few by default; a million takes minutes).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from baton.core.engine.plan import Logprobs
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import Adopted, Ask, Commit, Decline, Grant, Offer, PeerMessage, Refuse, Release, Renew
from baton.wire.engine_messages import WireError
from baton.wire.peer_messages import (
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
from baton.wire.seal import NONCE_BYTES, Seal, SealBroken, SealFault
from tests.wire.harms import changed, mutated
from tests.wire.peers import plain

INPUTS = int(os.environ.get("BATON_TEST_FUZZ_INPUTS", "20000"))

# ── peer messages ──────────────────────────────────────────────────────────────────────────────────────────────────


def _messages() -> list[PeerMessage]:
    sampling = Sampling(7, 0, 0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, ((5, 1.5), (6, -2.0)), (1, 2), 4, 5)
    submission = Submission(RequestId("tenant:request:0"), frozen_tokens(range(40)), sampling, 100, b"s" * 16, 1)
    line = Logprobs(0, np.array([-0.5], np.float32), np.array([[1, 2]], np.int32), np.array([[-0.5, -1.0]], np.float32))
    commit = Commit(3, 1, 17, line, 16, 5, 6, b"d" * 16, b"c" * 24)
    return [
        Ask(3, 1, submission),
        Grant(3, 1, 16, 2_000_000, b"t" * 16),
        Refuse(3, 1, "no room"),
        Adopted(3, 1),
        Release(3, 1, "the client is gone"),
        Offer(3, 1, 40),
        Renew(3, 1),
        commit,
        Commit(3, 2, 17, None, 0, 5, 6, b"d" * 16, b""),
        Decline(3, 1, PdCode.NOT_DELIVERED, "cannot be sent"),
    ]


def _frames() -> list[bytes]:
    register = Register("d0", 5, "decode", b"f" * 16, "float32", 16, (4096,) * 4, ("tcp:127.0.0.1:4711", "shm:/run/x"))
    said: list[Registration] = [register, Registered(), Unfit("block_size 16 is not 32")]
    return [encode_peer(message) for message in _messages()] + [encode_registration(message) for message in said]


def _peer_input(frames: list[bytes], trees: list[object], draw: random.Random) -> bytes:
    match draw.randrange(10):
        case 0:
            return draw.randbytes(draw.randrange(120))
        case 1 | 2 | 3 | 4:
            return mutated(draw.choice(frames), draw.choice(frames), draw)
        case _:
            return msgspec.msgpack.encode(changed(draw.choice(trees), draw))


def _understood(decode: Callable[[bytes], PeerMessage | Registration], frame: bytes) -> str | None:
    """The kind of message; None where it is refused. Whatever is understood says the same when it is said again."""
    try:
        message = decode(frame)
    except WireError:
        return None
    encode = encode_registration if isinstance(message, Register | Registered | Unfit) else encode_peer
    assert plain(decode(encode(message))) == plain(message), frame.hex()  # type: ignore[arg-type]
    return type(message).__name__


def test_whatever_a_peer_sends_is_a_message_or_a_wire_error() -> None:
    draw = random.Random(20)
    frames = _frames()
    trees = [msgspec.msgpack.decode(frame) for frame in frames]
    understood = Counter[str | None]()
    for _ in range(INPUTS):
        frame = _peer_input(frames, trees, draw)
        kinds = [
            _understood(decode, frame) for decode in (decode_to_prefill_side, decode_to_decode_side, decode_registration)
        ]
        assert kinds.count(None) >= 2, "no frame is two kinds of message"
        understood[next((kind for kind in kinds if kind is not None), None)] += 1
    kinds_of_ours = {type(message).__name__ for message in _messages()} | {"Register", "Registered", "Unfit"}
    assert set(understood) == kinds_of_ours | {None}, "each kind was hit, and each was left whole now and then"
    assert understood[None] > INPUTS // 2


# ── the seal ───────────────────────────────────────────────────────────────────────────────────────────────────────

KEY = b"the key of the cluster"
FRAMES = [b"one", b"", b"three, a little longer"]
LIMIT = 64


def _seal(connects: bool) -> Seal:
    nonce = (b"c" if connects else b"a") * NONCE_BYTES
    return Seal.connect(KEY, "d", nonce, LIMIT) if connects else Seal.accept(KEY, "p", nonce, LIMIT)


class Recording:
    """What the other side of a connection says: its parts of the handshake, then sealed frames, one of them too long."""

    def __init__(self, heard_by_connector: bool) -> None:
        self.heard_by_connector = heard_by_connector
        hearer = _seal(heard_by_connector)
        nonce = (b"a" if heard_by_connector else b"c") * NONCE_BYTES
        speaker = Seal.accept(KEY, "p", nonce) if heard_by_connector else Seal.connect(KEY, "d", nonce)
        self.shaken = b""
        for _ in range(2):
            speaker.take(hearer.outgoing())
            part = speaker.outgoing()
            self.shaken += part
            hearer.take(part)
            speaker.take(hearer.outgoing())
        part = speaker.outgoing()
        self.shaken += part
        hearer.take(part)
        assert hearer.is_open
        assert speaker.is_open
        self.sealed = [speaker.seal(frame) for frame in FRAMES]
        self.oversized = speaker.seal(bytes(LIMIT + 1))

    def fresh(self) -> Seal:
        return _seal(self.heard_by_connector)


def _stream(recording: Recording, other: Recording, draw: random.Random) -> tuple[bytes, bytes]:
    """What comes before the harm, and what comes then."""
    sealed = b"".join(recording.sealed)
    match draw.randrange(10):
        case 0:
            return b"", draw.randbytes(draw.randrange(200))
        case 1 | 2 | 3:
            return b"", mutated(recording.shaken + sealed, other.shaken, draw)
        case 4:
            return b"", bytes([*b"BTN\n", draw.choice((1, 1, 2)), draw.randrange(4), draw.randrange(256)]) + draw.randbytes(
                120
            )
        case 5:
            parts = [*recording.sealed, recording.oversized, *other.sealed]
            return recording.shaken, b"".join(draw.choices(parts, k=draw.randint(1, 5)))
        case 6:
            upto = draw.randrange(len(sealed))
            return recording.shaken + sealed[:upto], draw.randbytes(draw.randrange(1, 80))
        case _:
            return recording.shaken, mutated(sealed, b"".join(other.sealed), draw)


def test_whatever_a_stranger_or_the_way_does_to_a_stream_only_true_frames_come_out() -> None:
    draw = random.Random(21)
    recordings = [Recording(True), Recording(False)]
    refused = Counter[SealFault]()
    whole = 0
    for at in range(INPUTS):
        recording, other = recordings[at % 2], recordings[1 - at % 2]
        before, after = _stream(recording, other, draw)
        cut = draw.randrange(len(after) + 1)
        seal, got = recording.fresh(), list[bytes]()
        try:
            for part in (before, after[:cut], after[cut:]):
                got += seal.take(part)
            whole += 1
        except SealBroken as broken:
            refused[broken.fault] += 1
        assert got == FRAMES[: len(got)], (before + after).hex()
        assert len(seal._buffer) <= len(recording.shaken) + LIMIT + 64, "nothing is kept that cannot become a frame"
    assert set(refused) >= set(SealFault) - {SealFault.SAME_NAME}, "each was reached; the name only by luck"
    assert sum(refused.values()) > INPUTS // 2
    assert whole, "streams that are only cut are no fault"
