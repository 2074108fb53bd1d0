"""The attempts of a choice and the intervals within them, from its notes or, where there are none, from its bill.

    notes      queued ─ placed d1 ─ handover d1 ─ decode d1 ─ moved (lost) ─ placed d2 ─ prefill d2 ─ decode d2 ─▶ end
    attempts   ├──────────────── 1, at d1 ──────────────────┤├──────────────────── 2, at d2 ────────────────────┤
    intervals  ├ queue ┤├ queue ┤├ prefill ┤├ handover ┤├ decode ┤├ queue ┤├ queue ┤├ prefill ┤├──── decode ────┤

An attempt begins when the choice begins to wait for a place, so that attempts follow each other without a gap. All times are
within the given beginning and end, and no interval overlaps another. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.api.tracing.stage_notes import StageNote
from baton.core.engine.ended import Bill
from baton.core.routing.timeline_stage import TimelineStage

QUEUE, PREFILL, HANDOVER, RESTORE = "queue", "prefill", "handover", "restore"
DECODE, PREEMPTED = "decode", "preempted"
STAGE_NAMES = {
    TimelineStage.QUEUED: QUEUE,
    TimelineStage.PLACED: QUEUE,
    TimelineStage.PREFILL: PREFILL,
    TimelineStage.HANDOVER: HANDOVER,
    TimelineStage.RESTORE: RESTORE,
    TimelineStage.DECODE: DECODE,
    TimelineStage.PREEMPTED: PREEMPTED,
}
_FROM = "from "


@dataclass(frozen=True, slots=True)
class StageInterval:
    name: str
    where: str
    """The instance; empty while a router looks for one."""
    began_us: int
    ended_us: int


@dataclass(slots=True, eq=False)
class TracedAttempt:
    began_us: int
    ended_us: int = 0
    where: str = ""
    """Empty: no instance took it."""
    cause: str = ""
    """Why the choice left the instance: the value of a `MoveCause`. Empty: it ended there."""
    reason: str = ""
    """The same in words."""
    intervals: list[StageInterval] = field(default_factory=list)


def attempts_of(
    notes: Sequence[StageNote], began_us: int, ended_us: int, bill: Bill | None, where: str = ""
) -> list[TracedAttempt]:
    """The attempts of one choice, in order; at least one. `where`: the instance, if no note names it."""
    ended_us = max(began_us, ended_us)
    builder = _AttemptBuilder(began_us, ended_us)
    for note in notes:
        builder.take(note)
    attempts = builder.finish()
    if not attempts:
        return [_attempt_of_bill(bill, began_us, ended_us, where)]
    if bill is not None and _has_own_bill(attempts):
        _split_handover(attempts[-1], bill.transfer_us, builder.prefiller)
    return attempts


class _AttemptBuilder:
    def __init__(self, began_us: int, ended_us: int) -> None:
        self.prefiller = ""
        """The instance that prefilled for the last hand-over, as far as it is known."""
        self._now_us = began_us
        self._ended_us = ended_us
        self._made: list[TracedAttempt] = []
        self._open: TracedAttempt | None = None
        self._stage = ""
        """The interval that is open; empty: none."""
        self._stage_where = ""
        self._since_us = began_us

    def take(self, note: StageNote) -> None:
        self._now_us = min(max(note.at_us, self._now_us), self._ended_us)
        attempt = self._open
        match note.stage:
            case TimelineStage.ENDED:
                pass
            case TimelineStage.MOVED:
                self._leave(note.why)
            case TimelineStage.PREEMPTED if note.why:
                self._leave(note.why)
            case TimelineStage.PLACED | TimelineStage.RESUMED if attempt is not None and attempt.where not in (
                "",
                note.where,
            ):
                self._leave("")  # the note of the move was left out
                self._place(note)
            case TimelineStage.PLACED | TimelineStage.RESUMED:
                self._place(note)
            case _:
                self._enter(STAGE_NAMES[note.stage], note.where)
        if note.stage is TimelineStage.HANDOVER and note.why.startswith(_FROM):
            self.prefiller = note.why.removeprefix(_FROM)

    def finish(self) -> list[TracedAttempt]:
        self._now_us = self._ended_us
        last = self._open
        if last is not None and not (self._made and not last.where and last.began_us == self._ended_us):
            self._close(last)
        return self._made

    def _place(self, note: StageNote) -> None:
        attempt = self._opened()
        is_accepted = note.stage is TimelineStage.RESUMED and attempt.where == note.where
        attempt.where = note.where
        if note.stage is TimelineStage.PLACED:
            self._enter(QUEUE, note.where)
        elif not is_accepted:
            self._end_stage()  # found where it was: what it does there is not known before the next note

    def _enter(self, name: str, where: str) -> None:
        attempt = self._opened()
        attempt.where = attempt.where or where
        if (name, where) != (self._stage, self._stage_where):
            self._end_stage()
            self._stage, self._stage_where, self._since_us = name, where, self._now_us

    def _opened(self) -> TracedAttempt:
        if self._open is None:
            self._open = TracedAttempt(self._now_us)
        return self._open

    def _leave(self, why: str) -> None:
        attempt = self._opened()
        attempt.cause, _, attempt.reason = (part.strip() for part in why.partition(":"))
        self._close(attempt)
        self._enter(QUEUE, "")

    def _close(self, attempt: TracedAttempt) -> None:
        self._end_stage()
        attempt.ended_us = self._now_us
        self._made.append(attempt)
        self._open = None

    def _end_stage(self) -> None:
        if self._stage and self._open is not None:
            interval = StageInterval(self._stage, self._stage_where, self._since_us, self._now_us)
            self._open.intervals.append(interval)
        self._stage = ""


def _has_own_bill(attempts: Sequence[TracedAttempt]) -> bool:
    """Whether the bill of the choice, which is the sum over its attempts, is that of its last attempt alone: instances that
    were lost or refused it have sent none."""
    return all(attempt.cause in ("lost", "refused") for attempt in attempts[:-1])


def _split_handover(attempt: TracedAttempt, transfer_us: int, prefiller: str) -> None:
    """From the grant to the adoption, D only knows that it waits. The bill tells how much of that P computed: the rest is
    the transfer, at the end."""
    found = [index for index, interval in enumerate(attempt.intervals) if interval.name == HANDOVER]
    if len(found) != 1:
        return
    (at,) = found
    whole = attempt.intervals[at]
    split_us = whole.ended_us - transfer_us
    if whole.began_us < split_us < whole.ended_us:
        attempt.intervals[at : at + 1] = [
            StageInterval(PREFILL, prefiller, whole.began_us, split_us),
            StageInterval(HANDOVER, whole.where, split_us, whole.ended_us),
        ]


def _attempt_of_bill(bill: Bill | None, began_us: int, ended_us: int, where: str) -> TracedAttempt:
    """One attempt, its stages in their usual order. A bill has sums: after a preemption their order is not known, and there
    are no intervals."""
    attempt = TracedAttempt(began_us, ended_us, where)
    if bill is None or bill.preemptions:
        return attempt
    restore, handover = (0, bill.transfer_us) if bill.attempts else (bill.transfer_us, 0)
    stages = (
        (QUEUE, bill.queue_us), (RESTORE, restore), (PREFILL, bill.prefill_us), (HANDOVER, handover),
        (DECODE, bill.decode_us),
    )  # fmt: skip
    at_us = began_us
    for name, spent_us in stages:
        upto_us = min(at_us + spent_us, ended_us)
        if upto_us > at_us:
            attempt.intervals.append(StageInterval(name, where, at_us, upto_us))
        at_us = upto_us
    return attempt
