"""Virtual time: one heap of events, one random stream per component, and the story of what happened.

Owns the clock and the order of events. Time is in integer microseconds; events at one time happen in the order in which they
were scheduled (heap keys are (time, sequence)). All randomness in a world comes from `stream(name)`, which depends on the
seed and the name alone: a component that draws more or less does not change the others. Nothing here reads a real clock,
iterates a set or uses `hash()`, so a seed gives the same run in any process.

An actor is any object that schedules events on its host:

    host.after(delay_us, self._wake, argument)      happens later, unless the host has crashed by then
    alarm = Alarm(host, self._wake); alarm.set(at)  for objects with deadlines: `alarm.set(worker.next_deadline())`

A host is a machine that can crash (its events never happen) and pause (they happen when it is resumed).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable

from baton.core.errors import BatonError

STORY_LINES_MAX = 200_000

Act = Callable[..., None]


class EventsExhausted(BatonError):
    """The run exceeded its bound on events, as in an endless loop."""


def stream_of(seed: int, name: str) -> random.Random:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))


class World:
    def __init__(self, seed: int, *, events_max: int, tell_story: bool = False, keep_digest: bool = True) -> None:
        self.seed = seed
        self.now_us = 0
        self.events = 0
        self.progress_us = 0
        """When `progressed` was last called: something other than a heartbeat happened."""
        self.fired: Counter[str] = Counter()
        """Number of times each fault was injected."""
        self.keeps_notes = keep_digest or tell_story
        """Whether `note` has an effect; check it before building a costly line."""
        self.story: deque[str] = deque(maxlen=STORY_LINES_MAX)
        self._tell_story = tell_story
        self._events_max = events_max
        self._heap: list[tuple[int, int, Act, tuple[object, ...]]] = []
        self._sequence = 0
        self._ambush: tuple[int, Act] | None = None
        self._digest = hashlib.blake2b(digest_size=16)

    def stream(self, name: str) -> random.Random:
        return stream_of(self.seed, name)

    def at(self, at_us: int, act: Act, *arguments: object) -> None:
        self.put(at_us, act, arguments)

    def put(self, at_us: int, act: Act, arguments: tuple[object, ...]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_us if at_us > self.now_us else self.now_us, self._sequence, act, arguments))

    def after(self, delay_us: int, act: Act, *arguments: object) -> None:
        self.put(self.now_us + delay_us, act, arguments)

    @property
    def next_us(self) -> int | None:
        """Time of the next event; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Run the next event."""
        if self.events >= self._events_max:
            raise EventsExhausted(f"{self.events} events by {self.now_us} µs, and no end")
        self.events += 1
        self.now_us, _, act, arguments = heapq.heappop(self._heap)
        act(*arguments)
        if self._ambush is not None and self._ambush[0] == self.events:
            self._ambush[1]()

    def ambush(self, event: int, act: Act) -> None:
        """Run `act` right after the event with this number."""
        self._ambush = (event, act)

    def progressed(self) -> None:
        self.progress_us = self.now_us

    def fire(self, fault: str, where: str) -> None:
        """Count and note a fault."""
        self.fired[fault] += 1
        if self.keeps_notes:
            self.note(where, f"fault: {fault}")

    def note(self, who: str, what: str) -> None:
        """Add one line to the story. The digest covers every line, whether it is kept or not."""
        line = f"{self.now_us} {who} {what}"
        self._digest.update(line.encode())
        if self._tell_story:
            self.story.append(line)

    def digest(self) -> str:
        return self._digest.hexdigest()


class Host:
    """A machine: a crash discards its events, a pause delays them."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.lives = 0
        """Number of crashes; events of an earlier life never happen."""
        self.up = True
        self._paused = False
        self._held: list[tuple[int, Act, tuple[object, ...]]] = []

    def after(self, delay_us: int, act: Act, *arguments: object) -> None:
        world = self.world
        world.put(world.now_us + delay_us, self._run, (self.lives, act, arguments))

    def at(self, at_us: int, act: Act, *arguments: object) -> None:
        self.world.put(at_us, self._run, (self.lives, act, arguments))

    def crash(self) -> None:
        self.lives += 1
        self.up = False
        self._held.clear()

    def restart(self) -> None:
        self.up = True

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        """Run the events that were due during the pause, in order."""
        self._paused = False
        held, self._held = self._held, []
        for life, act, arguments in held:
            self.world.after(0, self._run, life, act, arguments)

    @property
    def paused(self) -> bool:
        return self._paused

    def run(self, act: Act, *arguments: object) -> None:
        """Run now; when the host is resumed, if it is paused; never, if it is down."""
        self._run(self.lives, act, arguments)

    def _run(self, life: int, act: Act, arguments: tuple[object, ...]) -> None:
        if life != self.lives or not self.up:
            return
        if self._paused:
            self._held.append((life, act, arguments))
        else:
            act(*arguments)


class Alarm:
    """Wakes an actor at the time that was set last, and at no other."""

    def __init__(self, host: Host, wake: Callable[[], None]) -> None:
        self._host = host
        self._wake = wake
        self._at_us: int | None = None
        self._armed_us: int | None = None
        """Time of our earliest event in the heap; a later alarm is scheduled when that event runs."""

    def set(self, at_us: int | None) -> None:
        self._at_us = at_us
        if at_us is not None and (self._armed_us is None or at_us < self._armed_us):
            self._armed_us = at_us
            self._host.at(at_us, self._ring, at_us)

    def _ring(self, armed_us: int) -> None:
        if armed_us != self._armed_us:
            return
        self._armed_us = None
        if self._at_us is None:
            return
        if self._at_us <= self._host.world.now_us:
            self._at_us = None
            self._wake()
        else:
            self.set(self._at_us)
