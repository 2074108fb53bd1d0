"""The simulated transfer keeps a driver's promises whatever happens: tokens, fences, checks, bytes where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.handover.messages import Fenced, Handover, PeerEvent, PeerId, ShipFailed, Shipped, TransferBroken, Verified
from baton.executor.contract import KvView
from baton.sim.faults import Fault, KvRates
from baton.sim.faulty_transfers import FENCED_WITHIN_US, FaultyReceiver, FaultySender, FaultyTransfers, KvTimes
from baton.sim.law_names import ALIEN_BYTES, WHOLE_KV, LawBroken
from baton.sim.world import Host, World

LAYERS, BYTES, BLOCKS = 2, 8, 6
AT_TAKER, AT_GIVER = Handover(PeerId("P"), 7, 1), Handover(PeerId("D"), 7, 1)
TOKEN = b"one-time token"


def times(pulls: bool = False, fence_us: int = 100) -> KvTimes:
    return KvTimes(delay_us=100, jitter_us=0, piece_us=10, burst=1, verify_us=5, fence_us=fence_us, pulls=pulls)


class Pair:
    """A giver P and a taker D, and all that they report."""

    def __init__(self, rates: KvRates | None = None, pulls: bool = False, fence_us: int = 100) -> None:
        self.world = World(1, events_max=10_000)
        self.transfers = FaultyTransfers(self.world, rates or KvRates(), times(pulls, fence_us))
        self.giver_host, self.taker_host = Host(self.world, "P"), Host(self.world, "D")
        self.given, self.taken = self._pool(1), self._pool(0)
        self.at_giver: list[PeerEvent] = []
        self.at_taker: list[PeerEvent] = []
        self.sender = FaultySender(self.transfers, "P", self.giver_host, self.given, self.at_giver.append)
        self.receiver = FaultyReceiver(self.transfers, "D", self.taker_host, self.taken, self.at_taker.append)
        self.transfers.enter("P", self._idle_receiver("P"), self.sender)
        self.transfers.enter("D", self.receiver, self._idle_sender("D"))

    def _pool(self, seed: int) -> KvView:
        pool = np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYERS * BYTES), dtype=np.uint8)
        return KvView(pool if seed else np.zeros_like(pool), ((0, BYTES), (BYTES, 2 * BYTES)), "uint8")

    def _idle_receiver(self, name: str) -> FaultyReceiver:
        return FaultyReceiver(self.transfers, name, self.giver_host, self.given, self.at_giver.append)

    def _idle_sender(self, name: str) -> FaultySender:
        return FaultySender(self.transfers, name, self.taker_host, self.taken, self.at_taker.append)

    def run(self, for_us: int = 1_000_000) -> None:
        until_us = self.world.now_us + for_us
        while self.world.next_us is not None and self.world.next_us <= until_us:
            self.world.step()

    def expect(self, blocks: tuple[int, ...] = (4, 2)) -> None:
        self.receiver.expect(AT_TAKER, TOKEN, 1, np.array(blocks, dtype=np.int32))

    def open(self, token: bytes = TOKEN) -> None:
        self.sender.open_ship(AT_GIVER, token, 1, np.array([0, 3], dtype=np.int32))

    def ship(self) -> None:
        self.sender.ship(AT_GIVER, None, 1, 3, last=True)

    def checks(self) -> bytes:
        (shipped,) = [event for event in self.at_giver if isinstance(event, Shipped)]
        return shipped.checks


@pytest.mark.parametrize("pulls", [False, True])
def test_bytes_land_in_the_blocks_that_were_leased_and_the_checks_agree(pulls: bool) -> None:
    pair = Pair(pulls=pulls)
    pair.expect()
    pair.open()
    pair.ship()
    pair.run()
    pair.receiver.verify(AT_TAKER, pair.checks())
    pair.run()
    assert pair.at_taker[-1] == Verified(AT_TAKER)
    assert np.array_equal(pair.taken.pool[[4, 2]], pair.given.pool[[0, 3]])
    assert not pair.taken.pool[[0, 1, 3, 5]].any()
    assert pair.receiver.open == pair.sender.open == 0


def test_layers_leave_one_by_one_as_they_are_computed() -> None:
    pair = Pair()
    pair.expect()
    pair.open()
    pair.sender.ship(AT_GIVER, 9, 1, 3, last=True)
    assert pair.sender.awaits(9)
    assert not pair.sender.awaits(8)
    pair.run()
    assert not pair.taken.pool.any()
    pair.sender.layer_done(9, 0)
    pair.run()
    assert pair.taken.pool[4, :BYTES].any()
    assert not pair.taken.pool[4, BYTES:].any()
    pair.sender.layer_done(9, 1)
    pair.run()
    assert any(isinstance(event, Shipped) for event in pair.at_giver)


def test_a_flipped_bit_is_found() -> None:
    pair = Pair(KvRates(flipped=1.0))
    pair.expect()
    pair.open()
    pair.ship()
    pair.run()
    pair.receiver.verify(AT_TAKER, pair.checks())
    pair.run()
    assert pair.world.fired[Fault.KV_FLIPPED] == 1
    assert pair.at_taker[-1] == TransferBroken(AT_TAKER, "checks differ")


def test_checks_that_differ_without_a_flipped_bit_break_a_law() -> None:
    pair = Pair()
    pair.expect()
    pair.open()
    pair.ship()
    pair.run()
    pair.receiver.verify(AT_TAKER, bytes(16))
    with pytest.raises(LawBroken, match=WHOLE_KV):
        pair.run()


def test_after_its_fence_is_answered_nothing_lands_and_before_that_it_may() -> None:
    pair = Pair(fence_us=2_000)
    pair.expect()
    pair.open()
    pair.sender.ship(AT_GIVER, 1, 1, 3, last=True)
    pair.run()
    pair.receiver.fence(AT_TAKER)
    pair.sender.layer_done(1, 0)
    pair.run()
    assert pair.world.fired[Fault.KV_WHILE_FENCING] == 2
    assert Fenced(AT_TAKER) in pair.at_taker
    before = pair.taken.pool.copy()
    pair.sender.layer_done(1, 1)  # a giver that has not heard of it
    pair.run()
    assert np.array_equal(pair.taken.pool, before)


def test_a_giver_that_slept_goes_on_and_meets_the_fence() -> None:
    pair = Pair()
    pair.expect()
    pair.open()
    pair.run()
    pair.ship()
    pair.giver_host.pause()
    pair.run()
    pair.receiver.fence(AT_TAKER)
    pair.run()
    landed = pair.taken.pool.copy()
    pair.giver_host.resume()
    pair.run()
    assert np.array_equal(pair.taken.pool, landed)
    assert pair.world.fired[Fault.KV_TOO_LATE] + sum(isinstance(event, ShipFailed) for event in pair.at_giver)


def test_a_fence_is_always_answered_also_when_slow_or_unknown() -> None:
    pair = Pair(KvRates(slow_fence=1.0))
    pair.expect()
    for end, name in ((pair.receiver, AT_TAKER), (pair.sender, AT_GIVER)):
        end.fence(name)
    pair.run(FENCED_WITHIN_US)
    assert Fenced(AT_TAKER) in pair.at_taker
    assert Fenced(AT_GIVER) in pair.at_giver
    assert pair.world.fired[Fault.FENCE_SLOW] >= 1


def test_a_token_opens_one_connection_once_and_another_opens_none() -> None:
    pair = Pair()
    pair.expect()
    pair.open(b"another token")
    pair.run()
    assert pair.at_giver == [ShipFailed(AT_GIVER, "nobody expects this connection")]
    pair.open()
    pair.ship()
    pair.run()
    pair.open()
    pair.run()
    assert pair.at_giver[-1] == ShipFailed(AT_GIVER, "nobody expects this connection")


def test_two_hand_overs_may_not_land_in_one_block() -> None:
    pair = Pair()
    pair.expect((4, 2))
    with pytest.raises(LawBroken, match=ALIEN_BYTES):
        pair.receiver.expect(Handover(PeerId("P"), 8, 1), b"b", 0, np.array([2], dtype=np.int32))


def test_writing_where_a_transfer_reads_is_seen_at_its_fence() -> None:
    pair = Pair()
    pair.expect()
    pair.open()
    pair.sender.ship(AT_GIVER, None, 1, 2, last=False)
    pair.run()
    pair.given.pool[0] ^= 1
    pair.sender.fence(AT_GIVER)
    with pytest.raises(LawBroken, match=ALIEN_BYTES):
        pair.run()


@pytest.mark.parametrize(
    ("rates", "fault"), [(KvRates(broken=1.0), Fault.KV_BROKEN), (KvRates(refused=1.0), Fault.KV_REFUSED)]
)
def test_a_giver_learns_of_a_broken_and_of_a_refused_connection(rates: KvRates, fault: Fault) -> None:
    pair = Pair(rates)
    pair.expect()
    pair.open()
    pair.ship()
    pair.run()
    assert pair.world.fired[fault] == 1
    assert isinstance(pair.at_giver[-1], ShipFailed)
    assert not pair.sender.open


def test_a_giver_learns_that_its_taker_is_gone() -> None:
    pair = Pair()
    pair.expect()
    pair.open()
    pair.run()
    pair.taker_host.crash()
    pair.transfers.leave("D")
    pair.run()
    assert pair.at_giver == [ShipFailed(AT_GIVER, "the taker is gone")]
    pair.open()
    pair.run()
    assert pair.at_giver[-1] == ShipFailed(AT_GIVER, "connection refused")
