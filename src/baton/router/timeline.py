"""What happened to one choice of a request, as the timeline shows it: notes in the order of time, each until the next.

    queued ── placed d1 ── prefill p1 ── hand-over d1 ── decode d1 ── moved (from d1) ── placed d2 ── decode d2 ── ended

Notes of what goes on inside an instance travel with its beat, so they come after later notes of the router itself; they
are put where they belong. Bounded: a choice that is moved without end keeps its beginning and its latest notes.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.routing.events import TimelineStage

NOTES_MAX = 64
NOTES_OF_THE_BEGINNING = 8
WHY_MAX = 200

LASTING = frozenset(
    {TimelineStage.QUEUED, TimelineStage.PLACED, TimelineStage.PREFILL, TimelineStage.HANDOVER, TimelineStage.DECODE}
)
"""To be told of one of these again is no news."""
BEFORE_A_TOKEN = frozenset(
    {TimelineStage.QUEUED, TimelineStage.PLACED, TimelineStage.RESUMED, TimelineStage.PREFILL, TimelineStage.HANDOVER}
)
AT_A_PLACE = frozenset({TimelineStage.PLACED, TimelineStage.RESUMED})


@dataclass(slots=True)
class TimelineNote:
    stage: TimelineStage
    where: str
    at_us: int
    tokens: int
    """Delivered when this was noted."""
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
        """Whether it was news."""
        if stage is TimelineStage.ENDED:
            return self.end(at_us, why)
        if self.ended_us is not None and at_us > self.ended_us:
            return False
        at = len(self.notes)
        while at > 0 and self.notes[at - 1].at_us > at_us:
            at -= 1
        if stage is TimelineStage.DECODE and at > 0 and self.notes[at - 1].stage is TimelineStage.PREFILL:
            return False  # the last chunk of the prefill was planned, not computed: its token will show when that is done
        if self._is_known(stage, where, at, at_us):
            return False
        self._put(at, TimelineNote(stage, where, at_us, self.tokens, why[:WHY_MAX]))
        return True

    def delivered(self, tokens: int, at_us: int) -> None:
        """Tokens came, so it decodes: nobody has to wait for the beat that says so."""
        if self.notes and self.notes[-1].stage in BEFORE_A_TOKEN:
            self._put(len(self.notes), TimelineNote(TimelineStage.DECODE, self.place, at_us, self.tokens, ""))
        if self.last_token_us is None:
            self.first_token_us = at_us
        self.last_token_us = at_us
        self.tokens += tokens

    def found(self, tokens: int, at_us: int) -> None:
        """It had come so far with a router that was lost; when its first token came is not known."""
        self.tokens, self.last_token_us = tokens, at_us

    def end(self, at_us: int, finish: str) -> bool:
        if self.ended_us is not None:
            return False
        self.ended_us, self.finish = at_us, finish[:WHY_MAX]
        return True

    @property
    def place(self) -> str:
        """Where it is carried out now, or was last."""
        return next((note.where for note in reversed(self.notes) if note.stage in AT_A_PLACE), "")

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
        """The note before says the same; or the one after does, which then began earlier than was thought."""
        if stage not in LASTING:
            return False
        if at > 0 and (self.notes[at - 1].stage, self.notes[at - 1].where) == (stage, where):
            return True
        if at < len(self.notes) and (self.notes[at].stage, self.notes[at].where) == (stage, where):
            self.notes[at].at_us = at_us
            return True
        return False
