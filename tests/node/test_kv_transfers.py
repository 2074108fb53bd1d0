"""The choice of a transfer between two instances, and that orders reach the transfer of their hand-over."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from baton.core.config import DECODE, PREFILL
from baton.core.handover.messages import (
    Arriving,
    Expect,
    Fence,
    Fenced,
    Handover,
    OpenShip,
    PeerEvent,
    PeerId,
    Ship,
    ShipFailed,
    Shipped,
    Verified,
    Verify,
)
from baton.kv.shared_memory import allocate_mirror, allocate_pool, release_pool
from baton.kv.transfer_contract import KvLayout, KvMemory
from baton.node.kv_transfers import KvTransfers, NoTransfer, kinds_of
from tests.support.devices import DeviceLike

HOST = "127.0.0.1"
GIVER, TAKER = PeerId("giver"), PeerId("taker")
LAYOUT = KvLayout(b"model", "bytes", 16, (64, 32))
ON_GIVER, ON_TAKER = Handover(TAKER, 7, 1), Handover(GIVER, 7, 1)
SOURCES, TARGETS = np.array([5, 1, 3], dtype=np.int32), np.array([0, 6, 2], dtype=np.int32)
EVENT_S = 20


class Side:
    def __init__(self, transfers: KvTransfers, events: queue.SimpleQueue[PeerEvent]) -> None:
        self.transfers = transfers
        self._events = events

    def next(self) -> PeerEvent:
        while isinstance(event := self._events.get(timeout=EVENT_S), Arriving):
            pass
        return event


@pytest.fixture
def memories() -> Iterator[tuple[KvMemory, KvMemory]]:
    made = allocate_pool(LAYOUT, 8), allocate_pool(LAYOUT, 8)
    made[0].pool[:] = np.arange(made[0].pool.size, dtype=np.uint32).reshape(made[0].pool.shape).astype(np.uint8)
    yield made
    for memory in made:
        release_pool(memory)


@pytest.fixture
def sides(memories: tuple[KvMemory, KvMemory], request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    given, taken = request.param
    made = []
    for role, setting, memory in ((PREFILL, given, memories[0]), (DECODE, taken, memories[1])):
        events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        made.append(Side(KvTransfers(role, setting, memory, events.put, HOST), events))
    yield made[0], made[1]
    for side in made:
        side.transfers.close()


@pytest.fixture(params=[("auto", True), ("auto", False), ("tcp", True)], ids=["one host", "two hosts", "by tcp"])
def on_devices(
    memories: tuple[KvMemory, KvMemory], request: pytest.FixtureRequest
) -> Iterator[tuple[Side, Side, tuple[DeviceLike, DeviceLike], bool]]:
    """Both sides have their KV on a device; the last says whether they are on one host."""
    setting, same_host = request.param
    devices = [DeviceLike(memory.pool, memory.fd) for memory in memories]
    mirrors, made = [allocate_mirror(LAYOUT, device, device) for device in devices], []
    for role, mirror in zip((PREFILL, DECODE), mirrors, strict=True):
        events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        made.append(Side(KvTransfers(role, setting, mirror, events.put, HOST), events))
    yield made[0], made[1], (devices[0], devices[1]), same_host and setting == "auto"
    for side, mirror in zip(made, mirrors, strict=True):
        side.transfers.close()
        release_pool(mirror)


def with_settings(*pairs: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sides", pairs, ids=[" to ".join(pair) for pair in pairs], indirect=True)


def open_handover(prefill: Side, decode: Side, same_host: bool = True) -> None:
    assert prefill.transfers.accept(TAKER, decode.transfers.offer(GIVER, same_host)) is None
    decode.transfers.carry_out(Expect(ON_TAKER, b"token", 2, TARGETS))
    prefill.transfers.carry_out(OpenShip(ON_GIVER, b"token", 2, SOURCES))


@with_settings(("auto", "auto"), ("auto", "tcp"), ("tcp", "tcp"), ("shm", "shm"), ("auto", "shm"))
def test_what_is_ordered_on_one_side_arrives_on_the_other(
    sides: tuple[Side, Side], memories: tuple[KvMemory, KvMemory]
) -> None:
    prefill, decode = sides
    open_handover(prefill, decode)
    prefill.transfers.carry_out(Ship(ON_GIVER, 1, 2, 4, last=False))
    prefill.transfers.carry_out(Ship(ON_GIVER, 2, 4, 5, last=True))
    for step in (1, 2):
        for layer in (0, 1):
            prefill.transfers.layer_done(step, layer)
        prefill.transfers.step_done(step)
    shipped = prefill.next()
    assert isinstance(shipped, Shipped)
    decode.transfers.carry_out(Verify(ON_TAKER, shipped.checks))
    assert decode.next() == Verified(ON_TAKER)
    assert (memories[1].pool[TARGETS] == memories[0].pool[SOURCES]).all()
    assert decode.transfers.arrived_bytes() == 3 * LAYOUT.block_bytes
    # What is done needs no fence, and is kept nowhere; one that comes all the same is answered.
    assert not {**prefill.transfers._sending, **decode.transfers._receiving}
    decode.transfers.carry_out(Fence(ON_TAKER))
    prefill.transfers.carry_out(Fence(ON_GIVER))
    assert (decode.next(), prefill.next()) == (Fenced(ON_TAKER), Fenced(ON_GIVER))


def test_kv_on_devices_arrives_and_stays_there_where_it_can(
    on_devices: tuple[Side, Side, tuple[DeviceLike, DeviceLike], bool], memories: tuple[KvMemory, KvMemory]
) -> None:
    prefill, decode, devices, straight = on_devices
    open_handover(prefill, decode, same_host=straight)
    prefill.transfers.carry_out(Ship(ON_GIVER, 1, 2, 5, last=True))
    for layer in (1, 0):
        prefill.transfers.layer_done(1, layer)
    prefill.transfers.step_done(1)
    shipped = prefill.next()
    assert isinstance(shipped, Shipped)
    decode.transfers.carry_out(Verify(ON_TAKER, shipped.checks))
    assert decode.next() == Verified(ON_TAKER)
    assert (memories[1].pool[TARGETS] == memories[0].pool[SOURCES]).all()
    assert bool(devices[1].pulled) == straight


@with_settings(("auto", "auto"), ("auto", "tcp"))
def test_what_is_fenced_on_either_side_ends_on_both(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    open_handover(prefill, decode)
    decode.transfers.carry_out(Fence(ON_TAKER))
    assert decode.next() == Fenced(ON_TAKER)
    prefill.transfers.carry_out(Ship(ON_GIVER, None, 2, 5, last=True))
    assert isinstance(prefill.next(), ShipFailed)
    prefill.transfers.carry_out(Fence(ON_GIVER))
    assert prefill.next() == Fenced(ON_GIVER)
    assert not {**prefill.transfers._sending, **decode.transfers._receiving}


@with_settings(("auto", "auto"))
def test_auto_takes_shared_memory_on_one_host_and_tcp_between_two(sides: tuple[Side, Side]) -> None:
    _, decode = sides
    assert decode.transfers.offer(GIVER, same_host=True)[0].startswith("shm:")
    assert decode.transfers.offer(GIVER, same_host=False)[0].startswith("tcp:127.0.0.1:")


@with_settings(("shm", "tcp"), ("tcp", "shm"))
def test_two_that_insist_on_different_ways_refuse_each_other_by_name(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    reason = prefill.transfers.accept(TAKER, decode.transfers.offer(GIVER, same_host=True))
    assert reason is not None
    assert "shm" in reason
    assert "tcp" in reason


@with_settings(("auto", "auto"))
def test_a_peer_without_an_address_or_a_session_gets_nothing(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    assert "0 were given" in (prefill.transfers.accept(TAKER, ()) or "")
    assert prefill.transfers.accept(TAKER, decode.transfers.offer(GIVER, same_host=True)) is None
    prefill.transfers.forget(TAKER)
    prefill.transfers.carry_out(OpenShip(ON_GIVER, b"token", 2, SOURCES))
    assert isinstance(prefill.next(), ShipFailed)


def test_auto_never_opens_the_ports_of_mooncake() -> None:
    assert set(kinds_of("auto")) <= {"shm", "tcp"}


def test_a_way_that_does_not_exist_is_refused_at_the_start(memories: tuple[KvMemory, KvMemory]) -> None:
    with pytest.raises(NoTransfer, match="pigeon"):
        KvTransfers(DECODE, "pigeon", memories[1], lambda _event: None, HOST)
