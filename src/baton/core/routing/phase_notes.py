"""Timeline notes of the phases that instances report of their requests. Nothing is decided from them.

Notes come with beats, when the attempt may have ended: the last ended attempts are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.core.engine.request import Phase
from baton.core.routing.events import Instance, PhaseReport, Session, TimelineNoted, TimelineStage
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.identity import AttemptId, ChoiceAttempt, RequestNumber
from baton.core.routing.routed_request import Attempt, RoutedRequest

RECENT_MAX = 1024
STAGES = {
    Phase.RUNNING_PREFILL.name: TimelineStage.PREFILL,
    Phase.RECEIVING.name: TimelineStage.HANDOVER,
    Phase.RESTORING.name: TimelineStage.RESTORE,
    Phase.HANDING_OVER.name: TimelineStage.HANDOVER,
    Phase.RUNNING_DECODE.name: TimelineStage.DECODE,
}


@dataclass(frozen=True, slots=True)
class _Trace:
    """The part of an attempt that notes are made from."""

    session: Session
    choices: tuple[int, ...]
    began: list[int]
    """Choices that the instance has started."""
    prefillers: dict[int, Instance]
    """Choice → the instance chosen to prefill it."""


class PhaseTimeline:
    def __init__(self) -> None:
        self._traces: OrderedDict[AttemptId, _Trace] = OrderedDict()
        """Attempts that have ended."""

    def over(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self._traces[attempt.id] = _trace(attempt)
        while len(self._traces) > RECENT_MAX:
            self._traces.popitem(last=False)

    def noted(
        self, member: FleetMember, notes: Sequence[PhaseReport], requests: Mapping[RequestNumber, RoutedRequest], now_us: int
    ) -> list[TimelineNoted]:
        made = []
        for note in notes:
            number, choice, _ = note.attempt
            trace = self._trace_of(note.attempt, requests.get(number))
            if trace is None or trace.session != member.session or choice not in trace.choices:
                continue
            stage = _stage(trace, choice, note.phase)
            if stage is not None:
                at_us, prefiller = now_us - note.ago_us, trace.prefillers.get(choice)
                why = f"from {prefiller}" if stage is TimelineStage.HANDOVER and prefiller is not None else ""
                made.append(TimelineNoted(number, choice, stage, member.name, at_us, why))
        return made

    def _trace_of(self, which: ChoiceAttempt, request: RoutedRequest | None) -> _Trace | None:
        attempt = None if request is None else request.attempts.get(which.attempt)
        return self._traces.get(which.group) if attempt is None else _trace(attempt)


def _trace(attempt: Attempt) -> _Trace:
    choices = tuple(choice.index for choice in attempt.choices)
    return _Trace(attempt.member.session, choices, attempt.began, attempt.prefillers)


def _stage(trace: _Trace, choice: int, phase: str) -> TimelineStage | None:
    stage = STAGES.get(phase)
    if stage is not None:
        if choice not in trace.began:
            trace.began.append(choice)
        return stage
    return TimelineStage.PREEMPTED if phase == Phase.WAITING.name and choice in trace.began else None
