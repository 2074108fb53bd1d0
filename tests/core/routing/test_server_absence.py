"""Requests without a token while no instance serves: how long they wait, and that they end once."""

from __future__ import annotations

from baton.core.engine.request import FinishReason
from baton.core.errors import RefusalCode
from baton.core.handover.faults import PdCode
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import DeliverTokens, Instance, InstanceDrains, InstanceLost, RequestDeclined
from tests.support.routing import PREEMPTED, Bench, choices, ended, facts, submission

CONFIG = RouterConfig(absent_us=1_000_000)


def test_a_request_refused_after_its_time_is_declined_at_once() -> None:
    """Its instance began to drain before it answered, and nobody else serves."""
    bench = Bench(CONFIG)
    bench.join(facts("a"))
    body = bench.arrive(submission("x"))
    send = bench.sent()
    bench.tell(InstanceDrains(Instance("a")))
    bench.pass_us(1_100_000)
    assert not bench.ever(RequestDeclined), "it may still be accepted"
    bench.refuse(send, RefusalCode.DRAINING)
    assert [(item.request, item.refusal.code) for item in bench.of(RequestDeclined)] == [(body, RefusalCode.NO_INSTANCE)]
    assert bench.router.open_requests == 0


def test_a_refusal_does_not_start_the_time_again() -> None:
    bench = Bench(CONFIG)
    bench.join(facts("a"))
    first = bench.arrive(submission("x"))
    send = bench.sent()
    bench.tell(InstanceDrains(Instance("a")))
    bench.pass_us(600_000)
    second = bench.arrive(submission("y"))
    bench.refuse(send, RefusalCode.DRAINING)
    assert not bench.of(RequestDeclined)
    bench.pass_us(450_000)
    assert [item.request for item in bench.of(RequestDeclined)] == [first]
    bench.pass_us(600_000)
    assert [item.request for item in bench.of(RequestDeclined)] == [second]


def test_a_request_that_was_accepted_waits_from_the_loss_of_its_instance_on() -> None:
    bench = Bench(CONFIG)
    bench.join(facts("a"))
    _, send = bench.open(submission("x"))
    bench.tell(InstanceDrains(Instance("a")))
    bench.pass_us(5_000_000)
    bench.tell(InstanceLost(send.session, "reset"))
    bench.pass_us(900_000)
    assert not bench.ever(DeliverTokens)
    bench.join(facts("a", incarnation=2))
    assert bench.sent().choices == (0,)


def test_a_request_with_a_choice_at_an_instance_that_drains_is_not_ended() -> None:
    bench = Bench(CONFIG)
    bench.join(facts("a"))
    _, send = bench.open(*choices("x", 2))
    bench.tell(InstanceDrains(Instance("a")))
    bench.came(send, nth=1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
    bench.pass_us(5_000_000)
    assert not bench.ever(DeliverTokens)
    bench.tell(InstanceLost(send.session, "reset"))
    bench.pass_us(1_100_000)
    ends = [item.outcome for item in bench.of(DeliverTokens) if item.outcome is not None]
    assert [(end.reason, end.fault and end.fault.code) for end in ends] == [
        (FinishReason.RESCHEDULE, PdCode.NOT_DELIVERED)
    ] * 2


def test_a_request_of_two_choices_refused_after_its_deadline_is_declined_once() -> None:
    bench = Bench(RouterConfig(deadline_us=1_000_000))
    bench.join(facts("a"))
    bench.arrive(*choices("x", 2))
    send = bench.sent()
    bench.now_us += 1_000_000
    bench.refuse(send, RefusalCode.QUEUE_FULL)
    assert len(bench.ever(RequestDeclined)) == 1
    assert bench.router.open_requests == 0
