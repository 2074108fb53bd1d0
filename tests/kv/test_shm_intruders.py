"""What a peer may pass for shared memory, and is not mapped for."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Iterator

import pytest

from baton.core.handover.messages import TransferBroken
from baton.kv.shared_memory import allocate_pool, release_pool
from baton.kv.transfer_contract import available
from baton.kv.transfer_frames import encode_hello
from baton.kv.transfer_shm import ShmSenderKind, encode_introduction
from tests.support.transfers import GIVER_BLOCKS, LAYOUT, TOKEN, Pair, giver_names, ids, pair_of, taker_names

pytestmark = pytest.mark.skipif(available("shm") is not None, reason=str(available("shm")))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of("shm") as made:
        yield made


def _introduce(pair: Pair, pool_blocks: int, blocks: list[int], fds: list[int]) -> str:
    """Why it was not taken."""
    pair.receiver.expect(taker_names(1), TOKEN, 0, ids(7, 8))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(pair.receiver.address.removeprefix("shm:"))
        data = encode_hello("shm", giver_names(1), LAYOUT.digest, TOKEN)
        data += encode_introduction(pool_blocks, b"", ids(*blocks))
        socket.send_fds(sock, [data], fds)
        reason = pair.got.next(TransferBroken).reason
        assert sum(pair.receiver.refused.values()) == 1
        return reason


def _memfds() -> int:
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:baton-kv" in os.readlink(f"/proc/self/fd/{entry}")
    return found


def test_no_memory_at_all(pair: Pair) -> None:
    assert "no memory was passed" in _introduce(pair, GIVER_BLOCKS, [1, 2], [])


def test_more_than_one_memory(pair: Pair) -> None:
    assert pair.giver.fd is not None
    before = _memfds()
    assert "no memory was passed" in _introduce(pair, GIVER_BLOCKS, [1, 2], [pair.giver.fd] * 3)
    assert _memfds() == before


@pytest.mark.parametrize("pool_blocks", [0, 1, GIVER_BLOCKS - 1, GIVER_BLOCKS + 1, 2**63])
def test_a_pool_of_another_size(pair: Pair, pool_blocks: int) -> None:
    assert pair.giver.fd is not None
    assert _introduce(pair, pool_blocks, [0, 0], [pair.giver.fd])


@pytest.mark.parametrize("block", [-1, GIVER_BLOCKS, 2**31 - 1])
def test_blocks_outside_of_the_pool(pair: Pair, block: int) -> None:
    assert pair.giver.fd is not None
    assert "source block out of range" in _introduce(pair, GIVER_BLOCKS, [1, block], [pair.giver.fd])


def test_memory_that_could_shrink_under_us(pair: Pair) -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, GIVER_BLOCKS * LAYOUT.block_bytes)
    assert "not sealed" in _introduce(pair, GIVER_BLOCKS, [1, 2], [fd])
    os.close(fd)


def test_only_this_user_finds_the_socket(pair: Pair) -> None:
    folder = os.path.dirname(pair.receiver.address.removeprefix("shm:"))
    assert os.stat(folder).st_mode & 0o777 == 0o700


def test_what_is_passed_cannot_be_mapped_to_write() -> None:
    memory = allocate_pool(LAYOUT, 3)
    transport = ShmSenderKind(memory)
    _, (passed,) = transport.introduce(ids(0))
    assert mmap.mmap(passed, memory.pool.nbytes, prot=mmap.PROT_READ)[:1] == b"\0"
    with pytest.raises(PermissionError):
        mmap.mmap(passed, memory.pool.nbytes)
    transport.close()
    release_pool(memory)
