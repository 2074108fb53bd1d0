"""The simulated store of a world: named objects on a separate machine that outlives all instances.

Owns the objects. It moves bytes and knows nothing of blocks. An operation is answered later with a list, with None if the
store cannot be reached, or never. Objects may be torn, lost, flipped, swapped or replaced by foreign ones at given rates;
the reader must detect that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from baton.core.errors import InvariantViolated
from baton.sim.faults import Fault, StoreRates, flip_bit, log_uniform_us
from baton.sim.world import Host, World
from baton.wire.envelope import LAYOUT_BYTES, EnvelopeFlaw, open_any, seal

NAME = "store"
SLOW_US = 2_000, 800_000
ABSENT_US = 20_000, 900_000

Answer = TypeVar("Answer")


class StoreReach(Enum):
    """The present answer to operations."""

    ANSWERS = "answers"
    REFUSES = "refuses"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class StoreTimes:
    delay_us: int
    """Round trip and processing."""
    jitter_us: int
    objects_max: int
    """Beyond this number the oldest objects are evicted."""


class SimulatedStore:
    def __init__(self, world: World, rates: StoreRates, times: StoreTimes) -> None:
        self.host = Host(world, NAME)
        self.rates = rates
        self._times = times
        self._stream = world.stream(NAME)
        self._objects: dict[str, bytes] = {}
        """Oldest first."""
        self._reach = StoreReach.ANSWERS
        self._absent_until_us = 0
        self.is_dead = False
        """Whether it failed for good."""

    def __len__(self) -> int:
        return len(self._objects)

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, names: Sequence[str], answer: Callable[[list[bool] | None], None]) -> None:
        self._ask(lambda: [name in self._objects for name in names], answer)

    def get(self, names: Sequence[str], answer: Callable[[list[bytes | None] | None], None]) -> None:
        self._ask(lambda: [self._objects.get(name) for name in names], answer)

    def put(self, objects: Sequence[tuple[str, bytes]], answer: Callable[[list[bool] | None], None]) -> None:
        """Answers False for an object without room."""
        self._ask(lambda: [self._place(name, data) for name, data in objects], answer)

    def drop(self, names: Sequence[str]) -> None:
        """Remove corrupt objects, without an answer."""
        self._ask(lambda: [self._objects.pop(name, None) is None for name in names], lambda _: None)

    def _ask(self, work: Callable[[], list[Answer]], answer: Callable[[list[Answer] | None], None]) -> None:
        stream, world = self._stream, self.host.world
        hangs, fails, slow, share = (stream.random() for _ in range(4))
        slow_us = log_uniform_us(stream, *SLOW_US)
        took_us = self._times.delay_us + int(share * self._times.jitter_us)
        if self._reach is not StoreReach.ANSWERS:
            world.fire(Fault.STORE_AWAY, NAME)
            if self._reach is StoreReach.REFUSES:
                self.host.after(took_us, answer, None)
            return
        if hangs < self.rates.hangs:
            world.fire(Fault.STORE_HANGS, NAME)
            return
        if fails < self.rates.fails:
            world.fire(Fault.STORE_FAILS, NAME)
            self.host.after(took_us, answer, None)
            return
        if slow < self.rates.slow:
            world.fire(Fault.STORE_SLOW, NAME)
            took_us += slow_us
        self.host.after(took_us // 2, self._work, work, answer, took_us - took_us // 2)

    def _work(self, work: Callable[[], list[Answer]], answer: Callable[[list[Answer] | None], None], back_us: int) -> None:
        self.host.after(back_us, answer, work())

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(self, name: str, data: bytes) -> bool:
        harm, full = self._stream.random(), self._stream.random()
        if full < self.rates.full:
            self.host.world.fire(Fault.STORE_FULL, NAME)
            return False
        self._objects.pop(name, None)
        self._objects[name] = data
        if len(self._objects) > self._times.objects_max:
            del self._objects[next(iter(self._objects))]
        self._harm(name, harm)
        return True

    def _harm(self, name: str, drawn: float) -> None:
        """Damage an object in at most one way; it is done at once, before any read."""
        rates = self.rates
        for chance, fault, spoil in (
            (rates.torn, Fault.STORE_TORN, self._tear),
            (rates.lost, Fault.STORE_LOST, self._lose),
            (rates.flipped, Fault.STORE_FLIPPED, self._flip),
            (rates.swapped, Fault.STORE_SWAPPED, self._swap),
            (rates.alien, Fault.STORE_ALIEN, self._replace),
        ):
            if drawn < chance:
                self.host.world.fire(fault, NAME)
                spoil(name)
                return
            drawn -= chance

    def _tear(self, name: str) -> None:
        data = self._objects[name]
        self._objects[name] = data[: self._stream.randrange(len(data))]

    def _lose(self, name: str) -> None:
        del self._objects[name]

    def _flip(self, name: str) -> None:
        data = self._objects[name]
        self._objects[name] = flip_bit(data, self._stream.randrange(len(data) * 8))

    def _swap(self, name: str) -> None:
        """Swap with a random object, perhaps itself."""
        objects, other = self._objects, self._stream.choice(tuple(self._objects))
        objects[name], objects[other] = objects[other], objects[name]

    def _replace(self, name: str) -> None:
        """Replace it by a valid object of another model or another tenant."""
        opened = open_any(memoryview(self._objects[name]))
        if isinstance(opened, EnvelopeFlaw):
            raise InvariantViolated(f"{name} was given to the store in a bad envelope: {opened}")
        payload = bytes(byte ^ 0xA5 for byte in opened.payload)
        key, layout = opened.key, opened.layout
        if self._stream.random() < 0.5:
            layout = self._stream.randbytes(LAYOUT_BYTES)
        else:
            key = self._stream.randbytes(len(key))
        whole = bytearray(len(self._objects[name]))
        seal(key, layout, memoryview(payload), memoryview(whole))
        self._objects[name] = bytes(whole)

    # ── outages ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def go_away(self, stream: random.Random) -> None:
        """For a while, refuse operations or leave them unanswered."""
        lasts_us, reach = (
            log_uniform_us(stream, *ABSENT_US),
            stream.choice((StoreReach.REFUSES, StoreReach.REFUSES, StoreReach.SILENT)),
        )
        if not self.is_dead:
            self._reach = reach
            self._absent_until_us = max(self._absent_until_us, self.host.world.now_us + lasts_us)
            self.host.after(lasts_us, self._come_back)

    def die(self, stream: random.Random) -> None:
        self.host.world.fire(Fault.STORE_DEAD, NAME)
        self._reach = stream.choice((StoreReach.REFUSES, StoreReach.SILENT))
        self.is_dead = True

    def wipe(self) -> None:
        self.host.world.fire(Fault.STORE_WIPED, NAME)
        self._objects.clear()

    def heal(self) -> None:
        """End all faults, except a permanent failure."""
        self.rates = StoreRates()
        self._absent_until_us = 0
        self._come_back()

    def _come_back(self) -> None:
        if self.host.world.now_us >= self._absent_until_us and not self.is_dead:
            self._reach = StoreReach.ANSWERS
