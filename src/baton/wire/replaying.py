"""Replays a flight recording: the same objects get the same calls, and each result must be the recorded one.

    for step in Replay(Recording(data)).steps():
        step.difference            None: it was decided as recorded

The hashes of a recording are used instead of computed ones, so that neither secrets nor real tokens are needed. Where the
recording has another snapshot in between, the state that was reached must be that of the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.core.content_hashes import RecordedHashes
from baton.core.engine.laws import audit
from baton.core.engine.worker import Worker
from baton.core.errors import InvariantViolated
from baton.wire import watched_sessions, watched_worker
from baton.wire.flight_recorder import Raised
from baton.wire.recording_file import BadRecording, EncodedCall, Recording
from baton.wire.router_sessions import RouterSessions
from baton.wire.snapshot import decode_value, encode_value, first_difference, restore, state_of

ROOTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "engine": (Worker, watched_worker.METHODS),
    "router": (RouterSessions, watched_sessions.METHODS),
}
"""What is recorded of each kind of process: the class, and the methods that a recording may call."""


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    number: int
    """Counted from 1."""
    method: str
    arguments: tuple[Any, ...]
    result: Any
    """As replayed; a Raised if it raised."""
    difference: str | None
    """How the recorded result differs, or which invariant broke; None: neither."""


class Replay:
    def __init__(self, recording: Recording, with_laws: bool = True) -> None:
        """`with_laws`: check the invariants of an engine after each call."""
        found = ROOTS.get(recording.header.of)
        if found is None:
            raise BadRecording(f"this is a recording of {recording.header.of!r}")
        self._recording = recording
        self._root, self._methods = found
        self._with_laws = with_laws
        self._hashes = RecordedHashes()
        self._object: Any = None
        self._number = 0
        self.left_out = 0
        """Calls that are not in the recording."""
        self.segments = 0
        """Snapshots that were read."""

    def steps(self) -> Iterator[ReplayedCall]:
        for frame in self._recording.frames():
            if isinstance(frame, bytes):
                yield from self._restored(frame)
                continue
            if isinstance(frame, int):
                self.left_out += frame
                self._object = None
                continue
            if self._object is None:
                raise BadRecording("the recording has calls before its first snapshot")
            hashes, calls = frame
            self._hashes.put(hashes)
            for call in calls:
                yield self._replayed(call)

    def _restored(self, data: bytes) -> Iterator[ReplayedCall]:
        before, self._object = self._object, restore(data, self._hashes)
        self.segments += 1
        if not isinstance(self._object, self._root):
            raise BadRecording(f"the recording has a snapshot of a {type(self._object).__name__}")
        if before is None:
            return
        reached, recorded = state_of(before), state_of(self._object)
        if reached != recorded:
            yield ReplayedCall(self._number, "snapshot", (), None, first_difference(reached, recorded))

    def _replayed(self, call: EncodedCall) -> ReplayedCall:
        self._number += 1
        if call.method not in self._methods:
            raise BadRecording(f"the recording calls {call.method!r}")
        arguments, before = decode_value(call.arguments), self._hashes.unused
        missing = self._hashes.missing
        result = self._result(call.method, arguments)
        used = before - self._hashes.unused + self._hashes.missing - missing
        difference = _difference(call, result, used) or self._broken_law(result)
        return ReplayedCall(self._number, call.method, arguments, result, difference)

    def _broken_law(self, result: Any) -> str | None:
        if not self._with_laws or not isinstance(self._object, Worker):
            return None
        if isinstance(result, Raised):
            return f"it is as recorded: {result.error}: {result.text}"
        try:
            audit(self._object.scheduler)
        except InvariantViolated as error:
            return f"it is as recorded, and breaks an invariant: {error}"
        return None

    def _result(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return getattr(self._object, method)(*arguments)
        except Exception as error:  # noqa: BLE001  whatever was raised may have been recorded, and is compared with that
            return Raised(type(error).__name__, str(error))


def _difference(call: EncodedCall, result: Any, hashes: int) -> str | None:
    if encode_value(result) != call.result:
        return f"the recording has {decode_value(call.result)!r}"
    return None if hashes == call.hashes else f"the recording has {call.hashes} hashes computed in it, and here are {hashes}"
