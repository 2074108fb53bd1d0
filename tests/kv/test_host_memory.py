"""Copies between device blocks and host rows: first what a request waits for; let go of as soon as a fence is ordered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.tiers.transfers import CopyIn, CopyOut, StorageEvent, TransferDone, TransferFenced, TransferId
from baton.kv.block_access import Bytes2d, HostBlocks
from baton.kv.host_memory import HostCopier, HostMemory, TransferHold
from tests.support.blocks import DEADLINE_S, GatedBlocks

BLOCKS, ROWS, BLOCK_BYTES = 8, 6, 32


class Bench:
    def __init__(self, pool: Bytes2d, blocks: HostBlocks | None = None) -> None:
        self.pool = pool
        self.memory = HostMemory(ROWS, BLOCK_BYTES)
        self._told: queue.SimpleQueue[StorageEvent] = queue.SimpleQueue()
        self.copier = HostCopier(blocks or HostBlocks(pool), self.memory, self._told.put)

    def next(self) -> StorageEvent:
        return self._told.get(timeout=DEADLINE_S)

    @property
    def is_quiet(self) -> bool:
        return self._told.empty()


def filled_pool() -> Bytes2d:
    return np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8), BLOCK_BYTES).reshape(BLOCKS, BLOCK_BYTES)


def numbers(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(filled_pool())
    yield made
    made.copier.close()


@pytest.fixture
def gated(request: pytest.FixtureRequest) -> Iterator[tuple[Bench, GatedBlocks]]:
    pool = filled_pool()
    blocks = GatedBlocks(pool, getattr(request, "param", 1))
    made = Bench(pool, blocks)
    yield made, blocks
    blocks.gate.release(100)
    made.copier.close()


def test_blocks_go_out_to_rows_and_come_back_into_other_blocks(bench: Bench) -> None:
    bench.copier.copy(CopyOut(TransferId(1), numbers(2, 7), numbers(5, 0)))
    assert bench.next() == TransferDone(TransferId(1), (True, True))
    assert bench.memory.rows[:, 0].tolist() == [8, 0, 0, 0, 0, 3]
    bench.copier.copy(CopyIn(TransferId(2), numbers(0, 5), numbers(0, 1)))
    assert bench.next() == TransferDone(TransferId(2), (True, True))
    assert bench.pool[:, -1].tolist() == [8, 3, 3, 4, 5, 6, 7, 8]
    assert (bench.copier.out_bytes, bench.copier.in_bytes) == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_copies_of_one_kind_are_made_in_the_order_they_were_ordered(bench: Bench) -> None:
    for haul in range(50):
        bench.copier.copy(CopyOut(TransferId(haul), numbers(haul % BLOCKS), numbers(3)))
    assert [bench.next() for _ in range(50)] == [TransferDone(TransferId(haul), (True,)) for haul in range(50)]
    assert bench.memory.rows[3, 0] == 49 % BLOCKS + 1


def test_what_a_request_waits_for_goes_before_what_nobody_waits_for(gated: tuple[Bench, GatedBlocks]) -> None:
    bench, blocks = gated
    bench.copier.copy(CopyOut(TransferId(1), numbers(0), numbers(0)))
    assert blocks.next() == [0]
    bench.copier.copy(CopyOut(TransferId(2), numbers(1), numbers(1)))
    bench.copier.copy(CopyOut(TransferId(3), numbers(2), numbers(2)))
    bench.copier.copy(CopyIn(TransferId(4), numbers(3), numbers(3)))
    bench.copier.copy(CopyIn(TransferId(5), numbers(4), numbers(4)))
    blocks.gate.release(100)
    assert [bench.next().transfer for _ in range(5)] == [1, 4, 5, 2, 3]


def test_a_fence_stops_a_copy_at_the_next_block_and_is_answered_only_then(gated: tuple[Bench, GatedBlocks]) -> None:
    bench, blocks = gated
    bench.copier.copy(CopyOut(TransferId(1), numbers(0, 1, 2), numbers(0, 1, 2)))
    blocks.gate.release()
    assert [blocks.next(), blocks.next()] == [[0], [1]]
    assert bench.copier.fence(TransferId(1))
    assert bench.is_quiet, "block 1 is still being copied"
    blocks.gate.release()
    assert bench.next() == TransferFenced(TransferId(1))
    assert bench.memory.rows[:, 0].tolist() == [1, 2, 0, 0, 0, 0]
    assert not bench.copier.fence(TransferId(1)), "it is over"


@pytest.mark.parametrize("gated", [3], indirect=True)
def test_a_device_copies_runs_of_blocks_and_a_fence_stops_it_after_one(gated: tuple[Bench, GatedBlocks]) -> None:
    bench, blocks = gated
    bench.copier.copy(CopyOut(TransferId(1), numbers(0, 2, 4, 6, 7), numbers(0, 1, 2, 3, 4)))
    blocks.gate.release()
    assert [blocks.next(), blocks.next()] == [[0, 2, 4], [6, 7]]
    blocks.gate.release()
    assert bench.next() == TransferDone(TransferId(1), (True,) * 5)
    bench.copier.copy(CopyIn(TransferId(2), numbers(0, 1, 2, 3), numbers(7, 6, 5, 4)))
    assert blocks.next() == [7, 6, 5]
    assert bench.copier.fence(TransferId(2))
    assert bench.is_quiet, "three blocks are still being copied"
    blocks.gate.release()
    assert bench.next() == TransferFenced(TransferId(2))
    assert bench.pool[:, 0].tolist() == [1, 2, 3, 4, 5, 5, 3, 1]


def test_what_waits_behind_a_copy_is_let_go_of_at_once(gated: tuple[Bench, GatedBlocks]) -> None:
    bench, blocks = gated
    bench.copier.copy(CopyOut(TransferId(1), numbers(0), numbers(0)))
    bench.copier.copy(CopyOut(TransferId(2), numbers(1), numbers(1)))
    bench.copier.copy(CopyOut(TransferId(3), numbers(2), numbers(2)))
    assert blocks.next() == [0]
    assert bench.copier.fence(TransferId(2))
    assert bench.next() == TransferFenced(TransferId(2)), "although nothing is let go on"
    blocks.gate.release(100)
    assert [bench.next(), bench.next()] == [TransferDone(TransferId(1), (True,)), TransferDone(TransferId(3), (True,))]
    assert bench.memory.rows[:3, 0].tolist() == [1, 0, 3]


def test_a_haul_that_is_over_or_was_never_ordered_is_not_known(bench: Bench) -> None:
    bench.copier.copy(CopyOut(TransferId(1), numbers(0), numbers(0)))
    assert bench.next() == TransferDone(TransferId(1), (True,))
    assert not bench.copier.fence(TransferId(1))
    assert not bench.copier.fence(TransferId(99))
    assert bench.is_quiet


def test_closing_leaves_what_waits_and_ends_what_runs(gated: tuple[Bench, GatedBlocks]) -> None:
    bench, blocks = gated
    bench.copier.copy(CopyOut(TransferId(1), numbers(0, 1), numbers(0, 1)))
    bench.copier.copy(CopyOut(TransferId(2), numbers(2), numbers(2)))
    assert blocks.next() == [0]
    closer = threading.Thread(target=bench.copier.close)
    closer.start()
    blocks.gate.release(100)
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert bench.is_quiet
    assert bench.memory.rows[2, 0] == 0


@pytest.mark.parametrize(
    "order",
    [
        CopyOut(TransferId(1), numbers(BLOCKS), numbers(0)),
        CopyOut(TransferId(1), numbers(-1), numbers(0)),
        CopyIn(TransferId(1), numbers(ROWS), numbers(0)),
        CopyIn(TransferId(1), numbers(-1), numbers(0)),
        CopyIn(TransferId(1), numbers(0), numbers(0, 1)),
    ],
    ids=["no such block", "a block before the first", "no such row", "a row before the first", "not as many"],
)
def test_an_order_that_cannot_be_is_a_bug_and_says_so(bench: Bench, order: CopyOut | CopyIn) -> None:
    with pytest.raises(InvariantViolated):
        bench.copier.copy(order)


def test_rows_are_as_long_as_blocks() -> None:
    with pytest.raises(InvariantViolated, match="rows of 31 bytes"):
        HostCopier(HostBlocks(filled_pool()), HostMemory(ROWS, BLOCK_BYTES - 1), lambda _: None)


# ── who answers a fence ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fence_is_answered_by_whoever_lets_go_last() -> None:
    held = TransferHold()
    assert held.take()
    assert not held.fence(), "the holder answers"
    assert not held.is_abandoned()
    assert not held.let_go()
    assert held.is_abandoned()
    loose = TransferHold()
    assert loose.take()
    assert loose.let_go()
    assert loose.fence(), "whoever fences answers"
    assert loose.is_abandoned()
    assert not loose.take(), "and nothing is touched any more"
