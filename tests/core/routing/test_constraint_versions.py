"""A constrained answer that moves among instances with different versions of its backend: compared, placed, never stuck."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.engine.request import Constraint, FinishReason, MaskReference, Submission
from baton.core.errors import RefusalCode
from baton.core.routing.events import DeliverTokens, InstanceLost, MaskCame, SendAttempt, WantMask
from tests.support.routing import Bench, facts, submission

VERSION = RefusalCode.OTHER_BACKEND_VERSION
MASK = b"0123456789abcdef"


def constrained(name: str) -> Submission:
    made = submission(name)
    return replace(made, sampling=replace(made.sampling, constraint=Constraint("llguidance", "1.0", "{}")))


def version_of(send: SendAttempt) -> str | MaskReference:
    constraint = send.group[0].sampling.constraint
    assert constraint is not None
    return constraint.version


class Moved:
    """Two instances with another version; the one that began the answer is lost after two tokens."""

    def __init__(self, others: int = 2) -> None:
        self.bench = bench = Bench()
        bench.join(facts("began"))
        self.body, send = bench.open(constrained("x"))
        bench.came(send, 5, 6)
        for number in range(others):
            bench.join(facts(f"other-{number}"))
        bench.tell(InstanceLost(bench.sessions["began"], "reset"))

    def refuse(self) -> SendAttempt:
        """The instance that has it refuses it for its version; returns the next attempt."""
        last = self.bench.ever(SendAttempt)[-1]
        self.bench.refuse(last, VERSION)
        return self.next_after(last)

    def next_after(self, last: SendAttempt) -> SendAttempt:
        for _ in range(100):
            if self.bench.ever(SendAttempt)[-1] is not last:
                return self.bench.ever(SendAttempt)[-1]
            self.bench.pass_us(100_000)
        raise AssertionError("it was not sent again")

    def tell_mask(self, digest: bytes, outputs: int = 2) -> None:
        self.bench.tell(MaskCame(self.body, 0, outputs, digest))


def test_an_instance_of_another_version_is_asked_again_with_the_mask_to_compare() -> None:
    moved = Moved()
    again = moved.refuse()
    (wanted,) = moved.bench.ever(WantMask)
    assert (wanted.request, wanted.choice, wanted.outputs) == (moved.body, 0, (5, 6))
    assert version_of(again) == "1.0", "nobody has told the mask yet"
    moved.tell_mask(MASK)
    last = moved.refuse()
    assert version_of(last) == MaskReference("1.0", 2, MASK)
    assert len(moved.bench.ever(WantMask)) == 1, "it is asked for once"
    moved.bench.take(last)
    moved.bench.came(last, 7)
    assert moved.bench.delivered(moved.body) == [5, 6, 7]


def test_who_has_another_mask_is_avoided_and_where_all_have_any_that_permits_it_may_take_it() -> None:
    moved = Moved(others=2)
    moved.refuse()
    moved.tell_mask(MASK)
    first = moved.refuse()
    second = moved.refuse()
    assert first.session != second.session, "the other instance may have the same mask"
    assert version_of(second) == MaskReference("1.0", 2, MASK)
    third = moved.refuse()
    assert version_of(third) == MaskReference("1.0", 2, b""), "nobody has that mask"
    moved.bench.take(third)
    assert not [item for item in moved.bench.ever(DeliverTokens) if item.outcome is not None]


def test_where_no_version_permits_what_was_delivered_it_ends_with_a_typed_error_after_the_time_to_come_back() -> None:
    moved = Moved(others=1)
    moved.refuse()
    moved.tell_mask(b"")
    assert version_of(moved.refuse()) == MaskReference("1.0", 2, b"")
    began_us = moved.bench.now_us
    while not (over := [item for item in moved.bench.ever(DeliverTokens) if item.outcome is not None]):
        last_send = moved.bench.ever(SendAttempt)[-1]
        moved.bench.refuse(last_send, VERSION)
        if not [item for item in moved.bench.ever(DeliverTokens) if item.outcome is not None]:
            moved.next_after(last_send)
    assert moved.bench.now_us - began_us >= moved.bench.router.config.absent_us
    (last,) = over
    assert last.outcome is not None
    assert last.outcome.reason is FinishReason.RESCHEDULE
    assert last.outcome.generated_tokens == 2
    assert last.outcome.fault is not None


def test_an_instance_of_its_version_that_comes_back_takes_what_all_others_have_refused() -> None:
    moved = Moved(others=1)
    moved.refuse()
    moved.tell_mask(b"")
    moved.refuse()
    last = moved.bench.ever(SendAttempt)[-1]
    moved.bench.refuse(last, VERSION)
    moved.bench.join(facts("began", incarnation=2))
    again = moved.next_after(last)
    assert again.session == moved.bench.sessions["began"]
    moved.bench.take(again)
    moved.bench.came(again, 7)
    assert moved.bench.delivered(moved.body) == [5, 6, 7]


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_mask_of_another_place_in_the_answer_is_not_used(outputs: int) -> None:
    moved = Moved()
    moved.refuse()
    moved.tell_mask(MASK, outputs)
    assert version_of(moved.refuse()) == "1.0"


def test_after_more_tokens_the_mask_is_asked_for_again() -> None:
    moved = Moved()
    moved.refuse()
    moved.tell_mask(MASK)
    taken = moved.refuse()
    moved.bench.take(taken)
    moved.bench.came(taken, 7)
    moved.bench.tell(InstanceLost(taken.session, "reset"))
    assert version_of(moved.next_after(taken)) == "1.0", "the mask after two tokens says nothing of that after three"
    moved.refuse()
    assert [wanted.outputs for wanted in moved.bench.ever(WantMask)] == [(5, 6), (5, 6, 7)]


def test_a_mask_that_comes_when_its_request_is_over_changes_nothing() -> None:
    moved = Moved()
    assert moved.bench.tell(MaskCame(moved.body, 0, 2, MASK)) == []
    moved.bench.tell(MaskCame(type(moved.body)(99), 0, 2, MASK))
