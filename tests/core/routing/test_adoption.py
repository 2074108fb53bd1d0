"""What instances held for a router that lost sight of it: kept, delivered, claimed or dropped."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.request import FinishReason, Serial
from baton.core.routing import adoption as adopting
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    AdmitInstance,
    AttemptAccepted,
    CancelChoices,
    ClientLeft,
    DeliverTokens,
    ForgetChoices,
    InstanceLost,
    RequestClaimed,
    RequestOpened,
    SendAttempt,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.identity import RequestNumber
from baton.core.routing.routed_requests import digest_of
from tests.support.routing import PREEMPTED, Bench, choices, ended, facts, held, submission

RESCHEDULED = ended(FinishReason.RESCHEDULE, PREEMPTED)


def admitted(bench: Bench) -> AdmitInstance:
    (admit,) = bench.of(AdmitInstance)
    return admit


# ── our own ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_lost_connection_a_choice_goes_on_where_it_is_and_the_missing_tokens_are_delivered() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    body, send = bench.open(*choices("x", 1))
    bench.came(send, 5, 6)
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("a"), held(41, 5, 6, 7, 8))
    ((serial, kept),) = admitted(bench).keep
    assert (serial, kept.choice) == (41, 0)
    assert bench.last[0] == admitted(bench), "nothing names the attempt before it"
    assert bench.of(DeliverTokens) == [DeliverTokens(body, 0, [7, 8], ["lp7", "lp8"], 16, None)]
    assert not bench.of(SendAttempt)
    bench.came(replace(send, session=bench.sessions["a"], attempt=kept.group), 9, end=ended(FinishReason.STOP))
    assert bench.delivered(body) == [5, 6, 7, 8, 9]
    assert [item.attempt for item in bench.of(ForgetChoices)] == [kept.group]


def test_a_choice_that_is_found_where_it_was_has_used_up_no_retry() -> None:
    bench = Bench(RouterConfig(retry_burst=1, retry_rate=1))
    session = bench.join(facts("a", slots=8))
    for _ in range(3):
        bench.open(*choices("x", 1))
    kept = [held(41 + number, origin=f"origin {1 + number}".encode()) for number in range(3)]
    for _ in range(10):
        bench.tell(InstanceLost(session, "reset"))
        session = bench.join(facts("a", slots=8), *kept)
        assert len(admitted(bench).keep) == 3
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("b", slots=8))
    bench.pass_us(2_100_000)
    assert len(bench.ever(SendAttempt)) == 3 + 3, "one at once, and one a second"


def test_an_end_after_fewer_tokens_than_came_is_the_cut_of_a_client_whose_router_was_lost() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    _, send = bench.open(*choices("x", 1))
    bench.came(send, 5, 6)
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("a"), held(41, 5, 6, 7, 8))
    ((_, kept),) = admitted(bench).keep
    end = msgspec.structs.replace(ended(FinishReason.STOP), generated_tokens=3)
    bench.came(replace(send, session=bench.sessions["a"], attempt=kept.group), end=end)
    outcomes = [item.outcome for item in bench.of(DeliverTokens) if item.outcome is not None]
    assert [outcome.generated_tokens for outcome in outcomes] == [3]


def test_a_session_that_replaces_another_brings_its_choices_along() -> None:
    bench = Bench()
    bench.join(facts("b"))
    bench.join(facts("a"))
    body, send = bench.open(*choices("x", 1))
    bench.came(send, 5)
    name = bench.router.fleet.members[send.session].name
    bench.join(facts(name), held(41, 5))
    assert [serial for serial, _ in admitted(bench).keep] == [41]
    assert not bench.of(SendAttempt)
    assert bench.router.requests()[0].choices[0].losses == 0
    assert bench.delivered(body) == [5]


def test_what_ended_meanwhile_is_delivered_with_its_end() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    body, send = bench.open(*choices("x", 1))
    bench.came(send, 5)
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("a"), held(41, 5, 6, end=EndedRequest(Serial(0), FinishReason.STOP, 2, Bill(computed_tokens=42))))
    (last,) = bench.of(DeliverTokens)
    assert (last.tokens, last.outcome and last.outcome.reason) == ([6], FinishReason.STOP)
    assert last.outcome is not None
    assert last.outcome.bill.computed_tokens == 42
    assert bench.of(ForgetChoices)
    assert bench.delivered(body) == [5, 6]


@pytest.mark.parametrize("heard", [True, False])
def test_an_end_that_an_instance_reports_at_every_join_is_billed_once(heard: bool) -> None:
    """It keeps the end of an attempt until the request is over; `heard`: it came before the connection was lost."""
    bench = Bench(RouterConfig(preempt_retry_count=1))
    session = bench.join(facts("a"))
    body, send = bench.open(*choices("x", 1))
    end = ended(FinishReason.RESCHEDULE, PREEMPTED, Bill(preemptions=1, queue_us=7))
    bench.came(send, 5, end=end if heard else None)
    for _ in range(3):
        bench.tell(InstanceLost(session, "reset"))
        session = bench.join(facts("a"), held(41, 5, end=end))
    bench.pass_us(2_000_000)
    (again,) = bench.of(SendAttempt)
    assert again.group[0].resumes_in_place, "it has used up its one move"
    assert again.group[0].preemptions == 1
    bench.take(again)
    bench.came(again, 6, end=ended(FinishReason.STOP, bill=Bill(queue_us=5)))
    (last,) = [item.outcome for item in bench.of(DeliverTokens) if item.outcome is not None]
    assert (last.bill.preemptions, last.bill.queue_us) == (1, 12)
    assert bench.delivered(body) == [5, 6]


def test_an_end_of_another_attempt_at_the_same_instance_is_billed_too() -> None:
    bench = Bench(RouterConfig(preempt_retry_count=3, backoff_us=1, backoff_us_max=1))
    bench.join(facts("a"))
    _, send = bench.open(*choices("x", 1))
    end = ended(FinishReason.RESCHEDULE, PREEMPTED, Bill(preemptions=1, queue_us=7))
    bench.came(send, end=end)
    bench.pass_us(100_000)
    (again,) = bench.of(SendAttempt)
    bench.take(again)
    bench.tell(InstanceLost(again.session, "reset"))
    second = msgspec.structs.replace(choices("x", 1)[0], preemptions=1)
    other = msgspec.structs.replace(end, serial=Serial(42))
    bench.join(facts("a"), replace(held(42, end=other), submission=second, preemptions=2))
    bench.pass_us(2_000_000)
    third = bench.ever(SendAttempt)[-1]
    assert third.group[0].preemptions == 2
    bench.take(third)
    bench.came(third, 6, end=ended(FinishReason.STOP))
    (last,) = [item.outcome for item in bench.of(DeliverTokens) if item.outcome is not None]
    assert (last.bill.preemptions, last.bill.queue_us) == (2, 14)


def test_an_instance_that_was_lost_before_it_could_say_that_it_took_a_body_has_opened_it() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    body = bench.arrive(*choices("x", 1))
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("a"), held(41, 5))
    assert bench.of(RequestOpened) == [RequestOpened(body)]
    assert bench.delivered(body) == [5]


def test_what_is_elsewhere_by_now_or_differs_or_is_over_is_not_kept() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    _, send = bench.open(*choices("x", 1))
    bench.came(send, 5, 6)
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("c"), held(40, 5), held(41, 5, 7, 8))
    assert admitted(bench).keep == (), "less than was delivered, and something else"
    moved = bench.sent()
    bench.join(facts("a"), held(42, 5, 6, 7))
    assert admitted(bench).keep == (), "it was sent elsewhere"
    bench.take(moved)
    bench.came(moved, 7, end=ended(FinishReason.STOP))
    bench.join(facts("d"), held(43, 5, 6, 7))
    assert admitted(bench).keep == (), "its body is over, not an orphan"
    assert not bench.ever(UnclaimedFound)


def test_what_was_preempted_elsewhere_meanwhile_is_sent_anew_with_its_count() -> None:
    bench = Bench(RouterConfig(preempt_retry_exclude_decode=False))
    session = bench.join(facts("a"))
    _, send = bench.open(*choices("x", 1))
    bench.came(send, 5)
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("b"))
    moved = bench.sent()
    bench.take(moved)
    bench.came(moved, 6, end=ended(FinishReason.RESCHEDULE, PREEMPTED, Bill(preemptions=1)))
    bench.join(facts("a"), held(41, 5, 6, 7))
    assert admitted(bench).keep == (), "the instance does not know of the preemption, and might preempt it again"
    bench.pass_us(1_000_000)
    sent = bench.ever(SendAttempt)[-1].group[0]
    assert (sent.preemptions, sent.generated.tolist()) == (1, [5, 6])


def test_an_origin_is_hashed_once_however_many_of_its_choices_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    monkeypatch.setattr(adopting, "digest_of", lambda origin: hashed.append(origin) or digest_of(origin))
    bench = Bench()
    two = [held(number, 5, choice=number, of=8) for number in range(8)]
    bench.join(facts("a"), *two, *(held(8 + number, 6, choice=number, of=4, origin=b"origin 2") for number in range(4)))
    assert len(admitted(bench).keep) == 12
    assert hashed == [b"origin 1", b"origin 2"]


# ── orphans ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def orphaned(bench: Bench) -> UnclaimedFound:
    (orphan,) = bench.of(UnclaimedFound)
    return orphan


def test_a_body_that_nobody_knows_is_an_orphan_that_goes_on_until_somebody_claims_it() -> None:
    bench = Bench()
    session = bench.join(facts("a"), held(41, 5, 6, before=(3, 4), of=2, choice=1))
    orphan = orphaned(bench)
    assert (orphan.origin, orphan.delivered) == (b"origin 1", (None, (3, 4, 5, 6)))
    assert (orphan.extras, orphan.outcomes) == (((), ("lp5", "lp6")), (None, None))
    ((_, kept),) = admitted(bench).keep
    bench.tell(RequestClaimed(orphan.request))
    send = SendAttempt(session, kept.group, (), (1,), 2, b"")
    bench.came(send, 7)
    assert bench.of(DeliverTokens) == [DeliverTokens(orphan.request, 1, [7], None, None, None)]
    bench.pass_us(bench.config.orphan_grace_us + 400_000)
    (gone,) = bench.of(DeliverTokens)
    assert (gone.choice, gone.outcome and gone.outcome.reason) == (0, FinishReason.RESCHEDULE), "nobody had told of it"
    bench.came(send, 8, end=ended(FinishReason.STOP))
    assert bench.router.open_requests == 0
    assert not bench.ever(UnclaimedDropped)


def test_a_later_join_completes_an_orphan_and_the_longest_history_wins() -> None:
    bench = Bench()
    bench.join(facts("a"), held(1, 5, of=2), held(2, 7, choice=1, of=2, end=RESCHEDULED))
    orphan = orphaned(bench)
    assert orphan.delivered == ((5,), (7,))
    bench.join(facts("b"), held(3, 8, choice=1, of=2, before=(7,)))
    assert not bench.of(UnclaimedFound)
    assert [serial for serial, _ in admitted(bench).keep] == [3]
    assert bench.of(DeliverTokens) == [DeliverTokens(orphan.request, 1, [8], ["lp8"], None, None)]
    bench.join(facts("c"), held(4, choice=1, of=2, before=(7,)), held(5, 6, 9, of=2, before=(5,)))
    assert [serial for serial, _ in admitted(bench).keep] == [5]
    assert len(bench.of(CancelChoices)) == 1, "the shorter history of choice 0 is not needed any more"
    assert bench.of(DeliverTokens) == [DeliverTokens(orphan.request, 0, [6, 9], ["lp6", "lp9"], None, None)]


def test_of_two_histories_in_one_join_the_longer_is_kept() -> None:
    bench = Bench()
    bench.join(facts("a"), held(1, 5, end=RESCHEDULED), held(2, 6, before=(5,)))
    assert [serial for serial, _ in admitted(bench).keep] == [2]
    assert orphaned(bench).delivered == ((5, 6),)


def test_an_orphan_whose_attempt_had_ended_is_carried_on() -> None:
    bench = Bench()
    bench.join(facts("a"), held(1, 5, 6, end=RESCHEDULED))
    assert not bench.of(SendAttempt), "another instance may be about to tell that it is further"
    bench.pass_us(1_100_000)
    send = bench.sent()
    assert (send.group[0].generated.tolist(), send.origin) == ([5, 6], b"origin 1")
    bench.take(send)
    assert not bench.of(RequestOpened)


def test_an_orphan_is_carried_on_when_its_instance_is_lost() -> None:
    bench = Bench()
    bench.join(facts("b"))
    session = bench.join(facts("a"), held(1, 5, 6))
    bench.tell(InstanceLost(session, "reset"))
    assert bench.sent().group[0].generated.tolist() == [5, 6]


def test_an_orphan_that_nobody_claims_is_cancelled_and_dropped() -> None:
    bench = Bench(RouterConfig(orphan_grace_us=2_000_000))
    session = bench.join(facts("a"), held(1, 5), held(2, 6, origin=b"origin 2", end=ended(FinishReason.STOP)))
    first, second = bench.of(UnclaimedFound)
    bench.tell(RequestClaimed(second.request))
    assert bench.of(ForgetChoices), "it had ended, and its client has everything"
    bench.pass_us(2_300_000)
    assert bench.of(UnclaimedDropped) == [UnclaimedDropped(first.request)]
    assert [item.session for item in bench.of(CancelChoices)] == [session]
    assert not bench.of(DeliverTokens)
    assert bench.tell(RequestClaimed(first.request)) == []
    assert bench.router.open_requests == 0


def test_choices_that_no_instance_holds_begin_anew_when_it_is_known_what_was_asked() -> None:
    bench = Bench()
    bench.join(facts("a"), held(1, 5, of=2))
    orphan = orphaned(bench)
    bench.tell(RequestClaimed(orphan.request, choices("x", 2)))
    bench.pass_us(1_100_000)
    send = bench.sent()
    assert (send.choices, send.group[0].generated.tolist(), send.group[0].leader) == ((1,), [], None)
    bench.tell(AttemptAccepted(send.session, send.attempt))
    bench.came(send, 8)
    assert bench.of(DeliverTokens)[0].request == orphan.request


def test_a_client_may_leave_an_orphan() -> None:
    bench = Bench()
    bench.join(facts("a"), held(1, 5))
    orphan = orphaned(bench)
    bench.tell(RequestClaimed(orphan.request))
    bench.tell(ClientLeft(orphan.request))
    assert bench.of(CancelChoices)
    assert bench.router.open_requests == 0


def test_what_makes_no_sense_is_not_kept() -> None:
    bench = Bench()
    odd = replace(held(3, 5, of=2), choice=2)
    bench.join(facts("a"), held(1, 5, origin=b""), odd, held(4, 5, of=2), held(5, 5, choice=0, of=1))
    assert [serial for serial, _ in admitted(bench).keep] == [4]


def test_numbers_of_orphans_are_nobodys() -> None:
    bench = Bench()
    bench.join(facts("a"), held(1, 5), held(2, 5, origin=b"origin 9"))
    assert [item.request for item in bench.of(UnclaimedFound)] == [RequestNumber(-1), RequestNumber(-2)]
    assert bench.arrive(submission("y"), origin=b"new") == RequestNumber(1)
