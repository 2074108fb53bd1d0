"""KV outside the pool: what is saved, what is looked for, what is brought back, and until when each of it may take.

    save    device ──CopyOut──▶ host ──Put──▶ store     when a request leaves its slot; nobody waits for it
    seek    store ──Look, Get──▶ host                   while a request waits in the queue; no block is held for it
    load    host ──CopyIn──▶ device                     when it is admitted, into blocks of its own

Owns the hauls that are open and the ledger of host memory. Every haul has a time limit. Whoever is too late is fenced, and
only when that is answered are its blocks and rows used for something else: a slow copy and a dead one take the same path. A
store that fails or is late several times in a row is left alone for a while.

Nothing here waits, and nothing evicts while it looks. Bytes are the driver's: `storage` has what it is told and answers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from baton.core.config import BringBack, WorkerConfig
from baton.core.engine.blocks import BlockPool
from baton.core.engine.gauges import StorageGauges
from baton.core.engine.plan import NO_INT32S, Int32s
from baton.core.engine.prefix import Key
from baton.core.engine.request import Serial
from baton.core.engine.victims import Rates
from baton.core.tiers.circuit_breaker import Breaker
from baton.core.tiers.host_rows import HostRows
from baton.core.tiers.transfers import (
    CopyIn,
    CopyOut,
    FenceHaul,
    Get,
    Haul,
    Hauled,
    HaulFailed,
    HaulFenced,
    Look,
    Put,
    StorageEffect,
    StorageEvent,
)

FINISHED_SHARE = 4
"""While more than one in so many blocks is leaving, those of finished requests are not saved too."""
STORED_US = 300_000_000
"""So long it is believed that a store has what it had: it may evict, or have been emptied."""
STORED_KEPT = 4
"""So many times the rows of host memory are remembered as stored."""
FADING = 0.98
"""A rate that keeps us from trying is believed a little less each time, so that one bad measurement is not for ever."""
BETTER_SHARE, WORSE_SHARE = 0.3, 0.1
"""Of a measurement in the rate that is believed. It has the machine's hiccups in it, too, and those only make it worse."""


class Kind(Enum):
    OUT = "copy to host"
    IN = "copy to device"
    LOOK = "look"
    GET = "get"
    PUT = "put"


OF_STORE = (Kind.LOOK, Kind.GET, Kind.PUT)
FILLS = (Kind.OUT, Kind.GET)
"""Hauls that write rows."""
READS = (Kind.IN, Kind.PUT)
"""Hauls that read rows."""


@dataclass(slots=True)
class OpenHaul:
    haul: Haul
    kind: Kind
    keys: tuple[Key, ...]
    began_us: int
    deadline_us: int
    blocks: Int32s = field(default_factory=lambda: NO_INT32S)
    serial: Serial | None = None
    """IN: whose."""
    seeker: Hashable = None
    """LOOK: who wants to know."""
    fencing: bool = False


@dataclass(slots=True)
class _Seek:
    """What is brought from the store for somebody who waits."""

    waits_for: set[Haul]
    until_us: int
    wanted: deque[Key] = field(default_factory=deque)
    """Which the store has, and nobody has been told to fetch yet."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A copy into a request's blocks is over: so many of them, from the first on, hold what they should."""

    serial: Serial
    blocks: int


@dataclass(frozen=True, slots=True)
class Departed:
    """What a request that goes elsewhere leaves behind is stored, or will not be."""

    serial: Serial


Outcome = Loaded | Departed


@dataclass(slots=True)
class _Departure:
    keys: set[Key]
    until_us: int


class Tiers:
    def __init__(self, config: WorkerConfig, pool: BlockPool, rates: Rates) -> None:
        self._config = config.tiers
        self._block_size = config.block_size
        self._pool = pool
        self.host = HostRows(config.tiers.host_rows)
        limits = config.tiers.failures_max, config.tiers.retry_us, config.tiers.retry_us_max
        self._breakers = {kind: Breaker(*limits) for kind in OF_STORE}
        """One for each kind of order: a store may answer looks and hang in everything else."""
        self._rates = rates
        self._open: dict[Haul, OpenHaul] = {}
        self._fills: dict[Key, Haul] = {}
        """Which haul brings a key into host memory."""
        self._seeks: dict[Hashable, _Seek] = {}
        self._to_put: OrderedDict[Key, None] = OrderedDict()
        """Rows that the store is to have; one that is gone when its turn comes is left out."""
        self._putting: set[Key] = set()
        self._at_store = dict.fromkeys(OF_STORE, 0)
        """Orders to the store that are open, of each kind."""
        self._stored: OrderedDict[Key, int] = OrderedDict()
        """What the store was known to have, and when; it may have dropped it since."""
        self._departures: dict[Serial, _Departure] = {}
        self._orders: list[StorageEffect] = []
        self._outcomes: list[Outcome] = []
        self._next_haul = 0
        self._now_us = 0
        self._counts = dict.fromkeys(StorageGauges.__struct_fields__, 0)

    # ── what others may know ─────────────────────────────────────────────────────────────────────────────────────────────

    def gauges(self) -> StorageGauges:
        now = {
            "host_rows": self.host.rows,
            "host_used": self.host.used,
            "hauls": len(self._open),
            "breaker_open": int(any(breaker.is_open for breaker in self._breakers.values())),
            "breaker_opened": sum(breaker.opened for breaker in self._breakers.values()),
        }
        return StorageGauges(**{**self._counts, **now})

    def open(self) -> tuple[OpenHaul, ...]:
        """For the laws."""
        return tuple(self._open.values())

    @property
    def busy(self) -> bool:
        """Whether something is being saved. What waits for its turn waits for one of these, or for a store that is gone."""
        return any(haul.kind in (Kind.OUT, Kind.PUT) for haul in self._open.values())

    def next_deadline(self) -> int | None:
        if not (self._open or self._seeks or self._departures):
            return None  # as most of the time, and this is asked several times an event
        hauls = (haul.deadline_us for haul in self._open.values() if not haul.fencing)
        seeks = (seek.until_us for seek in self._seeks.values())
        departures = (departure.until_us for departure in self._departures.values())
        return min((*hauls, *seeks, *departures), default=None)

    def take_orders(self) -> list[StorageEffect]:
        orders, self._orders = self._orders, []
        return orders

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, blocks: Int32s, preempted: bool, now_us: int) -> list[Key]:
        """Copy to host memory what of these blocks, given in sequence order and still held, is named and not there yet.

        Answers the keys that the store may be expected to have soon and has not yet.
        """
        self._now_us = now_us
        named = [(key, block) for block in blocks.tolist() if (key := self._pool.prefix.key_of(block)) is not None]
        missing = [(key, block) for key, block in named if key not in self.host]
        here = [key for key, _ in named if self.host.row_of(key) is not None] if len(missing) < len(named) else []
        self.host.touch(here)
        if missing and self._may_save(len(missing), preempted):
            rows = self.host.take([key for key, _ in missing])
            self._counts["unsaved"] += len(missing) - len(rows)
            self._copy_out(missing[: len(rows)], rows)
        elif missing:
            self._counts["unsaved"] += len(missing)
        if not self._config.store:
            return []
        for key in reversed(here):
            self._offer_to_store(key)
        self._put_some()
        if self._breakers[Kind.PUT].is_open:
            return []
        return [key for key, _ in named if key in self._fills or key in self._to_put or key in self._putting]

    def _may_save(self, blocks: int, preempted: bool) -> bool:
        if not preempted and self._pool.leaving * FINISHED_SHARE > self._pool.blocks:
            return False
        return self.brings_back(blocks)

    def brings_back(self, blocks: int) -> bool:
        """Whether so many blocks are to come from host memory rather than be computed; where not, that is noted."""
        if self._config.bring_back is BringBack.ALWAYS or self._copying_is_quicker():
            return True
        self._counts["recompute_cheaper"] += blocks
        self._rates.copy_us_per_block *= FADING
        return False

    def _copying_is_quicker(self) -> bool:
        return self._rates.copy_us_per_block < self._block_size * self._rates.prefill_us_per_token

    def _copy_out(self, saved: list[tuple[Key, int]], rows: Int32s) -> None:
        """The end of the sequence first: it is then the least recently used, here and in the store."""
        most = self._config.haul_blocks
        for first in reversed(range(0, len(saved), most)):
            part = saved[first : first + most]
            blocks = np.array([block for _, block in part], dtype=np.int32)
            haul = self._begin(Kind.OUT, tuple(key for key, _ in part), self._config.copy_us, blocks)
            self._pool.lend(blocks)
            self._orders.append(CopyOut(haul, blocks, rows[first : first + most]))

    def _offer_to_store(self, key: Key) -> None:
        if self._config.store and not self.is_known_stored(key) and key not in self._putting:
            self._to_put[key] = None
            if len(self._to_put) > self.host.rows:
                self._give_up_storing(next(iter(self._to_put)))

    def _give_up_storing(self, key: Key) -> None:
        del self._to_put[key]
        self._counts["unstored"] += 1
        self._nobody_waits_for(key)

    def _put_some(self) -> None:
        while self._to_put and self._may_ask(Kind.PUT):
            keys: list[Key] = []
            while self._to_put and len(keys) < self._config.haul_blocks:
                key = next(iter(self._to_put))
                if self.host.row_of(key) is None:
                    self._give_up_storing(key)
                else:
                    del self._to_put[key]
                    keys.append(key)
            if keys:
                self._put(tuple(keys))

    def _put(self, keys: tuple[Key, ...]) -> None:
        haul = self._begin(Kind.PUT, keys, self._config.put_us)
        rows = np.array([self.host.row_of(key) for key in keys], dtype=np.int32)
        self._putting.update(keys)
        self.host.read(keys)
        self._orders.append(Put(haul, keys, rows))

    def depart(self, serial: Serial, keys: Sequence[Key], now_us: int) -> None:
        """Say when the store has these, or will not get them: Departed comes in any case, within the time limit."""
        self._departures[serial] = _Departure(set(keys), now_us + self._config.depart_us)

    def forget_departure(self, serial: Serial) -> None:
        """Departed does not come."""
        del self._departures[serial]

    def _may_ask(self, kind: Kind) -> bool:
        return self._at_store[kind] < self._config.hauls_max and self._breakers[kind].allows(self._now_us)

    # ── seeking ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def seek(self, seeker: Hashable, keys: Sequence[Key], now_us: int) -> bool:
        """Bring what the store has of these keys, which continue what is here, into host memory. False: not now."""
        self._now_us = now_us
        if not keys or seeker in self._seeks:
            return True
        # Where getting is tried with one order only, so is looking: it would have to wait for that one.
        if not (self._may_ask(Kind.LOOK) and self._breakers[Kind.GET].allows(now_us)):
            return False
        if not self._fetches(len(keys)):
            return True
        haul = self._begin(Kind.LOOK, tuple(keys), self._config.look_us, seeker=seeker)
        self._seeks[seeker] = _Seek({haul}, now_us + self._config.look_us + self._config.get_us)
        self._orders.append(Look(haul, tuple(keys)))
        return True

    def _fetches(self, blocks: int) -> bool:
        """Whether so many blocks are to come from the store rather than be computed; where not, that is noted."""
        if self._config.bring_back is BringBack.ALWAYS:
            return True
        rates = self._rates
        fetching = rates.look_us + blocks * (rates.fetch_us_per_block + rates.copy_us_per_block)
        if fetching < blocks * self._block_size * rates.prefill_us_per_token:
            return True
        self._counts["recompute_cheaper"] += blocks
        rates.fetch_us_per_block *= FADING
        rates.look_us *= FADING
        return False

    def is_known_stored(self, key: Key) -> bool:
        """The store had it when it was last heard of, and that is not long ago."""
        known_us = self._stored.get(key)
        return known_us is not None and self._now_us - known_us < STORED_US

    def is_seeking(self, seeker: Hashable) -> bool:
        return seeker in self._seeks

    def forget_seeker(self, seeker: Hashable) -> None:
        """It does not wait any more; what is under way goes on, and is there for others."""
        self._seeks.pop(seeker, None)

    def _looked(self, haul: OpenHaul, came: Sequence[bool]) -> None:
        there = _leading(came)
        for key in haul.keys[:there]:
            self._remember_stored(key)
        self._lacks(haul.keys[there:])
        seek = self._seeks.get(haul.seeker)
        if seek is None:
            return
        seek.wanted.extend(haul.keys[:there])
        self._get_some()

    def _get_some(self) -> None:
        for seek in self._seeks.values():
            while seek.wanted and self._may_ask(Kind.GET):
                self._get(seek)

    def _get(self, seek: _Seek) -> None:
        """The next few that are wanted; those that are on their way already are only waited for."""
        keys: list[Key] = []
        while seek.wanted and len(keys) < self._config.haul_blocks:
            key = seek.wanted.popleft()
            if key in self._fills:
                seek.waits_for.add(self._fills[key])
            elif key not in self.host:
                keys.append(key)
        rows = self.host.take(keys)
        if len(rows) < len(keys):
            seek.wanted.clear()  # no room: what would come after a gap is of no use
        if len(rows):
            taken = tuple(keys[: len(rows)])
            haul = self._begin(Kind.GET, taken, self._config.get_us)
            seek.waits_for.add(haul)
            self._orders.append(Get(haul, taken, rows))

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, serial: Serial, keys: Sequence[Key], rows: Int32s, blocks: Int32s, now_us: int) -> None:
        """Copy these rows, which hold what the keys name, into blocks that nobody else has. Loaded comes when it is over."""
        self._now_us = now_us
        haul = self._begin(Kind.IN, tuple(keys), self._config.copy_us, blocks, serial=serial)
        self.host.read(keys)
        self._orders.append(CopyIn(haul, rows, blocks))

    def give_up_load(self, serial: Serial) -> None:
        """Nobody wants it any more. Loaded still comes, when nothing writes to the blocks."""
        for haul in self._open.values():
            if haul.serial == serial and not haul.fencing:
                self._fence(haul)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: StorageEvent, now_us: int) -> None:
        self._now_us = now_us
        haul = self._open.get(event.haul)
        if haul is not None:
            self._ended(haul, event)
        self._go_on()

    def expire(self, now_us: int) -> None:
        """Fence what is late; let go of who waited long enough."""
        self._now_us = now_us
        for haul in [haul for haul in self._open.values() if not haul.fencing and haul.deadline_us <= now_us]:
            self._counts["late"] += 1
            self._fence(haul)
            self._measure(haul)
            if haul.kind in OF_STORE:
                self._has_failed(haul.kind)
                self._found(haul)
            if haul.kind is Kind.GET:
                self._lacks(haul.keys)
        for seeker in [seeker for seeker, seek in self._seeks.items() if seek.until_us <= now_us]:
            del self._seeks[seeker]
        for serial in [serial for serial, departure in self._departures.items() if departure.until_us <= now_us]:
            self._depart_now(serial)
        self._go_on()

    def _lacks(self, keys: Iterable[Key]) -> None:
        """The store is not believed to have these any more."""
        for key in keys:
            self._stored.pop(key, None)

    def _has_failed(self, kind: Kind) -> None:
        self._breakers[kind].failed(self._now_us)
        if self._breakers[kind].is_open:
            self._stored.clear()  # it may come back empty

    def _go_on(self) -> None:
        """Whatever ended may be what the next orders waited for; a store that is given up is waited for by nobody."""
        self._put_some()
        self._get_some()
        if self._breakers[Kind.PUT].is_open:
            for serial in list(self._departures):
                self._depart_now(serial)
        self._end_seeks()

    def take_outcomes(self) -> list[Outcome]:
        """What has happened since the last call; to be asked for after whatever may have had an effect here."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _begin(
        self,
        kind: Kind,
        keys: tuple[Key, ...],
        limit_us: int,
        blocks: Int32s = NO_INT32S,
        serial: Serial | None = None,
        seeker: Hashable = None,
    ) -> Haul:
        haul = Haul(self._next_haul)
        self._next_haul += 1
        self._open[haul] = OpenHaul(haul, kind, keys, self._now_us, self._now_us + limit_us, blocks, serial, seeker)
        if kind in FILLS:
            self._fills.update(dict.fromkeys(keys, haul))
        if kind in OF_STORE:
            self._at_store[kind] += 1
            self._breakers[kind].asked()
        return haul

    def _fence(self, haul: OpenHaul) -> None:
        haul.fencing = True
        self._orders.append(FenceHaul(haul.haul))

    def _ended(self, haul: OpenHaul, event: StorageEvent) -> None:
        """The driver has let go of it, whatever came of it."""
        del self._open[haul.haul]
        came = event.came if isinstance(event, Hauled) else (False,) * len(haul.keys)
        if haul.kind in OF_STORE:
            self._at_store[haul.kind] -= 1
        if not haul.fencing:
            self._judge_driver(haul, event)
        match haul.kind:
            case Kind.OUT:
                self._copied_out(haul, came)
            case Kind.IN:
                self._copied_in(haul, came)
            case Kind.LOOK:
                if not haul.fencing:
                    self._looked(haul, came)
            case Kind.GET:
                self._got(haul, came)
            case Kind.PUT:
                self._has_put(haul, came)
        self._found(haul)

    def _judge_driver(self, haul: OpenHaul, event: StorageEvent) -> None:
        failed = isinstance(event, HaulFailed | HaulFenced)
        self._counts["failed"] += failed
        if not failed:
            self._measure(haul)
        if haul.kind in OF_STORE:
            if failed:
                self._has_failed(haul.kind)
            else:
                self._breakers[haul.kind].succeeded()

    def _measure(self, haul: OpenHaul) -> None:
        took_us, rates = self._now_us - haul.began_us, self._rates
        each = took_us / max(1, len(haul.keys))
        match haul.kind:
            case Kind.IN:
                rates.copy_us_per_block = _blend(rates.copy_us_per_block, each)
            case Kind.GET:
                rates.fetch_us_per_block = _blend(rates.fetch_us_per_block, each)
            case Kind.LOOK:
                rates.look_us = _blend(rates.look_us, took_us)
            case _:
                pass

    def _copied_out(self, haul: OpenHaul, came: Sequence[bool]) -> None:
        self._pool.give_back(haul.blocks)
        self._fill(haul, came)
        self._counts["saved"] += sum(came)
        self._counts["unsaved"] += len(came) - sum(came)
        for key, is_there in zip(reversed(haul.keys), reversed(came), strict=True):
            if is_there:
                self._offer_to_store(key)
            else:
                self._nobody_waits_for(key)

    def _copied_in(self, haul: OpenHaul, came: Sequence[bool]) -> None:
        self.host.let_go(haul.keys)
        blocks = _leading(came)
        self._counts["loaded"] += blocks
        if haul.serial is not None:
            self._outcomes.append(Loaded(haul.serial, blocks))

    def _got(self, haul: OpenHaul, came: Sequence[bool]) -> None:
        self._fill(haul, came)
        self._counts["fetched"] += sum(came)
        for key, is_there in zip(haul.keys, came, strict=True):
            if is_there:
                self._remember_stored(key)
            else:
                self._lacks([key])
                self._nobody_waits_for(key)
        if False in came:
            for seek in self._seeks.values():
                if haul.haul in seek.waits_for:
                    seek.wanted.clear()  # what comes after a gap is of no use

    def _has_put(self, haul: OpenHaul, came: Sequence[bool]) -> None:
        self.host.let_go(haul.keys)
        self._counts["stored"] += sum(came)
        self._counts["unstored"] += len(came) - sum(came)
        self._putting.difference_update(haul.keys)
        for key, is_there in zip(haul.keys, came, strict=True):
            if is_there:
                self._remember_stored(key)
            else:
                self._nobody_waits_for(key)

    def _fill(self, haul: OpenHaul, came: Sequence[bool]) -> None:
        for key in haul.keys:
            del self._fills[key]
        self.host.filled([key for key, is_there in zip(haul.keys, came, strict=True) if is_there])
        self.host.spoilt([key for key, is_there in zip(haul.keys, came, strict=True) if not is_there])

    def _remember_stored(self, key: Key) -> None:
        self._stored[key] = self._now_us
        self._stored.move_to_end(key)
        self._to_put.pop(key, None)
        self._nobody_waits_for(key)
        if len(self._stored) > STORED_KEPT * self.host.rows:
            self._stored.popitem(last=False)

    def _nobody_waits_for(self, key: Key) -> None:
        """The store has it, or will not get it."""
        for serial, departure in list(self._departures.items()):
            departure.keys.discard(key)
            if not departure.keys:
                self._depart_now(serial)

    def _depart_now(self, serial: Serial) -> None:
        del self._departures[serial]
        self._outcomes.append(Departed(serial))

    def _found(self, haul: OpenHaul) -> None:
        """Who waited for this haul waits for it no more."""
        for seek in self._seeks.values():
            seek.waits_for.discard(haul.haul)

    def _end_seeks(self) -> None:
        gone = not self._breakers[Kind.GET].allows(self._now_us)
        for seeker in [seeker for seeker, seek in self._seeks.items() if not seek.waits_for and (gone or not seek.wanted)]:
            del self._seeks[seeker]


def _leading(came: Sequence[bool]) -> int:
    return came.index(False) if False in came else len(came)


def _blend(believed: float, measured: float) -> float:
    share = BETTER_SHARE if measured < believed else WORSE_SHARE
    return believed * (1 - share) + measured * share
