"""What an instance's next heartbeat to its router says: the engine's gauges, changes of cached prefixes, phases entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.prefix import KEY_BYTES
from baton.wire.engine_messages import Pulse
from baton.wire.router_messages import KEYS_A_BEAT_MAX, NOTES_A_BEAT_MAX, HeartbeatMessage

NO_GAUGES = SchedulerGauges()


class CachedPrefixes:
    """Changes of cached prefixes that wait for a beat. Those before the engine's answer to TellNames are void."""

    def __init__(self) -> None:
        self.void()

    def void(self) -> None:
        self._begun = False
        self._fresh = False
        self._named: dict[bytes, None] = {}
        self._forgotten: dict[bytes, None] = {}

    def add(self, pulse: Pulse) -> None:
        if pulse.fresh:
            self._begun = self._fresh = True
            self._named, self._forgotten = {}, {}
        if not self._begun:
            return
        for key in _keys(pulse.forgotten):
            self._named.pop(key, None)
            self._forgotten[key] = None
        for key in _keys(pulse.named):
            self._forgotten.pop(key, None)
            self._named[key] = None

    def take(self) -> tuple[bool, bytes, bytes]:
        fresh, self._fresh = self._fresh, False
        return fresh, _taken(self._named), _taken(self._forgotten)


class Heartbeats:
    def __init__(self, has: Callable[[int], bool]) -> None:
        self._has = has
        """Whether a request is a router's, by serial."""
        self._gauges = NO_GAUGES
        self._computing = False
        self._prefixes = CachedPrefixes()
        self._notes: list[tuple[int, str, int]] = []
        """(serial, phase, when)"""

    def void(self) -> None:
        """The session is over: the next one begins with nothing said."""
        self._prefixes.void()
        self._notes.clear()

    def feel(self, pulse: Pulse, serving: bool, now_us: int) -> None:
        self._gauges, self._computing = pulse.gauges, pulse.computing
        if not serving:
            return
        self._prefixes.add(pulse)
        self._notes += [(serial, phase, now_us - ago) for serial, phase, ago in pulse.notes if self._has(serial)]
        del self._notes[:-NOTES_A_BEAT_MAX]

    def beat(self, silent_us: int, now_us: int) -> HeartbeatMessage:
        fresh, named, forgotten = self._prefixes.take()
        notes = tuple((serial, phase, max(0, now_us - at_us)) for serial, phase, at_us in self._notes)
        self._notes.clear()
        return HeartbeatMessage(self._gauges, max(0, silent_us), self._computing, fresh, named, forgotten, notes)


def _keys(data: bytes) -> Iterator[bytes]:
    return (data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))


def _taken(keys: dict[bytes, None]) -> bytes:
    """As many as a beat may have; the others wait for the next."""
    taken = list(keys)[:KEYS_A_BEAT_MAX] if len(keys) > KEYS_A_BEAT_MAX else list(keys)
    for key in taken:
        del keys[key]
    return b"".join(taken)
