"""What a process does until it serves, for the operator: each stage when it begins, and in the end how long each took.

    [  0.0 s] importing torch
    [  6.2 s] loading the weights
    [  8.1 s] compiling the CPU kernels (once for this machine)
    started in 24.6 s: importing 6.2 s, loading 1.9 s, compiling 16.3 s

Times count from the start of the command. `baton up` reads these lines of its instances.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.node.http_server import Say
from baton.node.stage_progress import StageProgress

_STAGE = re.compile(r"^\[ *[0-9.]+ s\] (.+)$")
_STARTED = re.compile(r"^(started in [0-9.]+ s\b.*)$", re.MULTILINE)


class StageView(Protocol):
    """Shows stages as they come."""

    def began(self, stage: str, at_s: float) -> None: ...

    def advanced(self, progress: StageProgress) -> None:
        """The stage has come so far. Without it nobody knows how much there is to do."""

    def ended(self, stage: str, took_s: float) -> None: ...

    def close(self) -> None:
        """Show nothing any more. Idempotent."""


@dataclass(frozen=True, slots=True)
class StageLines:
    """A line for each stage, for logs."""

    say: Say

    def began(self, stage: str, at_s: float) -> None:
        self.say(f"[{at_s:5.1f} s] {stage}")

    def advanced(self, progress: StageProgress) -> None: ...

    def ended(self, stage: str, took_s: float) -> None: ...

    def close(self) -> None: ...


def stage_of(line: str) -> str | None:
    """The stage that a line tells of."""
    found = _STAGE.match(line)
    return None if found is None else found[1]


def summary_in(text: str) -> str | None:
    """The summary that is among these lines."""
    found = _STARTED.search(text)
    return None if found is None else found[1]


class Unseen:
    """A view that shows nothing."""

    def began(self, stage: str, at_s: float) -> None: ...

    def advanced(self, progress: StageProgress) -> None: ...

    def ended(self, stage: str, took_s: float) -> None: ...

    def close(self) -> None: ...


class StartStages:
    def __init__(self, view: StageView, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._stage: str | None = None
        self._stage_s = self._began_s
        self._took_s: dict[str, float] = {}
        """By verb, in the order in which they came."""

    def begin(self, stage: str) -> None:
        now_s = self._clock_s()
        self._end_stage(now_s)
        self._stage, self._stage_s = stage, now_s
        self._view.began(stage, now_s - self._began_s)

    def advance(self, progress: StageProgress) -> None:
        self._view.advanced(progress)

    def end(self) -> None:
        """End the stage; another may begin later."""
        self._end_stage(self._clock_s())

    def summary(self) -> str:
        """End the last stage. The whole time, and that of each stage by its verb."""
        now_s = self._clock_s()
        self._end_stage(now_s)
        self._view.close()
        parts = ", ".join(f"{verb} {took_s:.1f} s" for verb, took_s in self._took_s.items())
        return f"started in {now_s - self._began_s:.1f} s" + (f": {parts}" if parts else "")

    def close(self) -> None:
        self._view.close()

    def _end_stage(self, now_s: float) -> None:
        if self._stage is None:
            return
        verb, took_s = self._stage.partition(" ")[0], now_s - self._stage_s
        self._took_s[verb] = self._took_s.get(verb, 0.0) + took_s
        self._view.ended(self._stage, took_s)
        self._stage = None
