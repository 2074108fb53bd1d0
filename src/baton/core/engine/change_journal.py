"""Changes at an engine since they were last taken: keys in the prefix cache, phases of requests.

Keeps the difference between the keys last reported and those cached now, not the history: a block that was cached and
evicted in between is not mentioned. Bounded: beyond a few times the pool, all keys are reported anew; of phases the oldest
notes are dropped, since nothing is decided from them; of preemptions the last count of each request is kept. Nothing is kept
before `ReportChanges` asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from baton.core.engine.request import Phase, Serial

NOTES_MAX = 1024
KEYS_MAX = 4096
"""Keys in one report at most."""


@dataclass(frozen=True, slots=True)
class CachedKeysChanged:
    """Changes in which prefixes an instance holds, by block key; each key is in one of the two."""

    fresh: bool = False
    """Keys reported before are void."""
    named: tuple[bytes, ...] = ()
    forgotten: tuple[bytes, ...] = ()


NO_KEYS_CHANGED = CachedKeysChanged()


@dataclass(frozen=True, slots=True)
class EnteredPhase:
    serial: Serial
    phase: Phase
    """The phase it entered."""
    ago_us: int


@dataclass(frozen=True, slots=True)
class EngineChanges:
    names: CachedKeysChanged = NO_KEYS_CHANGED
    notes: tuple[EnteredPhase, ...] = ()
    preempted: tuple[tuple[Serial, int], ...] = ()
    """Requests that were preempted, and how often each was so far, here and elsewhere."""


class PrefixJournal:
    def __init__(self, names: Callable[[], Iterable[bytes]], changes_max: int) -> None:
        """`names` returns all keys that are cached now."""
        self._cached_keys = names
        self._changes_max = changes_max
        self._unreported: dict[bytes, bool] = {}
        """Key → whether it is cached now, where that differs from what was reported."""
        self._fresh = True
        self.restart()

    def __len__(self) -> int:
        return len(self._unreported)

    @property
    def has_changes(self) -> bool:
        """Whether there is something to report; before the first report there is, even without keys."""
        return self._fresh or bool(self._unreported)

    def restart(self) -> None:
        """Report all keys anew, as many at a time as are taken."""
        self._fresh = True
        self._unreported = dict.fromkeys(self._cached_keys(), True)

    def changed(self, key: bytes, named: bool) -> None:
        # A key alternates between cached and not. A second change restores what was reported: nothing to report.
        if self._unreported.pop(key, None) is not None:
            return
        self._unreported[key] = named
        if len(self._unreported) > self._changes_max:
            self.restart()

    def take(self, keys_max: int) -> CachedKeysChanged:
        taken = list(islice(self._unreported.items(), keys_max))
        for key, _ in taken:
            del self._unreported[key]
        fresh, self._fresh = self._fresh, False
        named = tuple(key for key, is_cached in taken if is_cached)
        return CachedKeysChanged(fresh, named, tuple(key for key, is_cached in taken if not is_cached))


class PhaseNotes:
    def __init__(self, before: PhaseNotes | None = None) -> None:
        self._noted: deque[tuple[Serial, Phase, int]] = deque(maxlen=NOTES_MAX)
        self._preempted: dict[Serial, int] = {} if before is None else before._preempted
        """Total preemptions of the requests that were preempted since the last report. None is dropped: the router keeps
        the count for when this instance is lost."""

    def note(self, serial: Serial, phase: Phase, now_us: int) -> None:
        self._noted.append((serial, phase, now_us))

    def take(self, now_us: int) -> tuple[EnteredPhase, ...]:
        notes = tuple(EnteredPhase(serial, phase, max(0, now_us - at_us)) for serial, phase, at_us in self._noted)
        self._noted.clear()
        return notes

    def preempted(self, serial: Serial, preemptions: int) -> None:
        self._preempted[serial] = preemptions

    def take_preempted(self) -> tuple[tuple[Serial, int], ...]:
        taken = tuple(self._preempted.items())
        self._preempted.clear()
        return taken
