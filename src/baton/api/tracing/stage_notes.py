"""What is noted of a choice while it runs, from which its spans are built afterwards."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton.core.routing.timeline_stage import TimelineStage


class StageNote(NamedTuple):
    """A choice entered a stage, which lasts until the next note."""

    stage: TimelineStage
    where: str
    """An instance; empty while it has none."""
    at_us: int
    """Time of this process's clock."""
    why: str = ""
    """For the end of an attempt `CAUSE: REASON`; for a hand-over `from INSTANCE`."""


class ChoiceHistory(Protocol):
    """The notes of one choice. Some come later than its end, since instances report in intervals."""

    def stage_notes(self) -> tuple[StageNote, ...]:
        """In the order of time."""
