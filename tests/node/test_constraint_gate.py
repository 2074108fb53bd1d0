"""What waits for a compiler waits alone: others pass, tenants take turns, and nobody waits for long."""

from __future__ import annotations

import queue

import msgspec
import pytest

from baton.core.engine.orders import Submit
from baton.core.errors import RefusalCode
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.scripted_backend import ScriptedBackend
from baton.node.constraint_gate import WAIT_US_MAX, ConstraintGate, GatePassed, GateRefused
from tests.support.constrained_submissions import (
    DEADLINE_S,
    HaltingBackend,
    allowed_first,
    asked,
    constraint,
    of_another_version,
)

VOCABULARY = 64


class Gate:
    def __init__(self, held_max: int = 100) -> None:
        self.now_us = 0
        self.backend = HaltingBackend()
        self.compiled = CompiledConstraints([self.backend])
        self.decided: queue.SimpleQueue[GatePassed | GateRefused] = queue.SimpleQueue()
        self.gate = ConstraintGate(self.compiled, VOCABULARY, self.decided.put, lambda: self.now_us, held_max)

    def next(self) -> GatePassed | GateRefused:
        return self.decided.get(timeout=DEADLINE_S)

    def passed(self) -> str:
        """The id of the next request that passes."""
        decided = self.next()
        assert isinstance(decided, GatePassed)
        return decided.submit.group[0].request_id


def test_what_has_no_constraint_or_a_compiled_one_passes_at_once() -> None:
    gate = Gate()
    gate.backend.release.release()
    gate.compiled.compile(constraint(1))
    assert gate.gate.passes(asked("plain", None))
    assert gate.gate.passes(asked("known", 1))
    assert not gate.gate.passes(asked("new", 2))


def test_what_is_held_passes_when_its_constraint_is_compiled() -> None:
    gate = Gate()
    assert gate.gate.hold(asked("new", 2)) is None
    gate.backend.begun.get(timeout=DEADLINE_S)
    assert gate.decided.empty()
    gate.backend.release.release()
    assert gate.passed() == "new"
    assert gate.gate.passes(asked("again", 2))


def test_tenants_take_turns() -> None:
    gate = Gate()
    for nth in range(3):
        assert gate.gate.hold(asked(f"greedy:{nth}:0", nth)) is None
    gate.backend.begun.get(timeout=DEADLINE_S)  # the first is being compiled
    assert gate.gate.hold(asked("modest:0:0", 9)) is None
    gate.backend.release.release(10)
    assert [gate.passed() for _ in range(4)] == ["greedy:0:0", "greedy:1:0", "modest:0:0", "greedy:2:0"]


def test_whoever_waited_too_long_is_refused_and_may_try_again() -> None:
    gate = Gate()
    assert gate.gate.hold(asked("first", 1)) is None
    gate.backend.begun.get(timeout=DEADLINE_S)
    assert gate.gate.hold(asked("late", 2, ticket=7)) is None
    gate.now_us += WAIT_US_MAX + 1
    gate.backend.release.release()
    assert gate.passed() == "first"
    refused = gate.next()
    assert isinstance(refused, GateRefused)
    assert (refused.ticket, refused.refusal.code, refused.refusal.retry_after_s) == (7, RefusalCode.QUEUE_FULL, 1)


def test_one_that_waited_too_long_passes_if_another_has_brought_its_constraint() -> None:
    gate = Gate()
    for name in ("first", "same"):
        assert gate.gate.hold(asked(name, 1)) is None
    gate.backend.begun.get(timeout=DEADLINE_S)
    gate.now_us += WAIT_US_MAX + 1
    gate.backend.release.release()
    assert [gate.passed(), gate.passed()] == ["first", "same"]


def test_no_more_are_held_than_may_be() -> None:
    gate = Gate(held_max=1)
    assert gate.gate.hold(asked("first", 1)) is None
    gate.backend.begun.get(timeout=DEADLINE_S)
    assert gate.gate.hold(asked("second", 2)) is None
    refused = gate.gate.hold(asked("third", 3, ticket=5))
    assert refused is not None
    assert (refused.ticket, refused.refusal.code) == (5, RefusalCode.QUEUE_FULL)


def test_a_constraint_that_cannot_be_compiled_is_passed_on_to_fail_by_itself() -> None:
    gate = Gate()
    gate.backend.fails = True
    gate.backend.release.release()
    assert gate.gate.hold(asked("bad", 1)) is None
    assert gate.passed() == "bad"


def test_a_group_waits_for_each_of_its_constraints_once() -> None:
    gate = Gate()
    one, other = asked("a", 1).group[0], asked("b", 2).group[0]
    again = msgspec.structs.replace(one, request_id="c")
    gate.backend.release.release(10)
    assert gate.gate.hold(Submit(0, (one, other, again))) is None
    assert gate.passed() == "a"
    assert [gate.backend.begun.get(timeout=DEADLINE_S) for _ in range(2)] == [constraint(1).source, constraint(2).source]
    assert gate.backend.begun.empty()


@pytest.mark.parametrize("kept", [1, 3])
def test_the_cache_keeps_the_latest_used_ones(kept: int) -> None:
    compiled = CompiledConstraints([ScriptedBackend()], compiled_max=kept)
    for seed in range(5):
        compiled.compile(constraint(seed))
    assert [compiled.has(constraint(seed)) for seed in range(5)] == [seed >= 5 - kept for seed in range(5)]


def test_masks_are_compared_before_an_answer_of_another_version_passes() -> None:
    gate, first = Gate(), asked("moved", 5).group[0]
    gate.backend.release.release()
    gate.compiled.compile(constraint(5))
    submit = Submit(3, (of_another_version(first, [allowed_first(constraint(5).source)], b""),))
    assert not gate.gate.passes(submit), "its constraint is compiled, and not compared"
    assert gate.gate.hold(submit) is None
    decided = gate.next()
    assert isinstance(decided, GatePassed)
    assert decided.submit.ticket == 3
    made = decided.submit.group[0].sampling.constraint
    assert made is not None
    assert made.version == ScriptedBackend.version
