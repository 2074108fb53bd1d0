"""Decides whether an engine makes progress: what `/health` means.

    starting ──ready──▶ watched ──no beat for 3 s, or a step or a turn of the loop older than the limit──▶ stalled

An engine process sends beats from a thread of its own, so that a step that takes long does not silence it; a stopped
process sends none. Each beat tells how many steps were launched and settled, and whether the loop turns, so that a process
that beats and does nothing is found as well. Loading, warming up and compiling come before `ready` and are never a stall.

Time counts only while the watcher itself was awake: it looks every LOOK_US, and what is missing between two looks (a
sleeping laptop, a stopped front end) is nobody's silence. The age of a step counts only while beats come: an engine that was
stopped and goes on has not computed meanwhile, and the longest step, from which the limit follows, does not contain it.
Has no clock; the front end and the simulator drive the same object.
"""

from __future__ import annotations

from msgspec import Struct

from baton.core.bounds import Long

BEAT_US = 100_000
"""Interval of an engine's beats."""
SILENT_US = 3_000_000
"""An engine without a beat for this long is stalled."""
LOOK_US = 200_000
"""Longest interval between two looks of a watcher that is awake."""
STALL_US = 10_000_000
STALL_STEPS = 20
"""The limit for a step is never under this many times the longest one."""


class EngineBeat(Struct, tag="beat", frozen=True, gc=False):
    """A sign of life of an engine process, sent every BEAT_US whatever it computes."""

    launched: Long
    """Steps launched since the start."""
    settled: Long
    """Steps whose results were taken in."""
    turns: Long
    """Turns of the engine's loop."""
    waits: bool
    """Whether the loop waits: for an event, or for its front end to read."""


class ProgressWatch:
    def __init__(self, stall_us: int = STALL_US) -> None:
        """`stall_us`: least limit for a step; a model whose steps take long has a higher one."""
        self._stall_us = stall_us
        self._longest_us = 0
        """Of all steps seen, or tried at the start."""
        self._last = EngineBeat(0, 0, 0, True)
        self._awake_us: int | None = None
        """The last look; None before the engine was ready."""
        self._heard_us = self._beat_us = self._settled_us = self._turned_us = 0
        """Of the last message, the last beat, the last progress of steps and of the loop; shifted by excused time."""

    @property
    def is_watching(self) -> bool:
        return self._awake_us is not None

    @property
    def limit_us(self) -> int:
        """Time after which a step that was launched and not settled is a stall."""
        return max(self._stall_us, STALL_STEPS * self._longest_us)

    def ready(self, tried_step_us: int, now_us: int) -> None:
        """The engine serves from now on. `tried_step_us`: the longest step that it tried at its start; 0: none."""
        self._longest_us = tried_step_us
        self._awake_us = self._heard_us = self._beat_us = self._settled_us = self._turned_us = now_us

    def heard(self, now_us: int) -> None:
        """A message of the engine came; all but beats."""
        self._excuse(now_us)
        self._heard_us = now_us

    def beaten(self, beat: EngineBeat, now_us: int) -> None:
        if not self.is_watching:
            return
        self._excuse(now_us)
        last, self._last = self._last, beat
        # A process that could not beat could not compute either: that time is no part of a step.
        lost_us = max(0, now_us - self._beat_us - BEAT_US)
        self._settled_us += lost_us
        self._turned_us += lost_us
        self._heard_us = self._beat_us = now_us
        if beat.settled != last.settled:
            # Less a beat at either end, by which it may look longer than it was: many short steps are no long one.
            self._longest_us = max(self._longest_us, now_us - self._settled_us - 2 * BEAT_US)
        if beat.settled != last.settled or beat.launched == beat.settled:
            self._settled_us = now_us
        if beat.turns != last.turns or beat.waits:
            self._turned_us = now_us

    def silent_us(self, now_us: int) -> int:
        """Time since the engine's last message, less that in which the watcher stood still."""
        if self._awake_us is None:
            return 0
        return max(0, now_us - self._heard_us - _stood_still_us(now_us - self._awake_us))

    def look(self, now_us: int) -> str | None:
        """Why the engine counts as stalled; None while it does not. To be called every LOOK_US."""
        if self._awake_us is None:
            return None
        self._excuse(now_us)
        if now_us - self._heard_us >= SILENT_US:
            return f"no beat of the engine for {_seconds(now_us - self._heard_us)}"
        beat, limit_us, beats_us = self._last, self.limit_us, min(now_us, self._beat_us + BEAT_US)
        if beat.launched != beat.settled and beats_us - self._settled_us >= limit_us:
            return f"a step has not ended for {_seconds(beats_us - self._settled_us)} (--stall-timeout {_seconds(limit_us)})"
        if not beat.waits and beats_us - self._turned_us >= limit_us:
            return (
                f"its loop has not turned for {_seconds(beats_us - self._turned_us)} (--stall-timeout {_seconds(limit_us)})"
            )
        return None

    def _excuse(self, now_us: int) -> None:
        """A watcher that is awake looks every LOOK_US: a longer gap is time in which it stood still."""
        if self._awake_us is None:
            return
        late_us = _stood_still_us(now_us - self._awake_us)
        self._awake_us = now_us
        self._heard_us += late_us
        self._beat_us += late_us
        self._settled_us += late_us
        self._turned_us += late_us


def _stood_still_us(gap_us: int) -> int:
    return gap_us - LOOK_US if gap_us > 2 * LOOK_US else 0


def _seconds(time_us: int) -> str:
    return f"{time_us / 1e6:.1f} s"
