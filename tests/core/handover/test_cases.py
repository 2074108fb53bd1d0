"""What one giver or one taker does alone, told by hand what its driver and its peer could say."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from baton.core.config import HandoverConfig, OnPreempt, PrefillPath, ReservePolicy
from baton.core.engine.orders import Cancel, Drain, StopAt
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import FinishReason, Sampling, Serial
from baton.core.engine.worker import Deliver, Effect, Event, FrontEndLost, StepDone, Tick
from baton.core.handover.decode_side import ATTEMPTS_MAX
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import (
    Adopted,
    Arriving,
    Ask,
    Commit,
    Decline,
    Fence,
    Fenced,
    Grant,
    Handover,
    Heard,
    Offer,
    PeerId,
    PeerLost,
    PeerMessage,
    PeerOpened,
    Refuse,
    Release,
    Renew,
    Ship,
    Shipped,
    Tell,
    TransferBroken,
    Verified,
)
from baton.core.handover.prefill_peers import DECLINED_US
from baton.core.handover.prefill_side import RENEW_US_MIN
from baton.core.handover.protocol import prompt_digest
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, Driver, submission
from tests.support.workers import Cluster, Rates, decode_config, prefill_config

PEER = PeerId("peer")


def giver(**changes: object) -> Driver:
    driver = Driver(prefill_config(**changes))
    driver.send(PeerOpened(PEER))
    return driver


def taker(**changes: object) -> Driver:
    driver = Driver(decode_config(**changes))
    driver.send(PeerOpened(PEER))
    return driver


def granted(driver: Driver, prompt: Sequence[int], max_tokens: int = 4) -> tuple[Handover, Grant]:
    """A taker has let a request in, asked for it, and granted the offer."""
    (serial,) = driver.submit(submission(prompt, max_tokens))
    driver.tick()
    (grant,) = hear(driver, Offer(serial, 1, len(prompt)))
    assert isinstance(grant, Grant)
    return Handover(PEER, serial, 1), grant


def commit(handover: Handover, driver: Driver, prompt: Sequence[int], **changes: object) -> Commit:
    fingerprint = driver.worker.scheduler.pool.prefix.fingerprint
    plain = Commit(
        request=handover.request, attempt=handover.attempt, token=1, logprobs=None, cached_tokens=0, queue_us=0,
        prefill_us=0, prompt_digest=prompt_digest(submission(prompt), fingerprint), checks=b"",
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)  # type: ignore[arg-type]


def prefilled(driver: Driver, prompt: Sequence[int]) -> list[PeerMessage]:
    """A giver has computed all of a prompt; answers what it said meanwhile."""
    ask(driver, 0, prompt)
    said = hear(driver, Grant(0, 1, cached_tokens=0, lease_us=1, token=b""))
    while driver.worker.next_deadline() == driver.now_us or driver.in_flight:
        driver.tick()
        if driver.in_flight:
            driver.in_flight.popleft()
            said += told(driver.send(StepDone(driver.executor.collect())))
    return said


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


@pytest.mark.parametrize("event", [Cancel(Serial(0)), StopAt(Serial(0), 0), FrontEndLost()])
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


def test_a_giver_that_declines_is_asked_again_when_there_is_no_other_or_a_while_later() -> None:
    """One that drains has an ever shorter queue: by its load alone it would be asked first, until it is gone."""
    d, other = taker(on_preempt=OnPreempt.RESCHEDULE), PeerId("another")
    d.send(PeerOpened(other))
    d.send(Heard(other, Offer(99, 1, 50, queued_tokens=1_000_000)))

    def asked() -> PeerId:
        d.submit(submission([len(d.outputs)] * 40, 4))
        for _ in range(20):
            asks = [act.peer for act in d.send(Tick()) if isinstance(act, Tell) and isinstance(act.message, Ask)]
            if asks:
                return asks[0]
            d.settle_one()
        raise AssertionError("nobody was asked")

    assert asked() == PEER
    hear(d, Decline(0, 1, PdCode.TIMEOUT, "the instance is draining"))
    assert asked() == other
    d.now_us += DECLINED_US
    assert asked() == PEER
    hear(d, Decline(2, 1, PdCode.TIMEOUT, "the instance is draining"))
    d.send(PeerLost(other, "gone"))
    assert asked() == PEER


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


def test_a_grant_leaves_the_reserve_of_what_runs() -> None:
    """Both fit when they are let in; the one that runs then uses up more than its reserve falls."""
    d = taker(blocks=25, context_tokens=100)
    d.submit(submission([1] * 4, 80, name="runs"))
    (serial,) = d.submit(submission(range(40), 4, name="asked for"))
    while len(d.outputs[Serial(0)]) < 40:
        d.tick()
        d.settle_one()
    assert d.worker.gauges().blocks.free >= 10
    (answer,) = hear(d, Offer(serial, 1, 40))
    assert isinstance(answer, Refuse)
    assert d.worker.gauges().blocks.leased == 0


def test_bytes_that_arrive_keep_a_lease_alive_and_so_does_a_renewal() -> None:
    d = taker(handover=HandoverConfig(lease_us=100, renew_us=10))
    handover, _ = granted(d, range(40))
    for event in (Arriving(handover), Heard(PEER, Renew(handover.request, 1)), Arriving(handover)):
        d.now_us += 99
        d.tick()
        d.send(event)
        assert d.worker.next_deadline() == d.now_us + 100
    assert d.worker.gauges().blocks.receiving == 10
    d.now_us += 100
    assert Fence(handover) in d.send(Tick())


@pytest.mark.parametrize("on_preempt", OnPreempt)
def test_a_client_that_leaves_while_a_lease_is_given_up_ends_with_the_fence(on_preempt: OnPreempt) -> None:
    d = taker(on_preempt=on_preempt)
    handover, _ = granted(d, range(40))
    d.send(TransferBroken(handover, "spoilt"))
    d.cancel(Serial(handover.request))
    d.cancel(Serial(handover.request))
    assert not d.ended
    d.send(Fenced(handover))
    ended = d.ended[Serial(handover.request)]
    resumes = on_preempt is OnPreempt.RESUME
    assert ended.reason is (FinishReason.ABORT if resumes else FinishReason.RESCHEDULE)
    assert (ended.fault is None) is resumes
    assert d.worker.is_idle


@pytest.mark.parametrize("how", ["broken", "late"])
def test_who_was_sent_to_stay_is_prefilled_here_when_no_kv_comes(how: str) -> None:
    d = taker(on_preempt=OnPreempt.RESCHEDULE)
    stays = msgspec.structs.replace(submission(range(40), 4), resumes_in_place=True)
    (serial,) = d.submit(stays)
    d.tick()
    if how == "late":
        d.now_us += d.config.handover.deadline_us
        d.send(Tick())
    else:
        hear(d, Offer(serial, 1, 40))
        d.send(TransferBroken(Handover(PEER, serial, 1), "spoilt"))
        d.send(Fenced(Handover(PEER, serial, 1)))
    assert serial not in d.ended
    d.run(100)
    assert (d.ended[serial].reason, len(d.outputs[serial])) == (FinishReason.LENGTH, 4)


@pytest.mark.parametrize(
    "changes", [{"prompt_digest": b"another"}, {"token": 1 << 31}, {"token": -1}], ids=["digest", "token", "negative"]
)
def test_a_commit_of_something_else_is_never_adopted(changes: dict[str, object]) -> None:
    d = taker()
    handover, _ = granted(d, range(40))
    answers = d.send(Heard(PEER, commit(handover, d, range(40), **changes)))
    assert Fence(handover) in answers
    assert isinstance(told(answers)[0], Release)
    assert d.send(Verified(handover)) == []


def test_no_two_grants_have_one_token() -> None:
    d = taker(blocks=100)
    tokens = [granted(d, range(n, n + 40))[1].token for n in range(3)]
    assert len(set(tokens)) == 3


@pytest.mark.parametrize("event", ["cancel", "stop"])
def test_an_adopted_request_that_ends_before_it_begins_is_in_no_plan(event: str) -> None:
    d = taker()
    handover, _ = granted(d, range(40))
    serial = Serial(handover.request)
    hear(d, commit(handover, d, range(40)))
    d.send(Verified(handover))
    assert d.outputs[serial] == [1]
    assert d.worker.next_deadline() == d.now_us
    d.send(Cancel(serial) if event == "cancel" else StopAt(serial, 1))
    assert d.ended[serial].generated_tokens == 1
    d.send(Tick())
    assert not d.plans
    assert d.worker.is_idle


def test_a_giver_says_how_long_it_queued_and_how_long_it_computed() -> None:
    p = giver()
    ask(p, 0, range(16))
    p.now_us = 100
    hear(p, Grant(0, 1, cached_tokens=0, lease_us=1, token=b""))
    p.now_us = 130
    p.tick()
    p.now_us = 180
    p.settle_one()
    (said,) = told(p.send(Shipped(Handover(PEER, 0, 1), b"checks")))
    assert isinstance(said, Commit)
    assert (said.queue_us, said.prefill_us) == (130, 50)


def test_a_giver_renews_while_its_bytes_still_leave_and_waits_for_an_answer_no_longer_than_its_deadline() -> None:
    p = giver(handover=HandoverConfig(lease_us=100, renew_us=10, deadline_us=1000))
    assert prefilled(p, range(40)) == []
    p.now_us += 10
    assert told(p.send(Tick())) == [Renew(0, 1)]
    assert p.worker.next_deadline() == p.now_us + 10
    p.send(Shipped(Handover(PEER, 0, 1), b"checks"))
    assert p.worker.next_deadline() == 1000
    p.now_us = 1000
    assert Fence(Handover(PEER, 0, 1)) in p.send(Tick())


def test_a_giver_computes_in_the_order_of_grants() -> None:
    p = giver(step_tokens=32)
    for request in range(3):
        ask(p, request, [request] * 20)
        hear(p, Grant(request, 1, cached_tokens=0, lease_us=1, token=b""))
    p.tick()
    (plan,) = (launch.plan for launch in p.plans)
    assert [(int(start.tokens[0]), chunk.end) for start, chunk in zip(plan.starts, plan.chunks, strict=True)] == [
        (0, 20),
        (1, 12),
    ]


def test_a_draining_giver_finishes_what_it_has_and_takes_nothing_more() -> None:
    p = giver(slots=1)
    ask(p, 0, range(20))
    ask(p, 1, range(20))
    p.send(Drain())
    assert [type(message) for message in ask(p, 2, range(20))] == [Decline]
    assert [type(message) for message in hear(p, Release(0, 1, "no"))] == [Offer]


@pytest.mark.parametrize("seed", range(6))
def test_bills_add_up_to_the_time_that_passed_and_the_tokens_that_were_fed(seed: int) -> None:
    stream = random.Random(seed)
    handover = HandoverConfig(local_tokens=4, lease_us=50_000, renew_us=10_000)
    d_config = decode_config(blocks=30, reserve=ReservePolicy.NONE, handover=handover)
    cluster = Cluster(seed, [prefill_config(handover=handover)], [d_config], Rates(repeated=0.2, late=0.2, failed=0.05))
    (d,) = cluster.ds
    asked: dict[Serial, tuple[int, int]] = {}
    ended_us: dict[Serial, int] = {}

    def turn() -> bool:
        happened = cluster.turn()
        ended_us.update({serial: d.now_us for serial in d.ended if serial not in ended_us})
        return happened

    for n in range(8):
        d.now_us = cluster.now_us
        prompt = [stream.randrange(VOCABULARY) for _ in range(stream.randint(1, 60))]
        (serial,) = d.submit(submission(prompt, 20, name=str(n)))
        asked[serial] = (cluster.now_us, len(prompt))
        for _ in range(30):
            turn()
            cluster.now_us += 7
    while not cluster.is_idle:
        if not turn():
            cluster.now_us = min(at for node in cluster.nodes.values() if (at := node.worker.next_deadline()) is not None)
    assert any(ended.bill.transfer_us for ended in d.ended.values())
    for serial, (asked_us, prompt_tokens) in asked.items():
        bill = d.ended[serial].bill
        assert bill.cached_tokens + bill.computed_tokens == prompt_tokens + 20 - 1
        spent_us = bill.queue_us + bill.prefill_us + bill.transfer_us + bill.decode_us
        assert spent_us == ended_us[serial] - asked_us


@pytest.mark.parametrize(("lease_us", "every_us"), [(100_000, 50_000), (1, RENEW_US_MIN), (60_000_000, 500_000)])
def test_a_giver_renews_as_often_as_the_lease_that_it_was_granted_needs(lease_us: int, every_us: int) -> None:
    p = giver()
    ask(p, 0, range(40))
    hear(p, Grant(0, 1, cached_tokens=0, lease_us=lease_us, token=b""))
    p.tick()
    p.tick()
    p.settle_one()
    p.settle_one()
    p.now_us = every_us - 1
    assert told(p.send(Tick())) == []
    p.now_us += 1
    assert told(p.send(Tick())) == [Renew(0, 1)]


def test_where_nobody_may_be_preempted_a_lease_is_promised_all_that_its_request_may_need() -> None:
    cluster = Cluster(1, [prefill_config()], [decode_config(max_preemptions=0, blocks=30)])
    (d,), (p,) = cluster.ds, cluster.ps
    serials = [d.submit(submission([n] * 40, 40, name=str(n)))[0] for n in range(3)]
    while not d.worker.gauges().blocks.leased:
        cluster.turn()
    assert d.worker.scheduler.promised() == 10
    cluster.run()
    assert [len(d.outputs[serial]) for serial in serials] == [40, 40, 40]
    assert p.worker.gauges().handovers.made == 3
    assert d.worker.gauges().preemptions_for_others == d.worker.gauges().preemptions_of_self == 0
    cluster.nothing_is_held()


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("wanted", [2, None])
def test_log_probabilities_of_the_first_token_come_with_it_where_they_were_asked_for(wanted: int | None, sent: bool) -> None:
    d = taker()
    prompt = list(range(40))
    (serial,) = d.submit(submission(prompt, 4, sampling=Sampling(seed=0, logprobs=wanted)))
    d.tick()
    hear(d, Offer(serial, 1, 40))
    handover = Handover(PEER, serial, 1)
    line = Logprobs(7, np.zeros(1, np.float32), np.array([[1, 2]], np.int32), np.zeros((1, 2), np.float32))
    hear(d, commit(handover, d, prompt, logprobs=line if sent else None))
    settled = [effect.settled for effect in d.send(Verified(handover)) if isinstance(effect, Deliver)]
    if wanted is not None and not sent:
        assert not settled, "adopted without what the client asked for"
        return
    ((serials, counts, logprobs),) = ((item.serials.tolist(), item.counts.tolist(), item.logprobs) for item in settled)
    assert (serials, counts) == ([serial], [1])
    assert [(item.row, item.top_ids.tolist()) for item in logprobs] == ([] if wanted is None else [(0, [[1, 2]])])


def test_an_offer_for_a_lease_that_is_being_given_up_is_released() -> None:
    d = taker()
    handover, _ = granted(d, range(40))
    d.send(TransferBroken(handover, "spoilt"))
    assert [type(message) for message in hear(d, Offer(handover.request, 1, 40))] == [Release]


def test_after_a_failed_lease_nobody_is_asked_again() -> None:
    d = taker()
    handover, _ = granted(d, range(40))
    d.send(TransferBroken(handover, "spoilt"))
    d.send(Fenced(handover))
    assert told(d.send(Tick())) == []
    assert d.plans[0].plan.chunks


def test_a_peer_that_is_lost_is_not_asked_while_another_is_there() -> None:
    d = taker(blocks=200)
    other = PeerId("other")
    d.send(PeerOpened(other))
    d.send(PeerLost(PEER, "gone"))
    for n in range(4):
        d.submit(submission([n] * 40, 4, name=str(n)))
    assert {effect.peer for effect in d.send(Tick()) if isinstance(effect, Tell)} == {other}


def test_nobody_is_asked_for_more_than_there_are_slots() -> None:
    d = taker(blocks=200, slots=2)
    for n in range(4):
        d.submit(submission([n] * 40, 4, name=str(n)))
    assert len(told(d.send(Tick()))) == 2


def test_a_giver_offers_two_steps_ahead_and_no_more() -> None:
    p = giver(step_tokens=16, slots=16, blocks=200)
    offers = [message for n in range(8) for message in ask(p, n, [n] * 10)]
    assert len(offers) == 4, "forty tokens are the first to pass two steps of sixteen"


def test_no_block_is_sent_twice_and_none_is_left_out() -> None:
    p = giver(step_tokens=6)
    prefilled(p, range(41))
    p.send(Shipped(Handover(PEER, 0, 1), b""))
    hear(p, Adopted(0, 1))
    p.tick()
    p.settle_one()
    assert p.worker.is_idle
    hear(p, Ask(1, 1, submission(range(41), 4, name="again")))
    hear(p, Grant(1, 1, cached_tokens=8, lease_us=1, token=b""))
    ships = [effect for effect in p.send(Tick()) if isinstance(effect, Ship)]
    assert [(ship.step is None, ship.first, ship.upto, ship.last) for ship in ships] == [
        (True, 2, 10, False),
        (False, 10, 11, True),
    ]


def test_a_taker_that_was_short_of_room_too_often_prefills_itself() -> None:
    d = taker(blocks=25, context_tokens=100)
    d.submit(submission([1] * 4, 80, name="runs"))
    (serial,) = d.submit(submission(range(40), 4, name="asked for"))
    while len(d.outputs[Serial(0)]) < 40:
        d.tick()
        d.settle_one()
    for attempt in range(1, ATTEMPTS_MAX + 1):
        assert [type(message) for message in hear(d, Offer(serial, attempt, 40))] == [Refuse]
        while d.in_flight:
            d.settle_one()
        d.worker.scheduler._pass._promises.policy.ratio = 0.0  # there is room again, and then none
        assert len(told(d.send(Tick()))) == (attempt < ATTEMPTS_MAX)
        d.worker.scheduler._pass._promises.policy.ratio = 0.7
    assert d.plans[-1].plan.chunks, "it is prefilled here"


def test_siblings_begin_with_the_adoption_of_their_leader() -> None:
    d = taker(blocks=100)
    prompt = list(range(40))
    group = [submission(prompt, 4, name=str(n), leader="0" if n else None) for n in range(3)]
    serial = d.submit(*group)[0]
    d.tick()
    hear(d, Offer(serial, 1, 40))
    handover = Handover(PEER, serial, 1)
    hear(d, commit(handover, d, prompt))
    d.send(Verified(handover))
    d.send(Tick())
    assert len(d.plans[0].plan.starts) == 3


@pytest.mark.parametrize("on_preempt", OnPreempt)
def test_what_no_giver_begins_is_prefilled_here_and_ends_nobodys_request(on_preempt: OnPreempt) -> None:
    d = taker(on_preempt=on_preempt)
    prompt = list(range(40))
    (serial,) = d.submit(submission(prompt, 4))
    d.tick()
    hear(d, Decline(serial, 1, PdCode.TIMEOUT, "the instance is draining"))
    d.run()
    assert d.outputs[serial] == undisturbed(prompt, Sampling(seed=0, temperature=0.0), 4, VOCABULARY)
    assert d.worker.gauges().handovers.timed_out == 1
