"""What one giver or one taker does alone, told by hand what its driver and its peer could say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.core.config import OnPreempt, PrefillPath
from baton.core.peers import Ask, Decline, Grant, Heard, Offer, PdCode, PeerId, PeerMessage, PeerOpened, Tell
from baton.core.request import Serial
from baton.core.worker import Cancelled, Effect, Event, Orphaned, StepDone, StopFound
from tests.support.driver import Driver, submission
from tests.support.workers import decode_config, prefill_config

PEER = PeerId("peer")


def giver(**changes: object) -> Driver:
    driver = Driver(prefill_config(**changes))
    driver.send(PeerOpened(PEER))
    return driver


def taker(**changes: object) -> Driver:
    driver = Driver(decode_config(**changes))
    driver.send(PeerOpened(PEER))
    return driver


def ask(driver: Driver, request: int, prompt: Sequence[int], attempt: int = 1) -> list[PeerMessage]:
    return hear(driver, Ask(request, attempt, submission(prompt, 4, name=str(request))))


def hear(driver: Driver, message: PeerMessage) -> list[PeerMessage]:
    return told(driver.send(Heard(PEER, message)))


def told(effects: list[Effect]) -> list[PeerMessage]:
    return [effect.message for effect in effects if isinstance(effect, Tell)]


def test_an_offer_that_ends_with_a_senseless_grant_makes_room_for_the_next_at_once() -> None:
    p = giver(slots=1)
    assert [type(message) for message in ask(p, 0, range(20))] == [Offer]
    assert ask(p, 1, range(20)) == []
    answers = hear(p, Grant(0, 1, cached_tokens=3, lease_us=1, token=b""))
    assert [(type(message).__name__, message.request) for message in answers] == [("Decline", 0), ("Offer", 1)]


def test_an_attempt_that_the_next_one_ends_makes_room_though_that_one_is_declined() -> None:
    p = giver(slots=1)
    ask(p, 0, range(20))
    ask(p, 1, range(20))
    answers = ask(p, 0, range(1000), attempt=2)
    assert [(type(message).__name__, message.request) for message in answers] == [("Decline", 0), ("Offer", 1)]


@pytest.mark.parametrize("path", PrefillPath)
@pytest.mark.parametrize("max_preemptions", [0, 8])
def test_a_prompt_as_long_as_the_whole_pool_is_prefilled(path: PrefillPath, max_preemptions: int) -> None:
    p = giver(prefill_path=path, max_preemptions=max_preemptions, blocks=10, block_size=4)
    ask(p, 0, [1] * 40)
    hear(p, Grant(0, 1, cached_tokens=0, lease_us=1, token=b""))
    p.tick()
    assert p.plans


@pytest.mark.parametrize("event", [Cancelled(Serial(0)), StopFound(Serial(0), 0), Orphaned()])
def test_no_client_ends_what_a_giver_does_for_its_peers(event: Event) -> None:
    p = giver()
    ask(p, 0, range(20))
    assert p.send(event) == []
    assert hear(p, Grant(0, 1, cached_tokens=0, lease_us=1, token=b"")) == []
    p.tick()
    assert p.plans


@pytest.mark.parametrize("on_preempt", OnPreempt)
@pytest.mark.parametrize("ends", ["cancelled", "declined"])
def test_time_spent_on_an_ask_that_came_to_nothing_is_no_time_in_the_queue(ends: str, on_preempt: OnPreempt) -> None:
    d = taker(on_preempt=on_preempt)
    (serial,) = d.submit(submission(range(40), 4))
    d.now_us = 5
    d.tick()
    d.now_us = 105
    if ends == "declined":
        hear(d, Decline(serial, 1, PdCode.TIMEOUT, "no"))
    d.cancel(serial)
    bill = d.ended[serial].bill
    assert (bill.queue_us, bill.transfer_us, bill.prefill_us, bill.decode_us) == (5, 100, 0, 0)


@pytest.mark.parametrize("path", PrefillPath)
def test_a_giver_offers_the_next_while_it_still_computes_a_long_prompt(path: PrefillPath) -> None:
    p = giver(prefill_path=path, step_tokens=16, context_tokens=200, blocks=100)
    ask(p, 0, range(160))
    hear(p, Grant(0, 1, cached_tokens=0, lease_us=1, token=b""))
    assert ask(p, 1, [7] * 160) == [], "two steps ahead of need"
    offered: list[PeerMessage] = []
    while not offered:
        p.tick()
        p.tick()
        p.in_flight.popleft()
        offered += told(p.send(StepDone(p.executor.collect())))
    assert isinstance(offered[0], Offer)
    assert p.in_flight, "the device has run dry"
