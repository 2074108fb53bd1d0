"""Moves KV between rows of host memory and a store, on threads of its own.

    rows ──copy──▶ arena, sealed ──put──▶ store        store ──get──▶ arena, verified ──copy──▶ rows

Owns those threads, their memory and their counters. A store may block, so it never touches a row: each thread has an arena
in which objects are sealed and verified, and bytes move between rows and arena only while the transfer has its hold. So a
fence is answered soon, whatever the store does. A thread whose transfer was fenced inside the store is *lost* until the
store returns; while all threads of a kind are lost, waiting and new transfers of that kind fail at once.

Looking, reading and writing have separate threads: a short look does not wait behind a long read, nor a read behind writes.
Corrupt objects are counted by flaw, removed from the store, and never written to a row.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key
from baton.core.tiers.transfers import Get, Look, Put, TransferDone, TransferFailed, TransferFenced, TransferId
from baton.kv.block_access import Bytes, Bytes2d
from baton.kv.host_memory import HostMemory, Report, TransferHold
from baton.kv.store import MISSING, OVERSIZED, BadStore, Store, StoreFailed
from baton.kv.store_guard import StoreGuard
from baton.wire.envelope import HEADER_BYTES, EnvelopeFlaw, object_name, stamp, unseal

log = logging.getLogger("baton.store")

THREADS = 2
"""Threads for reading, and as many for writing. Looking has one."""
ARENA_BYTES = 16 << 20
"""Bytes of each thread's arena. Longer transfers go through it part by part."""
ALIGNMENT = 64
WAITING_MAX = 1024
"""Most transfers that may wait for the threads of one kind."""
CLOSE_S = 2.0
"""Longest wait at closing for all threads that are inside the store, together."""

STORE_HANGS = "the store hangs: none of its calls has returned"
TOO_MANY_WAITING = "too many transfers wait for the store"

Order = Look | Get | Put


@dataclass(frozen=True, slots=True)
class StoreTally:
    """Counters of the store since the start."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    unstored_blocks: int = 0
    """Blocks for which the store had no room."""
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    missing_blocks: int = 0
    """Blocks that were requested and absent."""
    errors: int = 0
    """Transfers that failed."""
    bad: Mapping[str, int] = field(default_factory=dict)
    """Corrupt objects, by flaw."""


@dataclass(slots=True, eq=False)
class _Task:
    order: Order
    hold: TransferHold = field(default_factory=TransferHold)


class _Arena:
    """Memory of one thread, with room for a fixed number of objects."""

    def __init__(self, memory: Bytes2d, object_bytes: int) -> None:
        """`memory` is [objects, at least `object_bytes`]."""
        self.objects = [row.data[:object_bytes] for row in memory]
        self.payloads: Bytes2d = memory[:, HEADER_BYTES:object_bytes]
        """The payloads as an array: numpy copies release the interpreter's lock."""


class _WorkerThreads:
    """The threads of one kind of work, and the transfers that wait for them."""

    def __init__(self, name: str, work: Callable[[_Task, _Arena], None], arenas: Sequence[_Arena], waiting_max: int) -> None:
        self._work = work
        self._waiting: deque[_Task] = deque()
        self._waiting_max = waiting_max
        self._at_work: list[_Task | None] = [None] * len(arenas)
        """The current task of each thread."""
        self._condition = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(number, arena), name=f"{name}-{number}", daemon=True)
            for number, arena in enumerate(arenas)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, task: _Task) -> str | None:
        """Queue a task: None, or the reason why it was rejected."""
        with self._condition:
            if self._is_lost():
                return STORE_HANGS
            if len(self._waiting) >= self._waiting_max:
                return TOO_MANY_WAITING
            self._waiting.append(task)
            self._condition.notify()
            return None

    def fenced(self, task: _Task) -> list[_Task]:
        """Forget a fenced task. If all threads are lost now, returns and forgets the waiting tasks too: they must fail."""
        with self._condition:
            with contextlib.suppress(ValueError):
                self._waiting.remove(task)
            if not self._is_lost():
                return []
            left = list(self._waiting)
            self._waiting.clear()
            return left

    def stop(self) -> None:
        """Waiting tasks are not started."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    def ended(self, deadline_s: float) -> bool:
        """Wait for the threads; False if one is still inside the store at the deadline."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _is_lost(self) -> bool:
        return all(task is not None and task.hold.is_abandoned() for task in self._at_work)

    def _run(self, number: int, arena: _Arena) -> None:
        while True:
            with self._condition:
                self._at_work[number] = None
                self._condition.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                task = self._at_work[number] = self._waiting.popleft()
            self._work(task, arena)


class StoreTransfers:
    def __init__(
        self,
        store: Store,
        memory: HostMemory,
        layout: bytes,
        report: Report,
        threads: int = THREADS,
        arena_bytes: int = ARENA_BYTES,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        """`layout` is the digest of the block layout. `close` closes the store."""
        self._store = store
        self._guard = StoreGuard()
        self._memory = memory
        self._layout = layout
        self._report = report
        self._open: dict[TransferId, _Task] = {}
        self._counted: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Protects the counters, `_failing` and `_full`."""
        self._failing = False
        """The last call of the store failed, and that was logged."""
        self._full = False
        """The store had no room at the last put, and that was logged."""
        object_bytes = HEADER_BYTES + self._block_bytes
        stride = -(-object_bytes // ALIGNMENT) * ALIGNMENT
        arena = np.zeros((2 * threads, max(1, arena_bytes // stride), stride), dtype=np.uint8)
        with contextlib.suppress(BadStore, StoreFailed), self._guard.guarded():
            store.attach(arena.data.cast("B"))  # once for all arenas: a store may keep only the last one
        arenas = [_Arena(part, object_bytes) for part in arena]
        self._look_threads = _WorkerThreads(
            "baton-store-look", self._work, [_Arena(arena[0, :0], 0)], waiting_max
        )  # looking moves no bytes
        self._read_threads = _WorkerThreads("baton-store-read", self._work, arenas[:threads], waiting_max)
        self._write_threads = _WorkerThreads("baton-store-write", self._work, arenas[threads:], waiting_max)

    @property
    def _block_bytes(self) -> int:
        return int(self._memory.rows.shape[1])

    def start(self, order: Order) -> None:
        if not isinstance(order, Look):
            self._memory.demand(order.rows)
        task = self._open[order.transfer] = _Task(order)
        reason = self._pool_of(task).add(task)
        if reason is not None:
            self._fail(task, reason)

    def fence(self, transfer: TransferId) -> bool:
        """False if the transfer is unknown here or finished; then no answer is reported."""
        task = self._open.get(transfer)
        if task is None:
            return False
        if task.hold.fence():
            self._open.pop(transfer, None)
            self._report(TransferFenced(transfer))
        for left in self._pool_of(task).fenced(task):
            self._fail(left, STORE_HANGS)
        return True

    def tally(self) -> StoreTally:
        with self._lock:
            return StoreTally(**self._counted, bad=dict(self._bad))

    def close(self) -> None:
        """Waiting transfers are discarded. A store that has not returned from a call is not closed."""
        deadline_s = time.monotonic() + CLOSE_S
        pools = (self._look_threads, self._read_threads, self._write_threads)
        for pool in pools:
            pool.stop()
        if all(pool.ended(deadline_s) for pool in pools):
            with contextlib.suppress(BadStore, StoreFailed), self._guard.guarded():
                self._store.close()

    def _pool_of(self, task: _Task) -> _WorkerThreads:
        match task.order:
            case Look():
                return self._look_threads
            case Get():
                return self._read_threads
            case Put():
                return self._write_threads

    # ── on the worker threads ────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, task: _Task, arena: _Arena) -> None:
        try:
            came = self._came(task, arena)
        except (BadStore, StoreFailed) as failure:
            self._fail(task, str(failure))
        else:
            self._end(task, TransferDone(task.order.transfer, tuple(came)))

    def _came(self, task: _Task, arena: _Arena) -> list[bool]:
        """Carry out the order: one result for each key, or fewer if it was fenced and they are not used."""
        order, at_once = task.order, len(arena.objects)
        if isinstance(order, Look):
            names = self._names(order.keys)
            return [] if task.hold.fenced else self._guard.asked(lambda: self._store.look(names), names)
        move = self._get if isinstance(order, Get) else self._put
        came: list[bool] = []
        for at in range(0, len(order.keys), at_once):
            if task.hold.fenced:
                break
            came += move(task, arena, order.keys[at : at + at_once], order.rows[at : at + at_once])
        return came

    def _get(self, task: _Task, arena: _Arena, keys: Sequence[Key], rows: Int32s) -> list[bool]:
        names, objects = self._names(keys), arena.objects[: len(keys)]
        sizes = self._guard.asked(lambda: self._store.get(names, objects), names)
        flaws = [self._flaw(key, data, size) for key, data, size in zip(keys, objects, sizes, strict=True)]
        bad = [name for name, flaw in zip(names, flaws, strict=True) if isinstance(flaw, EnvelopeFlaw)]
        if bad:
            self._drop(bad, [flaw for flaw in flaws if isinstance(flaw, EnvelopeFlaw)])
        sound = [at for at, flaw in enumerate(flaws) if flaw is None]
        moves = [(arena.payloads[at], self._memory.rows[rows[at]]) for at in sound]
        if not self._moved(task, moves):
            return []
        self._count(
            fetched_blocks=len(sound), fetched_bytes=len(sound) * self._block_bytes, missing_blocks=flaws.count(MISSING)
        )
        return [flaw is None for flaw in flaws]

    def _flaw(self, key: Key, data: memoryview, size: int) -> EnvelopeFlaw | int | None:
        """The flaw of an object; MISSING if there is none, None if it is sound."""
        if size == MISSING:
            return MISSING
        if size == OVERSIZED:
            return EnvelopeFlaw.TORN
        opened = unseal(key, self._layout, data[:size])
        if isinstance(opened, EnvelopeFlaw):
            return opened
        return None if len(opened) == self._block_bytes else EnvelopeFlaw.TORN

    def _put(self, task: _Task, arena: _Arena, keys: Sequence[Key], rows: Int32s) -> list[bool]:
        if not self._moved(task, [(self._memory.rows[row], arena.payloads[at]) for at, row in enumerate(rows.tolist())]):
            return []
        names, objects = self._names(keys), arena.objects[: len(keys)]
        for key, whole in zip(keys, objects, strict=True):
            stamp(key, self._layout, whole)
        stored = self._guard.asked(lambda: self._store.put(names, objects), names)
        kept = sum(stored)
        self._count(stored_blocks=kept, stored_bytes=kept * self._block_bytes, unstored_blocks=len(stored) - kept)
        self._log_full(kept < len(stored))
        return stored

    def _moved(self, task: _Task, moves: list[tuple[Bytes, Bytes]]) -> bool:
        """Copy the first of each pair to the second under the hold. False if fenced; the fence is answered here."""
        hold = task.hold
        if not hold.take():
            return False
        for source, target in moves:
            if hold.fenced:
                break
            np.copyto(target, source)
        if hold.let_go():
            return True
        self._open.pop(task.order.transfer, None)
        self._report(TransferFenced(task.order.transfer))
        return False

    def _drop(self, names: list[str], flaws: list[EnvelopeFlaw]) -> None:
        with self._lock:
            news = any(flaw not in self._bad for flaw in flaws)
            self._bad.update(flaws)
        level = logging.WARNING if news else logging.DEBUG  # one warning per flaw; the counters have the rest
        log.log(level, "stored blocks were bad, and are dropped: %s", dict(Counter(flaws)))
        try:
            with self._guard.guarded():
                self._store.drop(names)
        except (BadStore, StoreFailed) as failure:  # the other objects of the call are good
            log.warning("the store did not drop them: %s", failure)

    def _fail(self, task: _Task, reason: str) -> None:
        self._count(errors=1)
        self._end(task, TransferFailed(task.order.transfer, reason))

    def _end(self, task: _Task, event: TransferDone | TransferFailed) -> None:
        self._open.pop(task.order.transfer, None)
        if not task.hold.fenced:  # otherwise the fence was the answer
            self._log_failing(event)
            self._report(event)

    def _log_failing(self, event: TransferDone | TransferFailed) -> None:
        """Log once when the store begins to fail, and once when it works again."""
        failing = isinstance(event, TransferFailed)
        with self._lock:
            changed, self._failing = failing != self._failing, failing
        if changed and isinstance(event, TransferFailed):
            log.warning("the store fails, and KV is computed again meanwhile: %s", event.reason)
        elif changed:
            log.warning("the store works again")

    def _log_full(self, full: bool) -> None:
        """Log once when the store becomes full, and once when it has room again."""
        with self._lock:
            changed, self._full = full != self._full, full
        if changed and full:
            log.warning("the store has no room; KV that does not fit is computed again when it is needed")
        elif changed:
            log.warning("the store has room again")

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counted.update(more)

    def _names(self, keys: Sequence[Key]) -> list[str]:
        return [object_name(self._layout, key) for key in keys]
