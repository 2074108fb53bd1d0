"""The flight recorder: the last calls of a deciding object with their results, enough to make it decide the same again.

    recorder = FlightRecorder(worker, worker.hashes, weight_of)
    effects = recorder.call("handle", worker.handle, event, now_us)     instead of worker.handle(event, now_us)
    recorder.segments()                                                 what a file is written of

Two segments are kept, each opened by a copy of the state. When the newer one is full, the older one is dropped. Calls are
kept by reference, and all is encoded only when a file is written: events and effects do not change after they were handed
over. Most of them are Structs that the garbage collector does not look at (`gc=False`: they are trees), since two segments
have so many that a full collection would stop everything for a second. Has no clock, thread or file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from msgspec import Struct

from baton.core.content_hashes import ContentHashes
from baton.wire.captured_state import CapturedState, capture
from baton.wire.snapshot import CannotSnapshot

SEGMENT_BYTES = 32 << 20
"""Estimated size of the calls of a segment. Two segments are kept."""
SNAPSHOTS = 4
"""A segment is at least so many times as large as the copy that opens it: a larger one takes longer, and is taken more
rarely."""
CALL_BYTES = 800
"""Estimated size of a call without arrays."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Raised:
    """The result of a call that ended with an exception."""

    error: str
    text: str


class RecordedCall(Struct, frozen=True, gc=False):
    method: str
    arguments: tuple[Any, ...]
    result: Any
    hashes: int
    """Hashes of the segment computed up to the end of this call."""


@dataclass(slots=True, eq=False)
class Segment:
    state: CapturedState
    """Of the object before the first call."""
    calls: list[RecordedCall] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)


class CallWatch(Protocol):
    """Makes the calls of a deciding object, and takes note of them."""

    def call(
        self, method: str, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result: ...


class FlightRecorder:
    def __init__(
        self,
        watched: object,
        hashes: ContentHashes,
        weight_of: Callable[[tuple[Any, ...]], int],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`weight_of`: estimated bytes of a call, by its arguments."""
        self._watched = watched
        self._hashes = hashes
        self._weight_of = weight_of
        self._segment_bytes = segment_bytes
        self.on_open: Callable[[Segment], None] | None = None
        """Called with each segment that is opened after the first."""
        self.on_raise: Callable[[Exception], None] | None = None
        """Called when a call has raised, before its exception goes on."""
        self.stopped: str | None = None
        """Why nothing is recorded any more."""
        self._older: Segment | None = None
        self.newer = self._new_segment(None)

    def _new_segment(self, before: Segment | None) -> Segment:
        segment = Segment(capture(self._watched, None if before is None else before.state))
        self._hashes.results = segment.hashes
        self._room = max(self._segment_bytes, SNAPSHOTS * segment.state.estimated_bytes)
        return segment

    def _rotated(self) -> bool:
        """Open the next segment. Where that cannot be done, recording ends and deciding goes on."""
        if self.stopped is None:
            try:
                self._older, self.newer = self.newer, self._new_segment(self.newer)
            except CannotSnapshot as error:
                self.stopped = str(error)
                self._hashes.results = None
        if self.stopped is None and self.on_open is not None:
            self.on_open(self.newer)
        return self.stopped is None

    def call(
        self, method: str, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        if self._room <= 0 and not self._rotated():
            return function(*args, **kwargs)
        segment = self.newer
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            raised = Raised(type(error).__name__, str(error))
            segment.calls.append(RecordedCall(method, args, raised, len(segment.hashes)))
            if self.on_raise is not None:
                self.on_raise(error)
            raise
        segment.calls.append(RecordedCall(method, args, result, len(segment.hashes)))
        self._room -= self._weight_of(args)
        return result

    def segments(self) -> list[Segment]:
        """The older one first. They stay as they are, but for calls that are added to the newer one."""
        return [self.newer] if self._older is None else [self._older, self.newer]
