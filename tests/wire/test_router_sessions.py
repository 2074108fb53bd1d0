"""Router and instance over their messages: whatever breaks, every client gets the tokens of the undisturbed run, once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.orders import Accepted, Cancel, StopAt, Submit
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import FinishReason, Serial, Submission, frozen_tokens
from baton.core.errors import Refusal, RefusalCode
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    AdmitInstance,
    AttemptAccepted,
    AttemptRefused,
    CancelChoices,
    CloseSession,
    DeadlineCame,
    DeliverTokens,
    ForgetChoices,
    HeartbeatCame,
    InstanceJoined,
    InstanceLost,
    MessageCame,
    PhaseReport,
    RejectInstance,
    RequestDeclined,
    RouterEffect,
    RouterEvent,
    SendAttempt,
    Session,
    StopChoice,
    TokensCame,
)
from baton.core.routing.identity import AttemptId, ChoiceAttempt, RequestNumber
from baton.core.routing.router import Router
from baton.wire import router_messages as membership
from baton.wire.engine_messages import WireError, refused
from baton.wire.router_messages import (
    ORIGIN_BYTES_MAX,
    AllHeldSaid,
    FromInstance,
    HeartbeatMessage,
    HeldChoiceMessage,
    HeldGroup,
    Leaving,
    PlaceAttempt,
    TurnedAway,
    Welcome,
    decode_from_instance,
    encode_membership,
    held_bytes,
)
from baton.wire.router_sessions import (
    JOIN_US,
    CloseConnection,
    RouterSessionMove,
    RouterSessions,
    RouterSessionState,
    SayToInstance,
)
from tests.support.routed import World, body
from tests.wire.test_instance_sessions import GAUGES, JOIN, asks, line, open_as, serving, step

FULL = Refusal(RefusalCode.QUEUE_FULL, "full", 1)


def busy(members: int = 1, config: RouterConfig | None = None) -> World:
    """A body of two choices, and one that wants log-probabilities."""
    world = World(members, config)
    world.ask(body("abc", 2))
    world.ask(body("xyz", 1, 5, logprobs=1))
    return world


def messages(members: int) -> int:
    world = busy(members)
    world.run()
    world.judge()
    return world.delivered


# ── whatever breaks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_undisturbed_everything_is_delivered_and_forgotten() -> None:
    world = busy()
    world.run()
    world.judge()
    for asked in world.asked.values():
        assert asked.opened == 1
        assert [len(tokens) for tokens in asked.tokens] == [item.max_tokens for item in asked.group]
        for item, extras, tokens in zip(asked.group, asked.extras, asked.tokens, strict=True):
            assert len(extras) == (0 if item.sampling.logprobs is None else len(tokens))


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("what", ["reset", "away", "half", "router", "kill"])
def test_whatever_happens_instead_of_any_message_nobody_sees_it(what: str, members: int) -> None:
    """reset: the line breaks; away: for longer; half: one side knows first; router, kill: it, or an instance, is gone."""
    if what == "kill" and members == 1:
        pytest.skip("nobody would be left")
    broken = 0
    for number in range(1, messages(members) + 1):
        world = busy(members)
        world.break_at = {number: what}
        world.run()
        world.judge()
        broken += len(world.broken)
    assert broken == messages(members)


def test_two_faults_in_a_row_are_not_seen_either() -> None:
    draw = random.Random(3)
    kinds = ("reset", "away", "half", "router")
    for _ in range(60):
        first = draw.randrange(1, 20)
        world = busy(draw.choice((1, 2)))
        world.break_at = {first: draw.choice(kinds), first + draw.randrange(1, 16): draw.choice(kinds)}
        world.run()
        world.judge()


@pytest.mark.parametrize("seed", range(24))
def test_clients_that_come_leave_and_cut_during_any_faults_get_what_is_theirs(seed: int) -> None:
    draw = random.Random(seed)
    world = World(draw.choice((1, 2, 3)))
    at = 0
    for _ in range(draw.randrange(1, 7)):
        at += draw.randrange(1, 25)
        world.break_at[at] = draw.choice(("reset", "away", "half", "router"))
    names = [f"b{number}" for number in range(draw.randrange(2, 9))]
    while names or not world.quiet():
        assert world.now_us < 60_000_000
        if names and draw.random() < 0.3:
            world.ask(body(names.pop(), draw.choice((1, 1, 2, 3)), draw.randrange(1, 12), draw.choice((None, 1))))
        _let_somebody_act(world, draw)
        world.go_on()
    world.judge()


def _let_somebody_act(world: World, draw: random.Random) -> None:
    waiting = [asked for asked in world.asked.values() if asked.group and not asked.over]
    if not waiting or draw.random() > 0.08:
        return
    asked = draw.choice(waiting)
    choice = draw.randrange(len(asked.group))
    if draw.random() < 0.3:
        world.leave(asked)
    elif asked.opened and asked.tokens[choice] and asked.outcomes[choice] is None and choice not in asked.keep:
        world.cut(asked, choice, draw.randrange(1, len(asked.tokens[choice]) + 1))


def test_a_choice_whose_line_was_lost_goes_on_where_it_was() -> None:
    """One instance: after a reset it tells what it holds, and nothing is computed twice."""
    world = busy()
    while not any(asked.tokens[0] for asked in world.asked.values()):
        world.turn()
    world.break_line(world.members[0])
    world.run()
    world.judge()
    for asked in world.asked.values():
        for choice, item in enumerate(asked.group):
            outcome = asked.outcomes[choice]
            assert outcome is not None
            computed = outcome.bill.computed_tokens + outcome.bill.cached_tokens
            assert computed == len(item.prompt) + len(asked.tokens[choice]) - 1, "one run, not two"


def test_a_router_that_starts_anew_finds_what_was_under_way() -> None:
    world = busy()
    while not all(asked.tokens[0] for asked in world.asked.values()):
        world.turn()
    world.restart_router()
    world.run()
    world.judge()
    assert (world.resubmitted, len(world.asked)) == (0, 2)


def test_what_nobody_claims_is_ended_and_forgotten() -> None:
    world = World()
    world.ask(body("abc", 2, max_tokens=40))
    while not any(asked.tokens[0] for asked in world.asked.values()):
        world.turn()
    world.restart_router()
    world._waiting = []  # its clients are gone
    while not world.orphans:
        world.turn()
    world.run()
    world.judge()
    assert not world.asked


def test_without_a_router_everything_ends_after_the_grace() -> None:
    world = World(1, RouterConfig(orphan_grace_us=5_000_000))
    world.ask(body("abc", 2, max_tokens=40))
    (member,) = world.members
    while not member.sessions.open_requests:
        world.turn()
    member.hang_up("reset", again_us=60_000_000)
    lost_us, world.asked = world.now_us, {}
    assert member.sessions.next_deadline() == lost_us + 5_000_000
    world.now_us += 5_000_000
    for _ in range(10):
        world.turn()
    assert member.worker.is_idle
    assert (member.sessions.open_requests, member.sessions.held_choices) == (0, 0)


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_leaves_at_any_time_leaves_nothing_behind(turns: int) -> None:
    world = World()
    asked = world.ask(body("abc", 2, max_tokens=20))
    stays = world.ask(body("xyz"))
    for _ in range(turns):
        world.turn()
    world.leave(asked)
    world.run()
    world.judge()
    assert stays.over


@pytest.mark.parametrize("what", [None, "reset", "half"])
def test_a_choice_that_is_cut_ends_after_what_was_kept(what: str | None) -> None:
    world = World()
    asked = world.ask(body("abc", 2, max_tokens=20))
    while len(asked.tokens[0]) < 3:
        world.turn()
    world.cut(asked, 0, 2)
    had = len(asked.tokens[0])
    if what is not None:
        world.break_at = {world.delivered + 1: what}
    world.run()
    outcome = asked.outcomes[0]
    assert outcome is not None
    assert (outcome.reason, outcome.generated_tokens, len(asked.tokens[0])) == (FinishReason.STOP, 2, had)
    assert asked.tokens[1] == asked.expected(1)
    assert world.members[0].sessions.held_choices == 0


def test_what_no_instance_could_take_is_declined_here() -> None:
    world = World()
    huge = world.ask(body("abc"), origin=b"o" * (ORIGIN_BYTES_MAX + 1))
    assert huge.declined is not None
    assert huge.declined.code is RefusalCode.GROUP_TOO_LARGE
    many = world.ask(body("abc") * (membership.GROUP_MAX + 1))
    assert many.declined is not None
    assert world.sessions.router.open_requests == 0


def test_what_its_own_clients_asked_of_an_instance_stays_there() -> None:
    world = World()
    (member,) = world.members
    member.order(Submit(3, tuple(body("own", 1, 6))))
    world.ask(body("abc", 2))
    world.run()
    world.judge()
    assert [answer.ticket for answer in member.answers] == [3]
    tokens = [token for output in member.local for token in np.frombuffer(output.tokens, "<i4").tolist()]
    (own,) = body("own", 1, 6)
    assert tokens == world.ask([own]).expected(0)


def test_an_instance_that_drains_takes_nothing_new_and_finishes_what_it_has() -> None:
    world = World(2)
    first = world.ask(body("abc", 2, max_tokens=20))
    while not first.tokens[0]:
        world.turn()
    member = next(member for member in world.members if member.sessions.open_requests)
    member.say(member.sessions.leave())
    world.turn()
    second = world.ask(body("xyz"))
    world.run()
    world.judge()
    assert {note.where for note in world.noted if note.request == second.request and note.where} == {
        other.name for other in world.members if other is not member
    }


def test_an_older_life_of_an_instance_is_fenced() -> None:
    world = World(2)
    for _ in range(3):
        world.turn()
    young, old = world.members
    world.break_line(old)
    old.sessions._join = msgspec.structs.replace(young.sessions._join, incarnation=1)
    young.sessions._join = msgspec.structs.replace(young.sessions._join, incarnation=2)
    world.break_line(young)
    for _ in range(5):
        world.turn()
    assert old.fenced is not None
    assert young.fenced is None


# ── one session, by hand ─────────────────────────────────────────────────────────────────────────────────────────────────


class Script:
    """A router that returns the effects it is given, and records its events."""

    def __init__(self) -> None:
        self.config = RouterConfig()
        self.heard: list[RouterEvent] = []
        self.says: list[RouterEffect] = []

    def handle(self, event: RouterEvent, now_us: int) -> list[RouterEffect]:
        self.heard.append(event)
        said, self.says = self.says, []
        return said

    def next_deadline(self) -> int | None:
        return None


def attempt(number: int) -> AttemptId:
    """The first attempt of a request."""
    return AttemptId(RequestNumber(number), 1)


def which(number: int, choice: int) -> ChoiceAttempt:
    return ChoiceAttempt(RequestNumber(number), choice, 1)


class Hand:
    """A session with an instance that the test plays, after the join."""

    def __init__(self, *held: HeldGroup, keep: Sequence[tuple[int, int, int]] = ()) -> None:
        self.router = Script()
        self.sessions = RouterSessions(self.router, "router")  # type: ignore[arg-type]
        self.session = self.sessions.connected(0)
        for message in (JOIN, *held):
            assert self.hear(message) == []
        kept = tuple((serial, which(number, choice)) for serial, number, choice in keep)
        self.said = self.hear(AllHeldSaid(), AdmitInstance(self.session, kept))
        self.router.heard.clear()

    def hear(self, message: FromInstance, *effects: RouterEffect) -> list[object]:
        """Receive a message; returns the messages and client effects that follow."""
        self.router.says += effects
        return self._plain(self.sessions.receive(self.session, decode_from_instance(encode_membership(message)), 0))

    def want(self, *effects: RouterEffect) -> list[object]:
        self.router.says += effects
        return self._plain(self.sessions.tick(0))

    def _plain(self, acts: Sequence[object]) -> list[object]:
        return [act.message if isinstance(act, SayToInstance) else act for act in acts]

    def send(self, number: int, group: list[Submission]) -> PlaceAttempt:
        (place,) = self.want(
            SendAttempt(self.session, attempt(number), tuple(group), tuple(range(len(group))), len(group), b"origin")
        )
        assert isinstance(place, PlaceAttempt)
        return place

    def open_as(self, number: int, group: list[Submission], *serials: int) -> None:
        place = self.send(number, group)
        assert self.hear(Accepted(place.ticket, serials)) == []
        assert self.news() == [AttemptAccepted(self.session, attempt(number))]

    def news(self) -> list[RouterEvent]:
        """The router's events since the last call, except ticks and mere signs of life."""
        mere = (DeadlineCame, MessageCame)
        heard: list[RouterEvent] = [event for event in self.router.heard if not isinstance(event, mere)]
        self.router.heard.clear()
        return heard


def held_group(*serials: int, ended: Sequence[int] = ()) -> HeldGroup:
    group = body("abc", len(serials))
    lines = tuple(
        HeldChoiceMessage(place, serial, np.array([1], "<i4").tobytes(), np.array([7], "<i4").tobytes(), (), 0,
                 next(iter(step(ended=[serial]).ended)) if serial in ended else None)
        for place, serial in enumerate(serials)
    )  # fmt: skip
    return HeldGroup(tuple(group), tuple(range(len(group))), len(group), b"origin", lines)


def test_a_leg_is_placed_answered_and_heard_of() -> None:
    hand = Hand()
    assert hand.said == [Welcome("router", RouterConfig().beat_us, RouterConfig().orphan_grace_us)]
    group = body("abc", 2)
    place = hand.send(5, group)
    assert place == PlaceAttempt(0, tuple(group), (0, 1), 2, b"origin")
    hand.hear(Accepted(0, (8, 9)))
    hand.hear(step([(8, [1]), (9, [2, 3])], started=[(8, 4)]))
    hand.hear(step([(8, [5])], ended=[8, 9]))
    eight, nine = (EndedRequest(Serial(serial), FinishReason.LENGTH, 1, Bill()) for serial in (8, 9))
    five = attempt(5)
    assert hand.news() == [
        AttemptAccepted(hand.session, five),
        TokensCame(hand.session, which(5, 0), [1], None, 4, None),
        TokensCame(hand.session, which(5, 1), [2, 3], None, None, None),
        TokensCame(hand.session, which(5, 0), [5], None, None, eight),
        TokensCame(hand.session, which(5, 1), [], None, None, nine),
    ]


def test_a_refused_leg_is_over() -> None:
    hand = Hand()
    hand.send(5, body("abc"))
    hand.hear(refused(0, FULL))
    assert hand.news() == [AttemptRefused(hand.session, attempt(5), FULL)]
    assert hand.want(CancelChoices(hand.session, attempt(5), (0,)), ForgetChoices(hand.session, attempt(5))) == []


def test_a_leg_called_back_before_its_answer_is_cancelled_unheard() -> None:
    hand = Hand()
    hand.send(5, body("abc", 2))
    assert hand.want(CancelChoices(hand.session, attempt(5), (0, 1)), ForgetChoices(hand.session, attempt(5))) == []
    assert hand.hear(Accepted(0, (8, 9))) == [Cancel(8), Cancel(9)]
    assert hand.hear(step([(8, [1])], ended=[8, 9])) == []
    assert hand.news() == []


def test_a_leg_called_back_in_part_before_its_answer_goes_on_with_the_rest() -> None:
    hand = Hand()
    hand.send(5, body("abc", 2))
    assert hand.want(CancelChoices(hand.session, attempt(5), (1,))) == []
    assert hand.hear(Accepted(0, (8, 9))) == [Cancel(9)]
    hand.hear(step([(8, [1]), (9, [2])], ended=[9]))
    assert hand.news() == [
        AttemptAccepted(hand.session, attempt(5)),
        TokensCame(hand.session, which(5, 0), [1], None, None, None),
    ]
    assert hand.want(ForgetChoices(hand.session, attempt(5))) == []
    assert hand.hear(step(ended=[8])) == [membership.ForgetSerials((8,))], "what was cancelled is not kept there anyway"


def test_what_is_called_back_is_cancelled_once_and_not_heard_of() -> None:
    hand = Hand()
    hand.open_as(5, body("abc", 2), 8, 9)
    back = CancelChoices(hand.session, attempt(5), (0, 1))
    assert hand.want(back, back) == [Cancel(8), Cancel(9)]
    assert hand.hear(step([(8, [1])], ended=[8, 9])) == []
    assert hand.news() == []


def test_a_message_about_what_was_called_back_is_a_sign_of_life() -> None:
    """A line that is slow may carry nothing else for longer than an instance may be silent."""
    hand = Hand()
    hand.open_as(5, body("abc", 2), 8, 9)
    hand.want(CancelChoices(hand.session, attempt(5), (0, 1)))
    hand.send(6, body("xyz"))
    hand.send(7, body("uvw"))
    hand.want(CancelChoices(hand.session, attempt(6), (0,)), CancelChoices(hand.session, attempt(7), (0,)))
    for message in (step([(8, [1])]), step(ended=[8, 9]), Accepted(1, (10,)), refused(2, FULL)):
        hand.router.heard.clear()
        hand.hear(message)
        assert hand.router.heard == [MessageCame(hand.session)], message


def test_a_cut_is_ordered_when_there_is_something_to_cut() -> None:
    hand = Hand()
    hand.open_as(5, body("abc"), 8)
    cut = StopChoice(hand.session, which(5, 0), 2)
    assert hand.want(cut, cut) == [StopAt(8, 2)]
    hand.send(6, body("xyz"))
    assert hand.want(StopChoice(hand.session, which(6, 0), 1)) == []
    assert hand.hear(Accepted(1, (9,))) == [StopAt(9, 1)]
    assert hand.want(StopChoice(hand.session, which(99, 0), 1)) == []


def test_forgetting_waits_until_all_of_a_leg_is_over() -> None:
    hand = Hand()
    hand.open_as(5, body("abc", 2), 8, 9)
    assert hand.hear(step(ended=[8])) == []
    assert hand.want(ForgetChoices(hand.session, attempt(5))) == []
    assert hand.hear(step(ended=[9])) == [membership.ForgetSerials((8, 9))]


def test_what_was_cut_and_then_called_back_is_forgotten_at_its_end() -> None:
    hand = Hand()
    hand.open_as(5, body("abc"), 8)
    assert hand.want(StopChoice(hand.session, which(5, 0), 2), CancelChoices(hand.session, attempt(5), (0,))) == [
        StopAt(8, 2)
    ]
    assert hand.hear(step(ended=[8])) == [membership.ForgetSerials((8,))]


def test_of_what_was_held_the_kept_goes_on_and_the_rest_is_ended_or_forgotten() -> None:
    hand = Hand(held_group(3, 4, 5, 6, ended=(4, 6)), keep=[(3, 1, 0), (4, 1, 1)])
    assert hand.said[1:] == [Cancel(5), membership.ForgetSerials((6,))]
    hand.hear(step([(3, [1]), (5, [2])], ended=[5]))
    assert hand.news() == [TokensCame(hand.session, which(1, 0), [1], None, None, None)]
    assert hand.want(ForgetChoices(hand.session, attempt(1))) == []
    assert hand.hear(step(ended=[3])) == [membership.ForgetSerials((3, 4))]


def test_the_router_hears_what_was_held_and_is_told_of_phases_by_attempt() -> None:
    router = Script()
    sessions = RouterSessions(router, "router")  # type: ignore[arg-type]
    session = sessions.connected(0)
    for message in (JOIN, held_group(3, 4)):
        sessions.receive(session, message, 0)
    router.says.append(AdmitInstance(session, ((4, which(2, 1)),)))
    sessions.receive(session, AllHeldSaid(), 0)
    (joined,) = router.heard
    assert isinstance(joined, InstanceJoined)
    assert [(choice.serial, choice.choice, choice.tokens) for choice in joined.held] == [(3, 0, (7,)), (4, 1, (7,))]
    notes = ((3, "WAITING", 1), (4, "RUNNING_DECODE", 2), (5, "WAITING", 3))
    sessions.receive(session, HeartbeatMessage(GAUGES, 0, True, True, b"k" * 32, b"", notes), 0)
    beaten = router.heard[-1]
    assert isinstance(beaten, HeartbeatCame)
    assert beaten.sign.notes == (PhaseReport(which(2, 1), "RUNNING_DECODE", 2),)
    assert beaten.sign.names.named == (b"k" * 16, b"k" * 16)
    assert (beaten.sign.ledger.running, beaten.sign.ledger.free_blocks) == (1, 3)


def test_who_is_turned_away_is_told_why_and_not_heard_any_more() -> None:
    router = Script()
    sessions = RouterSessions(router, "router")  # type: ignore[arg-type]
    session = sessions.connected(0)
    sessions.receive(session, JOIN, 0)
    router.says.append(RejectInstance(session, "another model", False))
    assert sessions.receive(session, AllHeldSaid(), 0) == [
        SayToInstance(session, TurnedAway("another model", False)),
        CloseConnection(session, "another model"),
    ]
    router.heard.clear()
    assert sessions.receive(session, Leaving(), 0) == sessions.lost(session, "closed", 0) == []
    assert router.heard == []
    assert sessions.connected(0) != session


def test_a_lost_session_is_told_of_once_and_not_heard_any_more() -> None:
    hand = Hand()
    hand.open_as(5, body("abc"), 8)
    for _ in range(2):
        assert hand.sessions.lost(hand.session, "reset", 0) == []
    assert hand.hear(step([(8, [1])])) == []
    assert hand.news() == [InstanceLost(hand.session, "reset")]
    assert hand.want(CancelChoices(hand.session, attempt(5), (0,))) == [], "nobody is there to be told"


# ── instances that break the rules ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "said",
    [
        [AllHeldSaid()],
        [held_group(3)],
        [HeartbeatMessage(GAUGES, 0, True, False, b"", b"", ())],
        [step([(1, [1])])],
        [JOIN, JOIN],
        [JOIN, Accepted(0, (1,))],
        [JOIN, Leaving()],
        [JOIN, held_group(3), held_group(3)],
    ],
)
def test_a_session_that_does_not_begin_as_it_should_is_an_error(said: list[FromInstance]) -> None:
    router = Script()
    sessions = RouterSessions(router, "router")  # type: ignore[arg-type]
    session = sessions.connected(0)
    for message in said[:-1]:
        sessions.receive(session, message, 0)
    with pytest.raises(WireError):
        sessions.receive(session, said[-1], 0)
    assert sessions.lost(session, "broken", 0) == []
    assert router.heard == [], "the router never knew of it"


def test_who_does_not_join_in_time_is_closed() -> None:
    sessions = RouterSessions(Script(), "router")  # type: ignore[arg-type]
    silent, joined = sessions.connected(5), Hand()
    due_us = sessions.next_deadline()
    assert due_us == 5 + JOIN_US
    assert sessions.tick(due_us - 1) == []
    assert [type(act) for act in sessions.tick(due_us)] == [CloseConnection]
    assert sessions.receive(silent, JOIN, due_us) == []
    assert sessions.next_deadline() is None
    assert joined.sessions.tick(10 * JOIN_US) == joined.sessions.tick(20 * JOIN_US) == []


def test_every_turn_of_a_session_is_counted() -> None:
    hand, late = Hand(), RouterSessions(Script(), "router")  # type: ignore[arg-type]
    hand.sessions.lost(hand.session, "reset", 0)
    taken = {turn for turn, times in hand.sessions.session_moves().items() if times}
    assert taken == {
        (RouterSessionState.NEW, RouterSessionMove.JOIN),
        (RouterSessionState.JOINING, RouterSessionMove.ADMIT),
        (RouterSessionState.ADMITTED, RouterSessionMove.CLOSE),
    }
    late.connected(0)
    late.tick(JOIN_US)
    assert late.session_moves()[RouterSessionState.NEW, RouterSessionMove.CLOSE] == 1


def test_more_held_groups_than_may_be_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HELD_GROUPS_MAX", 1), ("HELD_BYTES_MAX", held_bytes(held_group(3)))):
        with monkeypatch.context() as patch:
            patch.setattr(f"baton.wire.router_sessions.{name}", value)
            sessions = RouterSessions(Script(), "router")  # type: ignore[arg-type]
            session = sessions.connected(0)
            sessions.receive(session, JOIN, 0)
            sessions.receive(session, held_group(3), 0)
            with pytest.raises(WireError, match="held"):
                sessions.receive(session, held_group(4), 0)


def test_whatever_an_instance_tells_that_it_holds_a_router_takes_and_a_line_carries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for where in ("held_choices", "router_sessions"):
        monkeypatch.setattr(f"baton.wire.{where}.HELD_BYTES_MAX", 20_000)
    sessions = serving()
    for serial in range(20):
        open_as(sessions, asks(f"r{serial}", logprobs=1), serial, ticket=serial)
        for _ in range(10):  # each row costs more than its numbers
            sessions.take(step([(serial, [7])], logprobs=(line(0, -1.0),)), 0)
    sessions.lost("cut", 0)
    said = sessions.opened(0)
    assert 5 < len(said) < 20
    assert sum(len(encode_membership(message)) for message in said) <= 20_000
    hand = Hand(*(message for message in said if isinstance(message, HeldGroup)))
    assert isinstance(hand.said[0], Welcome)


NEGATIVE = msgspec.structs.replace(step(ended=[8]).ended[0], generated_tokens=-1)


@pytest.mark.parametrize(
    "message",
    [
        JOIN,
        AllHeldSaid(),
        held_group(3),
        Accepted(0, (1,)),
        Accepted(7, (1,)),
        Accepted(1, (20,)),
        Accepted(1, (20, 20)),
        Accepted(1, (20, 8)),
        refused(0, FULL),
        refused(7, FULL),
        step([(8, [JOIN.vocabulary])]),
        step([(8, [-1])]),
        step([(8, [1]), (8, [2])]),
        step([(8, [1] * 5)]),
        step([(9, [1, 2])], logprobs=(line(0, -1.0),)),
        step([(30, [1])]),
        step(ended=[30]),
        step(ended=[8, 8]),
        step([(8, [1])], started=[(8, -1)]),
        msgspec.structs.replace(step([(8, [1])]), counts=np.array([2], "<i4").tobytes()),
        msgspec.structs.replace(step([(8, [1]), (9, [])]), counts=np.array([2, -1], "<i4").tobytes()),
        msgspec.structs.replace(step([(8, [1])]), serials=b"12345"),
        msgspec.structs.replace(step(), ended=(NEGATIVE,)),
        HeartbeatMessage(msgspec.structs.replace(GAUGES, running=-1), 0, True, False, b"", b"", ()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_instance_that_breaks_the_rules_is_an_error_and_the_router_hears_nothing_of_it(message: FromInstance) -> None:
    hand = Hand()
    hand.open_as(5, [*body("abc", 1), *body("log", 1, logprobs=1)], 8, 9)
    hand.send(6, body("xyz", 2))
    with pytest.raises(WireError):
        hand.hear(message)
    assert hand.news() == []
    hand.sessions.lost(hand.session, "broken", 0)
    assert hand.news() == [InstanceLost(hand.session, "broken")]


def test_tokens_are_counted_over_all_steps_and_legs() -> None:
    """Four may come; one of them came elsewhere."""
    hand = Hand()
    (item,) = body("abc", 1, max_tokens=4)
    hand.open_as(5, [Submission(item.request_id, item.prompt, item.sampling, 4, generated=frozen_tokens([3]))], 8)
    for token in range(3):
        hand.hear(step([(8, [token])]))
    with pytest.raises(WireError, match="serial 8"):
        hand.hear(step([(8, [1])]))


def test_tokens_that_were_held_are_counted_too() -> None:
    hand = Hand(held_group(3), keep=[(3, 1, 0)])
    hand.hear(step([(3, [1] * 3)]))
    with pytest.raises(WireError, match="serial 3"):
        hand.hear(step([(3, [1])]))


def test_a_row_of_fewer_tokens_than_none_is_an_error() -> None:
    hand = Hand()
    hand.open_as(5, body("abc", 2), 8, 9)
    with pytest.raises(WireError, match="-1 tokens of serial 9"):
        hand.hear(msgspec.structs.replace(step([(8, [1]), (9, [])]), counts=np.array([2, -1], "<i4").tobytes()))
    assert hand.news() == []


def test_when_the_router_hangs_up_over_a_row_the_rows_after_it_are_not_heard() -> None:
    hand = Hand()
    hand.open_as(5, body("abc", 2), 8, 9)
    assert hand.hear(step([(8, [1]), (9, [2])]), CloseSession(hand.session, "stuck")) == [
        CloseConnection(hand.session, "stuck")
    ]
    assert hand.news() == [TokensCame(hand.session, which(5, 0), [1], None, None, None)]


def test_where_a_request_was_is_remembered_for_its_last_notes_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.wire.router_sessions.RECENT_MAX", 2)
    hand = Hand()
    for serial in range(3):
        hand.open_as(serial, body(f"r{serial}"), serial)
        hand.hear(step(ended=[serial]))
        hand.news()
    notes = tuple((serial, "FINISHED", 1) for serial in range(3))
    hand.hear(HeartbeatMessage(GAUGES, 0, True, False, b"", b"", notes))
    (beaten,) = hand.news()
    assert isinstance(beaten, HeartbeatCame)
    assert [note.attempt.request for note in beaten.sign.notes] == [1, 2]


def test_log_probabilities_that_nobody_asked_for_are_left_out() -> None:
    hand = Hand()
    hand.open_as(5, body("abc"), 8)
    hand.hear(step([(8, [1])], logprobs=(line(0, -1.0),)))
    assert hand.news() == [TokensCame(hand.session, which(5, 0), [1], None, None, None)]


def test_who_asked_for_log_probabilities_gets_tokens_from_an_executor_that_has_none() -> None:
    hand = Hand()
    hand.open_as(5, body("abc", 1, logprobs=1), 8)
    hand.hear(step([(8, [1])]))
    assert hand.news() == [TokensCame(hand.session, which(5, 0), [1], None, None, None)]


def test_log_probabilities_come_with_their_tokens_and_name_tokens_only() -> None:
    hand = Hand()
    hand.open_as(5, body("abc", 1, logprobs=1), 8)
    hand.hear(step([(8, [1])], logprobs=(line(0, -1.0),)))
    assert hand.news() == [TokensCame(hand.session, which(5, 0), [1], [(-1.0, ((5, -1.0),))], None, None)]
    values = np.array([-1.0], np.float32)
    strange = Logprobs(0, values, np.array([[JOIN.vocabulary]], np.int32), values.reshape(1, 1))
    with pytest.raises(WireError, match="vocabulary"):
        hand.hear(step([(8, [1])], logprobs=(strange,)))


def test_what_a_broken_instance_had_goes_on_elsewhere() -> None:
    """The real router: after the error and the loss that follows it, the other instance gets what the first had."""
    sessions = RouterSessions(Router(RouterConfig(), b"secret", 1), "router")
    numbers: list[Session] = []
    for name in ("d0", "d1"):
        numbers.append(sessions.connected(0))
        sessions.receive(numbers[-1], msgspec.structs.replace(JOIN, name=name), 0)
        sessions.receive(numbers[-1], AllHeldSaid(), 0)
    number, acts = sessions.submit("tenant", body("abc"), b"origin", 0)
    (placed,) = [act for act in acts if isinstance(act, SayToInstance)]
    sessions.receive(placed.session, Accepted(0, (1,)), 0)
    (came,) = [a for a in sessions.receive(placed.session, step([(1, [7])]), 0) if isinstance(a, DeliverTokens)]
    assert (came.request, came.tokens) == (number, [7])
    with pytest.raises(WireError):
        sessions.receive(placed.session, step([(1, [1000])]), 0)
    again = [act for act in sessions.lost(placed.session, "broken", 0) if isinstance(act, SayToInstance)]
    assert [act.session for act in again if isinstance(act.message, PlaceAttempt)] == [
        session for session in numbers if session != placed.session
    ]
    (place,) = [act.message for act in again if isinstance(act.message, PlaceAttempt)]
    assert np.frombuffer(place.group[0].generated, "<i4").tolist() == [7]


def test_a_declined_body_is_told_with_its_number() -> None:
    sessions = RouterSessions(Router(RouterConfig(waiting_max=1, absent_us=1), b"secret", 1), "router")
    first, _ = sessions.submit("tenant", body("abc"), b"a", 0)
    second, acts = sessions.submit("tenant", body("xyz", 2), b"b", 0)
    declined = [act for act in acts if isinstance(act, RequestDeclined)]
    assert first != second
    assert [act.request for act in declined] == [second]
