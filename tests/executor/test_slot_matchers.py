"""Which slots of a step sit it out, and what they draw afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest

from baton.core.engine.request import NO_TOKENS, Constraint, Sampling
from baton.executor.constraints import slot_matchers
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import CompiledConstraint, Words, set_bits
from baton.executor.constraints.slot_matchers import SlotMatchers
from baton.executor.drafts import drafts_of

VOCABULARY = 32
FREE = Sampling(seed=0)


class CountingMatcher:
    """After n tokens only token n may come. Its mask waits for the gate."""

    def __init__(self, gate: Event, taken: int = 0) -> None:
        self._gate = gate
        self._taken = taken
        self.busy = False

    def mask(self, out: Words) -> None:
        self.busy = True
        assert self._gate.wait(60)
        self.busy = False
        set_bits(out, [self._taken])

    def consume(self, token: int) -> bool:
        assert not self.busy
        if token != self._taken:
            return False
        self._taken += 1
        return True

    def copy(self) -> CountingMatcher:
        assert not self.busy
        return CountingMatcher(self._gate, self._taken)

    def forced_tokens(self) -> list[int]:
        assert not self.busy
        return [self._taken, self._taken + 1]

    @property
    def is_stopped(self) -> bool:
        return False


class CountingBackend:
    """The source names the gate of its masks."""

    name = "counting"
    version = "1"

    def __init__(self) -> None:
        self.gates = {name: Event() for name in ("always", "quick", "slow", "slower")}
        self.gates["quick"].set()
        self.gates["always"].set()

    def compile(self, source: str) -> CompiledConstraint:
        gate = self.gates[source]

        class Compiled:
            def matcher(self) -> CountingMatcher:
                return CountingMatcher(gate)

        return Compiled()


def wish(source: str) -> Sampling:
    return Sampling(seed=0, constraint=Constraint("counting", "1", source))


class Slots:
    """A few slots with a matcher each, the sources of which are given."""

    def __init__(self, *sources: str | None) -> None:
        self.backend = CountingBackend()
        self.matchers = SlotMatchers(len(sources), VOCABULARY, CompiledConstraints([self.backend]))
        self.slots = np.arange(len(sources), dtype=np.int32)
        for slot, source in enumerate(sources):
            self.matchers.start(slot, NO_TOKENS, 0, FREE if source is None else wish(source))

    def step(self, position: int, drafts: list[list[int]] | None = None, patient: bool = True) -> list[bool]:
        self.prepare(position, drafts)
        return self.late(patient)

    def prepare(self, position: int, drafts: list[list[int]] | None = None) -> None:
        at = np.full(len(self.slots), position, dtype=np.int64)
        self.matchers.prepare(self.slots, at, drafts_of(drafts or [[] for _ in self.slots]))

    def late(self, patient: bool = True) -> list[bool]:
        return self.matchers.late(self.slots, np.full(len(self.slots), patient)).tolist()

    def open(self, source: str) -> None:
        self.backend.gates[source].set()

    def close(self, source: str) -> None:
        self.backend.gates[source].clear()

    def draw(self, slot: int, position: int, token: int) -> None:
        """After its mask has come."""
        assert self.allowed(slot, position)[0] == 1 << token
        at = np.array([slot], dtype=np.int32), np.array([position])
        self.matchers.record(*at, np.array([token], dtype=np.int32))

    def allowed(self, slot: int, position: int) -> Words:
        masks = self.matchers.masks(np.array([slot], dtype=np.int32), np.array([position]))
        assert masks.rows.tolist() == [0]
        return masks.words[0]


@pytest.fixture
def slots() -> Iterator[type[Slots]]:
    made: list[Slots] = []

    class Kept(Slots):
        def __init__(self, *sources: str | None) -> None:
            super().__init__(*sources)
            made.append(self)

    yield Kept
    for each in made:
        for gate in each.backend.gates.values():
            gate.set()
        each.matchers.close()


def test_only_the_slot_whose_mask_is_late_sits_out(slots: type[Slots]) -> None:
    some = slots("slow", None, "quick")
    some.prepare(0)
    assert some.allowed(2, 0)[0] == 1
    assert some.late() == [True, False, False]


def test_what_may_not_sit_out_is_waited_for(slots: type[Slots]) -> None:
    some = slots("slow", None)
    assert some.step(0, patient=False) == [False, False]


def test_masks_that_were_late_are_used_in_the_next_step(slots: type[Slots]) -> None:
    some = slots("slow", None)
    assert some.step(0) == [True, False]
    assert some.matchers.forced(0, 0, 8) == []  # nothing is asked of a matcher in use
    some.open("slow")
    assert some.step(0, patient=False) == [False, False]
    assert some.allowed(0, 0)[0] == 1


def test_what_is_forced_is_known_while_the_matcher_is_in_use(slots: type[Slots]) -> None:
    some = slots("slow", None)
    assert some.matchers.forced(0, 0, 8) == [0, 1]
    assert some.step(0, [[0, 1], []]) == [True, False]
    assert some.matchers.forced(0, 0, 8) == [0, 1]
    assert some.matchers.forced(0, 0, 1) == [0]


def test_ahead_are_the_drafts_that_are_allowed_and_what_is_forced_after_them(slots: type[Slots]) -> None:
    some, slot, position = slots("quick"), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)
    some.matchers.prepare(slot, position, drafts_of([[0, 1, 5]]), foresee=1)
    assert some.matchers.ahead(0) == (2, [0, 1, 2])
    some.matchers.prepare(slot, position, drafts_of([[]]), foresee=8)
    assert some.matchers.ahead(0) == (0, [0, 1])
    some.matchers.prepare(slot, position, drafts_of([[0]]))
    assert some.matchers.ahead(0) == (1, [0]), "who does not ask is told nothing"


def test_other_drafts_at_the_same_place_get_masks_of_their_own(slots: type[Slots]) -> None:
    some = slots("slow", None)
    assert some.step(0, [[0], []]) == [True, False]
    assert some.step(0, [[0, 1], []]) == [True, False]
    some.open("slow")
    two = np.array([0, 0, 0], dtype=np.int32)
    masks = some.matchers.masks(two, np.arange(3))
    assert [words[0] for words in masks.words] == [1, 2, 4]


def test_where_every_slot_is_late_the_first_that_is_ready_goes_on(
    slots: type[Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_matchers, "ALONE_S", 60)
    some = slots("slow", "slower")
    some.prepare(0)
    some.open("slower")
    assert some.late() == [True, False]


def test_a_step_in_which_nothing_can_be_drawn_ends_all_the_same(slots: type[Slots]) -> None:
    some = slots("slow", "slow")
    assert some.step(0) == [True, True]


def test_the_end_of_a_prefill_does_not_wait_behind_the_masks_of_decodes(slots: type[Slots]) -> None:
    some = slots("quick", "quick", "quick", None)
    some.prepare(0)
    for slot in range(3):
        some.draw(slot, 0, 0)
    some.close("quick")
    assert some.step(1)[:3] == [True, True, True], "every thread for decodes is taken"
    some.matchers.start(3, NO_TOKENS, 0, wish("always"))
    last = np.array([3], dtype=np.int32)
    some.matchers.prepare(last, np.zeros(1, dtype=np.int64), drafts_of([[]]))
    assert some.allowed(3, 0)[0] == 1


def test_nothing_is_forced_before_the_matcher_is_there(slots: type[Slots], monkeypatch: pytest.MonkeyPatch) -> None:
    some, may_compile = slots("quick"), Event()
    compile_then = some.backend.compile

    def compile_later(source: str) -> CompiledConstraint:
        assert may_compile.wait(60)
        return compile_then(source)

    monkeypatch.setattr(some.backend, "compile", compile_later)
    some.matchers.start(0, NO_TOKENS, 0, wish("always"))
    assert some.matchers.forced(0, 0, 8) == []
    may_compile.set()


def test_a_slot_that_is_used_again_does_not_use_masks_of_before(slots: type[Slots]) -> None:
    some = slots("slow", None)
    assert some.step(0) == [True, False]
    some.matchers.start(0, np.array([0, 1], dtype=np.int32), 0, wish("quick"))
    assert some.step(2, patient=False) == [False, False]
    assert some.allowed(0, 2)[0] == 1 << 2
