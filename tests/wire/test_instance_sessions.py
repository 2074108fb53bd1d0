"""InstanceSessions: each place is answered once and kept while a router may ask for it; requests of others are not
touched."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.bounds import INCARNATION_MAX
from baton.core.engine.orders import Accepted, Cancel, Drain, ReportChanges, StopAt, Submit
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.errors import IllegalTransition, Refusal, RefusalCode
from baton.core.routing.events import Join
from baton.wire import held_choices, instance_sessions
from baton.wire.engine_messages import DecodedRows, FromEngine, Pulse, WireError, refused
from baton.wire.heartbeats import EngineVitals
from baton.wire.held_choices import FIRST_ROUTED_TICKET
from baton.wire.instance_sessions import WELCOME_US, InstanceSessions, InstanceSessionState, SessionEffects
from baton.wire.router_messages import (
    KEYS_A_BEAT_MAX,
    AllHeldSaid,
    ForgetSerials,
    HeartbeatMessage,
    HeldGroup,
    Leaving,
    PlaceAttempt,
    PrefillPeersChanged,
    TurnedAway,
    Welcome,
    decode_from_instance,
    decode_from_router,
    encode_membership,
)
from tests.wire.steps import GAUGES, step

JOIN = Join("d0", 7, "mixed", b"f", "http://d0", "", 4, 64, 16, 512, 64, 99, False)
WELCOME = Welcome("r", 200_000, 5_000_000)
FULL = Refusal(RefusalCode.QUEUE_FULL, "full", 1)
NOTHING = SessionEffects()


def asks(*names: str, logprobs: int | None = None, prompt: Sequence[int] = (1, 2, 3)) -> list[Submission]:
    sampling = Sampling(seed=3, temperature=0.0, logprobs=logprobs)
    return [Submission(RequestId(name), frozen_tokens(prompt), sampling, 20) for name in names]


def place(ticket: int, group: list[Submission], origin: bytes = b"origin") -> PlaceAttempt:
    choices = tuple(range(len(group)))
    return PlaceAttempt(ticket, tuple(group), choices, len(group), origin)


def line(row: int, *values: float) -> Logprobs:
    """Log-probabilities of as many tokens, with one alternative each."""
    chosen = np.array(values, dtype=np.float32)
    return Logprobs(row, chosen, np.full((len(values), 1), 5, dtype=np.int32), chosen.reshape(-1, 1))


def serving(sessions: InstanceSessions | None = None) -> InstanceSessions:
    sessions = sessions or InstanceSessions(JOIN)
    sessions.opened(0)
    sessions.receive(WELCOME, 0)
    return sessions


def open_as(sessions: InstanceSessions, group: list[Submission], *serials: int, ticket: int = 0) -> None:
    order = sessions.receive(place(ticket, group), 0).orders[-1]
    assert isinstance(order, Submit)
    assert sessions.take(Accepted(order.ticket, serials), 0).messages == [Accepted(ticket, serials)]


def held(sessions: InstanceSessions, now_us: int = 0) -> list[HeldGroup]:
    """What the next session is told."""
    sessions.lost("cut", now_us)
    said = sessions.opened(now_us)
    assert (type(said[0]), said[-1]) == (Join, AllHeldSaid())
    groups = [decode_from_instance(encode_membership(message)) for message in said[1:-1]]
    assert all(isinstance(group, HeldGroup) for group in groups)
    return groups  # type: ignore[return-value]


def tokens_of(data: bytes) -> list[int]:
    return list(np.frombuffer(data, dtype="<i4").tolist())


# ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_session_begins_with_who_we_are_and_names_are_told_from_the_beginning() -> None:
    sessions = InstanceSessions(JOIN)
    assert sessions.opened(0) == [JOIN, AllHeldSaid()]
    assert sessions.receive(WELCOME, 0) == SessionEffects(orders=[ReportChanges()], welcomed=WELCOME)
    assert sessions.state is InstanceSessionState.SERVING


@pytest.mark.parametrize(
    "message",
    [place(0, asks("a")), Cancel(1), StopAt(1, 2), ForgetSerials((1,)), PrefillPeersChanged(()), Drain()],
    ids=lambda m: type(m).__name__,
)
def test_before_the_welcome_and_after_being_turned_away_a_router_may_say_nothing_else(message: object) -> None:
    sessions = InstanceSessions(JOIN)
    sessions.opened(0)
    with pytest.raises(WireError, match="joining"):
        sessions.receive(message, 0)  # type: ignore[arg-type]
    sessions.receive(TurnedAway("other model", False), 0)
    with pytest.raises(WireError, match="turned away"):
        sessions.receive(message, 0)  # type: ignore[arg-type]
    assert sessions.open_requests == 0


def test_a_second_welcome_or_a_late_refusal_is_an_error() -> None:
    sessions = serving()
    for message in (WELCOME, TurnedAway("x", True)):
        with pytest.raises(WireError, match="serving"):
            sessions.receive(message, 0)


def test_who_is_fenced_after_it_was_welcomed_learns_it() -> None:
    for fenced in (True, False):
        sessions = serving()
        sessions.lost("reset", 0)
        sessions.opened(0)
        out = sessions.receive(TurnedAway("a later life", fenced, 8 if fenced else 0), 0)
        assert out == SessionEffects(turned_away="a later life", fenced="a later life" if fenced else None)


def test_who_was_never_welcomed_joins_again_above_the_incarnation_that_the_router_names() -> None:
    sessions = InstanceSessions(JOIN)
    sessions.opened(0)
    known = JOIN.incarnation + 3_600_000_000_000
    out = sessions.receive(TurnedAway("outlived", True, known), 0)
    assert out == SessionEffects(turned_away="outlived", rejoins_as=known + 1)
    sessions.lost("turned away", 0)
    assert joined_as(sessions) == known + 1


@pytest.mark.parametrize("known", [0, 1, INCARNATION_MAX])
def test_a_number_that_cannot_be_exceeded_or_need_not_be_changes_nothing(known: int) -> None:
    join = msgspec.structs.replace(JOIN, incarnation=2)
    sessions = InstanceSessions(join)
    sessions.opened(0)
    out = sessions.receive(TurnedAway("outlived", True, known), 0)
    assert out == SessionEffects(turned_away="outlived"), "it is not fenced, and tries again"
    sessions.lost("turned away", 0)
    assert joined_as(sessions) == 2


@given(st.lists(st.integers(0, INCARNATION_MAX), max_size=12), st.integers(1, INCARNATION_MAX))
def test_whatever_routers_name_an_instance_stays_able_to_join(named: list[int], first: int) -> None:
    """It is never fenced before its first welcome, its number only rises, and by no more than is needed."""
    sessions = InstanceSessions(msgspec.structs.replace(JOIN, incarnation=first))
    now = first
    for known in named:
        assert joined_as(sessions) == now
        out = sessions.receive(TurnedAway("outlived", True, known), 0)
        assert out.fenced is None
        now = known + 1 if now <= known < INCARNATION_MAX else now
        sessions.lost("turned away", 0)
    assert 1 <= joined_as(sessions) == now <= INCARNATION_MAX
    assert sessions.receive(WELCOME, 0).welcomed == WELCOME


def joined_as(sessions: InstanceSessions) -> int:
    join = sessions.opened(0)[0]
    assert isinstance(join, Join)
    return join.incarnation


def test_a_session_opened_twice_is_a_bug() -> None:
    sessions = serving()
    with pytest.raises(IllegalTransition, match="SERVING"):
        sessions.opened(0)


def test_who_leaves_says_so_once_and_joins_as_draining() -> None:
    sessions = serving()
    assert (sessions.leave(), sessions.leave()) == ([Leaving()], [])
    sessions.lost("cut", 0)
    joined = sessions.opened(0)[0]
    assert isinstance(joined, Join)
    assert joined.draining


def test_neighbours_and_the_order_to_drain_reach_the_driver() -> None:
    sessions = serving()
    assert sessions.receive(PrefillPeersChanged(("p:1",)), 0) == SessionEffects(prefill_peers=("p:1",))
    assert sessions.receive(Drain(), 0) == SessionEffects(drain=True)
    assert sessions.leave() == [], "the router knows"


# ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_place_travels_under_a_ticket_of_ours_and_is_answered_under_the_routers() -> None:
    sessions = serving()
    message = place(5, asks("a", "b"))
    assert sessions.receive(message, 0) == SessionEffects(orders=[Submit(FIRST_ROUTED_TICKET, message.group)])
    assert sessions.owns_ticket(FIRST_ROUTED_TICKET)
    assert not sessions.owns_ticket(FIRST_ROUTED_TICKET - 1)
    assert sessions.take(Accepted(FIRST_ROUTED_TICKET, (8, 9)), 0) == SessionEffects(messages=[Accepted(5, (8, 9))])
    assert sessions.open_requests == 2


def test_a_refusal_is_passed_on_and_nothing_is_kept() -> None:
    sessions = serving()
    sessions.receive(place(5, asks("a")), 0)
    assert sessions.take(refused(FIRST_ROUTED_TICKET, FULL), 0) == SessionEffects(messages=[refused(5, FULL)])
    assert (sessions.open_requests, sessions.held_choices, held(sessions)) == (0, 0, [])


def test_two_places_under_one_ticket_are_an_error() -> None:
    sessions = serving()
    sessions.receive(place(5, asks("a")), 0)
    with pytest.raises(WireError, match="ticket 5"):
        sessions.receive(place(5, asks("b")), 0)


@pytest.mark.parametrize(
    "group",
    [
        asks("x" * 2000),
        [Submission(RequestId("a"), frozen_tokens([1]), Sampling(seed=1, temperature=float("nan")), 5)],
        [Submission(RequestId("a"), frozen_tokens([1]), Sampling(seed=1), 2, generated=frozen_tokens([1, 2]))],
        [Submission(RequestId("a"), frozen_tokens([1]), Sampling(seed=1), 5, leader=RequestId("nobody"))],
        [Submission(RequestId("a"), frozen_tokens([1]), Sampling(seed=1, stop_token_ids=(-1,)), 5)],
    ],
)
def test_what_would_hurt_the_engine_never_reaches_it(group: list[Submission]) -> None:
    sessions = serving()
    with pytest.raises(WireError):
        sessions.receive(decode_from_router(encode_membership(place(0, group))), 0)
    assert sessions.open_requests == sessions.held_choices == 0


@pytest.mark.parametrize(
    "group",
    [
        asks("a", prompt=(1, 64)),
        asks("a", prompt=(-1,)),
        [Submission(RequestId("a"), frozen_tokens([1]), Sampling(seed=1), 5, generated=frozen_tokens([64]))],
        [Submission(RequestId("a"), frozen_tokens([1]), Sampling(seed=1, logit_bias=((64, 1.0),)), 5)],
        [Submission(RequestId("a"), frozen_tokens([1]), Sampling(seed=1, stop_token_ids=(64,)), 5)],
    ],
)
def test_a_token_that_the_model_has_not_is_refused_here_and_nothing_else_suffers(group: list[Submission]) -> None:
    sessions = serving()
    out = sessions.receive(place(0, group), 0)
    refusal = Refusal(RefusalCode.NOT_IN_VOCABULARY, "a token that is not in the vocabulary")
    assert out == SessionEffects(messages=[refused(0, refusal)])
    assert sessions.open_requests == sessions.held_choices == 0
    open_as(sessions, asks("a"), 1, ticket=1)


def test_more_choices_than_are_taken_are_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_sessions, "CHOICES_MAX", 3)
    sessions = serving()
    open_as(sessions, asks("a", "b"), 1, 2)
    out = sessions.receive(place(1, asks("c", "d")), 0)
    assert not out.orders
    assert [type(answer).__name__ for answer in out.messages] == ["RefusedMessage"]
    open_as(sessions, asks("c"), 3, ticket=2)


def test_the_same_request_placed_again_ends_the_older_attempt() -> None:
    sessions = serving()
    open_as(sessions, asks("a", "b"), 1, 2)
    out = sessions.receive(place(1, asks("b")), 0)
    assert out.orders[0] == Cancel(2)
    assert sessions.take(Accepted(FIRST_ROUTED_TICKET + 1, (3,)), 0).messages == [Accepted(1, (3,))]
    over = step(ended=[2])
    assert sessions.take(over, 0) == SessionEffects(messages=[over]), "this router knows of the older one and hears its end"
    assert [[line.serial for line in group.lines] for group in held(sessions)] == [[1], [3]]


def test_the_same_request_placed_again_before_the_older_attempt_is_answered_cancels_it_with_its_answer() -> None:
    sessions = serving()
    sessions.receive(place(0, asks("a")), 0)
    assert not [order for order in sessions.receive(place(1, asks("a")), 0).orders if isinstance(order, Cancel)]
    assert sessions.take(Accepted(FIRST_ROUTED_TICKET, (1,)), 0) == SessionEffects([Cancel(1)], [Accepted(0, (1,))])
    sessions.take(Accepted(FIRST_ROUTED_TICKET + 1, (2,)), 0)
    assert [[line.serial for line in group.lines] for group in held(sessions)] == [[2]]


# ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_router_cannot_end_what_is_not_its_own() -> None:
    sessions = serving()
    open_as(sessions, asks("a"), 1)
    for message in (Cancel(7), StopAt(7, 1), ForgetSerials((7,))):
        assert sessions.receive(message, 0) == NOTHING
    assert sessions.receive(StopAt(1, 3), 0) == SessionEffects(orders=[StopAt(1, 3)])
    assert sessions.receive(Cancel(1), 0) == SessionEffects(orders=[Cancel(1)])
    assert sessions.receive(Cancel(1), 0) == NOTHING, "once is enough"


def test_what_is_cancelled_is_not_kept_but_heard_to_its_end() -> None:
    sessions = serving()
    open_as(sessions, asks("a"), 1)
    sessions.receive(Cancel(1), 0)
    last = step([(1, [4])], ended=[1])
    assert sessions.take(last, 0) == SessionEffects(messages=[last])
    assert (sessions.open_requests, sessions.held_choices, held(sessions)) == (0, 0, [])


def test_what_has_ended_is_kept_until_it_is_to_be_forgotten() -> None:
    sessions = serving()
    open_as(sessions, asks("a", "b"), 1, 2)
    sessions.take(step([(1, [4]), (2, [5])], ended=[1, 2]), 0)
    assert sessions.open_requests == 0
    assert sessions.receive(ForgetSerials((1,)), 0) == NOTHING
    (group,) = held(sessions)
    assert [(kept.serial, kept.place) for kept in group.lines] == [(2, 1)]
    sessions.receive(WELCOME, 0)
    sessions.receive(ForgetSerials((2,)), 0)
    assert (held(sessions), sessions.held_choices) == ([], 0)


def test_what_is_forgotten_while_it_is_open_is_ended() -> None:
    sessions = serving()
    open_as(sessions, asks("a"), 1)
    assert sessions.receive(ForgetSerials((1,)), 0) == SessionEffects(orders=[Cancel(1)])


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_held_is_said_with_all_that_came_of_it_and_steps_go_on_after_it() -> None:
    sessions = serving()
    open_as(sessions, asks("a", "b"), 1, 2)
    sessions.take(step([(1, [4]), (2, [5, 6])], started=[(1, 2), (2, 3)]), 0)
    sessions.lost("cut", 0)
    assert sessions.take(step([(1, [7]), (2, [8])], ended=[2]), 0) == NOTHING, "nobody is there"
    said = sessions.opened(0)
    (group,) = [message for message in said if isinstance(message, HeldGroup)]
    assert [(kept.serial, tokens_of(kept.tokens), kept.cached_tokens) for kept in group.lines] == [
        (1, [4, 7], 2),
        (2, [5, 6, 8], 3),
    ]
    assert [kept.ended and kept.ended.serial for kept in group.lines] == [None, 2]
    assert (group.choices, group.body_choices, group.origin) == ((0, 1), 2, b"origin")
    for kept in group.lines:
        assert sum(tokens_of(kept.counts)) == len(tokens_of(kept.tokens))
    after = step([(1, [9])])
    assert sessions.take(after, 0) == SessionEffects(messages=[after]), (
        "before the welcome, too: it comes after what is held"
    )


def test_log_probabilities_are_kept_row_by_row() -> None:
    sessions = serving()
    open_as(sessions, asks("a", logprobs=1), 1)
    open_as(sessions, asks("b"), 2, ticket=1)
    sessions.take(step([(2, [1]), (1, [4])], logprobs=(line(1, -0.5),)), 0)
    sessions.take(step([(1, [5, 6])], logprobs=(line(0, -1.0, -2.0),)), 0)
    first, second = held(sessions)
    (kept,) = first.lines
    assert (tokens_of(kept.counts), tokens_of(kept.tokens)) == ([1, 2], [4, 5, 6])
    assert [item.row for item in kept.logprobs] == [0, 1]
    assert [np.frombuffer(item.chosen, "<f4").tolist() for item in kept.logprobs] == [[-0.5], [-1.0, -2.0]]
    assert second.lines[0].logprobs == ()


def test_a_step_is_split_between_router_and_own_clients() -> None:
    sessions = serving()
    assert sessions.split(both := step([(1, [4]), (2, [5, 6])], ended=[1])) == (None, both)
    open_as(sessions, asks("a", "c"), 2, 4)
    ours = step([(2, [5]), (4, [1])])
    assert sessions.split(ours) == (ours, None)
    theirs = step([(1, [4])], ended=[3])
    assert sessions.split(theirs) == (None, theirs)
    mixed = step(
        [(1, [4]), (2, [5, 6]), (3, []), (4, [7])],
        ended=[1, 4],
        started=[(1, 9), (2, 8)],
        logprobs=(line(0, -1.0), line(1, -2.0, -3.0), line(3, -4.0)),
    )
    mine, others = sessions.split(mixed)
    assert mine is not None
    assert others is not None
    assert encode_membership(mine) == encode_membership(
        step([(2, [5, 6]), (4, [7])], ended=[4], started=[(2, 8)], logprobs=(line(0, -2.0, -3.0), line(1, -4.0)))
    )
    assert encode_membership(others) == encode_membership(
        step([(1, [4]), (3, [])], ended=[1], started=[(1, 9)], logprobs=(line(0, -1.0),))
    )
    assert DecodedRows(mine).tokens == [5, 6, 7]
    nothing = step()
    assert sessions.split(nothing) == (None, nothing), "its gauges are for the own front end"


# ── loss ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_place_accepted_while_nobody_is_there_is_held() -> None:
    sessions = serving()
    sessions.receive(place(0, asks("a")), 0)
    sessions.lost("cut", 0)
    assert sessions.take(Accepted(FIRST_ROUTED_TICKET, (1,)), 0) == NOTHING
    said = sessions.opened(0)
    (group,) = [message for message in said if isinstance(message, HeldGroup)]
    assert [(kept.serial, kept.tokens) for kept in group.lines] == [(1, b"")]
    after = step([(1, [4])])
    assert sessions.take(after, 0).messages == [after]


def test_a_place_that_is_unanswered_as_the_next_session_opens_is_cancelled_unheard() -> None:
    sessions = serving()
    sessions.receive(place(0, asks("a")), 0)
    open_as(sessions, asks("b"), 1, ticket=1)
    assert len(held(sessions)) == 1
    sessions.receive(WELCOME, 0)
    sessions.receive(place(0, asks("c")), 0)  # the new session's own ticket 0
    assert sessions.take(Accepted(FIRST_ROUTED_TICKET, (2,)), 0) == SessionEffects(orders=[Cancel(2)])
    assert sessions.take(Accepted(FIRST_ROUTED_TICKET + 2, (3,)), 0) == SessionEffects(messages=[Accepted(0, (3,))])
    said = sessions.take(step([(1, [4]), (2, [5]), (3, [6])], ended=[2]), 0).messages
    assert said == [step([(1, [4]), (3, [6])])], "nothing of what the router was never told"
    whole = step([(1, [4]), (3, [6])])
    assert sessions.take(whole, 0).messages[0] is whole
    assert sessions.open_requests == 2


def test_a_refusal_of_a_place_of_an_earlier_session_is_not_said_in_the_next() -> None:
    sessions = serving()
    sessions.receive(place(0, asks("a")), 0)
    assert held(sessions) == []
    assert sessions.take(refused(FIRST_ROUTED_TICKET, FULL), 0) == NOTHING
    assert sessions.held_choices == 0


def test_when_the_grace_is_over_what_is_open_is_cancelled_and_nothing_is_kept() -> None:
    sessions = serving()
    open_as(sessions, asks("a", "b"), 1, 2)
    sessions.take(step([(1, [4])], ended=[2]), 0)
    sessions.receive(place(1, asks("c")), 0)
    assert sessions.next_deadline() is None
    sessions.lost("cut", 1_000)
    assert sessions.next_deadline() == 1_000 + WELCOME.orphan_grace_us
    assert sessions.tick(1_000) == NOTHING
    assert sessions.tick(1_000 + WELCOME.orphan_grace_us) == SessionEffects(orders=[Cancel(1)])
    assert sessions.take(Accepted(FIRST_ROUTED_TICKET + 1, (3,)), 0) == SessionEffects(orders=[Cancel(3)])
    assert sessions.next_deadline() is None
    assert sessions.opened(0) == [JOIN, AllHeldSaid()]
    assert sessions.take(step([(1, [5])], ended=[1, 3]), 0) == NOTHING
    assert (sessions.open_requests, sessions.held_choices) == (0, 0)


def test_a_session_in_which_the_join_is_not_answered_is_hung_up_once() -> None:
    """Before it is welcomed an instance says nothing by which it could learn that the router has died."""
    sessions = InstanceSessions(JOIN, welcome_us=500)
    for began_us in (1_000, 9_000):
        sessions.opened(began_us)
        assert sessions.next_deadline() == began_us + 500
        assert sessions.tick(began_us + 499) == SessionEffects()
        assert sessions.tick(began_us + 500).hang_up == "it has not answered the join within 0.0005 s"
        assert sessions.next_deadline() is None
        assert sessions.tick(began_us + 501) == SessionEffects()
        sessions.lost("hung up", began_us + 502)
    sessions.opened(20_000)
    sessions.receive(WELCOME, 20_100)
    assert sessions.next_deadline() is None


def test_dialling_in_vain_does_not_make_the_grace_longer() -> None:
    sessions = serving()
    open_as(sessions, asks("a"), 1)
    sessions.lost("cut", 1_000)
    sessions.opened(2_000)
    assert sessions.tick(2_000 + WELCOME_US - 1) == NOTHING, "an answer is awaited"
    sessions.lost("no answer", 3_000)
    assert sessions.next_deadline() == 1_000 + WELCOME.orphan_grace_us
    sessions.opened(5_000)
    sessions.receive(WELCOME, 5_000)
    sessions.lost("cut", 6_000)
    assert sessions.next_deadline() == 6_000 + WELCOME.orphan_grace_us


def test_of_what_has_ended_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_choices, "ENDED_CHOICES_MAX", 2)
    sessions = serving()
    for serial in range(4):
        open_as(sessions, asks(f"r{serial}"), serial, ticket=serial)
    sessions.take(step([(serial, [1]) for serial in range(4)], ended=[1, 0, 3]), 0)
    assert [group.lines[0].serial for group in held(sessions)] == [0, 2, 3]
    monkeypatch.setattr(held_choices, "ENDED_BYTES_MAX", 2_000)
    sessions = serving()
    for serial in range(2):
        sessions.receive(place(serial, asks(f"r{serial}"), b"o" * 1_000), 0)
        sessions.take(Accepted(FIRST_ROUTED_TICKET + serial, (serial,)), 0)
        sessions.take(step(ended=[serial]), 0)
    assert [group.lines[0].serial for group in held(sessions)] == [1]


def test_a_group_that_cannot_travel_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_choices, "GROUP_BYTES_MAX", 2_000)
    sessions = serving()
    sessions.receive(place(0, asks("a"), b"o" * 2_000), 0)
    sessions.take(Accepted(FIRST_ROUTED_TICKET, (1,)), 0)
    open_as(sessions, asks("b"), 2, ticket=1)
    assert [group.lines[0].serial for group in held(sessions)] == [2]
    assert sessions.receive(WELCOME, 0).orders == [Cancel(1), ReportChanges()]
    both = step([(1, [1]), (2, [3])], ended=[1])
    assert sessions.take(both, 0).messages == [step([(2, [3])])]


# ── beats ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def pulse(
    fresh: bool = False,
    named: Sequence[int] = (),
    forgotten: Sequence[int] = (),
    notes: tuple[tuple[int, str, int], ...] = (),
) -> Pulse:
    said = (b"".join(key(number) for number in numbers) for numbers in (named, forgotten))
    return Pulse(GAUGES, True, fresh, *said, notes)


def names(beat: HeartbeatMessage | None) -> tuple[bool, list[int], list[int]]:
    assert beat is not None
    assert decode_from_instance(encode_membership(beat)) == beat
    lists = [
        [int.from_bytes(data[at : at + 16], "little") for at in range(0, len(data), 16)]
        for data in (beat.named, beat.forgotten)
    ]
    return beat.fresh, *lists  # type: ignore[return-value]


def test_names_go_out_once_in_a_session_and_from_the_beginning_in_the_next() -> None:
    sessions = serving()
    assert names(sessions.beat(pulse(named=[1]), EngineVitals(0), 0)) == (False, [], []), (
        "before the engine starts afresh: void"
    )
    assert names(sessions.beat(pulse(True, [1, 2]), EngineVitals(0), 0)) == (True, [1, 2], [])
    assert names(sessions.beat(None, EngineVitals(0), 0)) == (False, [], [])
    sessions.record_pulse(pulse(named=[3, 4], forgotten=[1]), 0)
    sessions.record_pulse(pulse(named=[1], forgotten=[3]), 0)
    assert names(sessions.beat(None, EngineVitals(0), 0)) == (False, [4, 1], [3]), "each in one of the two"
    sessions.record_pulse(pulse(named=[5]), 0)
    sessions.lost("cut", 0)
    assert sessions.beat(pulse(named=[6]), EngineVitals(0), 0) is None
    serving(sessions)
    assert names(sessions.beat(pulse(named=[7]), EngineVitals(0), 0)) == (False, [], [])
    assert names(sessions.beat(pulse(True, [1, 7]), EngineVitals(0), 0)) == (True, [1, 7], [])


def test_more_names_than_a_beat_takes_wait_for_the_next() -> None:
    sessions = serving()
    sessions.record_pulse(pulse(True, range(KEYS_A_BEAT_MAX)), 0)
    sessions.record_pulse(pulse(named=range(KEYS_A_BEAT_MAX, KEYS_A_BEAT_MAX + 3)), 0)
    assert names(sessions.beat(None, EngineVitals(0), 0)) == (True, list(range(KEYS_A_BEAT_MAX)), [])
    assert names(sessions.beat(None, EngineVitals(0), 0)) == (
        False,
        [KEYS_A_BEAT_MAX, KEYS_A_BEAT_MAX + 1, KEYS_A_BEAT_MAX + 2],
        [],
    )


def test_a_beat_says_how_the_engine_is_and_notes_of_the_routers_requests_only() -> None:
    sessions = serving()
    first = sessions.beat(None, EngineVitals(5), 0)
    assert first is not None
    assert (first.engine_silent_us, first.computing) == (5, False)
    open_as(sessions, asks("a"), 1)
    sessions.record_pulse(pulse(notes=((1, "waiting", 10), (2, "waiting", 10))), 1_000)
    beat = sessions.beat(None, EngineVitals(7), 1_500)
    assert beat is not None
    assert (beat.gauges, beat.computing, beat.engine_silent_us) == (GAUGES, True, 7)
    assert beat.notes == ((1, "waiting", 510),)
    again = sessions.beat(None, EngineVitals(0), 1_600)
    assert again is not None
    assert again.notes == ()


def test_an_answer_that_nobody_asked_for_is_an_error() -> None:
    answers: list[FromEngine] = [Accepted(FIRST_ROUTED_TICKET, (1,)), refused(FIRST_ROUTED_TICKET, FULL)]
    for answer in answers:
        with pytest.raises(WireError, match=str(FIRST_ROUTED_TICKET)):
            serving().take(answer, 0)  # type: ignore[arg-type]
