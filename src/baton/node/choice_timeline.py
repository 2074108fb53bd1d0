"""The timeline of one choice of a request: notes in the order of time, each lasting until the next.

    queued ── placed d1 ── prefill p1 ── hand-over d1 ── decode d1 ── moved (from d1) ── placed d2 ── decode d2 ── ended

Notes from inside an instance come with its heartbeat, after later notes of the router itself; they are inserted by time.
Bounded: a choice with too many notes keeps its first and its latest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.api.tracing.stage_notes import StageNote
from baton.core.routing.events import TimelineStage

NOTES_MAX = 64
NOTES_OF_THE_BEGINNING = 8
WHY_MAX = 200

LASTING = frozenset(
    {
        TimelineStage.QUEUED,
        TimelineStage.PLACED,
        TimelineStage.PREFILL,
        TimelineStage.HANDOVER,
        TimelineStage.RESTORE,
        TimelineStage.DECODE,
    }
)
"""Stages whose repetition is ignored."""
BEFORE_A_TOKEN = frozenset(
    {
        TimelineStage.QUEUED,
        TimelineStage.PLACED,
        TimelineStage.RESUMED,
        TimelineStage.PREFILL,
        TimelineStage.HANDOVER,
        TimelineStage.RESTORE,
    }
)
AT_A_PLACE = frozenset({TimelineStage.PLACED, TimelineStage.RESUMED})


_PHASES = {
    TimelineStage.PREFILL: "prefill",
    TimelineStage.HANDOVER: "prefill",
    TimelineStage.DECODE: "decode",
}


class PhaseTimes(NamedTuple):
    queue_us: int
    prefill_us: int
    decode_us: int


@dataclass(slots=True)
class TimelineNote:
    stage: TimelineStage
    where: str
    at_us: int
    tokens: int
    """Tokens delivered by then; of a note that came late, those before the note after it."""
    why: str


class ChoiceTimeline:
    def __init__(self) -> None:
        self.notes: list[TimelineNote] = []
        self.left_out = 0
        self.tokens = 0
        self.first_token_us: int | None = None
        self.last_token_us: int | None = None
        self.ended_us: int | None = None
        self.finish = ""

    def note(self, stage: TimelineStage, where: str, at_us: int, why: str = "") -> bool:
        """Add a note; returns whether it changed the timeline."""
        if stage is TimelineStage.ENDED:
            return self.end(at_us, why)
        if self.ended_us is not None and at_us > self.ended_us:
            return False
        at = len(self.notes)
        while at > 0 and self.notes[at - 1].at_us > at_us:
            at -= 1
        if stage is TimelineStage.DECODE and at > 0 and self.notes[at - 1].stage is TimelineStage.PREFILL:
            return False  # the last chunk of the prefill was planned, not computed: `delivered` will note the decode
        if self._is_known(stage, where, at, at_us):
            return False
        tokens = self.notes[at].tokens if at < len(self.notes) else self.tokens
        self._put(at, TimelineNote(stage, where, at_us, tokens, why[:WHY_MAX]))
        return True

    def delivered(self, tokens: int, at_us: int) -> None:
        """Count tokens. Where no decode was noted yet, note it now instead of waiting for the heartbeat."""
        if self.notes and self.notes[-1].stage in BEFORE_A_TOKEN:
            self._put(len(self.notes), TimelineNote(TimelineStage.DECODE, self.place, at_us, self.tokens, ""))
        if self.last_token_us is None:
            self.first_token_us = at_us
        self.last_token_us = at_us
        self.tokens += tokens

    def found(self, tokens: int, at_us: int) -> None:
        """A router that was lost had delivered this many tokens; the time of the first one is unknown."""
        self.tokens, self.last_token_us = tokens, at_us

    def end(self, at_us: int, finish: str) -> bool:
        if self.ended_us is not None:
            return False
        self.ended_us, self.finish = at_us, finish[:WHY_MAX]
        return True

    def phases(self) -> PhaseTimes:
        """How long an ended choice was in each phase, at all of its instances."""
        times = dict.fromkeys(("queue", "prefill", "decode"), 0)
        ends = [*self.notes[1:], None]
        for note, after in zip(self.notes, ends, strict=True):
            end_us = self.ended_us if after is None else after.at_us
            phase = _PHASES.get(note.stage, "queue")
            if note.stage in AT_A_PLACE and after is not None and after.stage is TimelineStage.DECODE:
                phase = "prefill"  # its instance has not told yet when it began
            times[phase] += max(0, (note.at_us if end_us is None else end_us) - note.at_us)
        return PhaseTimes(times["queue"], times["prefill"], times["decode"])

    @property
    def place(self) -> str:
        """The instance that it runs on, or ran on last."""
        return next((note.where for note in reversed(self.notes) if note.stage in AT_A_PLACE), "")

    def stage_notes(self) -> tuple[StageNote, ...]:
        """For a trace."""
        return tuple(StageNote(note.stage, note.where, note.at_us, note.why) for note in self.notes)

    def shown(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "first_us": self.first_token_us,
            "last_us": self.last_token_us,
            "ended_us": self.ended_us,
            "finish": self.finish,
            "left_out": self.left_out,
            "segments": self._segments(),
        }

    def _segments(self) -> list[list[object]]:
        """(stage, where, start, end or None, tokens delivered before, why)"""
        ends = [*(note.at_us for note in self.notes[1:]), self.ended_us]
        return [
            [note.stage.value, note.where, note.at_us, end, note.tokens, note.why]
            for note, end in zip(self.notes, ends, strict=False)
        ]

    def _put(self, at: int, note: TimelineNote) -> None:
        self.notes.insert(at, note)
        if len(self.notes) > NOTES_MAX:
            del self.notes[NOTES_OF_THE_BEGINNING]
            self.left_out += 1

    def _is_known(self, stage: TimelineStage, where: str, at: int, at_us: int) -> bool:
        """Whether the note before says the same, or the one after does; the latter is moved to the earlier time."""
        if stage not in LASTING:
            return False
        if at > 0 and (self.notes[at - 1].stage, self.notes[at - 1].where) == (stage, where):
            return True
        if at < len(self.notes) and (self.notes[at].stage, self.notes[at].where) == (stage, where):
            self.notes[at].at_us = at_us
            return True
        return False
