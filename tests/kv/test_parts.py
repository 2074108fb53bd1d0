"""The small parts of a transfer: layout, memory, checks, frames, what is expected, pace."""

from __future__ import annotations

import fcntl
import mmap
import os
import selectors
import socket
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Handover, PeerId
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.expected_blocks import ExpectedBlocks
from baton.kv.io_thread import IoThread
from baton.kv.rate_limit import ByteRateLimit
from baton.kv.scatter_io import ScatterBuffers
from baton.kv.shared_memory import allocate_pool, map_sealed, pool_bytes, release_pool, shared_bytes
from baton.kv.transfer_contract import KvLayout, KvMemory, available
from baton.kv.transfer_frames import (
    FRAME_BYTES,
    HELLO_BYTES,
    TOKEN_MAX,
    EndFrame,
    HelloFrame,
    MalformedFrame,
    PiecesFrame,
    decode_frame,
    decode_hello,
    encode_hello,
    encode_pieces,
)
from tests.support.devices import DeviceLike

LAYOUT = KvLayout(b"\x01\x02", "bfloat16", 16, (32, 64, 8))


# ── layout ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_layers_lie_one_after_the_other() -> None:
    assert LAYOUT.spans == ((0, 32), (32, 96), (96, 104))
    assert LAYOUT.block_bytes == 104


def test_memory_that_is_not_of_its_layout_is_refused() -> None:
    with pytest.raises(InvariantViolated):
        KvMemory(LAYOUT, np.zeros((4, 103), dtype=np.uint8), LAYOUT.spans)
    with pytest.raises(InvariantViolated):
        KvMemory(LAYOUT, np.zeros((4, 104), dtype=np.uint8), ((0, 104),))
    with pytest.raises(InvariantViolated):
        KvMemory(LAYOUT, np.zeros((104, 4), dtype=np.uint8).T, LAYOUT.spans)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

linux = pytest.mark.skipif(available("shm") is not None, reason=str(available("shm")))


@linux
def test_a_shared_pool_is_zeros_that_nobody_can_resize() -> None:
    memory = allocate_pool(LAYOUT, 100)
    assert not memory.pool.any()
    assert memory.fd is not None
    for size in (0, memory.pool.size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert memory.pool.ctypes.data % mmap.PAGESIZE == 0, "copies between pools are fast only when both are aligned alike"
    release_pool(memory)
    assert memory.fd is None


@linux
def test_a_map_shows_what_its_owner_writes_and_cannot_be_written() -> None:
    shared = shared_bytes(5000)
    mapped = map_sealed(shared.fd, 5000)
    assert isinstance(mapped, np.ndarray)
    shared.array[4321] = 7
    assert mapped[4321] == 7
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    shared.close()
    shared.close()


@linux
@pytest.mark.parametrize("size", [0, 4999, 5001, 2**62])
def test_a_pool_of_another_size_is_not_mapped(size: int) -> None:
    shared = shared_bytes(5000)
    assert map_sealed(shared.fd, size) == "the pool that was passed has another size"
    shared.close()


@linux
@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_a_pool_that_could_shrink_is_not_mapped(seals: int) -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 5000)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    assert map_sealed(fd, 5000) == "the pool that was passed is not sealed"
    os.close(fd)


@linux
def test_what_is_no_memfd_is_not_mapped() -> None:
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as file:
        for fd in (file.fileno(), reading, writing):
            assert isinstance(map_sealed(fd, 5000), str)
    os.close(reading)
    os.close(writing)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_check_is_the_xor_of_seeded_hashes_of_its_pieces() -> None:
    memory = allocate_pool(LAYOUT, 3)
    memory.pool[:] = np.arange(3 * 104, dtype=np.uint16).reshape(3, 104).astype(np.uint8)
    checks = BlockChecksums(40, 2, LAYOUT.spans, pool_bytes(memory))
    checks.add(range(3), 40, np.array([2, 0], dtype=np.int32))
    expected = b""
    for index, block in ((40, 2), (41, 0)):
        value = 0
        for layer, (begin, end) in enumerate(LAYOUT.spans):
            value ^= xxh3_64_intdigest(memory.pool[block, begin:end].tobytes(), seed=layer << 32 | index)
        expected += value.to_bytes(8, "little")
    assert checks.digest() == expected
    release_pool(memory)


@given(st.permutations([(layer, block) for layer in range(3) for block in range(2)]))
def test_the_order_of_pieces_does_not_matter_to_the_checks(order: list[tuple[int, int]]) -> None:
    pool = memoryview(bytes(range(208)))
    whole, parts = BlockChecksums(5, 2, LAYOUT.spans, pool), BlockChecksums(5, 2, LAYOUT.spans, pool)
    whole.add(range(3), 5, np.arange(2, dtype=np.int32))
    for layer, block in order:
        parts.add(range(layer, layer + 1), 5 + block, np.array([block], dtype=np.int32))
    assert parts.digest() == whole.digest()


@given(st.permutations([(layer, block) for layer in range(3) for block in range(2)]), st.integers(0, 207))
def test_checks_of_a_device_find_what_those_of_the_host_find(order: list[tuple[int, int]], flipped: int) -> None:
    pool = np.arange(208, dtype=np.uint8).reshape(2, 104)
    device = DeviceLike(pool)
    whole, parts, moved, harmed = (DeviceChecksums(5, 2, LAYOUT.spans, device) for _ in range(4))
    whole.add(range(3), 5, np.arange(2, dtype=np.int32))
    moved.add(range(3), 5, np.array([1, 0], dtype=np.int32))
    for layer, block in order:
        parts.add(range(layer, layer + 1), 5 + block, np.array([block], dtype=np.int32))
    pool.ravel()[flipped] ^= 4
    harmed.add(range(3), 5, np.arange(2, dtype=np.int32))
    assert parts.digest() == whole.digest()
    assert len({whole.digest(), moved.digest(), harmed.digest()}) == 3
    assert len(whole.digest()) == 2 * 8


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

tokens = st.binary(min_size=1, max_size=TOKEN_MAX)


@given(st.sampled_from(["shm", "tcp", "mooncake"]), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), tokens)
def test_a_hello_comes_back_as_it_was_said(kind: str, request: int, attempt: int, token: bytes) -> None:
    data = encode_hello(kind, Handover(PeerId("d"), request, attempt), LAYOUT.digest, token)
    assert len(data) == HELLO_BYTES
    assert decode_hello(kind, data) == HelloFrame(request, attempt, LAYOUT.digest, token)


def test_a_hello_of_another_kind_is_malformed() -> None:
    with pytest.raises(MalformedFrame):
        decode_hello("shm", encode_hello("tcp", Handover(PeerId("d"), 1, 1), LAYOUT.digest, b"t"))


@pytest.mark.parametrize("token", [b"", b"t" * (TOKEN_MAX + 1)])
def test_a_token_of_no_size_is_our_own_mistake(token: bytes) -> None:
    with pytest.raises(InvariantViolated):
        encode_hello("tcp", Handover(PeerId("d"), 1, 1), LAYOUT.digest, token)


@given(st.integers(0, 65535), st.integers(0, 65535), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_range_comes_back_as_it_was_named(low: int, high: int, first: int, count: int) -> None:
    found = decode_frame(encode_pieces(range(low, high), first, count))
    assert isinstance(found, PiecesFrame)
    assert (found.layers.start, found.layers.stop, found.first, found.count) == (low, high, first, count)


@given(st.binary(min_size=FRAME_BYTES, max_size=FRAME_BYTES), st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_any_bytes_are_a_frame_or_malformed(frame: bytes, hello: bytes) -> None:
    expected = ExpectedBlocks(3, np.arange(4, dtype=np.int32), 5)
    try:
        found = decode_frame(frame)
        assert isinstance(found, EndFrame) or expected.claim(found) in (None, "block out of range", "layer out of range")
    except MalformedFrame:
        pass
    with pytest.raises(MalformedFrame):
        decode_hello("tcp", hello if not hello.startswith(b"BKV1") else hello[::-1])


# ── what is expected ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(1, 4), st.integers(0, 9))
def test_everything_expected_comes_once(draw: object, blocks: int, layers: int, first: int) -> None:
    expected = ExpectedBlocks(first, np.arange(blocks, dtype=np.int32) * 2, layers)
    pieces = [PiecesFrame(range(layer, layer + 1), first + block, 1) for layer in range(layers) for block in range(blocks)]
    draw.shuffle(pieces)  # type: ignore[attr-defined]
    for piece in pieces:
        assert not expected.complete
        assert expected.claim(piece) is None
        assert expected.claim(piece) == "piece came twice"
        assert expected.targets(piece).tolist() == [2 * (piece.first - first)]
        expected.keep(piece)
    assert expected.complete


def test_nothing_expected_is_complete() -> None:
    assert ExpectedBlocks(0, np.empty(0, dtype=np.int32), 3).complete


# ── pace ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pace_keeps_to_its_rate() -> None:
    pace = ByteRateLimit(1000.0)
    assert pace.delay_s(5.0) == 0.0
    pace.spent(500, 5.0)
    assert pace.delay_s(5.0) == pytest.approx(0.5)
    pace.spent(500, 5.2)
    assert pace.delay_s(5.2) == pytest.approx(0.8)
    assert pace.delay_s(7.0) == 0.0
    assert pace.at_once(3) == 3
    assert pace.at_once(3000) == 5


def test_without_a_limit_nothing_waits() -> None:
    pace = ByteRateLimit(None)
    assert pace.at_once(3000) == 3000
    pace.spent(10**12, 1.0)
    assert pace.delay_s(1.0) == 0.0


# ── vectors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=5),
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_vectors_go_through_their_memory_once_and_in_order(
    shape: list[tuple[int, int]], steps: list[int], limit: int
) -> None:
    memory = memoryview(bytes(range(100)))
    vectors, at = ScatterBuffers(), 0
    for count, size in shape:
        vectors.add([memory[at + piece * size : at + (piece + 1) * size] for piece in range(count)])
        at += count * size
    seen = b""
    for step in steps:
        buffers = vectors.next(limit)
        assert len(buffers) <= limit
        taken = b"".join(buffers)[:step]
        seen += taken
        vectors.advance(len(taken))
        assert vectors.left == at - len(seen)
        assert bool(vectors) == (len(seen) < at)
    assert seen == bytes(memory[: len(seen)])


# ── the I/O thread ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_socket_that_was_closed_in_the_same_turn_does_not_end_the_lane() -> None:
    """Both ends were ready at once, and the first to be served closed the other."""
    done = threading.Event()
    pairs = [socket.socketpair(), socket.socketpair()]
    io_thread = IoThread("test", lambda _now: None, lambda: None)

    def close_all(_events: int) -> None:
        for ours, _ in pairs:
            io_thread.watch(ours, 0, lambda _: None)
            ours.close()

    for ours, theirs in pairs:
        io_thread.watch(ours, selectors.EVENT_READ, close_all)
        theirs.close()
    io_thread.start()
    io_thread.post(done.set)
    assert done.wait(5)
    io_thread.close()
