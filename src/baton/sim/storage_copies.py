"""KV outside the pool: the host memory of an instance, its copies, and its transfers with the store.

Owns what a driver owns in service: the rows of host memory, as real bytes, and every open transfer. The promises of a
production driver hold under all faults: an order returns at once; data to and from the store is held in private buffers and
verified before it is written to a row; a fence is always answered, after a while; after any answer, nothing of that transfer
is read or written. A copy that fails or is fenced leaves garbage in its target.

Two laws are checked here: while a transfer is open, nothing else writes to what it reads or writes; and one key always
stands for the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key
from baton.core.tiers.transfers import (
    CopyIn,
    CopyOut,
    FenceTransfer,
    Get,
    Look,
    Put,
    StorageEffect,
    StorageEvent,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferId,
)
from baton.sim.faults import CopyRates, Fault, log_uniform_us
from baton.sim.instance import SimulatedInstance
from baton.sim.law_names import TRUE_NAME, UNTOUCHED, LawBroken
from baton.sim.store import SimulatedStore
from baton.sim.world import World
from baton.wire.envelope import HEADER_BYTES, LAYOUT_BYTES, EnvelopeFlaw, object_name, seal, unseal

NONSENSE = 0xEE
COPY_SLOW_US = 3_000, 600_000
HASTY_WITHIN_US = 10_000
FENCED_WITHIN_US = 300_000
"""The slowest fence."""
Bytes = npt.NDArray[np.uint8]
NamesOf = Callable[[SimulatedInstance, TransferId], tuple[Key, ...]]


@dataclass(frozen=True, slots=True)
class CopyTimes:
    begin_us: int
    block_us: int
    jitter_us: int
    stage_us: int
    """Longest time until data to be stored is in private buffers."""
    fence_us: int


class StorageModel:
    """Shared by all StorageCopies of a world: the store, times, fault rates, and the bytes of every key."""

    def __init__(
        self,
        world: World,
        rates: CopyRates,
        times: CopyTimes,
        store: SimulatedStore | None,
        names_of: NamesOf = lambda *_: (),
    ) -> None:
        """`names_of`: the keys that a copy moves, which its order does not contain; for the laws."""
        self.when_hasty: Callable[[SimulatedInstance, TransferId, int], None] | None = None
        """Called when the client of a copy shall disconnect after a number of microseconds."""
        self.world = world
        self.names_of = names_of
        self.rates = rates
        self.times = times
        self.store = store
        self._known: dict[Key, bytes] = {}

    def heal(self) -> None:
        self.rates = CopyRates()
        if self.store is not None:
            self.store.heal()

    def is_true(self, key: Key, data: bytes, where: str) -> None:
        """Check that a key stands for the same KV everywhere."""
        known = self._known.setdefault(key, data)
        if known != data:
            raise LawBroken(TRUE_NAME, f"{where} has other KV under {key.hex()} than there was before")


@dataclass(slots=True, eq=False)
class _Range:
    """Rows or blocks that a transfer reads or writes, and the bytes that must be there while it is open."""

    memory: Bytes
    at: Int32s
    there: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.there = self.memory[self.at]

    @property
    def is_untouched(self) -> bool:
        return self.memory[self.at].tobytes() == self.there.tobytes()

    def write(self, first: int, data: Bytes) -> None:
        self.memory[self.at[first : first + len(data)]] = data
        self.there[first : first + len(data)] = data


@dataclass(slots=True, eq=False)
class _Task:
    """An open transfer."""

    transfer: TransferId
    keys: tuple[Key, ...]
    reads: _Range | None = None
    writes: _Range | None = None
    fencing: bool = False
    over: bool = False
    """Nothing of it may be read or written any more."""


class StorageCopies:
    """The host memory and open transfers of one life of an instance."""

    def __init__(self, storage_model: StorageModel, life: SimulatedInstance) -> None:
        config = life.spec.config
        self._storage_model = storage_model
        self._store = storage_model.store if config.tiers.store else None
        self._life = life
        self._host = life.host
        self._pool = life.executor.kv.pool
        self._rows: Bytes = np.zeros((config.tiers.host_rows, self._pool.shape[1]), dtype=np.uint8)
        self._stream = life.host.world.stream(f"porter {life.host.name} life {life.life}")
        self._tasks: dict[TransferId, _Task] = {}
        shape = f"{life.executor.kv.dtype} {config.block_size} {life.executor.kv.layers}".encode()
        self._layout = hashlib.blake2b(life.executor.fingerprint + shape, digest_size=LAYOUT_BYTES).digest()

    @property
    def open(self) -> int:
        return len(self._tasks)

    def carry_out(self, effect: StorageEffect) -> None:
        match effect:
            case CopyOut(transfer, blocks, rows):
                names = self._storage_model.names_of(self._life, transfer)
                self._copy(self._begin(transfer, names, (self._pool, blocks), (self._rows, rows)))
            case CopyIn(transfer, rows, blocks):
                names = self._storage_model.names_of(self._life, transfer)
                self._copy(self._begin(transfer, names, (self._rows, rows), (self._pool, blocks)))
                self._perhaps_hasty(transfer)
            case Look(transfer, keys):
                self._look(self._begin(transfer, keys))
            case Get(transfer, keys, rows):
                self._get(self._begin(transfer, keys, None, (self._rows, rows)))
            case Put(transfer, keys, rows):
                self._put(self._begin(transfer, keys, (self._rows, rows)))
            case FenceTransfer(transfer):
                self._fence(transfer)

    def _begin(
        self,
        transfer: TransferId,
        keys: tuple[Key, ...],
        reads: tuple[Bytes, Int32s] | None = None,
        writes: tuple[Bytes, Int32s] | None = None,
    ) -> _Task:
        task = _Task(transfer, keys, None if reads is None else _Range(*reads), None if writes is None else _Range(*writes))
        self._tasks[transfer] = task
        return task

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _copy(self, task: _Task) -> None:
        stream, storage_model = self._stream, self._storage_model
        slow, fails, share, slow_us = (
            stream.random(),
            stream.random(),
            stream.random(),
            log_uniform_us(stream, *COPY_SLOW_US),
        )
        blocks = 0 if task.reads is None else len(task.reads.at)
        took_us = (
            storage_model.times.begin_us + blocks * storage_model.times.block_us + int(share * storage_model.times.jitter_us)
        )
        if slow < storage_model.rates.slow:
            storage_model.world.fire(Fault.COPY_SLOW, self._host.name)
            took_us += slow_us
            self._host.after(took_us // 2, self._copy_half, task)
        self._host.after(took_us, self._copy_fails if fails < storage_model.rates.fails else self._copied, task)

    def _perhaps_hasty(self, transfer: TransferId) -> None:
        hasty, delay_us = self._stream.random(), self._stream.randrange(HASTY_WITHIN_US)
        if hasty < self._storage_model.rates.hasty and self._storage_model.when_hasty is not None:
            self._storage_model.when_hasty(self._life, transfer, delay_us)

    def _copy_half(self, task: _Task) -> None:
        if not task.over and task.reads is not None and task.writes is not None:
            self._must_be_untouched(task)
            half = len(task.reads.at) // 2
            task.writes.write(0, task.reads.memory[task.reads.at[:half]])

    def _copied(self, task: _Task) -> None:
        if task.over or task.reads is None or task.writes is None:
            return
        if task.fencing:
            self._storage_model.world.fire(Fault.COPY_WHILE_FENCING, self._host.name)
        self._must_be_untouched(task)
        data = task.reads.memory[task.reads.at]
        task.writes.write(0, data)
        for key, row in zip(task.keys, data, strict=False):  # without names if no worker has ordered it
            self._storage_model.is_true(key, row.tobytes(), self._host.name)
        self._end(task, TransferDone(task.transfer, (True,) * len(data)))

    def _copy_fails(self, task: _Task) -> None:
        if not task.over:
            self._storage_model.world.fire(Fault.COPY_FAILED, self._host.name)
            self._spoil(task)
            self._end(task, TransferFailed(task.transfer, "a simulated fault of the copier"))

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, task: _Task) -> None:
        if self._store is not None:
            self._store.look(self._names(task.keys), lambda found: self._back(self._looked, task, found))

    def _looked(self, task: _Task, found: list[bool] | None) -> None:
        self._end(task, _failed(task) if found is None else TransferDone(task.transfer, tuple(found)))

    def _get(self, task: _Task) -> None:
        if self._store is not None:
            self._store.get(self._names(task.keys), lambda objects: self._back(self._got, task, objects))

    def _got(self, task: _Task, objects: list[bytes | None] | None) -> None:
        """Write to rows only now, and only if it was not fenced meanwhile."""
        if objects is None:
            self._end(task, _failed(task))
            return
        self._must_be_untouched(task)
        came = tuple(self._accept(task, at, data) for at, data in enumerate(objects))
        self._end(task, TransferDone(task.transfer, came))

    def _accept(self, task: _Task, at: int, data: bytes | None) -> bool:
        key = task.keys[at]
        if data is None or task.writes is None or self._store is None:
            return False
        payload = unseal(key, self._layout, memoryview(data))
        if isinstance(payload, EnvelopeFlaw):
            self._storage_model.world.fire(Fault.STORE_BAD, self._host.name)
            self._store.drop(self._names((key,)))
            return False
        if len(payload) != self._rows.shape[1]:
            raise LawBroken(TRUE_NAME, f"{self._host.name} accepts {len(payload)} bytes as a block: {key.hex()}")
        self._storage_model.is_true(key, bytes(payload), self._host.name)
        task.writes.write(at, np.frombuffer(payload, dtype=np.uint8)[None])
        return True

    def _put(self, task: _Task) -> None:
        self._host.after(int(self._stream.random() * self._storage_model.times.stage_us), self._stage, task)

    def _stage(self, task: _Task) -> None:
        """Copy the rows into private buffers; they are not read again."""
        if task.over or task.reads is None or self._store is None:
            return
        self._must_be_untouched(task)
        objects = []
        for key, row in zip(task.keys, task.reads.memory[task.reads.at], strict=True):
            self._storage_model.is_true(key, row.tobytes(), self._host.name)
            whole = bytearray(HEADER_BYTES + len(row))
            seal(key, self._layout, memoryview(row), memoryview(whole))
            objects.append((object_name(self._layout, key), bytes(whole)))
        self._store.put(objects, lambda placed: self._back(self._looked, task, placed))

    def _back(self, act: Callable[..., None], task: _Task, answer: object) -> None:
        """The store has answered: pass it on if the life that asked has not ended."""
        if self._life.life == self._host.lives:
            self._host.run(self._hear, act, task, answer)

    def _hear(self, act: Callable[..., None], task: _Task, answer: object) -> None:
        if task.over:
            self._storage_model.world.fire(Fault.STORE_TOO_LATE, self._host.name)
        else:
            act(task, answer)

    def _names(self, keys: tuple[Key, ...]) -> list[str]:
        return [object_name(self._layout, key) for key in keys]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fence(self, transfer: TransferId) -> None:
        stream, storage_model = self._stream, self._storage_model
        slow, share, long_us = stream.random(), stream.random(), stream.randrange(5_000, FENCED_WITHIN_US)
        if transfer in self._tasks:
            self._tasks[transfer].fencing = True
        took_us = int(share * storage_model.times.fence_us)
        if slow < storage_model.rates.slow_fence:
            storage_model.world.fire(Fault.HAUL_FENCE_SLOW, self._host.name)
            took_us = long_us
        self._host.after(took_us, self._fenced, transfer)

    def _fenced(self, transfer: TransferId) -> None:
        task = self._tasks.get(transfer)
        if task is None:
            self._life.transfer_ended(TransferFenced(transfer))
        else:
            self._spoil(task)
            self._end(task, TransferFenced(transfer))

    def _spoil(self, task: _Task) -> None:
        """Leave garbage in half of the target, as an interrupted copy does."""
        self._must_be_untouched(task)
        if task.writes is not None:
            half = len(task.writes.at) // 2 + 1
            task.writes.write(0, np.full_like(task.writes.there[:half], NONSENSE))

    def _end(self, task: _Task, event: StorageEvent) -> None:
        self._must_be_untouched(task)
        task.over = True
        del self._tasks[task.transfer]
        self._life.transfer_ended(event)

    def _must_be_untouched(self, task: _Task) -> None:
        for part, what in ((task.reads, "reads"), (task.writes, "writes")):
            if part is not None and not part.is_untouched:
                raise LawBroken(
                    UNTOUCHED, f"{self._host.name}: somebody wrote to what haul {task.transfer} {what}: {part.at}"
                )


def _failed(task: _Task) -> TransferFailed:
    return TransferFailed(task.transfer, "the store is out of reach")
