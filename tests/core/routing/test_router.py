"""A client's request goes from instance to instance: every token once, one end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.engine.ended import Bill
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import FinishReason
from baton.core.errors import InvariantViolated, RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    AttemptAccepted,
    CancelChoices,
    ClientLeft,
    DeliverTokens,
    ForgetChoices,
    Heartbeat,
    HeartbeatCame,
    InstanceDrains,
    InstanceLost,
    PhaseReport,
    RequestDeclined,
    RequestOpened,
    SendAttempt,
    Session,
    StopChoice,
    StopStringFound,
    TimelineNoted,
    TimelineStage,
    TokensCame,
)
from tests.support.routing import PREEMPTED, Bench, choices, ended, facts, held, submission, which

STOP = ended(FinishReason.STOP)


def outcome(bench: Bench) -> DeliverTokens:
    (last,) = [item for item in bench.of(DeliverTokens) if item.outcome is not None]
    return last


def test_a_body_is_opened_by_the_instance_that_takes_it_and_forgotten_there_at_its_end() -> None:
    bench = Bench()
    bench.join(facts("a"))
    body = bench.arrive(submission("x"))
    send = bench.sent()
    assert (send.session, send.choices, send.body_choices, send.origin) == (bench.sessions["a"], (0,), 1, b"origin 1")
    assert not bench.ever(RequestOpened)
    bench.take(send)
    assert bench.of(RequestOpened) == [RequestOpened(body)]
    bench.came(send, 5, 6, cached=32)
    assert bench.of(DeliverTokens) == [DeliverTokens(body, 0, [5, 6], None, 32, None)]
    bench.came(send, 7, end=STOP)
    last = outcome(bench)
    assert (last.tokens, last.outcome and last.outcome.generated_tokens) == ([7], 3)
    assert bench.of(ForgetChoices) == [ForgetChoices(send.session, send.attempt)]
    assert bench.router.open_requests == 0


def test_what_its_instance_lost_goes_on_at_once_elsewhere_after_what_was_delivered() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    body, send = bench.open(submission("x"))
    bench.came(send, 5, 6)
    bench.tell(InstanceLost(send.session, "reset"))
    again = bench.sent()
    assert again.session != send.session
    assert again.group[0].generated.tolist() == [5, 6]
    assert (again.group[0].prompt.tolist(), again.group[0].max_tokens) == (list(range(40)), 100)
    assert next((note.stage, note.why) for note in bench.of(TimelineNoted)) == (
        TimelineStage.MOVED,
        "lost: a was lost: reset",
    )
    bench.take(again)
    assert not bench.of(RequestOpened), "a client is told once"
    bench.came(again, 7, end=STOP)
    assert bench.delivered(body) == [5, 6, 7]
    assert bench.router.counts.moved_tokens == 2


def test_choices_that_were_lost_together_travel_together_and_whoever_is_first_leads() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    _, send = bench.open(*choices("x", 3))
    assert [item.leader for item in send.group] == [None, "x/0", "x/0"]
    bench.came(send, 1, nth=1)
    bench.came(send, 9, nth=0, end=STOP)
    bench.tell(InstanceLost(send.session, "reset"))
    again = bench.sent()
    assert again.choices == (1, 2)
    assert [item.leader for item in again.group] == [None, "x/1"]
    assert [item.generated.tolist() for item in again.group] == [[1], []]


@pytest.mark.parametrize(
    ("tokens", "min_tokens", "reason"),
    [([1, 2, 3], 0, FinishReason.LENGTH), ([1, 9], 0, FinishReason.STOP), ([1, 9], 2, None), ([1], 0, None)],
)
def test_a_choice_that_had_its_last_token_when_its_instance_was_lost_has_ended(
    tokens: list[int], min_tokens: int, reason: FinishReason | None
) -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    _, send = bench.open(submission("x", max_tokens=3, stops=(9,), min_tokens=min_tokens))
    bench.came(send, *tokens)
    bench.tell(InstanceLost(send.session, "reset"))
    if reason is None:
        assert bench.of(SendAttempt)
    else:
        assert not bench.of(SendAttempt)
        assert outcome(bench).outcome is not None
        assert [item.outcome.reason for item in bench.of(DeliverTokens) if item.outcome] == [reason]


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_whoever_had_no_room_is_avoided_while_another_has_room() -> None:
    bench = Bench()
    for name in "ab":
        bench.join(facts(name))
    _, send = bench.open(submission("x"))
    seen = [send.session]
    for _ in range(3):
        bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
        assert not bench.of(SendAttempt), "not before the back-off is over"
        bench.pass_us(1_000_000)
        send = bench.sent()
        bench.take(send)
        seen.append(send.session)
    assert seen == [Session(1), Session(2), Session(1), Session(2)]


def test_without_exclusion_the_prefix_draws_it_back() -> None:
    bench = Bench(RouterConfig(preempt_retry_exclude_decode=False))
    for name in "ab":
        bench.join(facts(name))
    _, send = bench.open(submission("x"))
    bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
    bench.pass_us(1_000_000)
    assert bench.sent().session == send.session


@pytest.mark.parametrize("count", [0, 2])
def test_a_choice_that_found_no_room_too_often_is_sent_to_resume_in_place(count: int) -> None:
    bench = Bench(RouterConfig(preempt_retry_count=count))
    for name in "abc":
        bench.join(facts(name))
    body, send = bench.open(submission("x"))
    for _ in range(count):
        assert not send.group[0].resumes_in_place
        bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
        bench.pass_us(1_000_000)
        send = bench.sent()
        bench.take(send)
    assert send.group[0].resumes_in_place
    bench.came(send, 1, end=STOP)
    assert bench.delivered(body) == [1] * (count + 1)


def _full(*, free: int = 0, waiting: int = 0) -> SchedulerGauges:
    return SchedulerGauges(free_blocks=free, running_blocks=256 - free, waiting=waiting)


@pytest.mark.parametrize("other", [_full(), _full(free=200, waiting=1)])
def test_who_had_to_yield_goes_back_where_it_was_while_no_other_has_room(other: SchedulerGauges) -> None:
    bench = Bench()
    for name in "ab":
        bench.join(facts(name))
    _, send = bench.open(submission("x"))
    bench.ledgers = {"a": _full(free=3), "b": other}
    for _ in range(3):
        bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
        bench.pass_us(1_000_000)
        send = bench.sent()
        assert send.session == bench.sessions["a"], "b has no room either"
        bench.take(send)


def test_who_had_to_yield_waits_for_where_it_was_rather_than_crowd_another() -> None:
    bench = Bench(RouterConfig(ahead=0.5))
    for name in "ab":
        bench.join(facts(name, slots=2))
    _, send = bench.open(submission("x"))
    bench.ledgers = {"a": _full(free=100), "b": _full()}
    bench.pass_us(200_000)
    bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
    _, other = bench.open(submission("y"))
    assert other.session == send.session
    assert not [item for item in bench.pass_us(500_000) if isinstance(item, SendAttempt)]
    bench.came(other, 1, end=STOP)
    assert bench.sent().session == send.session


def test_its_count_of_preemptions_arrival_and_priority_travel_with_it() -> None:
    bench = Bench()
    for name in "ab":
        bench.join(facts(name))
    asked = replace(submission("x", priority=3), arrived_us=77)
    _, send = bench.open(asked)
    bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED, Bill(preemptions=2)))
    bench.pass_us(1_000_000)
    send = bench.sent()
    bench.take(send)
    assert (send.group[0].seniority, send.group[0].preemptions) == ((3, 77), 2)
    bench.tell(HeartbeatCame(send.session, Heartbeat(SchedulerGauges(), 0, False, preempted=((which(send), 5),))))
    bench.tell(InstanceLost(send.session, "killed"))
    assert (bench.sent().group[0].seniority, bench.sent().group[0].preemptions) == ((3, 77), 5), "as it was reported"


@pytest.mark.parametrize(
    "end",
    [
        ended(FinishReason.RESCHEDULE, PdFault(PdCode.NOT_DELIVERED, PdStage.TRANSFER, "torn")),
        ended(FinishReason.ERROR),
        ended(FinishReason.ABORT),
    ],
)
def test_losses_are_counted_apart_and_the_first_retry_is_at_once(end: object) -> None:
    bench = Bench(RouterConfig(preempt_retry_count=0, loss_retry_count=2))
    for name in "ab":
        bench.join(facts(name))
    _, send = bench.open(submission("x"))
    for attempt in range(2):
        bench.came(send, 1, end=end)  # type: ignore[arg-type]
        if attempt:
            assert not bench.of(SendAttempt)
            bench.pass_us(1_000_000)
        assert bench.sent().session != send.session, "not where it has just failed"
        send = bench.sent()
        bench.take(send)
    bench.came(send, 1, end=end)  # type: ignore[arg-type]
    last = outcome(bench).outcome
    assert last is not None
    assert last.reason is FinishReason.RESCHEDULE
    assert last.fault is not None


def test_back_off_doubles_less_a_jitter_of_up_to_half() -> None:
    bench = Bench(RouterConfig(preempt_retry_count=8, backoff_us=20_000, backoff_us_max=100_000))
    bench.join(facts("a"))
    _, send = bench.open(submission("x"))
    waits = []
    for _ in range(5):
        bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
        begun_us = bench.now_us
        while not bench.of(SendAttempt):
            due_us = bench.router.next_deadline()
            assert due_us is not None
            bench.run_to(due_us)
        waits.append(bench.now_us - begun_us)
        send = bench.sent()
        bench.take(send)
    fulls = [20_000, 40_000, 80_000, 100_000, 100_000]
    assert all(full / 2 <= wait <= full for wait, full in zip(waits, fulls, strict=True)), waits
    assert len(set(waits)) == 5


def test_retries_beyond_the_burst_wait_their_turn() -> None:
    bench = Bench(RouterConfig(retry_burst=2, retry_rate=10))
    bench.join(facts("a", slots=8))
    bench.join(facts("b", slots=8))
    for number in range(8):
        bench.open(submission(f"x{number}", first=number))
    bench.tell(InstanceLost(Session(1), "reset"))
    at_once = len(bench.of(SendAttempt))
    assert at_once == 2
    bench.pass_us(110_000)
    assert len(bench.of(SendAttempt)) == 1
    bench.pass_us(100_000)
    assert len(bench.of(SendAttempt)) == 1


def test_nobody_waits_for_the_retry_of_a_choice_whose_client_has_left() -> None:
    bench = Bench(RouterConfig(retry_burst=1, retry_rate=1))
    bench.join(facts("a", slots=8))
    bodies = [bench.open(submission(f"x{number}", first=number))[0] for number in range(8)]
    bench.tell(InstanceLost(Session(1), "reset"))
    for body in bodies:
        bench.tell(ClientLeft(body))
    session = bench.join(facts("b", slots=8))
    bench.open(submission("y", first=9))
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("c", slots=8))
    assert len(bench.of(SendAttempt)) == 1


@pytest.mark.parametrize(
    "code", [RefusalCode.DRAINING, RefusalCode.QUEUE_FULL, RefusalCode.WRONG_ROLE, RefusalCode.DUPLICATE_ID]
)
def test_a_refusal_that_is_the_instances_own_is_not_the_clients(code: RefusalCode) -> None:
    bench = Bench(RouterConfig(preempt_retry_count=0, loss_retry_count=0))
    for name in "ab":
        bench.join(facts(name))
    bench.arrive(submission("x"))
    for _ in range(4):
        send = bench.sent()
        bench.refuse(send, code)
        assert not bench.of(RequestDeclined)
        bench.pass_us(1_000_000)
        assert bench.sent().session != send.session
    bench.take(bench.sent())
    assert bench.of(RequestOpened)
    assert not bench.ever(ForgetChoices), "a refused attempt has nothing to forget"


def test_a_refusal_that_is_about_the_request_reaches_the_client() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    body = bench.arrive(submission("x"))
    bench.refuse(bench.sent(), RefusalCode.POOL_EXCEEDED)
    (declined,) = bench.of(RequestDeclined)
    assert (declined.request, declined.refusal.code) == (body, RefusalCode.POOL_EXCEEDED)
    assert bench.router.open_requests == 0
    assert bench.router.counts.declined == {"kv_pool_exceeded": 1}


def test_once_opened_such_a_refusal_ends_nothing() -> None:
    bench = Bench(RouterConfig(preempt_retry_count=1))
    bench.join(facts("a"))
    bench.join(facts("b"))
    _, send = bench.open(submission("x"))
    bench.came(send, 1)
    bench.tell(InstanceLost(send.session, "reset"))
    for _ in range(5):
        bench.refuse(bench.sent(), RefusalCode.POOL_EXCEEDED)
        assert not bench.of(DeliverTokens)
        bench.pass_us(1_000_000)
    bench.take(bench.sent())
    assert bench.router.open_requests == 1


def test_choices_that_are_too_many_for_an_instance_go_to_it_one_by_one() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    _, send = bench.open(*choices("x", 3))
    bench.came(send, 1)
    bench.tell(InstanceLost(send.session, "reset"))
    bench.refuse(bench.sent(), RefusalCode.GROUP_TOO_LARGE)
    bench.pass_us(1_000_000)
    sent = bench.of(SendAttempt)
    assert sorted(attempt.choices for attempt in sent) == [(0,), (1,), (2,)]
    for attempt in sent:
        bench.take(attempt)
    assert bench.router.open_requests == 1


def test_a_body_whose_instances_are_lost_before_they_answer_is_declined_in_the_end() -> None:
    bench = Bench(RouterConfig(loss_retry_count=1))
    for name in "abc":
        bench.join(facts(name))
    bench.arrive(*choices("x", 2))
    for _ in range(2):
        bench.tell(InstanceLost(bench.sent().session, "reset"))
    (declined,) = bench.of(RequestDeclined)
    assert declined.refusal.code is RefusalCode.NO_INSTANCE
    assert not bench.ever(DeliverTokens)
    assert (bench.router.open_requests, bench.router.waiting) == (0, 0)


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_choice_that_is_lost_again_and_again_without_a_token_may_be_the_cause_and_ends(tokens: int) -> None:
    bench = Bench(RouterConfig(fruitless_loss_count=3))
    for number in range(9):
        bench.join(facts(f"i{number}"))
    body, send = bench.open(submission("x"))
    bench.came(send, *range(tokens))
    for _ in range(2):
        bench.tell(InstanceLost(send.session, "killed"))
        bench.pass_us(1_000_000)
        send = bench.ever(SendAttempt)[-1]
        bench.take(send)
    bench.tell(InstanceLost(send.session, "killed"))
    last = outcome(bench).outcome
    assert last is not None
    assert (last.reason, last.generated_tokens) == (FinishReason.RESCHEDULE, tokens)
    assert bench.delivered(body) == list(range(tokens))


def test_a_choice_that_gets_on_between_its_losses_is_not_the_cause() -> None:
    bench = Bench(RouterConfig(fruitless_loss_count=2))
    for number in range(9):
        bench.join(facts(f"i{number}"))
    body, send = bench.open(submission("x"))
    for _ in range(8):
        bench.came(send, 1)
        bench.tell(InstanceLost(send.session, "killed"))
        bench.pass_us(1_000_000)
        send = bench.ever(SendAttempt)[-1]
        bench.take(send)
    bench.came(send, 1, end=STOP)
    assert bench.delivered(body) == [1] * 9


def test_a_choice_that_waits_where_the_connection_breaks_is_not_the_cause() -> None:
    bench = Bench(RouterConfig(fruitless_loss_count=2))
    session = bench.join(facts("a"))
    body, _ = bench.open(*choices("x", 1))
    for _ in range(9):
        bench.tell(InstanceLost(session, "reset"))
        session = bench.join(facts("a"), held(41))
    assert not bench.ever(DeliverTokens)[0].outcome
    bench.tell(InstanceLost(session, "reset"))
    bench.pass_us(5_000_000)
    bench.join(facts("b"))
    for _ in range(9):
        bench.refuse(bench.ever(SendAttempt)[-1], RefusalCode.QUEUE_FULL)
        bench.pass_us(1_000_000)
    bench.take(bench.ever(SendAttempt)[-1])
    bench.came(bench.ever(SendAttempt)[-1], 1, end=STOP)
    assert bench.delivered(body) == [1]


# ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_beyond_the_slots_newcomers_wait_here_in_the_order_of_priority_and_arrival() -> None:
    bench = Bench(RouterConfig(ahead=1))
    bench.join(facts("a", slots=1))
    _, send = bench.open(submission("x"))
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        bench.arrive(submission(name, priority=priority))
        assert not bench.of(SendAttempt)
    assert bench.router.waiting == 3
    order = []
    for _ in range(3):
        bench.came(send, 1, end=STOP)
        send = bench.sent()
        order.append(send.group[0].request_id)
        bench.take(send)
    assert order == ["first", "second", "late"]


def test_a_full_line_refuses_newcomers_but_not_those_who_find_a_place() -> None:
    bench = Bench(RouterConfig(ahead=1, waiting_max=1))
    bench.join(facts("a", slots=2))
    bench.arrive(*choices("x", 2))
    assert bench.of(SendAttempt), "it waits for nothing, so the line is no matter"
    bench.arrive(submission("y"))
    assert not bench.of(RequestDeclined)
    bench.arrive(submission("z"))
    (declined,) = bench.of(RequestDeclined)
    assert (declined.refusal.code, declined.refusal.retry_after_s) == (RefusalCode.QUEUE_FULL, 1)
    assert bench.router.waiting == 1


def test_accepted_requests_that_wait_for_another_instance_keep_no_newcomers_out() -> None:
    bench = Bench(RouterConfig(ahead=1, waiting_max=1))
    large = bench.join(facts("large", slots=4, blocks=200, context=2000))
    bench.open(*choices("x", 3, max_tokens=1500))
    bench.join(facts("small", slots=1))
    bench.tell(InstanceLost(large, "gone for good"))
    assert bench.router.waiting == 3
    bench.open(submission("y"))
    bench.arrive(submission("z"))
    assert not bench.of(RequestDeclined), "one may wait"
    bench.arrive(submission("zz"))
    assert bench.of(RequestDeclined)
    assert bench.router.waiting == 4


def test_without_anybody_who_serves_a_body_waits_a_while_and_is_declined() -> None:
    bench = Bench(RouterConfig(absent_us=5_000_000))
    bench.join(facts("p", "prefill"))
    bench.pass_us(20_000_000)
    first = bench.arrive(submission("x"))
    bench.pass_us(3_000_000)
    second = bench.arrive(submission("y"))
    bench.pass_us(2_500_000)
    assert [(item.request, item.refusal.code) for item in bench.of(RequestDeclined)] == [(first, RefusalCode.NO_INSTANCE)]
    bench.join(facts("a"))
    bench.take(bench.sent())
    assert bench.of(RequestOpened) == [RequestOpened(second)]


def test_who_has_tokens_waits_for_an_instance_until_the_deadline() -> None:
    bench = Bench(RouterConfig(absent_us=1_000_000, deadline_us=30_000_000))
    bench.join(facts("a"))
    _, send = bench.open(submission("x"))
    bench.came(send, 1)
    bench.tell(InstanceLost(send.session, "reset"))
    assert not bench.pass_us(29_000_000)
    bench.pass_us(2_000_000)
    last = outcome(bench).outcome
    assert last is not None
    assert last.fault is not None
    assert (last.reason, last.fault.code) == (FinishReason.RESCHEDULE, PdCode.NOT_DELIVERED)
    assert bench.router.open_requests == 0


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_the_client_leaves_the_instance_is_called_back_and_every_choice_ends_once() -> None:
    bench = Bench()
    bench.join(facts("a"))
    body, send = bench.open(*choices("x", 2))
    bench.came(send, 1, nth=1, end=STOP)
    bench.tell(ClientLeft(body))
    assert bench.of(CancelChoices) == [CancelChoices(send.session, send.attempt, (0,))]
    assert [(item.choice, item.outcome and item.outcome.reason) for item in bench.of(DeliverTokens)] == [
        (0, FinishReason.ABORT)
    ]
    assert bench.of(ForgetChoices)
    bench.came(send, 2)
    bench.tell(ClientLeft(body))
    assert bench.last == []
    assert bench.router.counts.late == 2


def test_a_body_that_is_left_before_it_was_taken_gets_no_answer() -> None:
    bench = Bench()
    bench.join(facts("a"))
    body = bench.arrive(submission("x"))
    send = bench.sent()
    bench.tell(ClientLeft(body))
    assert bench.of(CancelChoices) == [CancelChoices(send.session, send.attempt, (0,))]
    bench.take(send)
    assert not bench.ever(RequestOpened)
    assert not bench.ever(DeliverTokens)


def test_a_cut_choice_gives_no_more_tokens_and_ends_with_the_bill() -> None:
    bench = Bench()
    bench.join(facts("a"))
    body, send = bench.open(submission("x"))
    bench.came(send, 1, 2, 3)
    bench.tell(StopStringFound(body, 0, 2))
    assert bench.of(StopChoice) == [StopChoice(send.session, which(send), 2)]
    bench.came(send, 4)
    assert bench.last == []
    bench.came(send, end=ended(FinishReason.STOP, bill=Bill(computed_tokens=42)))
    last = outcome(bench).outcome
    assert last is not None
    assert (last.reason, last.generated_tokens, last.bill.computed_tokens) == (FinishReason.STOP, 2, 42)


@pytest.mark.parametrize("when", ["waiting", "sent", "cut"])
def test_a_cut_choice_needs_no_instance_any_more(when: str) -> None:
    bench = Bench()
    bench.join(facts("a"))
    body, send = bench.open(submission("x"))
    bench.came(send, 1, 2)
    if when == "cut":
        bench.tell(StopStringFound(body, 0, 1))
    if when == "sent":
        bench.join(facts("b"))
    bench.tell(InstanceLost(send.session, "reset"))
    if when != "cut":
        bench.tell(StopStringFound(body, 0, 1))
    last = outcome(bench).outcome
    assert last is not None
    assert (last.reason, last.generated_tokens) == (FinishReason.STOP, 1)
    assert len(bench.of(CancelChoices)) == (when == "sent")
    assert bench.router.open_requests == 0


def test_at_its_deadline_what_no_instance_has_accepted_ends_and_the_rest_goes_on() -> None:
    bench = Bench(RouterConfig(deadline_us=2_000_000))
    bench.join(facts("a"))
    bench.join(facts("b"))
    body, send = bench.open(*choices("x", 3))
    bench.came(send, 1, nth=0)
    bench.came(send, 2, nth=1)
    bench.came(send, 2, nth=1, end=ended(FinishReason.ERROR))
    unanswered = bench.arrive(submission("y"))
    bench.pass_us(2_000_000)
    assert [item.request for item in bench.ever(RequestDeclined)] == [unanswered]
    assert not [item for item in bench.ever(DeliverTokens) if item.outcome is not None]
    assert not bench.pass_us(10_000_000), "the router sleeps from beat to beat"
    bench.came(send, 3, nth=0)
    assert bench.delivered(body, 0) == [1, 3]


@pytest.mark.parametrize("how", ["lost", "preempted", "drained"])
def test_after_its_deadline_an_accepted_request_moves_once_more_and_resumes_in_place(how: str) -> None:
    bench = Bench(RouterConfig(deadline_us=2_000_000, drain_us=500_000))
    bench.join(facts("a"))
    bench.join(facts("b"))
    body, send = bench.open(submission("x"))
    assert not send.group[0].resumes_in_place
    bench.came(send, 1)
    bench.pass_us(3_000_000)
    if how == "lost":
        bench.tell(InstanceLost(send.session, "killed"))
    elif how == "preempted":
        bench.came(send, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
    else:
        bench.tell(InstanceDrains(bench.router.fleet.members[send.session].name))
    bench.pass_us(1_000_000)
    again = bench.ever(SendAttempt)[-1]
    assert again.session != send.session
    assert again.group[0].resumes_in_place
    bench.take(again)
    bench.came(again, 2, end=STOP)
    assert bench.delivered(body) == [1, 2]


def test_what_has_begun_waits_for_an_instance_that_can_hold_it_and_holds_up_nobody() -> None:
    bench = Bench()
    big = bench.join(facts("big", slots=32))
    bodies = [bench.open(submission(f"x{number}", 100, max_tokens=200)) for number in range(20)]
    for _, send in bodies:
        bench.came(send, 1)
    bench.join(facts("small", context=64))
    bench.tell(InstanceLost(big, "killed"))
    assert not any(isinstance(item, SendAttempt | DeliverTokens) for item in bench.pass_us(2_000_000))
    bench.arrive(submission("short", 10, max_tokens=10))
    assert bench.sent().session == bench.sessions["small"]
    bench.join(facts("big", slots=32))
    bench.pass_us(bench.config.beat_us)
    assert len(bench.of(SendAttempt)) == 20
    assert {send.session for send in bench.of(SendAttempt)} == {bench.sessions["big"]}


def test_a_tenant_has_no_more_open_than_it_may_and_pays_for_its_tokens() -> None:
    bench = Bench(RouterConfig(key_concurrency=2, key_tokens_per_minute=60))
    bench.join(facts("a"))
    body, send = bench.open(*choices("x", 2, tokens=30))
    bench.arrive(submission("y"))
    (declined,) = bench.of(RequestDeclined)
    assert (declined.refusal.code, declined.refusal.retry_after_s) == (RefusalCode.RATE_LIMITED, 1)
    bench.arrive(submission("other"), tenant="another")
    assert bench.of(SendAttempt)
    bench.came(send, *range(40), nth=0, end=STOP)
    bench.tell(ClientLeft(body))
    bench.arrive(submission("z"))
    (declined,) = bench.of(RequestDeclined)
    assert (declined.refusal.code, declined.refusal.retry_after_s) == (RefusalCode.RATE_LIMITED, 10)
    bench.pass_us(11_500_000)
    bench.arrive(submission("z"))
    assert bench.of(SendAttempt)


# ── details of an attempt───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_absent_limit_is_the_same_on_all_legs() -> None:
    bench = Bench()
    bench.join(facts("a", context=512))
    bench.join(facts("b", context=300))
    _, send = bench.open(submission("x", 40, max_tokens=None))
    assert send.group[0].max_tokens == 260
    bench.join(facts("c", context=100))
    bench.came(send, 1)
    bench.tell(InstanceLost(send.session, "reset"))
    assert bench.sent().group[0].max_tokens == 260


def test_who_prefills_is_named_and_those_who_decode_are_told_of_all() -> None:
    bench = Bench()
    bench.join(facts("d", "decode"))
    bench.join(facts("p", "prefill"))
    bench.join(facts("q", "prefill"))
    first = bench.arrive(submission("x"))
    chosen = bench.sent().group[0].prefill_at
    bench.arrive(submission("y", first=500))
    assert {chosen, bench.sent().group[0].prefill_at} == {"p:7000", "q:7000"}
    assert {view.facts.name: view.prefill_tokens for view in bench.router.views()} == {"d": 0, "p": 40, "q": 40}
    bench.tell(ClientLeft(first))
    assert sorted(view.prefill_tokens for view in bench.router.views()) == [0, 0, 40]


def test_bills_of_all_legs_are_summed_and_what_is_computed_again_says_so() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    _, send = bench.open(submission("x", 40))
    first = Bill(cached_tokens=16, computed_tokens=26, queue_us=5, prefill_us=7, decode_us=1, attempts=1)
    bench.came(send, 1, 2, cached=16, end=ended(FinishReason.RESCHEDULE, PREEMPTED, first))
    bench.pass_us(1_000_000)
    again = bench.sent()
    bench.take(again)
    second = Bill(cached_tokens=0, computed_tokens=44, recomputed_tokens=1, queue_us=10, attempts=3)
    bench.came(again, 3, cached=0, end=ended(FinishReason.STOP, bill=second))
    last = outcome(bench)
    assert last.cached_tokens is None, "said once, of the first attempt"
    assert last.outcome is not None
    assert last.outcome.bill == Bill(
        cached_tokens=16, computed_tokens=28, recomputed_tokens=43, queue_us=15, prefill_us=7, decode_us=1, attempts=2
    )


def test_phases_come_to_the_timeline_also_when_the_leg_is_over() -> None:
    bench = Bench()
    bench.join(facts("d", "decode"))
    bench.join(facts("p", "prefill"))
    body, send = bench.open(submission("x"))

    def note(phase: str, ago_us: int) -> list[tuple[TimelineStage, str | None, int, str]]:
        bench.tell(
            HeartbeatCame(
                send.session, Heartbeat(SchedulerGauges(), 0, True, notes=(PhaseReport(which(send), phase, ago_us),))
            )
        )
        return [(item.stage, item.where, bench.now_us - item.at_us, item.why) for item in bench.of(TimelineNoted)]

    assert note("WAITING", 5) == []
    assert note("RECEIVING", 4) == [(TimelineStage.HANDOVER, "d", 4, "from p")]
    assert note("RUNNING_DECODE", 3) == [(TimelineStage.DECODE, "d", 3, "")]
    assert note("WAITING", 2) == [(TimelineStage.PREEMPTED, "d", 2, "")]
    bench.came(send, 1, end=STOP)
    assert note("RUNNING_DECODE", 1) == [(TimelineStage.DECODE, "d", 1, "")]
    bench.tell(ClientLeft(body))


# ── late, or never ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_late_is_counted_and_means_nothing() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    body, send = bench.open(submission("x"))
    bench.tell(InstanceLost(send.session, "reset"))
    again = bench.sent()
    late = [
        TokensCame(send.session, which(send), [1]), TokensCame(again.session, which(send), [1]),
        TokensCame(again.session, which(again)._replace(choice=5), [1]),
        TokensCame(again.session, which(again), [1]), AttemptAccepted(send.session, send.attempt),
        InstanceLost(send.session, "again"),
        ClientLeft(type(body)(99)), StopStringFound(type(body)(99), 0, 1), StopStringFound(body, 7, 1),
    ]  # fmt: skip
    for event in late:
        assert bench.tell(event) == [], event
    assert bench.router.counts.late == len(late)


def test_a_leg_that_was_taken_cannot_be_refused() -> None:
    bench = Bench()
    bench.join(facts("a"))
    body, send = bench.open(submission("x"))
    bench.refuse(send, RefusalCode.QUEUE_FULL)
    assert bench.last == []
    bench.came(send, 1, end=STOP)
    assert bench.delivered(body) == [1]
    assert bench.of(ForgetChoices)


def test_a_leg_that_is_refused_after_its_choices_were_cut_has_nothing_to_forget() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    body, first = bench.open(*choices("x", 2))
    bench.came(first, 1, nth=0, end=ended(FinishReason.ERROR))
    again = bench.sent()
    bench.tell(StopStringFound(body, 0, 1))
    assert bench.of(CancelChoices) == [CancelChoices(again.session, again.attempt, (0,))]
    bench.refuse(again, RefusalCode.QUEUE_FULL)
    bench.came(first, 1, nth=1, end=STOP)
    assert bench.of(ForgetChoices) == [ForgetChoices(first.session, first.attempt)]


def test_a_body_arrives_once() -> None:
    bench = Bench()
    bench.arrive(submission("x"))
    bench._bodies = 0
    with pytest.raises(InvariantViolated):
        bench.arrive(submission("x"))
