"""What `/health` means: an engine that hangs is seen in time, and neither a slow one nor a watcher's sleep looks like it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine.progress_watch import BEAT_US, LOOK_US, SILENT_US, STALL_STEPS, STALL_US, EngineBeat, ProgressWatch

SEEN_US = 2 * BEAT_US + 2 * LOOK_US
"""Allowance beyond a limit until it is seen."""


@dataclass
class Watched:
    """An engine with one step after the other, seen by a watch; time passes in steps of 20 ms."""

    watch: ProgressWatch
    step_us: int
    now_us: int = 1_000_000
    begun_us: int | None = None
    """When the present step began, in time in which the engine ran; None: it is idle."""
    ran_us: int = 0
    launched: int = 0
    settled: int = 0
    turns: int = 0
    hangs: bool = False
    loop_hangs: bool = False
    beat_due_us: int = 0
    look_due_us: int = 0

    def pass_us(self, time_us: int, *, busy: bool = True, stopped: bool = False, asleep: bool = False) -> str | None:
        """The first stall that is seen. `stopped`: the engine; `asleep`: the watcher."""
        until_us = self.now_us + time_us
        while self.now_us < until_us:
            self.now_us += 20_000
            if not stopped:
                self.ran_us += 20_000
                self._run(busy, asleep)
            if not asleep and self.look_due_us <= self.now_us:
                self.look_due_us = self.now_us + LOOK_US
                if (stall := self.watch.look(self.now_us)) is not None:
                    return stall
        return None

    def _run(self, busy: bool, asleep: bool) -> None:
        if not self.loop_hangs:
            self.turns += 1
            if self.begun_us is not None and self.ran_us - self.begun_us >= self.step_us and not self.hangs:
                self.settled, self.begun_us = self.settled + 1, None
            if self.begun_us is None and busy:
                self.launched, self.begun_us = self.launched + 1, self.ran_us
        if self.beat_due_us <= self.now_us and not asleep:
            self.beat_due_us = self.now_us + BEAT_US
            self.watch.beaten(EngineBeat(self.launched, self.settled, self.turns, not self.loop_hangs), self.now_us)


def watched(step_us: int = 20_000, tried_us: int = 0, stall_us: int = STALL_US) -> Watched:
    made = Watched(ProgressWatch(stall_us), step_us)
    made.watch.ready(tried_us, made.now_us)
    return made


def test_loading_and_compiling_are_no_stall_however_long_they_take() -> None:
    watch = ProgressWatch()
    assert all(watch.look(second * 1_000_000) is None for second in range(3600))
    assert watch.silent_us(3600_000_000) == 0
    watch.beaten(EngineBeat(9, 0, 0, False), 3600_000_000)
    watch.ready(0, 3601_000_000)
    assert watch.look(3601_000_001) is None


def test_a_stopped_engine_is_seen_three_seconds_after_its_last_beat() -> None:
    engine = watched()
    assert engine.pass_us(5_000_000) is None
    assert engine.pass_us(SILENT_US - BEAT_US, stopped=True) is None
    stall = engine.pass_us(BEAT_US + SEEN_US, stopped=True)
    assert stall is not None
    assert stall.startswith("no beat of the engine for 3.")


def test_a_step_that_never_ends_is_seen_at_the_limit_though_the_process_beats() -> None:
    engine = watched()
    assert engine.pass_us(5_000_000) is None
    engine.hangs = True
    assert engine.pass_us(STALL_US - BEAT_US) is None
    stall = engine.pass_us(BEAT_US + SEEN_US)
    assert stall is not None
    assert "a step has not ended for 10." in stall
    assert "--stall-timeout 10.0 s" in stall


def test_a_loop_that_hangs_outside_of_a_step_is_seen_too() -> None:
    engine = watched()
    assert engine.pass_us(5_000_000, busy=False) is None
    engine.loop_hangs = True
    stall = engine.pass_us(STALL_US + SEEN_US)
    assert stall is not None
    assert "its loop has not turned" in stall


def test_an_idle_engine_is_no_hanging_one() -> None:
    assert watched().pass_us(60_000_000, busy=False) is None


def test_steps_of_thirty_seconds_are_served_when_one_was_tried() -> None:
    engine = watched(step_us=30_000_000, tried_us=30_000_000)
    assert engine.pass_us(300_000_000) is None
    assert engine.settled >= 9


@given(st.integers(20_000, 9_000_000), st.integers(0, 2_000_000))
def test_the_limit_is_twenty_times_the_longest_step_and_no_less_than_asked_for(step_us: int, tried_us: int) -> None:
    engine = watched(step_us, tried_us)
    assert engine.pass_us(3 * step_us + 1_000_000) is None
    longest_us = max(step_us, tried_us)
    assert engine.watch.limit_us >= max(STALL_US, STALL_STEPS * (longest_us - 3 * BEAT_US))
    assert engine.watch.limit_us <= max(STALL_US, STALL_STEPS * (longest_us + BEAT_US))


@given(st.lists(st.tuples(st.booleans(), st.integers(20_000, 2_500_000)), max_size=12), st.integers(20_000, 4_000_000))
def test_an_engine_that_goes_on_is_never_stalled(spells: list[tuple[bool, int]], step_us: int) -> None:
    """Whatever stops for under three seconds, the engine or the watcher, in any order."""
    engine = watched(step_us, tried_us=step_us, stall_us=1_000_000)
    for of_watcher, spell_us in spells:
        assert engine.pass_us(spell_us, stopped=not of_watcher, asleep=of_watcher) is None
        assert engine.pass_us(3 * BEAT_US) is None
    assert engine.pass_us(2 * step_us + 1_000_000) is None


@given(st.integers(1_000_000, 3_600_000_000), st.booleans())
def test_a_watcher_that_slept_does_not_count_its_sleep(sleep_us: int, stopped_too: bool) -> None:
    """As after a laptop's sleep: the first look finds everything late."""
    engine = watched()
    assert engine.pass_us(2_000_000) is None
    engine.now_us += sleep_us
    assert engine.watch.silent_us(engine.now_us) <= 2 * LOOK_US
    assert engine.watch.look(engine.now_us) is None
    assert engine.pass_us(1_000_000, stopped=stopped_too) is None


@given(st.integers(0, 5_000_000), st.sampled_from(["stop", "step", "loop"]), st.integers(20_000, 400_000))
def test_whatever_hangs_is_seen_within_its_limit(before_us: int, what: str, step_us: int) -> None:
    engine = watched(step_us)
    assert engine.pass_us(before_us) is None
    engine.hangs, engine.loop_hangs = what == "step", what == "loop"
    limit_us = SILENT_US if what == "stop" else engine.watch.limit_us
    assert engine.pass_us(limit_us + step_us + SEEN_US, stopped=what == "stop") is not None


def test_a_message_is_as_good_as_a_beat() -> None:
    engine = watched()
    for _ in range(100):
        engine.now_us += LOOK_US
        engine.watch.heard(engine.now_us)
        assert engine.watch.look(engine.now_us) is None


def test_an_engine_that_was_stopped_has_no_long_step_for_it() -> None:
    engine = watched()
    assert engine.pass_us(1_000_000) is None
    assert engine.pass_us(2_500_000, stopped=True) is None
    assert engine.pass_us(1_000_000) is None
    assert engine.watch.limit_us == STALL_US


@pytest.mark.parametrize("silent_us", [0, 1_000_000, 2_000_000])
def test_silence_is_the_time_since_the_last_word(silent_us: int) -> None:
    engine = watched()
    assert engine.pass_us(1_000_000) is None
    assert engine.pass_us(silent_us, stopped=True) is None
    assert silent_us <= engine.watch.silent_us(engine.now_us) <= silent_us + BEAT_US
