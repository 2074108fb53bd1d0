"""Who belongs to a router's fleet, for how long, and who is told."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.config import BadConfig
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import FinishReason
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    AdmitInstance,
    CancelChoices,
    ClientLeft,
    CloseSession,
    DeadlineCame,
    DeliverTokens,
    FleetChanged,
    Heartbeat,
    HeartbeatCame,
    Instance,
    InstanceDrains,
    InstanceJoined,
    InstanceLost,
    MessageCame,
    OrderDrain,
    RejectInstance,
    SendAttempt,
    Session,
    TellPrefillPeers,
)
from baton.core.routing.fleet_members import FENCE_US, SECOND_LOOK_US, FleetMembers, MemberMove
from baton.core.routing.identity import AttemptId
from baton.core.routing.router import SETTLE_US
from tests.support.routing import Bench, ended, facts, held, submission, which


def changes(bench: Bench) -> list[tuple[str, str]]:
    return [(item.name, item.what) for item in bench.of(FleetChanged)]


# ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"fingerprint": b"other"}, (b"model".hex(), b"other".hex())),
        ({"vocabulary": 77}, ("923 fewer",)),
        ({"block_size": 32}, ("32", "16")),
        ({"role": "observer"}, ("observer", "mixed, prefill, decode")),
    ],
)
def test_who_does_not_fit_is_turned_away_and_told_both_values(change: dict[str, object], values: tuple[str, str]) -> None:
    bench = Bench()
    bench.join(facts("a"))
    session = bench.join(replace(facts("b"), **change))  # type: ignore[arg-type]
    (turned,) = bench.of(RejectInstance)
    assert (turned.session, turned.fenced) == (session, False)
    assert all(value in turned.reason for value in values), turned.reason
    assert [view.facts.name for view in bench.router.views()] == ["a"]
    assert changes(bench) == [("b", "refused")]


def test_another_model_may_come_when_nobody_serves_the_first_and_nothing_was_begun_with_it() -> None:
    bench = Bench()
    other = replace(facts("b"), fingerprint=b"other")
    first = bench.join(facts("a"))
    _, send = bench.open(submission("x"))
    bench.came(send, 1)
    bench.tell(InstanceLost(first, "reset"))
    bench.join(other)
    assert bench.of(RejectInstance), "a body that was begun with the first model waits for it"
    again = bench.join(facts("a"))
    bench.take(bench.sent())
    bench.came(bench.ever(SendAttempt)[-1], 2, end=ended(FinishReason.STOP))
    bench.tell(InstanceLost(again, "reset"))
    bench.join(other)
    assert bench.of(AdmitInstance)


def test_an_older_life_is_fenced_and_a_newer_one_takes_its_place() -> None:
    bench = Bench()
    bench.join(facts("b"))
    bench.join(facts("a", incarnation=5))
    _, send = bench.open(submission("x"))
    old = bench.join(facts("a", incarnation=4))
    assert bench.of(RejectInstance) == [RejectInstance(old, bench.of(RejectInstance)[0].reason, True, known_incarnation=5)]
    assert "5" in bench.of(RejectInstance)[0].reason
    assert changes(bench) == [("a", "fenced")]
    bench.join(facts(str(bench.router.fleet.members[send.session].name), incarnation=6))
    assert [item.session for item in bench.of(CloseSession)] == [send.session]
    assert bench.of(SendAttempt), "what the earlier life had goes on"


def test_an_older_life_is_fenced_also_when_the_newer_one_has_just_gone() -> None:
    bench = Bench()
    session = bench.join(facts("a", incarnation=5))
    bench.tell(InstanceLost(session, "reset"))
    bench.join(facts("a", incarnation=4))
    assert bench.of(RejectInstance)[0].fenced
    bench.join(facts("a", incarnation=5))
    assert bench.of(AdmitInstance)


@pytest.mark.parametrize("other", [{"pid": 2}, {"url": "http://elsewhere"}])
def test_a_name_whose_holder_lives_is_not_given_to_another_process(other: dict[str, object]) -> None:
    bench = Bench()
    holder = bench.join(replace(facts("a"), pid=1, url="http://here"))
    newcomer = replace(facts("a", incarnation=2), pid=1, url="http://here")
    second = bench.join(replace(newcomer, **other))  # type: ignore[arg-type]
    assert bench.of(RejectInstance) == [
        RejectInstance(second, "a is there already, at http://here; give another --name", fenced=False)
    ]
    assert list(bench.router.fleet.members) == [holder]
    bench.sessions["a"] = holder
    bench.pass_us(1_000_000)
    assert list(bench.router.fleet.members) == [holder], "it beats"
    bench.join(newcomer)
    assert bench.of(AdmitInstance), "the same process, as far as anybody can tell"


def test_a_restarted_instance_gets_its_name_when_its_old_life_has_been_silent_for_its_time() -> None:
    bench = Bench()
    bench.join(replace(facts("a"), pid=1))
    waited_us = 0
    bench.join(replace(facts("a", incarnation=2), pid=2))
    while not bench.of(AdmitInstance):
        assert bench.of(RejectInstance)
        bench.pass_us(100_000, "a")
        waited_us += 100_000
        bench.join(replace(facts("a", incarnation=2), pid=2))
    assert waited_us <= RouterConfig().suspect_us + RouterConfig().beat_us


def test_another_model_is_turned_away_also_when_nobody_is_there() -> None:
    bench = Bench(RouterConfig(model="smollm2", model_mark=b"mod"))
    bench.join(replace(facts("b"), fingerprint=b"other"))
    assert "its model is not smollm2" in bench.of(RejectInstance)[0].reason
    bench.join(facts("a"))
    assert bench.of(AdmitInstance)


def test_after_a_while_an_older_life_is_one_whose_clock_was_set_back() -> None:
    bench = Bench()
    session = bench.join(facts("a", incarnation=5))
    bench.pass_us(2 * FENCE_US)
    bench.join(facts("a", incarnation=4))
    assert bench.of(RejectInstance)[0].fenced, "the newer one is still there"
    bench.tell(InstanceLost(session, "reset"))
    bench.now_us += FENCE_US - 1
    bench.join(facts("a", incarnation=4))
    assert bench.of(RejectInstance)[0].fenced
    bench.now_us += 1
    bench.join(facts("a", incarnation=4))
    assert bench.of(AdmitInstance)
    bench.join(facts("a", incarnation=5))
    bench.join(facts("a", incarnation=4))
    assert bench.of(RejectInstance)[0].fenced, "it has come back after all"


def test_a_session_is_replaced_by_a_newer_one_of_the_same_life() -> None:
    bench = Bench()
    first = bench.join(facts("a"))
    second = bench.join(facts("a"))
    assert [item.session for item in bench.of(CloseSession)] == [first]
    assert list(bench.router.fleet.members) == [second]
    assert bench.tell(InstanceLost(first, "reset")) == []
    assert list(bench.router.fleet.members) == [second]


def test_names_of_the_past_are_bounded() -> None:
    fleet = FleetMembers(RouterConfig())
    for number in range(5000):
        member = fleet.admit(Session(number), facts(f"i{number}", incarnation=9), draining=False, now_us=0)
        if number:
            fleet.remove(member, MemberMove.PART)
    assert fleet.objection(facts("i1", incarnation=1), 0) is None
    assert fleet.objection(facts("i0", incarnation=1), 0) is not None, "one that is there is never forgotten"
    assert fleet.objection(facts("i4999", incarnation=1), 0) is not None


# ── signs of life ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_silence_takes_an_instance_out_within_its_time_and_its_requests_go_on() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    _, send = bench.open(submission("x"))
    silent = bench.router.fleet.members[send.session].name
    bench.pass_us(500_000, silent)
    assert not bench.of(CloseSession)
    bench.pass_us(300_000, silent)
    assert [item.session for item in bench.of(CloseSession)] == [send.session]
    assert changes(bench) == [(silent, "suspected")]
    assert [item.session for item in bench.of(SendAttempt)] != [send.session]
    assert bench.router.counts.suspicions == {"suspected": 1, "stuck": 0}
    bench.join(facts(silent))
    assert bench.of(AdmitInstance), "it may come back"


def test_tokens_are_signs_of_life_too() -> None:
    bench = Bench()
    bench.join(facts("a"))
    _, send = bench.open(submission("x"))
    for _ in range(10):
        bench.pass_us(150_000, "a")
        bench.came(send, 1)
    assert not bench.ever(CloseSession)


def test_what_the_router_slept_through_is_nobodys_silence() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.pass_us(1_000_000)
    bench.now_us += 30_000_000
    bench.tell(DeadlineCame())
    assert not bench.of(CloseSession)
    bench.pass_us(300_000, "a")
    assert not bench.of(CloseSession), "it has all of its time again, less a beat"
    bench.pass_us(400_000, "a")
    assert bench.of(CloseSession)


@pytest.mark.parametrize("beats", [1.5, 1.9, 2.5, 20])
def test_time_in_which_the_router_stood_still_is_no_silence_of_an_instance(beats: float) -> None:
    """Also not with the shortest time of silence that may be set, and a sign of life that was just due."""
    bench = Bench(RouterConfig(beat_us=200_000, suspect_us=400_000))
    bench.join(facts("a"))
    bench.pass_us(150_000, "a")
    bench.arrive(submission("x"))
    bench.now_us += int(beats * 200_000)
    bench.tell(DeadlineCame())
    assert not bench.ever(CloseSession)
    bench.pass_us(400_000, "a")
    assert bench.ever(CloseSession)


@pytest.mark.parametrize("kind", ["tokens", "answer", "other"])
def test_an_instance_is_not_silent_while_any_message_of_it_comes(kind: str) -> None:
    """Also one about a choice that it does not have any more, from this router's point of view."""
    bench = Bench()
    bench.join(facts("a"))
    body, send = bench.open(submission("x"))
    bench.tell(ClientLeft(body))
    for _ in range(20):
        bench.pass_us(bench.config.suspect_us // 3, "a")
        if kind == "tokens":
            bench.came(send, 1)
        elif kind == "answer":
            bench.take(send)
        else:
            bench.tell(MessageCame(send.session))
    assert not bench.ever(CloseSession)
    bench.pass_us(bench.config.suspect_us + bench.config.beat_us, "a")
    assert bench.ever(CloseSession)


def test_a_silent_engine_behind_a_living_front_end_is_found() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    bench.tell(HeartbeatCame(session, Heartbeat(SchedulerGauges(), 599_999, False, engine_runs=False)))
    assert not bench.of(CloseSession)
    bench.tell(HeartbeatCame(session, Heartbeat(SchedulerGauges(), 600_000, False, engine_runs=False)))
    assert bench.of(CloseSession)
    assert changes(bench) == [("a", "suspected")]


def test_a_silent_engine_that_runs_is_late_and_has_three_seconds() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    bench.tell(HeartbeatCame(session, Heartbeat(SchedulerGauges(), 2_999_999, False, engine_runs=True)))
    assert not bench.of(CloseSession)
    bench.tell(HeartbeatCame(session, Heartbeat(SchedulerGauges(), 3_000_000, False, engine_runs=True)))
    assert changes(bench) == [("a", "suspected")]


@given(st.lists(st.integers(1_000, 3_000_000), min_size=1, max_size=20))
def test_a_router_that_stands_still_suspects_nobody_whose_messages_wait_for_it(gaps_us: list[int]) -> None:
    """It wakes up late, finds its own timer due first, and reads what has come only then."""
    bench = Bench()
    session = bench.join(facts("a"))
    for gap_us in gaps_us:
        bench.now_us += gap_us
        bench.tell(DeadlineCame())
        assert not bench.of(CloseSession)
        bench.tell(HeartbeatCame(session, Heartbeat(SchedulerGauges(), 0, False)))
        assert not bench.of(CloseSession)


def test_silence_is_looked_at_twice() -> None:
    """At the limit nobody is removed yet: what has arrived and was not read is read before the second look."""
    config = RouterConfig()
    bench = Bench()
    session = bench.join(facts("a"))
    heard_us = bench.now_us
    while bench.now_us < heard_us + config.suspect_us:
        bench.now_us = bench.router.next_deadline() or 0
        bench.tell(DeadlineCame())
        assert not bench.of(CloseSession)
    assert bench.now_us == heard_us + config.suspect_us, "the first look is due when the limit is reached"
    assert bench.router.next_deadline() == bench.now_us + SECOND_LOOK_US
    bench.tell(HeartbeatCame(session, Heartbeat(SchedulerGauges(), 0, False)))
    bench.now_us += SECOND_LOOK_US
    bench.tell(DeadlineCame())
    assert not bench.of(CloseSession), "it was only late"
    silent_us = bench.now_us
    while not bench.of(CloseSession):
        bench.now_us = bench.router.next_deadline() or 0
        bench.tell(DeadlineCame())
    assert bench.now_us <= silent_us + config.suspect_us + SECOND_LOOK_US


def test_time_in_which_an_engine_is_silent_is_no_time_of_its_step() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    for silent_ms in (0, 200, 400, 600, 800, 1000, 1200, 0, 0, 0):
        bench.now_us += 200_000
        bench.tell(DeadlineCame())
        sign = Heartbeat(
            SchedulerGauges(steps=1), silent_ms * 1000, computing=True, engine_runs=True, step_limit_us=1_100_000
        )
        bench.tell(HeartbeatCame(session, sign))
        assert not bench.of(CloseSession)


BEAT_US, DEAF_US = RouterConfig().beat_us, RouterConfig().deaf_us


def beat_after(bench: Bench, after_us: int, signs: dict[Session, Heartbeat]) -> None:
    """Time passes, and these beats come."""
    bench.now_us += after_us
    bench.tell(DeadlineCame())
    for session, sign in signs.items():
        bench.tell(HeartbeatCame(session, sign))


def sign(silent_us: int = 0, unanswered: AttemptId | None = None, limit_us: int = 60_000_000) -> Heartbeat:
    return Heartbeat(SchedulerGauges(), 0, False, step_limit_us=limit_us, router_silent_us=silent_us, unanswered=unanswered)


def test_an_instance_that_hears_nothing_of_the_router_is_removed_and_its_requests_go_on() -> None:
    bench = Bench()
    sessions = [bench.join(facts("a")), bench.join(facts("b"))]
    _, send = bench.open(submission("x"))
    heard_us = bench.now_us
    while send.session in bench.router.fleet.members:
        assert bench.now_us - heard_us < DEAF_US + BEAT_US
        silent_us = bench.now_us + BEAT_US - heard_us
        ours = {each: sign(0) for each in sessions if each != send.session}
        beat_after(bench, BEAT_US, ours | {send.session: sign(silent_us)})
    assert bench.now_us - heard_us >= DEAF_US
    assert [item.session for item in bench.of(CloseSession)] == [send.session]
    assert "heard nothing of this router" in bench.of(CloseSession)[0].reason
    assert [item.session != send.session for item in bench.of(SendAttempt)] == [True]


def test_a_router_that_slept_blames_nobody_for_hearing_nothing_meanwhile() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    beat_after(bench, BEAT_US, {session: sign(0)})
    bench.now_us += 10 * DEAF_US  # asleep; then it reads what was said meanwhile
    for silent_us in range(BEAT_US, 10 * DEAF_US, BEAT_US):
        bench.tell(HeartbeatCame(session, sign(silent_us)))
    assert session in bench.router.fleet.members


@given(st.lists(st.tuples(st.integers(1, BEAT_US), st.integers(0, 2 * DEAF_US)), max_size=40))
def test_who_is_removed_as_deaf_has_said_so_for_the_whole_time_and_only_who_has(beats: list[tuple[int, int]]) -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    hears_us = bench.now_us
    for after_us, silent_us in beats:
        beat_after(bench, after_us, {session: sign(silent_us)})
        hears_us = max(hears_us, bench.now_us - silent_us)
        is_deaf = bench.now_us - hears_us >= DEAF_US
        assert (session not in bench.router.fleet.members) == is_deaf
        if is_deaf:
            return


def test_what_is_moved_because_of_a_beat_goes_with_the_preemptions_that_it_tells_of() -> None:
    bench = Bench()
    sessions = [bench.join(facts("a")), bench.join(facts("b"))]
    _, send = bench.open(submission("x"))
    while send.session in bench.router.fleet.members:
        is_last = bench.router.fleet.members[send.session].hears_us + DEAF_US <= bench.now_us + BEAT_US
        told = ((which(send), 2),) if is_last else ()
        deaf = dataclasses.replace(sign(2 * DEAF_US), preempted=told)
        beat_after(bench, BEAT_US, {each: deaf if each == send.session else sign(0) for each in sessions})
    assert send.session not in bench.router.fleet.members
    assert [item.preemptions for item in bench.ever(SendAttempt)[-1].group] == [2]


def test_an_attempt_that_is_never_answered_is_taken_elsewhere() -> None:
    bench, limit_us = Bench(), 5_000_000
    sessions = [bench.join(facts("a")), bench.join(facts("b"))]
    body = bench.arrive(submission("x"))
    first, sent_us = bench.sent(), bench.now_us
    while first.session in bench.router.fleet.members:
        assert bench.now_us - sent_us < limit_us + BEAT_US
        waiting = {first.session: first.attempt}
        beat_after(bench, BEAT_US, {each: sign(0, waiting.get(each), limit_us) for each in sessions})
    assert bench.now_us - sent_us >= limit_us
    assert bench.router.counts.suspicions["stuck"] == 1
    again = bench.ever(SendAttempt)[-1]
    assert (again.attempt.request, again.session != first.session) == (body, True)


def test_answers_that_come_one_after_the_other_are_no_silence_and_hide_none() -> None:
    bench, limit_us = Bench(), 3 * BEAT_US
    session = bench.join(facts("a"))
    bench.arrive(submission("lost"))
    lost = bench.sent().attempt
    for n in range(20):
        bench.arrive(submission(f"x{n}"))
        sent = bench.sent()
        for _ in range(2):
            beat_after(bench, BEAT_US, {session: sign(0, sent.attempt, limit_us)})
        bench.take(sent)
        bench.came(sent, 1, end=ended(FinishReason.STOP))
    assert session in bench.router.fleet.members
    for _ in range(4):
        assert session in bench.router.fleet.members
        bench.take(bench.open(submission(f"y{bench.now_us}"))[1])
        beat_after(bench, BEAT_US, {session: sign(0, lost, limit_us)})
    assert session not in bench.router.fleet.members


def test_an_engine_that_computes_and_finishes_no_step_is_stuck() -> None:
    bench = Bench()
    session = bench.join(facts("a"))

    def beat(computing: bool, steps: int) -> list[tuple[str, str]]:
        bench.now_us += 200_000
        sign = Heartbeat(SchedulerGauges(steps=steps), 0, computing, step_limit_us=2_000_000)
        bench.tell(DeadlineCame())
        bench.tell(HeartbeatCame(session, sign))
        return changes(bench)

    assert not any(beat(computing=False, steps=5) for _ in range(30)), "it has nothing to do"
    assert not any(beat(computing=True, steps=step) for step in range(30))
    assert not any(beat(computing=True, steps=29) for _ in range(9))
    assert beat(computing=True, steps=29) == [("a", "stuck")]
    assert bench.router.counts.suspicions["stuck"] == 1


# ── draining ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_draining_instance_gets_nothing_new_and_finishes_what_it_has() -> None:
    bench = Bench()
    bench.join(facts("a"))
    body, send = bench.open(submission("x"))
    bench.tell(InstanceDrains(Instance("a")))
    assert bench.of(OrderDrain) == [OrderDrain(send.session)]
    assert changes(bench) == [("a", "draining")]
    assert [view.state for view in bench.router.views()] == ["draining"]
    bench.arrive(submission("y"))
    assert not bench.of(SendAttempt)
    bench.came(send, 1, end=ended(FinishReason.STOP))
    assert bench.delivered(body) == [1]
    assert bench.tell(InstanceDrains(Instance("a"))) == [], "told twice"
    assert bench.tell(InstanceDrains(Instance("nobody"))) == []


def test_what_a_draining_instance_does_not_finish_in_time_goes_on_elsewhere_and_is_no_loss() -> None:
    bench = Bench(RouterConfig(drain_us=1_000_000, loss_retry_count=0, preempt_retry_count=0))
    bench.join(facts("a"))
    _, send = bench.open(submission("x"))
    bench.came(send, 1)
    bench.tell(InstanceDrains(Instance("a")))
    bench.pass_us(3_000_000)
    assert not bench.of(CancelChoices), "nobody else is there"
    bench.join(facts("b"))
    bench.pass_us(300_000)
    assert bench.of(CancelChoices) == [CancelChoices(send.session, send.attempt, (0,))]
    assert bench.sent().group[0].generated.tolist() == [1]
    assert bench.router.counts.retries["drained"] == 1


def test_who_goes_after_draining_has_left_and_who_goes_with_something_open_is_lost() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.join(facts(name))
    _, send = bench.open(submission("x"))
    busy = bench.router.fleet.members[send.session]
    (idle,) = [member for member in bench.router.fleet.members.values() if member is not busy]
    bench.tell(InstanceDrains(idle.name))
    bench.tell(InstanceLost(idle.session, "closed"))
    assert changes(bench) == [(idle.name, "left")]
    bench.tell(InstanceDrains(busy.name))
    assert "nobody else serves" in bench.of(FleetChanged)[0].why
    bench.tell(InstanceLost(busy.session, "closed"))
    assert changes(bench) == [(busy.name, "lost")]


def test_who_drains_as_it_joins_finishes_and_gets_nothing() -> None:
    bench = Bench()
    bench.join(facts("a"), draining=True)
    assert changes(bench) == [("a", "joined"), ("a", "draining")]
    bench.arrive(submission("x"))
    assert not bench.of(SendAttempt)


def test_a_life_that_was_told_to_drain_drains_also_when_its_connection_breaks() -> None:
    bench = Bench(RouterConfig(drain_us=1_000_000))
    session = bench.join(facts("a"))
    bench.tell(InstanceDrains(Instance("a")))
    bench.pass_us(800_000)
    bench.tell(InstanceLost(session, "reset"))
    again = bench.join(facts("a"))
    assert bench.of(OrderDrain) == [OrderDrain(again)], "it may not have heard of it"
    assert changes(bench) == [("a", "joined"), ("a", "draining")]
    bench.arrive(submission("x"))
    assert not bench.of(SendAttempt)
    assert bench.router.fleet.members[again].drain_by_us == 2_000_000, "its time does not begin anew"
    bench.join(facts("a"), draining=True)
    assert not bench.of(OrderDrain), "it knows"
    bench.join(facts("a", incarnation=2))
    assert bench.sent().group[0].request_id == "x", "the next life serves"


# ── neighbours ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_those_who_take_are_told_when_those_who_give_change() -> None:
    bench = Bench()
    d = bench.join(facts("d", "decode"))
    bench.join(facts("m"))
    assert not bench.of(TellPrefillPeers)
    p = bench.join(facts("p", "prefill"))
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(d, ("p:7000",))]
    bench.join(facts("o", "prefill"))
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(d, ("o:7000", "p:7000"))]
    e = bench.join(facts("e", "decode"))
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(e, ("o:7000", "p:7000"))]
    bench.pass_us(SETTLE_US)
    assert not bench.of(TellPrefillPeers), "nothing has changed"
    bench.tell(InstanceLost(p, "reset"))
    assert {item.session: item.addresses for item in bench.of(TellPrefillPeers)} == {d: ("o:7000",), e: ("o:7000",)}
    bench.tell(InstanceLost(bench.sessions["o"], "reset"))
    assert {item.session: item.addresses for item in bench.of(TellPrefillPeers)} == {d: (), e: ()}


def test_who_drains_still_hands_over_what_it_was_asked_for() -> None:
    bench = Bench()
    d = bench.join(facts("d", "decode"))
    p = bench.join(facts("p", "prefill"))
    bench.tell(InstanceDrains(Instance("p")))
    assert not bench.of(TellPrefillPeers), "nobody hangs up on it"
    bench.arrive(submission("x"))
    assert bench.sent().group[0].prefill_at == "", "but nobody is sent there"
    bench.pass_us(SETTLE_US)
    bench.tell(InstanceLost(p, "it is done"))
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(d, ())]


def test_a_router_that_has_just_started_makes_nobody_hang_up_on_those_who_have_not_called_yet() -> None:
    bench = Bench()
    d = bench.join(facts("d", "decode"), held(41, 5))
    e = bench.join(facts("e", "decode"))
    assert not bench.of(TellPrefillPeers), "that nobody gives would be too early to say"
    bench.join(facts("p", "prefill"))
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(e, ("p:7000",))], (
        "the other may wait for a hand-over of somebody else"
    )
    bench.join(facts("q", "prefill"))
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(e, ("p:7000", "q:7000"))]
    bench.pass_us(SETTLE_US)
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(d, ("p:7000", "q:7000"))]


def test_when_nobody_has_called_for_a_while_nobody_gives() -> None:
    bench = Bench()
    d = bench.join(facts("d", "decode"))
    bench.pass_us(SETTLE_US - 1)
    assert not bench.ever(TellPrefillPeers)
    bench.pass_us(bench.config.beat_us)
    assert bench.of(TellPrefillPeers) == [TellPrefillPeers(d, ())]


def test_nobody_is_sent_to_who_only_prefills() -> None:
    bench = Bench()
    bench.join(facts("p", "prefill"))
    bench.arrive(submission("x"))
    assert not bench.of(SendAttempt)


def test_a_join_is_heard_once() -> None:
    bench = Bench()
    session = bench.join(facts("a"))
    assert bench.tell(InstanceJoined(session, facts("a"))) == []
    assert not bench.ever(DeliverTokens)


@pytest.mark.parametrize("bad", [{"suspect_us": 300_000}, {"waiting_max": 0}, {"ahead": 0.0}, {"key_concurrency": 0}])
def test_settings_that_cannot_work_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadConfig, match=next(iter(bad))):
        RouterConfig(**bad)  # type: ignore[arg-type]
