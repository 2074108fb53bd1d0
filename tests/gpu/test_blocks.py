"""Copies between a pool on a real device and the host: every byte where it belongs, and no step held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.tiers.transfers import CopyIn, CopyOut, TransferDone, TransferId
from baton.executor.contract import KvView
from baton.executor.cuda.blocks import STRAIGHT_BYTES, CudaBlocks
from baton.kv.host_memory import HostCopier, HostMemory

pytestmark = pytest.mark.cuda

BLOCKS, ROWS = 40, 64
SIZES = [8, 6, 4098, 65_536, STRAIGHT_BYTES + 16]
"""Of a block, in bytes: words of each length, and both ways."""


def pool_of(block_bytes: int) -> torch.Tensor:
    made = torch.randint(0, 256, (BLOCKS, block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return made.cuda()


def some(count: int, of: int, seed: int) -> Int32s:
    return np.random.default_rng(seed).permutation(of)[:count].astype(np.int32)


@pytest.fixture(params=SIZES)
def pool(request: pytest.FixtureRequest) -> torch.Tensor:
    return pool_of(request.param)


@pytest.fixture
def blocks(pool: torch.Tensor) -> Iterator[CudaBlocks]:
    made = CudaBlocks(pool)
    yield made
    made.close()


@pytest.fixture(params=["pinned", "plain"])
def host(request: pytest.FixtureRequest, blocks: CudaBlocks) -> np.ndarray:
    size = ROWS * blocks.block_bytes
    memory = blocks.allocate(size) if request.param == "pinned" else np.zeros(size, dtype=np.uint8)
    return memory.reshape(ROWS, blocks.block_bytes)


def spans_of(blocks: CudaBlocks) -> list[tuple[int, int]]:
    size = blocks.block_bytes
    return [(0, size), (size // 2, size), (size // 4, size // 2), (1, size - 1), (3, 3)]


def test_what_is_read_is_what_the_device_has_and_nothing_else_changes(
    blocks: CudaBlocks, pool: torch.Tensor, host: np.ndarray
) -> None:
    for number, (begin, end) in enumerate(spans_of(blocks)):
        sources, rows = some(30, BLOCKS, number), some(30, ROWS, number + 9)
        host[:] = 7
        wanted = host.copy()
        wanted[rows, begin:end] = pool.cpu().numpy()[sources, begin:end]
        blocks.read(sources, rows, host, begin, end)
        assert (host == wanted).all()


def test_what_is_written_is_what_the_host_has_and_nothing_else_changes(
    blocks: CudaBlocks, pool: torch.Tensor, host: np.ndarray
) -> None:
    host[:] = np.random.default_rng(3).integers(0, 256, host.shape, dtype=np.uint8)
    for number, (begin, end) in enumerate(spans_of(blocks)):
        targets, rows = some(30, BLOCKS, number), some(30, ROWS, number + 9)
        wanted = pool.cpu().numpy()
        wanted[targets, begin:end] = host[rows, begin:end]
        blocks.write(targets, rows, host, begin, end)
        assert (pool.cpu().numpy() == wanted).all()


def test_more_pieces_than_fit_into_a_bounce_all_arrive() -> None:
    pool = torch.arange(9000, dtype=torch.int64, device="cuda").view(9000, 1).repeat(1, 1024)
    blocks, host = CudaBlocks(pool), np.zeros((9000, 8192), dtype=np.uint8)
    order = some(9000, 9000, 2)
    torch.cuda.synchronize()
    blocks.read(order, order, host, 0, 8192)
    assert (host.view(np.int64) == np.arange(9000)[:, None]).all()
    pool.zero_()
    torch.cuda.synchronize()
    blocks.write(order, order, host, 0, 8192)
    assert bool((pool == torch.arange(9000, device="cuda")[:, None]).all())


def test_many_threads_copy_at_once() -> None:
    pool, errors = pool_of(65_536), []
    blocks = CudaBlocks(pool)
    wanted = pool.cpu().numpy()

    def work(number: int) -> None:
        own = np.arange(number * 5, number * 5 + 5, dtype=np.int32)
        host = np.zeros((BLOCKS, 65_536), dtype=np.uint8)
        for _ in range(50):
            blocks.read(own, own, host, 0, 65_536)
            if not (host[own] == wanted[own]).all():
                errors.append(number)
            blocks.write(own, own, host, 0, 65_536)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (pool.cpu().numpy() == wanted).all()


def test_a_copy_ends_while_the_stream_that_computes_is_busy() -> None:
    pool = pool_of(1 << 20)
    blocks, host = CudaBlocks(pool), np.zeros((BLOCKS, 1 << 20), dtype=np.uint8)
    order = np.arange(BLOCKS, dtype=np.int32)
    blocks.read(order, order, host, 0, 1 << 20)  # buffers exist from here on
    wanted = pool.cpu().numpy()
    torch.cuda._sleep(4_000_000_000)  # some seconds
    busy = torch.cuda.Event()
    busy.record()
    host[:] = 0
    blocks.read(order, order, host, 0, 1 << 20)
    assert not busy.query(), "the copy waited for the step"
    assert (host == wanted).all()
    torch.cuda.synchronize()


def test_a_pool_made_in_inference_mode_is_written_from_any_thread() -> None:
    with torch.inference_mode():
        pool = torch.zeros(4, 8, 16, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
    blocks, host = CudaBlocks(pool), np.full((2, 256), 1, dtype=np.uint8)
    thread = threading.Thread(
        target=blocks.write, args=(np.array([3], np.int32), np.array([1], np.int32), host, 0, blocks.block_bytes)
    )
    thread.start()
    thread.join()
    assert pool.view(4, -1).view(torch.uint8).sum(dim=1).tolist() == [0, 0, 0, 256]


def test_the_host_tier_works_on_a_device() -> None:
    pool, told = pool_of(65_536), []
    blocks = CudaBlocks(pool, run_bytes=4 * 65_536)
    heard = threading.Semaphore(0)

    def report(event: object) -> None:
        told.append(event)
        heard.release()

    memory = HostMemory(10, 65_536, blocks.allocate)
    copier = HostCopier(blocks, memory, report)
    before = pool.cpu()
    out, rows, back = some(10, BLOCKS, 1), some(10, 10, 2), some(10, BLOCKS, 3)
    copier.copy(CopyOut(TransferId(1), out, rows))
    assert heard.acquire(timeout=20)
    copier.copy(CopyIn(TransferId(2), rows, back))
    assert heard.acquire(timeout=20)
    copier.close()
    assert told == [TransferDone(TransferId(1), (True,) * 10), TransferDone(TransferId(2), (True,) * 10)]
    assert (pool.cpu()[back] == before[out]).all()
    blocks.close()


def test_a_view_of_a_device_knows_its_sizes_without_a_pool() -> None:
    view = KvView.on_device(CudaBlocks(pool_of(4098)), ((0, 4098),), "uint8")
    assert (view.blocks, view.block_bytes, view.pool.size) == (BLOCKS, 4098, 0)


def test_a_pool_that_is_none_is_refused() -> None:
    with pytest.raises(InvariantViolated):
        CudaBlocks(torch.zeros(4, 4))
    with pytest.raises(InvariantViolated):
        CudaBlocks(torch.zeros(4, 4, device="cuda").T[:, :2])
