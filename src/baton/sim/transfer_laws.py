"""Checks of KV transfers outside the pool on the events and effects of one worker.

Owns the record of one life: open copies and store operations, what each reads and writes, failures of the store, and
requests that wait to be rescheduled. The bytes themselves are checked in `storage_copies`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.core.config import OnPreempt, TierConfig, WorkerConfig
from baton.core.engine.orders import Cancel, StopAt
from baton.core.engine.plan import StepPlan
from baton.core.engine.request import Serial
from baton.core.engine.worker import Effect, Event, FrontEndLost, Launch, StepDone, Tick
from baton.core.tiers.transfers import (
    CopyIn,
    CopyOut,
    FenceTransfer,
    Get,
    Look,
    Put,
    StorageEvent,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferId,
)
from baton.sim.handover_laws import PASS_US
from baton.sim.law_names import (
    DEPARTS_IN_TIME,
    ENDS_AT_ONCE,
    LEFT_ALONE,
    TRANSFERS_BOUND,
    TRANSFERS_END,
    UNTOUCHED,
    LawBroken,
)

NOTHING: frozenset[int] = frozenset()


class TransferClass(Enum):
    OUT = "copy to host"
    IN = "copy to device"
    LOOK = "look"
    GET = "get"
    PUT = "put"


class TransferEnd(Enum):
    """The end of a transfer, as its driver reports it."""

    DONE = "all of it done"
    PARTLY = "some of it missing"
    FAILED = "failed"
    FENCED = "fenced"
    DONE_LATE = "ended while it was being fenced"


COPIES = (TransferClass.OUT, TransferClass.IN)
OF_STORE = (TransferClass.LOOK, TransferClass.GET, TransferClass.PUT)
TRANSFER_ENDS = [
    (kind, end) for kind in TransferClass for end in TransferEnd if not (kind in COPIES and end is TransferEnd.PARTLY)
]


class WorkerView(Protocol):
    """State of the worker that its events and effects do not show."""

    def knows(self, serial: Serial) -> bool:
        """Whether it has this request, waiting or in a slot."""

    def loads(self) -> list[tuple[TransferId, Serial]]:
        """Open copies to the device for clients' requests, and the request of each."""


@dataclass(slots=True)
class _Open:
    kind: TransferClass
    since_us: int
    limit_us: int
    reads_blocks: frozenset[int] = NOTHING
    writes_blocks: frozenset[int] = NOTHING
    reads_rows: frozenset[int] = NOTHING
    writes_rows: frozenset[int] = NOTHING
    fencing: bool = False


@dataclass(slots=True)
class _Store:
    """Failures and back-off of one kind of store operation; each kind fails on its own."""

    failures: int = 0
    """Consecutive failures."""
    alone_until_us: int | None = None
    tries: bool = False
    """Whether one operation was tried again since the back-off ended."""


_ENDS = TransferDone, TransferFailed, TransferFenced
_LETS_GO = Cancel, StopAt, FrontEndLost
"""Tuples: `isinstance` takes longer for a union."""


class TransferLaws:
    def __init__(self, config: WorkerConfig, where: str) -> None:
        self._config: TierConfig = config.tiers
        self._may_depart = config.tiers.store and config.on_preempt is OnPreempt.RESCHEDULE
        self._where = where
        self._open: dict[TransferId, _Open] = {}
        self._last = -1
        self._stores = {kind: _Store() for kind in OF_STORE}
        self._departing: dict[int, int] = {}
        """When each request lost its slot that has not ended yet."""
        self._doomed: dict[TransferId, Serial] = {}
        """Copies for requests that were ordered to end."""
        self.looks = 0
        """Number of Look orders."""
        self.left_alone = 0
        """Number of times that back-off from the store began."""
        self.moves: Counter[tuple[TransferClass, TransferEnd]] = Counter()

    @property
    def arriving_blocks(self) -> int:
        """Blocks that open copies write to."""
        return sum(len(transfer.writes_blocks) for transfer in self._open.values()) if self._open else 0

    def note(
        self,
        behind: WorkerView,
        event: Event,
        effects: Sequence[Effect],
        accepted: Collection[int],
        deadline_us: int | None,
        now_us: int,
    ) -> None:
        """Called after each event; `accepted`: serials of accepted requests whose end was not reported."""
        if isinstance(event, _ENDS):
            self._ended(behind, event, now_us)
        for effect in effects:
            self._note_effect(effect, now_us)
        self._lets_go(behind, event)
        if self._may_depart:
            self._note_departures(behind, event, accepted, now_us)
        if self._open or self._departing:
            self._in_time(type(event) is Tick, deadline_us, now_us)

    # ── the record ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ended(self, behind: WorkerView, event: StorageEvent, now_us: int) -> None:
        transfer = self._open.pop(event.transfer, None)
        if transfer is None:
            return
        self.moves[transfer.kind, _end_of(transfer, event)] += 1
        if transfer.kind in OF_STORE and not transfer.fencing:
            self._judge_store(transfer.kind, isinstance(event, TransferDone), now_us)
        serial = self._doomed.pop(event.transfer, None)
        if serial is not None and behind.knows(serial):
            raise LawBroken(
                ENDS_AT_ONCE, f"{self._where}: request {serial} is still there after haul {event.transfer} has ended"
            )

    def _note_effect(self, effect: Effect, now_us: int) -> None:
        config = self._config
        match effect:
            case CopyOut(transfer, blocks, rows):
                out = _Open(TransferClass.OUT, now_us, config.copy_us, reads_blocks=_set(blocks), writes_rows=_set(rows))
                self._ordered(transfer, out, len(rows))
            case CopyIn(transfer, rows, blocks):
                into = _Open(TransferClass.IN, now_us, config.copy_us, reads_rows=_set(rows), writes_blocks=_set(blocks))
                self._ordered(transfer, into, 0)
            case Look(transfer):
                self.looks += 1
                self._ordered(transfer, _Open(TransferClass.LOOK, now_us, config.look_us), 0)
            case Get(transfer, _, rows):
                self._ordered(transfer, _Open(TransferClass.GET, now_us, config.get_us, writes_rows=_set(rows)), len(rows))
            case Put(transfer, _, rows):
                self._ordered(transfer, _Open(TransferClass.PUT, now_us, config.put_us, reads_rows=_set(rows)), len(rows))
            case FenceTransfer(transfer):
                self._fencing(transfer, now_us)
            case Launch(plan):
                self._touches_nothing(plan)

    def _ordered(self, transfer: TransferId, new: _Open, blocks: int) -> None:
        if transfer <= self._last:
            raise LawBroken(UNTOUCHED, f"{self._where}: haul {transfer} is ordered after haul {self._last}")
        self._last = transfer
        for other, old in self._open.items():
            if _meet(new, old):
                raise LawBroken(UNTOUCHED, f"{self._where}: haul {transfer} ({new}) meets haul {other} ({old})")
        same = sum(old.kind is new.kind for old in self._open.values())
        if blocks > self._config.transfer_blocks or (new.kind in OF_STORE and same >= self._config.transfers_max):
            raise LawBroken(TRANSFERS_BOUND, f"{self._where}: haul {transfer} has {blocks} blocks, {same} like it are open")
        if new.kind in OF_STORE:
            self._may_ask(transfer, new)
        self._open[transfer] = new

    def _fencing(self, number: TransferId, now_us: int) -> None:
        transfer = self._open.get(number)
        if transfer is None or transfer.fencing:
            raise LawBroken(TRANSFERS_END, f"{self._where} fences haul {number}, which has ended or is being fenced")
        transfer.fencing = True
        if transfer.kind in OF_STORE:
            self._judge_store(transfer.kind, False, now_us)

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _judge_store(self, kind: TransferClass, answered: bool, now_us: int) -> None:
        store = self._stores[kind]
        if answered:
            store.failures, store.alone_until_us, store.tries = 0, None, False
            return
        store.failures += 1
        opens = store.alone_until_us is None and store.failures >= self._config.failures_max
        if opens or store.tries:
            store.alone_until_us, store.tries = now_us + self._config.retry_us, False
        self.left_alone += opens

    def _may_ask(self, transfer: TransferId, new: _Open) -> None:
        """After back-off, a single operation may be tried."""
        store = self._stores[new.kind]
        if store.alone_until_us is None:
            return
        if store.tries or new.since_us < store.alone_until_us:
            raise LawBroken(LEFT_ALONE, f"{self._where} asks it with haul {transfer} after {store.failures} failures: {new}")
        store.tries = True

    # ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _touches_nothing(self, plan: StepPlan) -> None:
        """Check that no step writes to blocks that a copy reads, or uses blocks whose KV has not arrived."""
        fresh = {*plan.grow_blocks.tolist(), *(copy.target for copy in plan.copies)}
        used = fresh.union(block for start in plan.starts for block in start.blocks.tolist())
        for number, transfer in self._open.items():
            if not transfer.reads_blocks.isdisjoint(fresh) or not transfer.writes_blocks.isdisjoint(used):
                raise LawBroken(UNTOUCHED, f"{self._where} plans with blocks of haul {number}: {transfer}")

    def _lets_go(self, behind: WorkerView, event: Event) -> None:
        """Check that a copy for a request that is ordered to end is fenced at once; the request ends with it."""
        if not isinstance(event, _LETS_GO):
            return
        for transfer, serial in behind.loads():
            if isinstance(event, FrontEndLost) or serial == event.serial:
                self._doomed[transfer] = serial
                if not self._open[transfer].fencing:
                    raise LawBroken(ENDS_AT_ONCE, f"{self._where} goes on with haul {transfer} for request {serial}")

    def _note_departures(self, behind: WorkerView, event: Event, accepted: Collection[int], now_us: int) -> None:
        if isinstance(event, StepDone):
            for serial in accepted:
                if serial not in self._departing and not behind.knows(Serial(serial)):
                    self._departing[serial] = now_us
        for serial in [serial for serial in self._departing if serial not in accepted]:
            del self._departing[serial]
        if self._departing and isinstance(event, FrontEndLost):
            raise LawBroken(ENDS_AT_ONCE, f"{self._where} keeps {list(self._departing)} for nobody")

    def _in_time(self, is_pass: bool, deadline_us: int | None, now_us: int) -> None:
        """What holds for the first to end holds for the others."""
        ends = [(item.since_us + item.limit_us, number) for number, item in self._open.items() if not item.fencing]
        if ends:
            end_us, number = min(ends)
            self._due(TRANSFERS_END, f"haul {number}", end_us, is_pass, deadline_us, now_us)
        if self._departing:
            serial = min(self._departing, key=self._departing.__getitem__)
            end_us = self._departing[serial] + self._config.depart_us
            self._due(DEPARTS_IN_TIME, f"request {serial}", end_us, is_pass, deadline_us, now_us)

    def _due(self, law: str, what: str, end_us: int, is_pass: bool, deadline_us: int | None, now_us: int) -> None:
        if is_pass and now_us >= end_us:
            raise LawBroken(law, f"{self._where}: {what} should have ended {now_us - end_us} µs ago")
        if deadline_us is None or deadline_us > max(now_us, end_us) + PASS_US:
            raise LawBroken(law, f"{self._where} looks at {deadline_us}, but {what} ends at {end_us}")


def _meet(new: _Open, old: _Open) -> bool:
    """Whether one of them writes where the other reads or writes."""
    blocks = new.writes_blocks & (old.reads_blocks | old.writes_blocks) | new.reads_blocks & old.writes_blocks
    rows = new.writes_rows & (old.reads_rows | old.writes_rows) | new.reads_rows & old.writes_rows
    return bool(blocks or rows)


def _end_of(transfer: _Open, event: StorageEvent) -> TransferEnd:
    match event:
        case TransferFenced():
            return TransferEnd.FENCED
        case _ if transfer.fencing:
            return TransferEnd.DONE_LATE
        case TransferFailed():
            return TransferEnd.FAILED
        case TransferDone(_, came):
            return TransferEnd.DONE if all(came) else TransferEnd.PARTLY


def _set(numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(int(number) for number in numbers)
