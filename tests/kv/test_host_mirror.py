"""KV on a device, handed over through a mirror: what is told when, what a fence waits for, and whose memory comes back."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import (
    Arriving,
    Fenced,
    Handover,
    PeerEvent,
    PeerId,
    ShipFailed,
    Shipped,
    TransferBroken,
    Verified,
)
from baton.kv.block_access import HostBlocks
from baton.kv.host_mirror import PARTS_AHEAD, HostMirror, MirrorCopier, MirrorStaging
from baton.kv.send_queue import BlockRun
from baton.kv.shared_memory import allocate_mirror, free_pages, release_pool, shared_bytes
from baton.kv.transfer_contract import KvLayout, KvMemory, available, make_receiver, make_sender
from baton.kv.transfer_frames import FRAME_BYTES, HELLO_BYTES, TAKEN, WELCOME
from baton.kv.transfer_shm import introduction_bytes
from tests.support.blocks import DEADLINE_S, GatedBlocks

pytestmark = pytest.mark.skipif(available("shm") is not None, reason=str(available("shm")))

LAYOUT = KvLayout(b"a model", "uint8", 4, (4096, 8192))
BLOCKS = 16
GIVEN, TAKEN_BY = Handover(PeerId("the taker"), 1, 1), Handover(PeerId("the giver"), 1, 1)
TOKEN = b"a token"


def ids(*blocks: int) -> Int32s:
    return np.array(blocks, dtype=np.int32)


class Side:
    """A device, its mirror, and what is heard of either."""

    def __init__(self, seed: int | None = None) -> None:
        self.kv = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        if seed is not None:
            self.kv[:] = np.random.default_rng(seed).integers(1, 256, self.kv.shape, dtype=np.uint8)
        self.device = GatedBlocks(self.kv, at_once=2)
        self.events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self.given_back: queue.SimpleQueue[int] = queue.SimpleQueue()
        shared = shared_bytes(self.kv.size)
        rows = shared.array.reshape(self.kv.shape)

        def give_back(block: int) -> None:
            free_pages(shared.fd, block * LAYOUT.block_bytes, LAYOUT.block_bytes)
            self.given_back.put(block)

        self.mirror = HostMirror(self.device, rows, give_back)
        self.memory = KvMemory(LAYOUT, rows, LAYOUT.spans, shared.fd, self.mirror)

    def next(self) -> PeerEvent:
        while isinstance(event := self.events.get(timeout=DEADLINE_S), Arriving):
            pass
        return event

    @property
    def is_quiet(self) -> bool:
        """Nothing was told that `next` has not told of."""
        while not self.events.empty():
            if not isinstance(self.events.get(), Arriving):
                return False
        return True

    def freed(self, count: int) -> list[int]:
        return sorted(self.given_back.get(timeout=DEADLINE_S) for _ in range(count))


@pytest.fixture
def giver() -> Iterator[Side]:
    side = Side(seed=1)
    yield side
    release_pool(side.memory)


@pytest.fixture
def taker() -> Iterator[Side]:
    side = Side()
    yield side
    release_pool(side.memory)


def kept_bytes(memory: KvMemory) -> int:
    assert memory.fd is not None
    return os.fstat(memory.fd).st_blocks * 512


# ── whole hand-overs ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_nothing_is_verified_before_the_device_has_it_and_then_no_memory_is_kept(
    kind: str, giver: Side, taker: Side
) -> None:
    receiver = make_receiver(kind, taker.memory, taker.events.put)
    sender = make_sender(kind, giver.memory, giver.events.put)
    giver.device.gate.release(100)
    receiver.expect(TAKEN_BY, TOKEN, 0, ids(9, 3, 4))
    sender.open(GIVEN, receiver.address, TOKEN, 0, ids(1, 2, 7))
    sender.ship(GIVEN, None, 0, 3, True)
    shipped = giver.next()
    assert isinstance(shipped, Shipped)
    receiver.verify(TAKEN_BY, shipped.checks)
    taker.device.next()
    assert taker.is_quiet, "a copy to the device is under way"
    taker.device.gate.release(100)
    assert taker.next() == Verified(TAKEN_BY)
    assert (taker.kv[[9, 3, 4]] == giver.kv[[1, 2, 7]]).all()
    assert (giver.freed(3), taker.freed(3)) == ([1, 2, 7], [3, 4, 9])
    assert (kept_bytes(giver.memory), kept_bytes(taker.memory)) == (0, 0)
    sender.close()
    receiver.close()


def test_what_was_sent_of_a_layer_is_what_the_device_had_when_it_was_signalled(giver: Side, taker: Side) -> None:
    receiver, sender = (
        make_receiver("tcp", taker.memory, taker.events.put),
        make_sender("tcp", giver.memory, giver.events.put),
    )
    taker.device.gate.release(100)
    receiver.expect(TAKEN_BY, TOKEN, 0, ids(9))
    sender.open(GIVEN, receiver.address, TOKEN, 0, ids(1))
    sender.ship(GIVEN, 5, 0, 1, True)
    sender.layer_done(5, 1)
    assert giver.device.next() == [1]
    giver.kv[1] = 77  # no layer has been read yet
    giver.device.gate.release()
    assert giver.device.is_quiet, "the other layer is not written yet"
    giver.kv[1, : LAYOUT.spans[0][1]] = 78
    sender.layer_done(5, 0)
    giver.device.gate.release()
    shipped = giver.next()
    assert isinstance(shipped, Shipped)
    receiver.verify(TAKEN_BY, shipped.checks)
    assert taker.next() == Verified(TAKEN_BY)
    assert set(taker.kv[9].tolist()) == {77, 78}
    sender.close()
    receiver.close()


# ── fences ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_taker_answers_a_fence_when_the_copy_under_way_has_ended_and_makes_no_other(giver: Side, taker: Side) -> None:
    receiver, sender = (
        make_receiver("tcp", taker.memory, taker.events.put),
        make_sender("tcp", giver.memory, giver.events.put),
    )
    giver.device.gate.release(100)
    receiver.expect(TAKEN_BY, TOKEN, 0, ids(*range(8)))
    sender.open(GIVEN, receiver.address, TOKEN, 0, ids(*range(8)))
    for first in range(0, 8, 2):
        sender.ship(GIVEN, None, first, first + 2, first == 6)
    assert isinstance(giver.next(), Shipped)
    moving = taker.device.next()
    receiver.fence(TAKEN_BY)
    receiver.fence(Handover(PeerId("somebody"), 2, 1))
    assert taker.next() == Fenced(Handover(PeerId("somebody"), 2, 1)), "of one that has no copy under way"
    assert taker.is_quiet
    taker.device.gate.release(100)
    assert taker.next() == Fenced(TAKEN_BY)
    assert taker.kv.any(axis=1).nonzero()[0].tolist() == sorted(moving)
    assert taker.device.is_quiet
    assert taker.freed(8) == list(range(8))
    receiver.close()
    sender.close()


def test_a_fence_after_it_was_spoilt_waits_for_the_copy_too(giver: Side, taker: Side) -> None:
    receiver, sender = (
        make_receiver("tcp", taker.memory, taker.events.put),
        make_sender("tcp", giver.memory, giver.events.put),
    )
    giver.device.gate.release(100)
    receiver.expect(TAKEN_BY, TOKEN, 0, ids(1, 2))
    sender.open(GIVEN, receiver.address, TOKEN, 0, ids(1, 2))
    sender.ship(GIVEN, None, 0, 1, False)
    taker.device.next()
    sender.fence(GIVEN)
    assert isinstance(taker.next(), TransferBroken)
    receiver.fence(TAKEN_BY)
    receiver.fence(Handover(PeerId("somebody"), 2, 1))
    assert taker.next() == Fenced(Handover(PeerId("somebody"), 2, 1))
    assert taker.is_quiet
    taker.device.gate.release(100)
    assert taker.next() == Fenced(TAKEN_BY)
    receiver.close()
    sender.close()


def test_a_giver_answers_a_fence_when_nothing_of_it_is_read_any_more(giver: Side, taker: Side) -> None:
    receiver, sender = (
        make_receiver("tcp", taker.memory, taker.events.put),
        make_sender("tcp", giver.memory, giver.events.put),
    )
    receiver.expect(TAKEN_BY, TOKEN, 0, ids(*range(8)))
    sender.open(GIVEN, receiver.address, TOKEN, 0, ids(*range(8)))
    sender.ship(GIVEN, None, 0, 8, True)
    giver.device.next()
    sender.fence(GIVEN)
    sender.fence(Handover(PeerId("somebody"), 2, 1))
    assert giver.next() == Fenced(Handover(PeerId("somebody"), 2, 1))
    assert giver.is_quiet
    giver.device.gate.release(100)
    assert giver.next() == Fenced(GIVEN)
    assert giver.device.is_quiet
    assert giver.freed(8) == list(range(8))
    sender.close()
    receiver.close()


# ── whose memory comes back ──────────────────────────────────────────────────────────────────────────────────────────────


class DeafTaker:
    """Takes one line of `shm`, and says only what the test lets it say."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "line"))
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        self.address = f"shm:{folder / 'line'}"

    def welcome(self, blocks: int) -> socket.socket:
        line, _ = self._listener.accept()
        line.settimeout(DEADLINE_S)
        size = HELLO_BYTES + introduction_bytes(blocks)
        data, fds, _, _ = socket.recv_fds(line, size, 1)
        assert len(data) == size
        for fd in fds:
            os.close(fd)
        line.sendall(WELCOME)
        return line

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def deaf() -> Iterator[DeafTaker]:
    with tempfile.TemporaryDirectory() as folder:  # its path is short, as that of a socket must be
        made = DeafTaker(Path(folder))
        yield made
        made.close()


@pytest.mark.parametrize("last_word", [TAKEN, b""], ids=["it has taken it", "it is gone"])
def test_what_a_taker_may_still_fetch_stays(giver: Side, deaf: DeafTaker, last_word: bytes) -> None:
    giver.device.gate.release(100)
    sender = make_sender("shm", giver.memory, giver.events.put)
    sender.open(GIVEN, deaf.address, TOKEN, 0, ids(1, 2))
    sender.ship(GIVEN, None, 0, 2, True)
    line = deaf.welcome(2)
    assert isinstance(giver.next(), Shipped)
    assert giver.given_back.empty()
    assert (giver.memory.pool[[1, 2]] == giver.kv[[1, 2]]).all()
    if last_word:
        line.sendall(last_word)
    else:
        line.close()
    assert giver.freed(2) == [1, 2]
    line.close()
    sender.close()


def test_a_block_that_two_hand_overs_share_comes_back_with_the_second(giver: Side, deaf: DeafTaker) -> None:
    giver.device.gate.release(100)
    sender, lines = make_sender("shm", giver.memory, giver.events.put), []
    for request in (1, 2):
        handover = Handover(PeerId("the taker"), request, 1)
        sender.open(handover, deaf.address, TOKEN, 0, ids(1, 1 + request))
        sender.ship(handover, None, 0, 2, True)
        lines.append(deaf.welcome(2))
        assert isinstance(giver.next(), Shipped)
    lines[0].sendall(TAKEN)
    assert giver.freed(1) == [2]
    lines[1].sendall(TAKEN)
    assert giver.freed(2) == [1, 3]
    sender.close()
    for line in lines:
        line.close()


def test_a_giver_that_closes_gives_everything_back(giver: Side, deaf: DeafTaker) -> None:
    giver.device.gate.release(100)
    sender, lines = make_sender("shm", giver.memory, giver.events.put), []
    for request, last in ((1, True), (2, False)):
        handover = Handover(PeerId("the taker"), request, 1)
        sender.open(handover, deaf.address, TOKEN, 0, ids(2 * request, 2 * request + 1))
        sender.ship(handover, None, 0, 2 if last else 1, last)
        lines.append(deaf.welcome(2))
        lines[-1].recv(FRAME_BYTES)
    assert isinstance(giver.next(), Shipped)
    sender.close()
    assert isinstance(giver.next(), ShipFailed)
    assert giver.freed(4) == [2, 3, 4, 5]
    for line in lines:
        line.close()


def test_a_mirror_costs_nothing_before_it_is_used() -> None:
    memory = allocate_mirror(LAYOUT, HostBlocks(np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)))
    assert kept_bytes(memory) == 0
    memory.pool[3] = 1
    memory.pool[4] = 2
    assert memory.mirror is not None
    memory.mirror.hold(ids(3, 4))
    memory.mirror.let_go(ids(3))
    assert kept_bytes(memory) == LAYOUT.block_bytes
    assert not memory.pool[3].any()
    assert (memory.pool[4] == 2).all()
    release_pool(memory)


def test_giving_back_touches_no_neighbour() -> None:
    shared = shared_bytes(3 * 5000)
    shared.array[:] = 1
    free_pages(shared.fd, 5000, 5000)
    assert shared.array.reshape(3, 5000).any(axis=1).tolist() == [True, False, True]
    assert (shared.array.reshape(3, 5000)[[0, 2]] == 1).all()
    shared.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        free_pages(-1, 0, 1)


# ── the order of parts ───────────────────────────────────────────────────────────────────────────────────────────────────


class SlowLane:
    """Work that ferries post, done when the test says so."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[object] = queue.SimpleQueue()

    def post(self, work: object, _urgent: bool) -> bool:
        self._posted.put(work)
        return True

    def do_one(self) -> None:
        work = self._posted.get(timeout=DEADLINE_S)
        assert callable(work)
        work()


runs = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 2), st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS)), max_size=6
)


@given(runs, st.integers(1, 5))
def test_runs_come_out_of_the_mirror_whole_and_in_order(named: list[tuple[int, int, int, int]], at_once: int) -> None:
    kv = np.arange(BLOCKS * LAYOUT.block_bytes, dtype=np.uint32).astype(np.uint8).reshape(BLOCKS, -1)
    device, rows = HostBlocks(kv), np.zeros_like(kv)
    device.run_bytes = at_once * 4096
    mirror, io_thread = HostMirror(device, rows, lambda _block: None), SlowLane()
    ready = deque(
        BlockRun(range(low, min(2, low + count)), first, min(BLOCKS, first + blocks)) for low, count, first, blocks in named
    )
    wanted = [(layer, block) for run in ready for block in range(run.first, run.upto) for layer in run.layers]
    copier = MirrorCopier("test", mirror, mirror.fetch, io_thread.post)
    order = np.arange(BLOCKS - 1, -1, -1, dtype=np.int32)
    staging = MirrorStaging(
        copier, mirror, LAYOUT.spans, GIVEN, 0, order, lambda: ready.popleft() if ready else None, lambda: None
    )
    found: list[tuple[int, int]] = []
    while True:
        part = staging.next()
        if part is None and staging.is_empty:
            break
        if part is None:
            io_thread.do_one()
            continue
        low, high = LAYOUT.spans[part.layers.start][0], LAYOUT.spans[part.layers.stop - 1][1]
        assert part.upto - part.first <= max(1, at_once * 4096 // (high - low))
        blocks = order[part.first : part.upto]
        assert (rows[blocks, low:high] == kv[blocks, low:high]).all()
        found += [(layer, block) for block in range(part.first, part.upto) for layer in part.layers]
    copier.close()
    assert found == wanted


def test_no_more_is_brought_than_may_lie_ahead() -> None:
    kv = np.ones((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    device, io_thread = GatedBlocks(kv), SlowLane()
    mirror = HostMirror(device, np.zeros_like(kv), lambda _block: None)
    copier = MirrorCopier("test", mirror, mirror.fetch, io_thread.post)
    ready = deque([BlockRun(range(2), 0, BLOCKS)])
    order = np.arange(BLOCKS, dtype=np.int32)
    device.gate.release(100)
    staging = MirrorStaging(
        copier, mirror, LAYOUT.spans, GIVEN, 0, order, lambda: ready.popleft() if ready else None, lambda: None
    )
    assert staging.next() is None
    assert [device.next() for _ in range(PARTS_AHEAD)] == [[block] for block in range(PARTS_AHEAD)]
    for _ in range(PARTS_AHEAD):
        io_thread.do_one()
    assert device.is_quiet
    assert staging.next() == BlockRun(range(2), 0, 1)
    assert device.next() == [PARTS_AHEAD]
    copier.close()


def test_what_is_dropped_does_not_move_and_is_not_told() -> None:
    kv = np.ones((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    device, io_thread, told = GatedBlocks(kv), SlowLane(), []
    mirror = HostMirror(device, np.zeros_like(kv), lambda _block: None)
    copier = MirrorCopier("test", mirror, mirror.fetch, io_thread.post)
    other = Handover(PeerId("x"), 2, 1)
    copier.copy(GIVEN, ids(1), 0, 4, lambda: told.append("first"))
    copier.copy(GIVEN, ids(2), 0, 4, lambda: told.append("second"))
    copier.copy(other, ids(3), 0, 4, lambda: told.append("other"))
    assert device.next() == [1]
    copier.drop(GIVEN, lambda: told.append("dropped"))
    copier.drop(Handover(PeerId("x"), 3, 1), lambda: told.append("unknown"))
    assert told == ["unknown"]
    device.gate.release(100)
    assert device.next() == [3]
    io_thread.do_one()
    io_thread.do_one()
    assert told == ["unknown", "dropped", "other"]
    closer = threading.Thread(target=copier.close)
    closer.start()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
