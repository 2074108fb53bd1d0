"""The record of a router that the laws read: when its promises begin to count, from messages given by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.orders import Accepted
from baton.core.engine.request import FinishReason, Serial, Submission
from baton.core.errors import RefusalCode
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import ChoiceOutcome, DeliverTokens, Session, UnclaimedFound
from baton.core.routing.identity import RequestNumber
from baton.sim.attempt_book import COUNT_EVERY, AttemptBook
from baton.sim.attempt_laws import SLACK_US
from baton.sim.faults import Fault
from baton.sim.law_names import BACK_OFF, DESERVED_END, DRAINS_IN_TIME, WAITS_IN_TIME, LawBroken
from baton.wire.engine_messages import RefusedMessage, StepOutput
from baton.wire.heartbeats import NO_GAUGES
from baton.wire.router_messages import (
    AllHeldSaid,
    FromInstance,
    HeldChoiceMessage,
    HeldGroup,
    Leaving,
    PlaceAttempt,
    Welcome,
)
from baton.wire.router_sessions import SayToInstance
from tests.support.routing import choices, facts, submission

CONFIG = RouterConfig(absent_us=50_000, drain_us=200_000, beat_us=200_000, suspect_us=60_000_000)
FIRST, SECOND = Session(1), Session(2)


class NoFaults:
    def may_be_suspected(self, instance: int) -> bool:
        return False

    def may_be_lost(self, instance: int, accepted: bool) -> bool:
        return True

    def fire(self, fault: Fault, where: str) -> None: ...


class Watched:
    """A router that is only told of: nothing decides here."""

    def __init__(self) -> None:
        self.book = AttemptBook(CONFIG, NoFaults())

    def yields_of(self, origin: bytes) -> tuple[int, ...]:
        return ()

    def open_at(self) -> dict[Session, int]:
        return {session: len(seen.open_choices()) for session, seen in self.book._life.sessions.items()}

    def holders(self, key: bytes) -> tuple[Session, ...]:
        return ()

    def join(self, session: Session, now_us: int, *held: FromInstance, draining: bool = False, said_us: int = 0) -> None:
        """`said_us`: how long after its Join the instance has said what it holds."""
        self.book.connected(session, session)
        self.book.heard(session, replace(facts(f"instance {session}"), draining=draining), now_us)
        for message in (*held, AllHeldSaid()):
            self.book.heard(session, message, now_us + said_us)
        self.book.acted(SayToInstance(session, Welcome("router", 1, 1)), now_us + said_us)
        self.look(now_us + said_us)

    def place(self, session: Session, now_us: int, *choices: Submission) -> None:
        group = choices or (submission("x"),)
        self.book.asked(RequestNumber(1), group, b"x", now_us)
        indices = tuple(range(len(group)))
        self.book.acted(SayToInstance(session, PlaceAttempt(1, group, indices, len(group), b"x")), now_us)

    def end(self, session: Session, serial: int, reason: FinishReason, now_us: int) -> None:
        ended = EndedRequest(Serial(serial), reason, 0, Bill())
        self.book.heard(session, StepOutput(b"", b"", b"", (), (), (ended,), NO_GAUGES), now_us)

    def outcome(self, choice: int, reason: FinishReason, now_us: int) -> None:
        outcome = ChoiceOutcome(reason, 0, Bill(attempts=1))
        self.book.acted(DeliverTokens(RequestNumber(1), choice, [], None, None, outcome), now_us)

    def look(self, now_us: int) -> None:
        self.book.looked(self, now_us)

    def look_often(self, now_us: int) -> None:
        """Often enough that all laws are checked."""
        for _ in range(COUNT_EVERY):
            self.look(now_us)


def broken_by(watched: Watched, now_us: int) -> str:
    with pytest.raises(LawBroken) as caught:
        watched.look_often(now_us)
    return caught.value.law


def held_group() -> HeldGroup:
    line = HeldChoiceMessage(place=0, serial=7, counts=b"", tokens=b"", logprobs=(), cached_tokens=None, ended=None)
    return HeldGroup((submission("x"),), (0,), 1, b"x", (line,))


def test_the_time_to_drain_counts_from_the_welcome() -> None:
    """A router knows what is open at an instance when all of it was said, which may be long after the Join."""
    watched = Watched()
    watched.join(FIRST, 0)
    watched.join(SECOND, 10_000, held_group(), draining=True, said_us=90_000)
    watched.book.acted(UnclaimedFound(RequestNumber(-1), b"x", ((),), ((),), (None,), (None,)), 100_000)
    watched.book.claimed(RequestNumber(-1))
    due_us = 100_000 + CONFIG.drain_us + CONFIG.beat_us + SLACK_US
    watched.look_often(due_us)
    assert broken_by(watched, due_us + 1) == DRAINS_IN_TIME


def test_what_is_open_at_an_instance_that_drains_must_leave_it_in_time() -> None:
    watched = Watched()
    watched.join(FIRST, 0)
    watched.join(SECOND, 0)
    watched.place(FIRST, 0)
    watched.book.heard(FIRST, Accepted(1, (7,)), 0)
    watched.book.heard(FIRST, Leaving(), 10_000)
    due_us = 10_000 + CONFIG.drain_us + CONFIG.beat_us + SLACK_US
    watched.look_often(due_us)
    assert broken_by(watched, due_us + 1) == DRAINS_IN_TIME


def test_a_refusal_does_not_excuse_a_longer_wait_while_nobody_serves() -> None:
    watched = Watched()
    watched.join(FIRST, 0)
    watched.place(FIRST, 0)
    watched.book.heard(FIRST, Leaving(), 10_000)
    watched.look(10_000)
    watched.look(90_000)
    watched.book.heard(FIRST, RefusedMessage(1, RefusalCode.DRAINING, "", None), 90_000)
    assert broken_by(watched, 90_000) == WAITS_IN_TIME


def test_a_choice_found_where_it_was_has_found_room() -> None:
    """What others had refused before does not delay it when that instance is lost too."""
    watched = Watched()
    watched.join(FIRST, 0)
    watched.place(FIRST, 0)
    watched.book.heard(FIRST, RefusedMessage(1, RefusalCode.QUEUE_FULL, "", None), 1_000)
    watched.join(SECOND, 2_000, held_group())
    watched.book.lost(SECOND, 3_000)
    watched.book.acted(SayToInstance(FIRST, PlaceAttempt(2, (submission("x"),), (0,), 1, b"x")), 3_000)


def test_a_choice_that_was_refused_backs_off() -> None:
    watched = Watched()
    watched.join(FIRST, 0)
    watched.place(FIRST, 0)
    watched.book.heard(FIRST, RefusedMessage(1, RefusalCode.QUEUE_FULL, "", None), 1_000)
    with pytest.raises(LawBroken) as caught:
        watched.book.acted(SayToInstance(FIRST, PlaceAttempt(2, (submission("x"),), (0,), 1, b"x")), 3_000)
    assert caught.value.law == BACK_OFF


def test_a_request_that_was_accepted_waits_from_the_loss_of_its_instance_on() -> None:
    watched = Watched()
    watched.join(FIRST, 0)
    watched.place(FIRST, 0)
    watched.book.heard(FIRST, Accepted(1, (7,)), 0)
    watched.book.heard(FIRST, Leaving(), 10_000)
    watched.look(10_000)
    watched.book.lost(FIRST, 90_000)
    watched.look(90_000 + CONFIG.absent_us + SLACK_US)
    assert broken_by(watched, 90_001 + CONFIG.absent_us + SLACK_US) == WAITS_IN_TIME


def one_of_two_choices_has_ended() -> Watched:
    """Nobody serves from 10,000 µs on; the second choice is lost at 20,000 µs, and the first one ends at 60,000 µs."""
    watched = Watched()
    watched.join(FIRST, 0)
    watched.place(FIRST, 0, *choices("x", 2))
    watched.book.heard(FIRST, Accepted(1, (7, 8)), 0)
    watched.book.heard(FIRST, Leaving(), 10_000)
    watched.look(10_000)
    watched.end(FIRST, 8, FinishReason.RESCHEDULE, 20_000)
    watched.end(FIRST, 7, FinishReason.STOP, 60_000)
    watched.outcome(0, FinishReason.STOP, 60_000)
    return watched


def test_the_end_of_one_choice_does_not_begin_the_wait_of_another_again() -> None:
    one_of_two_choices_has_ended().outcome(1, FinishReason.RESCHEDULE, 20_000 + CONFIG.absent_us)


def test_a_choice_is_not_given_up_before_it_has_waited_long_enough_itself() -> None:
    with pytest.raises(LawBroken) as caught:
        one_of_two_choices_has_ended().outcome(1, FinishReason.RESCHEDULE, 19_999 + CONFIG.absent_us)
    assert caught.value.law == DESERVED_END
