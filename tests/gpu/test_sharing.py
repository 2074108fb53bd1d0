"""Blocks of another process on the same device: read without a detour, and hashed there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.engine.plan import Int32s
from baton.executor.cuda.blocks import CudaBlocks

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
BLOCKS, THEIR_BLOCKS, BLOCK_BYTES = 12, 20, 24_592


def pool_of(blocks: int, seed: int) -> torch.Tensor:
    made = torch.randint(0, 256, (blocks, BLOCK_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.cuda()


def ids(*blocks: int) -> Int32s:
    return np.array(blocks, dtype=np.int32)


@pytest.fixture
def theirs() -> Iterator[bytes]:
    """What opens the pool of a process that lives as long as the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.test_sharing"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield bytes.fromhex(process.stdout.readline())
    process.communicate("over\n")


def test_blocks_of_another_process_are_pulled_into_ours(theirs: bytes) -> None:
    pool = pool_of(BLOCKS, 1)
    wanted, source = pool.cpu(), pool_of(THEIR_BLOCKS, 2).cpu()
    blocks = CudaBlocks(pool)
    window = blocks.open(theirs, THEIR_BLOCKS)
    assert not isinstance(window, str), window
    again = blocks.open(theirs, THEIR_BLOCKS)
    assert not isinstance(again, str), "it can be opened twice"
    again.close()
    for begin, end in ((0, BLOCK_BYTES), (8, 4096), (3, 5000), (7, 7)):
        sources, targets = ids(19, 0, 7, 8), ids(3, 11, 0, 5)
        window.pull(sources, targets, begin, end)
        wanted[targets.tolist(), begin:end] = source[sources.tolist(), begin:end]
        assert torch.equal(pool.cpu(), wanted)
    window.close()


def test_what_cannot_be_opened_says_why(theirs: bytes) -> None:
    blocks = CudaBlocks(pool_of(BLOCKS, 1))
    assert blocks.open(b"", 1) == "that is no name of device memory"
    assert blocks.open(bytes(36) + theirs[36:], 1) == "it lies on another device"
    assert blocks.open(theirs, 1 << 30) == "its device memory is shorter than its pool"
    broken = blocks.open(theirs[:36] + bytes(64) + theirs[100:], 1)
    assert isinstance(broken, str)
    assert "cannot be opened" in broken


@pytest.mark.parametrize("spans", [[(0, BLOCK_BYTES)], [(0, 8192), (8192, BLOCK_BYTES)], [(1, 4), (2, 4096), (5, 5)]])
def test_a_digest_depends_on_the_bytes_and_on_nothing_else(spans: list[tuple[int, int]]) -> None:
    pool = pool_of(BLOCKS, 1)
    blocks, copy = CudaBlocks(pool), CudaBlocks(pool.flip(0).contiguous())
    torch.cuda.synchronize()
    found = blocks.digests(ids(*range(BLOCKS)), spans)
    assert found.shape == (len(spans), BLOCKS)
    assert (copy.digests(ids(*range(BLOCKS)), spans) == found[:, ::-1]).all()
    assert (blocks.digests(ids(4), spans) == found[:, 4:5]).all()


@pytest.mark.parametrize("at", [0, 1, 4096, BLOCK_BYTES - 1])
def test_one_flipped_bit_anywhere_changes_a_digest(at: int) -> None:
    pool = pool_of(2, 1)
    blocks = CudaBlocks(pool)
    before = blocks.digests(ids(0, 1), [(0, BLOCK_BYTES)])
    pool[1, at] ^= 128
    torch.cuda.synchronize()
    after = blocks.digests(ids(0, 1), [(0, BLOCK_BYTES)])
    assert (before == after).tolist() == [[True, False]]


def test_words_that_change_places_change_a_digest() -> None:
    pool = pool_of(2, 1)
    pool[1] = pool[0]
    pool[1, :16] = pool[0, :16].roll(8)
    torch.cuda.synchronize()
    (found,) = CudaBlocks(pool).digests(ids(0, 1), [(0, BLOCK_BYTES)])
    assert found[0] != found[1]


def _share() -> None:
    """The other process."""
    blocks = CudaBlocks(pool_of(THEIR_BLOCKS, 2))
    sys.stdout.write(blocks.share().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    _share()
