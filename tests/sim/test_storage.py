"""Host memory and the store of a simulated world keep what drivers promise, whatever goes wrong on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from baton.core.config import TierConfig, WorkerConfig
from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import KEY_BYTES, Key
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
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor
from baton.sim.disk import SimulatedDisk
from baton.sim.faults import CopyRates, DiskRates, Fault, StoreRates
from baton.sim.instance import InstanceSpec, SimulatedInstance
from baton.sim.law_names import TRUE_NAME, UNTOUCHED, LawBroken
from baton.sim.scenario import FlatTimes
from baton.sim.storage_copies import NONSENSE, CopyTimes, StorageCopies, StorageModel
from baton.sim.store import SimulatedStore, StoreTimes
from baton.sim.world import Host, World

ROWS, BLOCKS = 6, 8
KEYS = tuple(Key(bytes([number]) * KEY_BYTES) for number in range(ROWS))
TIMES = CopyTimes(begin_us=100, block_us=10, jitter_us=0, stage_us=50, fence_us=1_000)
CONFIG = WorkerConfig(slots=2, blocks=BLOCKS, block_size=4, context_tokens=32, tiers=TierConfig(host_rows=ROWS, store=True))


def numbers(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


def scripted(shape: ExecutorShape) -> ScriptedExecutor:
    return ScriptedExecutor(shape, 32, 2)


class Bench:
    """One instance with a porter, whose answers are only collected."""

    def __init__(self, rates: StoreRates | None = None, copies: CopyRates | None = None) -> None:
        self.world = World(7, events_max=10_000)
        self.store = SimulatedStore(self.world, rates or StoreRates(), StoreTimes(delay_us=400, jitter_us=0, objects_max=4))
        self.storage_model = StorageModel(self.world, copies or CopyRates(), TIMES, self.store)
        self.host = Host(self.world, "instance 0")
        self.heard: list[StorageEvent] = []
        self.boot()

    def boot(self) -> None:
        spec = InstanceSpec(0, CONFIG, scripted, FlatTimes(1_000, 10), bytes(32))
        self.life = _Quiet(self.host, SimulatedDisk(self.host, DiskRates()), spec, self.heard.append)
        self.life.start(lambda _: None)
        self.porter = StorageCopies(self.storage_model, self.life)
        self.run()
        self.life.executor.kv.pool[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None] + 1

    def run(self) -> None:
        while self.world.next_us is not None:
            self.world.step()

    def fill(self, *rows: int) -> None:
        for row in rows:
            self.porter._rows[row] = 100 + row

    def stored(self, *rows: int) -> None:
        """What these rows hold is in the store under their keys."""
        self.fill(*rows)
        self.porter.carry_out(Put(TransferId(0), tuple(KEYS[row] for row in rows), numbers(*rows)))
        self.run()
        self.porter._rows[:] = 0
        self.heard.clear()


class _Quiet(SimulatedInstance):
    def __init__(self, host: Host, disk: SimulatedDisk, spec: InstanceSpec, heard: Callable[[StorageEvent], None]) -> None:
        super().__init__(host, disk, spec)
        self._told_to = heard

    def transfer_ended(self, event: StorageEvent) -> None:
        self._told_to(event)


def test_bytes_go_out_and_come_back() -> None:
    bench = Bench()
    bench.porter.carry_out(CopyOut(TransferId(1), numbers(3, 5), numbers(0, 4)))
    bench.run()
    bench.porter.carry_out(CopyIn(TransferId(2), numbers(4, 0), numbers(0, 1)))
    bench.run()
    assert bench.heard == [TransferDone(TransferId(1), (True, True)), TransferDone(TransferId(2), (True, True))]
    assert bench.life.executor.kv.pool[:2, 0].tolist() == [6, 4]
    assert bench.porter.open == 0


def test_the_store_keeps_what_it_is_given_beyond_the_life_of_an_instance() -> None:
    bench = Bench()
    bench.stored(1, 2)
    bench.host.crash()
    bench.host.restart()
    bench.boot()
    bench.porter.carry_out(Look(TransferId(0), KEYS[:3]))
    bench.porter.carry_out(Get(TransferId(1), KEYS[:3], numbers(3, 4, 5)))
    bench.run()
    assert bench.heard == [
        TransferDone(TransferId(0), (False, True, True)),
        TransferDone(TransferId(1), (False, True, True)),
    ]
    assert bench.porter._rows[:, 0].tolist() == [0, 0, 0, 0, 101, 102]


def test_a_store_with_a_limit_forgets_the_oldest() -> None:
    bench = Bench()
    bench.stored(0, 1, 2, 3, 4)
    bench.porter.carry_out(Look(TransferId(1), KEYS[:5]))
    bench.run()
    assert bench.heard == [TransferDone(TransferId(1), (False, True, True, True, True))]
    assert len(bench.store) == 4


@pytest.mark.parametrize(
    ("rates", "fault"),
    [
        (StoreRates(torn=1.0), Fault.STORE_TORN),
        (StoreRates(flipped=1.0), Fault.STORE_FLIPPED),
        (StoreRates(alien=1.0), Fault.STORE_ALIEN),
    ],
)
def test_a_bad_object_is_never_accepted_and_is_dropped(rates: StoreRates, fault: Fault) -> None:
    bench = Bench(rates)
    bench.stored(0)
    bench.porter.carry_out(Get(TransferId(1), KEYS[:1], numbers(2)))
    bench.run()
    assert bench.world.fired[fault] == bench.world.fired[Fault.STORE_BAD] == 1
    assert bench.heard == [TransferDone(TransferId(1), (False,))]
    assert not bench.porter._rows.any()
    assert len(bench.store) == 0


def test_swapped_objects_are_found_out() -> None:
    bench = Bench()
    bench.stored(0)
    bench.store.rates = StoreRates(swapped=1.0)
    for attempt in range(20):
        bench.stored(1 + attempt % 2)
    bench.store.rates = StoreRates()
    bench.porter.carry_out(Get(TransferId(1), KEYS[:3], numbers(0, 1, 2)))
    bench.run()
    (answer,) = bench.heard
    assert isinstance(answer, TransferDone)
    assert answer.came.count(False) == bench.world.fired[Fault.STORE_BAD] >= 1
    for row, came in enumerate(answer.came):
        assert bench.porter._rows[row, 0] == (100 + row if came else 0)


@pytest.mark.parametrize("order", ["put", "get", "look", "out", "in"])
def test_every_fence_is_answered_and_nothing_happens_after_it(order: str) -> None:
    bench = Bench(StoreRates(hangs=1.0) if order in ("put", "get", "look") else None, CopyRates(slow=1.0))
    bench.fill(0, 1)
    orders: dict[str, StorageEffect] = {
        "put": Put(TransferId(1), KEYS[:2], numbers(0, 1)),
        "get": Get(TransferId(1), KEYS[:2], numbers(0, 1)),
        "look": Look(TransferId(1), KEYS[:2]),
        "out": CopyOut(TransferId(1), numbers(2, 3), numbers(0, 1)),
        "in": CopyIn(TransferId(1), numbers(0, 1), numbers(2, 3)),
    }
    bench.porter.carry_out(orders[order])
    bench.porter.carry_out(FenceTransfer(TransferId(1)))
    while not bench.heard:
        bench.world.step()
    rows, pool = bench.porter._rows.copy(), bench.life.executor.kv.pool.copy()
    bench.run()
    assert bench.heard == [TransferFenced(TransferId(1))]
    assert (bench.porter._rows == rows).all()
    assert (bench.life.executor.kv.pool == pool).all()
    if order in ("get", "out"):
        assert NONSENSE in rows


def test_a_fence_of_what_is_unknown_is_answered_too() -> None:
    bench = Bench()
    bench.porter.carry_out(FenceTransfer(TransferId(9)))
    bench.run()
    assert bench.heard == [TransferFenced(TransferId(9))]


def test_a_late_answer_of_the_store_touches_no_row() -> None:
    bench = Bench()
    bench.stored(0)
    bench.store.rates = StoreRates(slow=1.0)
    bench.porter.carry_out(Get(TransferId(1), KEYS[:1], numbers(3)))
    bench.porter.carry_out(FenceTransfer(TransferId(1)))
    bench.run()
    assert bench.heard == [TransferFenced(TransferId(1))]
    assert bench.world.fired[Fault.STORE_TOO_LATE] == 1
    assert bench.porter._rows[3, 0] == NONSENSE


class _Least(random.Random):
    """The first of everything, and the least."""

    def uniform(self, a: float, b: float) -> float:
        return min(a, b)

    def choice(self, seq: Sequence[Any]) -> Any:  # type: ignore[override]
        return seq[0]


def test_a_store_that_is_away_fails_and_one_that_is_back_answers() -> None:
    bench = Bench()
    bench.store.go_away(_Least())
    bench.porter.carry_out(Look(TransferId(1), KEYS[:1]))
    bench.run()
    bench.porter.carry_out(Look(TransferId(2), KEYS[:1]))
    bench.run()
    assert bench.heard == [TransferFailed(TransferId(1), "the store is out of reach"), TransferDone(TransferId(2), (False,))]


def test_a_store_that_died_does_not_heal() -> None:
    bench = Bench()
    bench.store.die(_Least())
    bench.store.heal()
    bench.porter.carry_out(Look(TransferId(1), KEYS[:1]))
    bench.run()
    assert bench.heard == [TransferFailed(TransferId(1), "the store is out of reach")]


def test_a_full_store_says_so_and_keeps_nothing() -> None:
    bench = Bench(StoreRates(full=1.0))
    bench.porter.carry_out(Put(TransferId(1), KEYS[:2], numbers(0, 1)))
    bench.run()
    assert bench.heard == [TransferDone(TransferId(1), (False, False))]
    assert len(bench.store) == 0


def test_while_its_host_sleeps_nothing_is_copied() -> None:
    bench = Bench()
    bench.porter.carry_out(CopyOut(TransferId(1), numbers(3), numbers(0)))
    bench.host.pause()
    bench.run()
    assert not bench.heard
    assert not bench.porter._rows.any()
    bench.host.resume()
    bench.run()
    assert bench.heard == [TransferDone(TransferId(1), (True,))]


def _write_block(bench: Bench) -> None:
    bench.life.executor.kv.pool[3] = 77


def _write_row(bench: Bench) -> None:
    bench.porter._rows[0] = 77


@pytest.mark.parametrize("meddle", [_write_block, _write_row])
@pytest.mark.parametrize("fences", [False, True])
def test_whoever_writes_where_a_copy_reads_or_writes_breaks_a_law(meddle: Callable[[Bench], None], fences: bool) -> None:
    bench = Bench()
    bench.porter.carry_out(CopyOut(TransferId(1), numbers(2, 3), numbers(1, 0)))
    if fences:
        bench.porter.carry_out(FenceTransfer(TransferId(1)))
    bench.world.after(1, partial(meddle, bench))
    with pytest.raises(LawBroken) as caught:
        bench.run()
    assert caught.value.law == UNTOUCHED


def test_other_bytes_under_the_same_name_break_a_law() -> None:
    bench = Bench()
    bench.stored(0)
    bench.porter._rows[0] = 5
    bench.porter.carry_out(Put(TransferId(1), KEYS[:1], numbers(0)))
    with pytest.raises(LawBroken) as caught:
        bench.run()
    assert caught.value.law == TRUE_NAME
