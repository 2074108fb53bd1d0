"""The phases of the requests of one instance, as its engine notes them: for the traces of clients that ask it directly.

The engine tells with its pulses, up to a tenth of a second after a phase began, also of requests that have ended meanwhile.
A pulse that was read late shifts its phases by as much: what comes before the first token is never put behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

from baton.api.engine import TokenBurst
from baton.api.tracing.stage_notes import StageNote
from baton.core.engine.request import Phase
from baton.core.routing.phase_notes import STAGES
from baton.core.routing.timeline_stage import TimelineStage
from baton.node.token_streams import BufferedTokenStream, TokenSource, with_history

NOTES_MAX = 64
"""Notes of one request; of more the first are kept."""
BEFORE_A_TOKEN = (TimelineStage.PLACED, TimelineStage.PREFILL, TimelineStage.HANDOVER, TimelineStage.RESTORE)


class PhaseHistory:
    """The notes of one request."""

    def __init__(self, where: str, now_us: int) -> None:
        self._where = where
        self._notes = [StageNote(TimelineStage.PLACED, where, now_us)]
        self._token_us: int | None = None
        """When the first token came after phases of which the engine has not told the end yet."""

    def entered(self, phase: str, at_us: int) -> None:
        """The engine's scheduler began to plan this phase."""
        stage = STAGES.get(phase)
        if phase == Phase.WAITING.name and any(note.stage is not TimelineStage.PLACED for note in self._notes):
            stage = TimelineStage.PREEMPTED
        before = next((note.stage for note in reversed(self._notes) if note.at_us <= at_us), TimelineStage.PLACED)
        if stage is TimelineStage.DECODE and before is TimelineStage.PREFILL:
            return  # the last chunk was planned, not computed: `delivered` notes the decode
        if stage in BEFORE_A_TOKEN and self._token_us is not None:
            at_us = min(at_us, self._token_us - 1)
        elif stage is not None:
            self._token_us = None
        if stage is not None:
            self._put(stage, at_us)

    def delivered(self, now_us: int) -> None:
        """Tokens came: whatever it did before, it decodes."""
        if self._notes[-1].stage in BEFORE_A_TOKEN:
            self._token_us = now_us
            self._put(TimelineStage.DECODE, now_us)

    def stage_notes(self) -> tuple[StageNote, ...]:
        return tuple(self._notes)

    def _put(self, stage: TimelineStage, at_us: int) -> None:
        at = len(self._notes)
        while at > 1 and self._notes[at - 1].at_us > at_us:
            at -= 1
        if len(self._notes) < NOTES_MAX and self._notes[at - 1].stage is not stage:
            self._notes.insert(at, StageNote(stage, self._where, at_us))


class PhaseHistories:
    def __init__(self, where: str, now_us: Callable[[], int]) -> None:
        """`where`: the name of this instance."""
        self._where = where
        self.now_us = now_us
        self._by_serial: WeakValueDictionary[int, PhaseHistory] = WeakValueDictionary()
        """Kept by the streams, and after them by the traces that want the last notes."""

    def begin(self, serial: int) -> PhaseHistory:
        history = self._by_serial[serial] = PhaseHistory(self._where, self.now_us())
        return history

    def record(self, notes: Iterable[tuple[int, str, int]]) -> None:
        """Notes of a pulse: (serial, phase, microseconds ago)."""
        now_us = self.now_us()
        for serial, phase, ago_us in notes:
            history = self._by_serial.get(serial)
            if history is not None:
                history.entered(phase, now_us - ago_us)


class TracedTokenStream(BufferedTokenStream[int]):
    """A stream whose end has the history of its request."""

    def __init__(self, source: TokenSource[int], serial: int, histories: PhaseHistories) -> None:
        super().__init__(source, serial)
        self._histories = histories
        self._history = histories.begin(serial)

    def push(self, burst: TokenBurst) -> None:
        if burst.tokens:
            self._history.delivered(self._histories.now_us())
        super().push(burst if burst.ended is None else with_history(burst, burst.ended, self._history))


def stream_of(source: TokenSource[int], serial: int, histories: PhaseHistories | None) -> BufferedTokenStream[int]:
    """With a history where one is wanted."""
    return BufferedTokenStream(source, serial) if histories is None else TracedTokenStream(source, serial, histories)
