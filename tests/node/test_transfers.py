"""What an instance remembers of its transfers."""

from __future__ import annotations

from baton.core.config import DECODE, PREFILL
from baton.core.peers import Expect, Fence, Fenced, OpenShip, PeerId, Ship, Shipped, Verified, Verify
from baton.node.transfers import Transfers
from tests.support.transfers import GIVER_BLOCKS, TAKER_BLOCKS, TOKEN, Reports, giver_names, ids, make_pool, taker_names


def test_a_hand_over_that_was_made_is_forgotten_on_both_sides() -> None:
    sent, got = Reports(), Reports()
    giver = Transfers(PREFILL, "tcp", make_pool(GIVER_BLOCKS, seed=1), sent, "127.0.0.1")
    taker = Transfers(DECODE, "tcp", make_pool(TAKER_BLOCKS), got, "127.0.0.1")
    try:
        addresses = taker.offer(PeerId("the giver"), same_host=True)
        assert giver.accept(PeerId("the taker"), addresses) is None
        for request in range(3):
            there, here = taker_names(request), giver_names(request)
            taker.carry_out(Expect(there, TOKEN, 0, ids(5, 6)))
            giver.carry_out(OpenShip(here, TOKEN, 0, ids(7, 8)))
            giver.carry_out(Ship(here, None, 0, 2, last=True))
            taker.carry_out(Verify(there, sent.next(Shipped).checks))
            assert got.next(Verified).handover == there
        assert not giver._sending
        assert not taker._receiving
        giver.carry_out(Fence(giver_names(0)))
        assert sent.next(Fenced).handover == giver_names(0)
    finally:
        giver.close()
        taker.close()
