"""Makes notes for the timeline of what instances say of the phases of their requests. Nothing is decided from them.

Notes come with beats, so a leg may be over by then: the last ones are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from baton.core.carrying import Journey
from baton.core.fleet import Member
from baton.core.request import Phase
from baton.core.routing import Leg, Noted, PhaseNote, Stage

RECENT_MAX = 1024
STAGES = {
    Phase.RUNNING_PREFILL.name: Stage.PREFILL,
    Phase.RECEIVING.name: Stage.HANDOVER,
    Phase.HANDING_OVER.name: Stage.HANDOVER,
    Phase.RUNNING_DECODE.name: Stage.DECODE,
}


class Phases:
    def __init__(self) -> None:
        self._recent: OrderedDict[Leg, Journey] = OrderedDict()

    def over(self, legs: Sequence[Journey]) -> None:
        for journey in legs:
            self._recent[journey.leg] = journey
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    def noted(self, member: Member, notes: Sequence[PhaseNote], legs: dict[Leg, Journey], now_us: int) -> list[Noted]:
        made = []
        for note in notes:
            journey = legs.get(note.leg) or self._recent.get(note.leg)
            if journey is None or journey.member is not member or not 0 <= note.place < len(journey.choices):
                continue
            stage = _stage(journey, note)
            if stage is not None:
                choice = journey.choices[note.place]
                made.append(Noted(choice.body.body, choice.index, stage, member.name, now_us - note.ago_us))
        return made


def _stage(journey: Journey, note: PhaseNote) -> Stage | None:
    stage = STAGES.get(note.phase)
    if stage is not None:
        if note.place not in journey.ran:
            journey.ran.append(note.place)
        return stage
    return Stage.PREEMPTED if note.phase == Phase.WAITING.name and note.place in journey.ran else None
