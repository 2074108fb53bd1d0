"""KV that takes time only: when it leaves and lands, and what the workers are told of it."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.handover.messages import Arriving, Fenced, Handover, PeerEvent, PeerId, Shipped, Verified
from baton.executor.contract import NO_KV
from baton.sim.timed_transfers import KvLinkModel, NetworkCard, TimedReceiver, TimedSender, TimedTransfers
from baton.sim.world import Host, World

LAYERS, BLOCK_BYTES, DELAY_US = 10, 1_000_000, 50
TOKEN = b"once"


class Pair:
    """A giver P, a taker D, and everything that they are told, with the time."""

    def __init__(self, bytes_per_us: float) -> None:
        self.world = World(0, events_max=10_000)
        self.told: list[tuple[int, str, PeerEvent]] = []
        self.transfers = TimedTransfers(KvLinkModel(LAYERS, BLOCK_BYTES, bytes_per_us * 1e6, DELAY_US))
        _, self.giver = self._connect("P")
        self.taker, _ = self._connect("D")

    def _connect(self, name: str) -> tuple[TimedReceiver, TimedSender]:
        def tell(event: PeerEvent) -> None:
            self.told.append((self.world.now_us, name, event))

        return self.transfers.connect(name, Host(self.world, name), NO_KV, tell)

    def open(self, request: int, blocks: int) -> tuple[Handover, Handover]:
        """The giver's and the taker's name of a granted hand-over."""
        ours, theirs = Handover(PeerId("D"), request, 1), Handover(PeerId("P"), request, 1)
        self.taker.expect(theirs, TOKEN, 0, np.arange(blocks, dtype=np.int32))
        self.giver.open_ship(ours, TOKEN, 0, np.arange(blocks, dtype=np.int32))
        return ours, theirs

    def computes(self, step: int, begin_us: int, end_us: int) -> None:
        """A device runs this step, and tells of each layer."""
        if self.giver.awaits(step):
            for layer, ready_us in enumerate(self.giver.layers_us(end_us - begin_us)):
                self.world.at(begin_us + ready_us, self.giver.layer_done, step, layer)
            self.world.at(end_us, self.giver.step_done, step)

    def run(self) -> None:
        while self.world.next_us is not None:
            self.world.step()

    def when(self, event: PeerEvent) -> int:
        (at_us,) = [at_us for at_us, _, said in self.told if said == event]
        return at_us


def test_with_a_quick_lane_one_layer_is_left_when_the_step_ends() -> None:
    pair = Pair(bytes_per_us=1000.0)
    ours, theirs = pair.open(1, blocks=4)
    pair.giver.ship(ours, 5, 0, 4, last=True)
    pair.taker.verify(theirs, b"")
    pair.computes(5, 1_000, 101_000)
    pair.run()
    layer_us = 4 * BLOCK_BYTES / LAYERS / 1000
    assert pair.when(Shipped(ours, b"")) == 101_000 + layer_us
    assert pair.when(Verified(theirs)) == 101_000 + layer_us + DELAY_US
    assert pair.when(Arriving(theirs)) == 11_000 + layer_us + DELAY_US


def test_a_lane_half_again_as_quick_as_prefill_has_sent_nine_tenths_by_its_end() -> None:
    produced_bytes_per_us = 4 * BLOCK_BYTES / 100_000
    pair = Pair(bytes_per_us=1.5 * produced_bytes_per_us)
    ours, _ = pair.open(1, blocks=4)
    pair.giver.ship(ours, 1, 0, 4, last=True)
    pair.computes(1, 0, 100_000)
    pair.run()
    left_us = pair.when(Shipped(ours, b"")) - 100_000
    assert left_us * 1.5 * produced_bytes_per_us <= 0.1 * 4 * BLOCK_BYTES * 1.01


def test_a_lane_slower_than_prefill_takes_as_long_as_all_bytes_after_the_first_layer() -> None:
    pair = Pair(bytes_per_us=20.0)
    ours, theirs = pair.open(1, blocks=4)
    pair.giver.ship(ours, 1, 0, 2, last=False)
    pair.computes(1, 0, 10_000)
    pair.giver.ship(ours, 2, 2, 4, last=True)
    pair.computes(2, 10_000, 20_000)
    pair.taker.verify(theirs, b"")
    pair.run()
    assert pair.when(Shipped(ours, b"")) == 1_000 + 4 * BLOCK_BYTES / 20
    assert pair.giver.card.busy_us == pair.taker.card.busy_us == pytest.approx(4 * BLOCK_BYTES / 20)
    assert pair.giver.card.bytes == pair.taker.card.bytes == pytest.approx(4 * BLOCK_BYTES)


def test_what_is_complete_already_leaves_at_once_and_in_turn() -> None:
    pair = Pair(bytes_per_us=1000.0)
    first, second = pair.open(1, blocks=3)[0], pair.open(2, blocks=3)[0]
    for ours in (first, second):
        pair.giver.ship(ours, None, 0, 3, last=True)
    pair.run()
    assert (pair.when(Shipped(first, b"")), pair.when(Shipped(second, b""))) == (3_000, 6_000)


def test_it_is_verified_only_when_everything_is_there_and_was_asked_for() -> None:
    pair = Pair(bytes_per_us=1000.0)
    ours, theirs = pair.open(1, blocks=2)
    pair.giver.ship(ours, None, 0, 1, last=False)
    pair.taker.verify(theirs, b"")
    pair.run()
    assert not any(isinstance(event, Verified) for _, _, event in pair.told)
    pair.giver.ship(ours, None, 1, 2, last=True)
    pair.run()
    assert pair.when(Verified(theirs)) == pair.world.now_us


def test_where_the_taker_has_everything_nothing_travels() -> None:
    pair = Pair(bytes_per_us=1000.0)
    ours, theirs = pair.open(1, blocks=0)
    pair.giver.ship(ours, 3, 0, 0, last=True)
    pair.computes(3, 0, 1_000)
    pair.taker.verify(theirs, b"")
    pair.run()
    assert pair.when(Verified(theirs)) == 0
    assert pair.when(Shipped(ours, b"")) == 1_000
    assert not any(isinstance(event, Arriving) for _, _, event in pair.told)


def test_after_a_fence_nothing_leaves_lands_or_is_verified() -> None:
    pair = Pair(bytes_per_us=1000.0)
    ours, theirs = pair.open(1, blocks=4)
    pair.giver.ship(ours, 1, 0, 4, last=True)
    pair.taker.verify(theirs, b"")
    pair.computes(1, 0, 100_000)
    pair.giver.fence(ours)
    pair.taker.fence(theirs)
    pair.run()
    assert [event for _, _, event in pair.told] == [Fenced(ours), Fenced(theirs)]
    assert pair.giver.card.bytes == 0


def test_a_lane_carries_one_piece_after_the_other() -> None:
    card = NetworkCard(bytes_per_s=1e6)
    assert [card.transmit(0, 10), card.transmit(5, 10), card.transmit(100, 1)] == [10, 20, 101]
    assert (card.bytes, card.busy_us) == (21, 21)
