"""Sessions between instances over real sockets: refused connections are counted, and other sessions do not notice."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from baton.core.config import DECODE, MIXED, PREFILL, Role
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import Adopted, Ask, Decline, Heard, PeerEvent, PeerId, PeerLost, PeerOpened, Renew
from baton.kv.transfer_contract import KvLayout
from baton.node import peer_connection as connection_module
from baton.node import peers as peers_module
from baton.node.inbox import EngineInbox, Item
from baton.node.peer_connection import LocalInstance
from baton.node.peers import PeerConnections, listen
from baton.wire.peer_messages import Register, Registered, encode_peer, encode_registration
from baton.wire.peer_session import SessionFault
from baton.wire.seal import NONCE_BYTES, Seal, SealFault
from baton.wire.sealed_stream import ConnectionFault, StreamConfig
from tests.support.driver import submission

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
LAYOUT = KvLayout(b"model", "float32", 16, (64, 64))
DEADLINE_S = 20.0


class NoWays:
    def offer(self, peer: PeerId, same_host: bool) -> tuple[str, ...]:
        return ("tcp:127.0.0.1:9",)

    def accept(self, peer: PeerId, addresses: tuple[str, ...]) -> str | None:
        return None

    def forget(self, peer: PeerId) -> None:
        pass


class Instance:
    """An instance as its peers see it."""

    def __init__(self, plays: Role, name: str, calls: tuple[str, ...] = (), **changed: Any) -> None:
        self.inbox = EngineInbox()
        self.me = replace(
            LocalInstance(name, time.time_ns() // 1000, plays, LAYOUT, vocabulary=100, cluster_key=KEY), **changed
        )
        listener = listen("127.0.0.1", 0) if plays.gives else None
        self.address = "" if listener is None else f"127.0.0.1:{listener.getsockname()[1]}"
        self.peers = PeerConnections(self.me, NoWays(), self.inbox, listener, calls)
        self._items: list[Item] = []

    def next(self) -> Item:
        self.wait(lambda: bool(self._items))
        return self._items.pop(0)

    def wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        self._take()
        while not holds():
            assert time.monotonic() < deadline, "nothing came"
            select.select([self.inbox], [], [], 0.02)
            self._take()

    def _take(self) -> None:
        """Take events as the engine loop does."""
        for item in self.inbox.take():
            assert isinstance(item, PeerEvent)
            self.peers.before_handling(item)
            self._items.append(item)


Make = Callable[..., Instance]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Instance] = []

    def build(*args: Any, **kwargs: Any) -> Instance:
        made.append(Instance(*args, **kwargs))
        return made[-1]

    yield build
    for instance in made:
        instance.peers.close()
        instance.inbox.close()


def in_session(make: Make) -> tuple[Instance, Instance]:
    prefill = make(PREFILL, "p")
    decode = make(DECODE, "d", (prefill.address,))
    assert decode.next() == PeerOpened(PeerId(prefill.address))
    assert prefill.next() == PeerOpened(PeerId("d"))
    return prefill, decode


def still_serves(make: Make, prefill: Instance) -> None:
    """A valid peer that connects now gets its session, whatever happened before."""
    decode = make(DECODE, "good", (prefill.address,))
    assert decode.next() == PeerOpened(PeerId(prefill.address))
    decode.peers.send(PeerId(prefill.address), Adopted(7, 1))
    prefill.wait(lambda: Heard(PeerId("good"), Adopted(7, 1)) in prefill._items)


def test_each_hears_what_the_other_says_in_order(make: Make) -> None:
    prefill, decode = in_session(make)
    for number in range(300):
        decode.peers.send(PeerId(prefill.address), Adopted(number, 1))
        prefill.peers.send(PeerId("d"), Renew(number, 1))
    assert [prefill.next() for _ in range(300)] == [Heard(PeerId("d"), Adopted(n, 1)) for n in range(300)]
    assert [decode.next() for _ in range(300)] == [Heard(PeerId(prefill.address), Renew(n, 1)) for n in range(300)]


def test_an_instance_may_have_several_peers(make: Make) -> None:
    givers = [make(PREFILL, f"p{n}") for n in range(2)]
    takers = [make(DECODE, f"d{n}", tuple(prefill.address for prefill in givers)) for n in range(3)]
    for prefill in givers:
        assert {prefill.next() for _ in range(3)} == {PeerOpened(PeerId(f"d{n}")) for n in range(3)}
    for decode in takers:
        assert {decode.next() for _ in range(2)} == {PeerOpened(PeerId(prefill.address)) for prefill in givers}


def test_a_peer_that_went_away_is_lost_at_once_and_called_again(make: Make) -> None:
    prefill, decode = in_session(make)
    port = int(prefill.address.rpartition(":")[2])
    prefill.peers.close()
    lost = decode.next()
    assert isinstance(lost, PeerLost)
    assert lost.peer == prefill.address
    back = EngineInbox()
    peers = PeerConnections(
        replace(prefill.me, incarnation=prefill.me.incarnation + 1), NoWays(), back, listen("127.0.0.1", port), ()
    )
    assert decode.next() == PeerOpened(PeerId(prefill.address))
    peers.close()
    back.close()


def test_whom_to_call_can_change_at_any_time(make: Make) -> None:
    givers = [make(PREFILL, f"p{n}") for n in range(3)]
    names = [PeerId(prefill.address) for prefill in givers]
    decode = make(DECODE, "d")
    decode.peers.connect_to((names[0], names[1]))
    assert {decode.next(), decode.next()} == {PeerOpened(names[0]), PeerOpened(names[1])}
    decode.peers.connect_to((names[1], names[2], names[2], "nonsense", "host:", ":7", "host:70000", "host:-1"))
    after = {decode.next(), decode.next()}
    assert after == {PeerLost(names[0], "it is not one of our peers any more"), PeerOpened(names[2])}
    assert [type(givers[0].next()) for _ in range(2)] == [PeerOpened, PeerLost]
    decode.peers.send(names[1], Adopted(1, 1))
    assert [givers[1].next() for _ in range(2)] == [PeerOpened(PeerId("d")), Heard(PeerId("d"), Adopted(1, 1))]
    decode.peers.connect_to(tuple(names))
    assert decode.next() == PeerOpened(names[0])
    decode.peers.connect_to(())
    assert {type(decode.next()) for _ in range(3)} == {PeerLost}


def test_one_that_could_not_be_reached_is_called_no_more_once_it_is_not_a_peer(make: Make) -> None:
    """The address may belong to another process by then."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    prefill = make(PREFILL, "p")
    decode = make(DECODE, "d", (f"127.0.0.1:{port}",))
    decode.peers.connect_to((prefill.address,))
    assert decode.next() == PeerOpened(PeerId(prefill.address))
    assert list(decode.peers._dials) == [prefill.address]


def test_who_opens_a_second_session_ends_its_first(make: Make) -> None:
    prefill, _ = in_session(make)
    make(DECODE, "d", (prefill.address,))
    first, second = prefill.next(), prefill.next()
    assert isinstance(first, PeerLost)
    assert (first.peer, second) == ("d", PeerOpened(PeerId("d")))


def test_another_key_is_refused_and_counted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    prefill = make(PREFILL, "p")
    make(DECODE, "stranger", (prefill.address,), cluster_key=OTHER_KEY)
    prefill.wait(lambda: prefill.peers.refused[SealFault.WRONG_KEY] > 1)
    assert not prefill._items
    still_serves(make, prefill)
    assert sum("cluster key" in record.message for record in caplog.records) == 1  # told once, though it calls on


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"layout": replace(LAYOUT, block_size=8)}, ("block_size", "16", "8")),
        ({"layout": replace(LAYOUT, dtype="float16")}, ("dtype", "float32", "float16")),
        ({"layout": replace(LAYOUT, layer_bytes=(64,))}, ("layers", "2", "1")),
        ({"layout": replace(LAYOUT, fingerprint=b"other")}, ("fingerprint", b"model".hex(), b"other".hex())),
        ({"role": MIXED}, ("role", "prefill", "mixed")),
    ],
    ids=["block size", "dtype", "layers", "model", "role"],
)
def test_what_does_not_fit_is_refused_with_both_values(
    make: Make, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], named: tuple[str, ...]
) -> None:
    prefill = make(PREFILL, "p")
    with caplog.at_level(logging.ERROR, logger="baton.peers"):
        decode = make(DECODE, "other", (prefill.address,), **changed)
        prefill.wait(lambda: prefill.peers.refused[SessionFault.UNFIT] > 1)
        decode.wait(lambda: decode.peers.refused[SessionFault.UNFIT] > 1)
    assert not prefill._items
    assert not decode._items
    told = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert all(value in line for line in told for value in named), told
    assert len(told) == 2  # each side once, though the caller goes on calling
    still_serves(make, prefill)


# ── those who mean no good ───────────────────────────────────────────────────────────────────────────────────────────────


class Caller:
    """A peer played by the test, up to any point of the handshake."""

    def __init__(self, prefill: Instance, key: bytes = KEY, name: str = "caller") -> None:
        host, _, port = prefill.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(DEADLINE_S)
        self.seal = Seal.connect(key, name, os.urandom(NONCE_BYTES))
        self.sent = b""

    def prove(self) -> Caller:
        while not self.seal.is_open:
            self.write(self.seal.outgoing())
            if not self.seal.is_open:
                self.seal.take(self.socket.recv(4096))
        return self

    def register(self) -> Caller:
        self.prove()
        register = Register("caller", 1, "decode", b"model", "float32", 16, (64, 64), ("tcp:127.0.0.1:9",))
        self.say(encode_registration(register))
        self.say(encode_registration(Registered()))
        return self

    def say(self, frame: bytes) -> None:
        self.write(self.seal.seal(frame))

    def write(self, data: bytes) -> None:
        self.sent += data
        self.socket.sendall(data)

    def is_hung_up(self) -> bool:
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65536):
                pass
        return True


Call = Callable[..., Caller]


@pytest.fixture
def call() -> Iterator[Call]:
    with contextlib.ExitStack() as open_sockets:

        def build(*args: Any) -> Caller:
            caller = Caller(*args)
            open_sockets.enter_context(caller.socket)
            return caller

        yield build


NOISE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(10_000),
    "half a hello": b"BTN\n\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_is_refused_and_counted(make: Make, call: Call, monkeypatch: pytest.MonkeyPatch, noise: bytes) -> None:
    monkeypatch.setattr(connection_module, "REGISTER_S", 0.2)
    prefill = make(PREFILL, "p")
    caller = call(prefill)
    caller.write(noise)
    assert caller.is_hung_up()
    prefill.wait(lambda: sum(prefill.peers.refused.values()) == 1)
    still_serves(make, prefill)


def test_a_recorded_session_cannot_be_played_again(make: Make, call: Call) -> None:
    prefill = make(PREFILL, "p")
    caller = call(prefill).register()
    caller.say(encode_peer(Adopted(1, 1)))
    assert prefill.next() == PeerOpened(PeerId("caller"))
    assert prefill.next() == Heard(PeerId("caller"), Adopted(1, 1))
    again = call(prefill)
    again.write(caller.sent)
    assert again.is_hung_up()
    assert prefill.peers.refused[SealFault.WRONG_KEY] == 1
    assert not prefill.inbox.take()


def test_a_frame_that_comes_twice_ends_the_session(make: Make, call: Call) -> None:
    prefill = make(PREFILL, "p")
    caller = call(prefill).register()
    assert prefill.next() == PeerOpened(PeerId("caller"))
    before = len(caller.sent)
    caller.say(encode_peer(Adopted(1, 1)))
    caller.write(caller.sent[before:])
    assert caller.is_hung_up()
    assert prefill.peers.refused[SealFault.OUT_OF_SEQUENCE] == 1
    heard = list(iter(lambda: isinstance(prefill.next(), PeerLost), True))
    assert len(heard) <= 1  # none where both came in one piece
    still_serves(make, prefill)


def test_a_flipped_bit_ends_the_session(make: Make, call: Call) -> None:
    prefill = make(PREFILL, "p")
    caller = call(prefill).register()
    assert prefill.next() == PeerOpened(PeerId("caller"))
    sealed = bytearray(caller.seal.seal(encode_peer(Adopted(1, 1))))
    sealed[-20] ^= 1
    caller.write(bytes(sealed))
    assert caller.is_hung_up()
    assert prefill.peers.refused[SealFault.FORGED] == 1
    assert isinstance(prefill.next(), PeerLost)


@pytest.mark.parametrize("frame", [b"\xc1", bytes(1000), encode_peer(Renew(1, 1))], ids=["bad", "0", "wrong way"])
def test_a_message_that_is_none_ends_the_session(make: Make, call: Call, frame: bytes) -> None:
    prefill = make(PREFILL, "p")
    caller = call(prefill).register()
    assert prefill.next() == PeerOpened(PeerId("caller"))
    caller.say(frame)
    assert caller.is_hung_up()
    assert prefill.peers.refused[ConnectionFault.MALFORMED] == 1
    assert isinstance(prefill.next(), PeerLost)
    still_serves(make, prefill)


def test_a_token_outside_of_the_vocabulary_does_not_reach_the_engine(make: Make, call: Call) -> None:
    prefill = make(PREFILL, "p")
    caller = call(prefill).register()
    assert prefill.next() == PeerOpened(PeerId("caller"))
    caller.say(encode_peer(Ask(1, 1, submission([1, 100]))))
    assert caller.is_hung_up()
    assert prefill.peers.refused[ConnectionFault.MALFORMED] == 1
    assert isinstance(prefill.next(), PeerLost)


def test_nothing_is_heard_of_who_has_not_registered(make: Make, call: Call) -> None:
    prefill = make(PREFILL, "p")
    caller = call(prefill).prove()
    caller.say(encode_peer(Adopted(1, 1)))
    assert caller.is_hung_up()
    assert prefill.peers.refused[ConnectionFault.MALFORMED] == 1
    assert not prefill.inbox.take()


def test_a_peer_that_does_not_read_is_hung_up(make: Make, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "PEER_STREAM", StreamConfig(unread_bytes_max=1 << 16, unread_us=1))
    prefill = make(PREFILL, "p")
    call(prefill).register()
    assert prefill.next() == PeerOpened(PeerId("caller"))
    for number in range(40_000):
        prefill.peers.send(PeerId("caller"), Decline(number, 1, next(iter(PdCode)), "x" * 500))
    assert isinstance(prefill.next(), PeerLost)
    assert prefill.peers.refused[ConnectionFault.NOT_READING] == 1
    still_serves(make, prefill)


def test_who_says_more_than_the_engine_takes_is_hung_up(make: Make, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "INBOX_MAX", 50)
    prefill = make(PREFILL, "p")
    caller = call(prefill).register()
    assert prefill.next() == PeerOpened(PeerId("caller"))
    for number in range(64):
        caller.say(encode_peer(Adopted(number, 1)))
    assert caller.is_hung_up()
    assert prefill.peers.refused[SessionFault.FLOODING] == 1
    assert len(prefill.inbox) == 51  # what it said, and that it is gone
    prefill.inbox.take()
    still_serves(make, prefill)


def test_strangers_are_bounded_and_keep_nobody_out(make: Make, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "UNREGISTERED_MAX", 3)
    prefill = make(PREFILL, "p")
    waiting = [call(prefill) for _ in range(4)]
    assert waiting[0].is_hung_up()
    assert prefill.peers.refused[ConnectionFault.TOO_MANY] == 1
    still_serves(make, prefill)
    assert prefill.peers.refused[ConnectionFault.TOO_MANY] == 2
