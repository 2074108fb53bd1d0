"""Processes that connect to a listening process and must never be let in: without the key, or under its own name.

Owns what they send, byte by byte: noise, a handshake with another key, the recording of an earlier connection, whatever they
are sent. None of them may open a connection; `lines.StreamConnection` holds that law for every connection made here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from baton.sim.faults import Fault, flip_bit
from baton.sim.network import SimulatedNetwork, Socket
from baton.sim.world import Host
from baton.wire.seal import NONCE_BYTES, Seal, SealBroken

OTHER_KEY = b"the key of another cluster"
STAYS_US = 400_000
NOISE_BYTES_MAX = 400


class Stranger:
    """One connection of one stranger. What it writes depends on its kind alone."""

    def __init__(self, network: SimulatedNetwork, host: Host, target: str, answers: Callable[[bytes], bytes]) -> None:
        """`answers(b"")` is what it writes first; then it answers whatever it receives."""
        self._answers = answers
        self._socket: Socket = network.connect(host.name, target, host, self, is_hostile=True)
        host.after(STAYS_US, self._socket.abort)

    def connected(self) -> None:
        self._socket.write(self._answers(b""))

    def received(self, data: bytes) -> None:
        self._socket.write(self._answers(data))

    def ended(self, error: str | None) -> None:
        pass

    def has_room(self) -> None:
        pass


def send_stranger(network: SimulatedNetwork, stream: random.Random, target: str, key: bytes, number: int) -> None:
    """Connect to `target`, as one kind of stranger that the stream chooses."""
    host = Host(network.world, f"stranger {number}")
    recorded = (network.recorded or {}).get(target)
    kind = stream.choice((Fault.NO_KEY, Fault.REPLAY, Fault.REPLAY, Fault.REFLECTION, Fault.SAME_NAME))
    if kind is Fault.REPLAY and not recorded:
        kind = Fault.NO_KEY
    network.world.fire(kind, target)
    nonce = stream.randbytes(NONCE_BYTES)
    match kind:
        case Fault.REPLAY:
            answers = _plays(b"".join(recorded or ()), stream)
        case Fault.REFLECTION:
            answers = _reflects(Seal.connect(OTHER_KEY, host.name, nonce).outgoing())
        case Fault.SAME_NAME:
            answers = _shakes_hands(Seal.connect(key, target, nonce))
        case _ if stream.random() < 0.5:
            answers = _shakes_hands(Seal.connect(OTHER_KEY, host.name, nonce))
        case _:
            answers = _plays(stream.randbytes(stream.randrange(1, NOISE_BYTES_MAX)), stream)
    Stranger(network, host, target, answers)


def _plays(recording: bytes, stream: random.Random) -> Callable[[bytes], bytes]:
    """Write it all at once, or half of it at first, and at times with a flipped bit."""
    flipped = flip_bit(recording, stream.randrange(len(recording) * 8)) if stream.random() < 0.2 else recording
    at = stream.choice((len(flipped), len(flipped) // 2))
    parts = [flipped[:at], flipped[at:]]
    return lambda _data: parts.pop(0) if parts else b""


def _reflects(hello: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data or hello


def _shakes_hands(seal: Seal) -> Callable[[bytes], bytes]:
    def answer(data: bytes) -> bytes:
        try:
            seal.take(data)
        except SealBroken:
            return b""
        return seal.outgoing()

    return answer
