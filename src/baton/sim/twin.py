"""The law of snapshots: what is restored from a snapshot decides as the object that it was taken of.

At times drawn from the number of calls a twin is restored from a snapshot and gets the next calls too, with arguments that
share nothing with those of the original. Its results must be the same, and at the end its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from baton.core.content_hashes import ContentHashes
from baton.sim.law_names import SAME_TWIN, LawBroken
from baton.wire.flight_recorder import Arguments, Result
from baton.wire.snapshot import decode_value, encode_value, first_difference, restore, snapshot, state_of

FIRST_CALL = 40
"""The calls until the first twin; the second comes three times as late, and so on: most worlds are short."""
CALLS_OF_TWIN = 12


class Decider(Protocol):
    """An object that is driven by calls and tells when the next one is due."""

    def next_deadline(self) -> int | None: ...


class TwinCheck:
    """A CallWatch: makes the calls, and from time to time those of a twin."""

    def __init__(self, name: str, watched: Decider, hashes: ContentHashes, first_call: int = FIRST_CALL) -> None:
        self._name = name
        self._watched = watched
        self._hashes = hashes
        self._calls = 0
        self._next_twin = first_call
        self._twin: Any = None
        self._left = 0

    def call(
        self, method: str, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        self._calls += 1
        if self._calls == self._next_twin:
            self._next_twin *= 3
            self._twin, self._left = restore(snapshot(self._watched), self._hashes), CALLS_OF_TWIN
        if self._twin is None:
            return function(*args, **kwargs)
        its_args = restore(snapshot(args), self._hashes)
        result = function(*args, **kwargs)
        self._compare(method, args, encode_value(result), encode_value(getattr(self._twin, method)(*its_args)))
        return result

    def _compare(self, method: str, args: tuple[Any, ...], ours: bytes, its: bytes) -> None:
        if ours != its:
            what = f"{self._name}: {method}{args!r} gave {decode_value(ours)!r}, and restored {decode_value(its)!r}"
            raise LawBroken(SAME_TWIN, what[:4000])
        # After each call, as a driver does: asking also sweeps queues, and the order within a heap tells when it was swept.
        if self._watched.next_deadline() != self._twin.next_deadline():
            raise LawBroken(SAME_TWIN, f"{self._name}: a restored one has another deadline")
        self._left -= 1
        if self._left:
            return
        state, its_state = state_of(self._watched), state_of(self._twin)
        if state != its_state:
            what = f"after {CALLS_OF_TWIN} calls a restored one differs in {first_difference(state, its_state)}"
            raise LawBroken(SAME_TWIN, f"{self._name}: {what}")
        self._twin = None
