"""Makes notes for the timeline of what instances say of the phases of their requests. Nothing is decided from them.

Notes come with beats, so a leg may be over by then: the last ones are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.engine.request import Phase
from baton.core.routing.events import Instance, Leg, Noted, PhaseNote, RequestNumber, Session, Stage
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.routed_request import Attempt

RECENT_MAX = 1024
STAGES = {
    Phase.RUNNING_PREFILL.name: Stage.PREFILL,
    Phase.RECEIVING.name: Stage.HANDOVER,
    Phase.RESTORING.name: Stage.PREFILL,
    Phase.HANDING_OVER.name: Stage.HANDOVER,
    Phase.RUNNING_DECODE.name: Stage.DECODE,
}


@dataclass(frozen=True, slots=True)
class _Trace:
    """What is remembered of a leg."""

    session: Session
    body: RequestNumber
    choices: tuple[int, ...]
    began: list[int]
    """Places that the instance has begun with."""
    givers: dict[int, Instance]
    """By place: who was chosen to prefill it."""


class PhaseTimeline:
    def __init__(self) -> None:
        self._traces: OrderedDict[Leg, _Trace] = OrderedDict()
        """Of legs that are over."""

    def over(self, legs: Sequence[Attempt]) -> None:
        for journey in legs:
            self._traces[journey.leg] = _trace(journey)
        while len(self._traces) > RECENT_MAX:
            self._traces.popitem(last=False)

    def noted(self, member: FleetMember, notes: Sequence[PhaseNote], legs: dict[Leg, Attempt], now_us: int) -> list[Noted]:
        made = []
        for note in notes:
            journey = legs.get(note.leg)
            trace = self._traces.get(note.leg) if journey is None else _trace(journey)
            if trace is None or trace.session != member.session or not 0 <= note.place < len(trace.choices):
                continue
            stage = _stage(trace, note)
            if stage is not None:
                at_us, giver = now_us - note.ago_us, trace.givers.get(note.place)
                why = f"from {giver}" if stage is Stage.HANDOVER and giver is not None else ""
                made.append(Noted(trace.body, trace.choices[note.place], stage, member.name, at_us, why))
        return made


def _trace(journey: Attempt) -> _Trace:
    choices = tuple(choice.index for choice in journey.choices)
    return _Trace(journey.member.session, journey.body.body, choices, journey.began, journey.givers)


def _stage(trace: _Trace, note: PhaseNote) -> Stage | None:
    stage = STAGES.get(note.phase)
    if stage is not None:
        if note.place not in trace.began:
            trace.began.append(note.place)
        return stage
    return Stage.PREEMPTED if note.phase == Phase.WAITING.name and note.place in trace.began else None
