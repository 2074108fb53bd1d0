"""Assembles an instance's heartbeats to its router: gauges, changes of cached prefixes, phases entered and preemptions
since the last one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.progress_watch import STALL_US
from baton.wire.engine_messages import Pulse
from baton.wire.router_messages import KEYS_A_BEAT_MAX, NOTES_A_BEAT_MAX, HeartbeatMessage, keys_of

NO_GAUGES = SchedulerGauges()


class CachedPrefixes:
    """Changes of cached prefixes not sent yet. Changes before the engine's answer to ReportChanges are ignored."""

    def __init__(self) -> None:
        self.void()

    def void(self) -> None:
        self._is_reporting = False
        self._fresh = False
        self._named: dict[bytes, None] = {}
        self._forgotten: dict[bytes, None] = {}

    def add(self, pulse: Pulse) -> None:
        if pulse.fresh:
            self._is_reporting = self._fresh = True
            self._named, self._forgotten = {}, {}
        if not self._is_reporting:
            return
        for key in keys_of(pulse.forgotten):
            self._named.pop(key, None)
            self._forgotten[key] = None
        for key in keys_of(pulse.named):
            self._forgotten.pop(key, None)
            self._named[key] = None

    def take(self) -> tuple[bool, bytes, bytes]:
        fresh, self._fresh = self._fresh, False
        return fresh, _take_keys(self._named), _take_keys(self._forgotten)


@dataclass(frozen=True, slots=True)
class EngineVitals:
    """What a front end sees of its engine's process."""

    silent_us: int
    """Time since its last message or beat."""
    runs: bool = True
    """Whether a silent process uses a CPU or waits for one."""
    step_limit_us: int = STALL_US
    """Time after which a step that has not ended is a stall."""


class Heartbeats:
    def __init__(self, is_routed: Callable[[int], bool]) -> None:
        self._is_routed = is_routed
        """Whether a serial belongs to a request of the router."""
        self._gauges = NO_GAUGES
        self._computing = False
        self._prefixes = CachedPrefixes()
        self._notes: list[tuple[int, str, int]] = []
        """(serial, phase, time entered)"""
        self._preempted: dict[int, int] = {}
        """Serial → preemptions so far, where that has changed since the last heartbeat."""

    def void(self) -> None:
        """Forget what is pending: the session is over."""
        self._prefixes.void()
        self._notes.clear()
        self._preempted.clear()

    def record_pulse(self, pulse: Pulse, serving: bool, now_us: int) -> None:
        self._gauges, self._computing = pulse.gauges, pulse.computing
        if not serving:
            return
        self._prefixes.add(pulse)
        self._notes += [(serial, phase, now_us - ago) for serial, phase, ago in pulse.notes if self._is_routed(serial)]
        del self._notes[:-NOTES_A_BEAT_MAX]
        self._preempted.update((serial, count) for serial, count in pulse.preempted if self._is_routed(serial))

    def beat(self, engine: EngineVitals, router_silent_us: int, now_us: int) -> HeartbeatMessage:
        fresh, named, forgotten = self._prefixes.take()
        notes = tuple((serial, phase, max(0, now_us - at_us)) for serial, phase, at_us in self._notes)
        self._notes.clear()
        preempted = tuple(self._preempted.items())[:NOTES_A_BEAT_MAX]  # the rest waits for the next
        for serial, _ in preempted:
            del self._preempted[serial]
        return HeartbeatMessage(
            self._gauges, max(0, engine.silent_us), self._computing, fresh, named, forgotten, notes, preempted, engine.runs,
            engine.step_limit_us, max(0, router_silent_us),
        )  # fmt: skip


def _take_keys(keys: dict[bytes, None]) -> bytes:
    """Remove and return as many keys as one heartbeat may have; the rest waits for the next."""
    taken = list(keys)[:KEYS_A_BEAT_MAX] if len(keys) > KEYS_A_BEAT_MAX else list(keys)
    for key in taken:
        del keys[key]
    return b"".join(taken)
