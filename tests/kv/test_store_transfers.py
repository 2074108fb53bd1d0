"""KV between host rows and a store: only sound blocks arrive, and a store that hangs or fails holds nobody up."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import KEY_BYTES, Key
from baton.core.errors import InvariantViolated
from baton.core.tiers.transfers import Get, Look, Put, StorageEvent, TransferDone, TransferFailed, TransferFenced, TransferId
from baton.kv.block_access import Bytes2d
from baton.kv.host_memory import HostMemory
from baton.kv.store import BadStore, Store
from baton.kv.store_transfers import ALIGNMENT, CLOSE_S, STORE_HANGS, StoreTally, StoreTransfers
from baton.wire.envelope import HEADER_BYTES, object_name
from tests.support.memory_store import DEADLINE_S, MemoryStore

LAYOUT, OTHER_LAYOUT = bytes(range(16)), bytes(range(1, 17))
ROWS, BLOCK_BYTES = 16, 96
OBJECT_BYTES = -(-(HEADER_BYTES + BLOCK_BYTES) // ALIGNMENT) * ALIGNMENT
"""In an arena."""
KEYS = tuple(Key(bytes([number]) * KEY_BYTES) for number in range(1, 17))
NAMES = [object_name(LAYOUT, key) for key in KEYS]


class Bench:
    """Rows that are all different, and transfers between them and a store."""

    def __init__(self, store: Store, *, threads: int = 1, objects: int = 4, waiting_max: int = 8) -> None:
        self.memory = HostMemory(ROWS, BLOCK_BYTES)
        self.memory.rows[:] = np.arange(1, ROWS + 1, dtype=np.uint8)[:, None]
        self._told: queue.SimpleQueue[StorageEvent] = queue.SimpleQueue()
        arena_bytes = objects * OBJECT_BYTES
        self.transfers = StoreTransfers(store, self.memory, LAYOUT, self._told.put, threads, arena_bytes, waiting_max)
        self._hauls = 0

    def next(self) -> StorageEvent:
        return self._told.get(timeout=DEADLINE_S)

    def next_of(self, haul: TransferId) -> str:
        """Why it failed."""
        event = self.next()
        assert isinstance(event, TransferFailed)
        assert event.transfer == haul
        return event.reason

    @property
    def is_quiet(self) -> bool:
        return self._told.empty()

    def look(self, *which: int) -> TransferId:
        haul = self._number()
        self.transfers.start(Look(haul, tuple(KEYS[at] for at in which)))
        return haul

    def put(self, *which: int) -> TransferId:
        """Row i under key i."""
        haul = self._number()
        self.transfers.start(Put(haul, tuple(KEYS[at] for at in which), numbers(*which)))
        return haul

    def get(self, which: tuple[int, ...], rows: tuple[int, ...]) -> TransferId:
        haul = self._number()
        self.transfers.start(Get(haul, tuple(KEYS[at] for at in which), numbers(*rows)))
        return haul

    def retried(self, order: Callable[[], TransferId]) -> TransferDone:
        """Again and again until a thread that was lost has come back for it."""
        while True:
            order()
            event = self.next()
            if isinstance(event, TransferDone):
                return event
            assert isinstance(event, TransferFailed)
            assert event.reason == STORE_HANGS

    def _number(self) -> TransferId:
        self._hauls += 1
        return TransferId(self._hauls)

    @property
    def firsts(self) -> list[int]:
        """What each row holds."""
        return [int(row[0]) if len(set(row.tolist())) == 1 else -1 for row in self.memory.rows]


def numbers(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def bench(store: MemoryStore) -> Iterator[Bench]:
    made = Bench(store)
    yield made
    store.go_on()
    made.transfers.close()


# ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_put_is_found_and_comes_back_into_other_rows(bench: Bench, store: MemoryStore) -> None:
    bench.put(*range(6))  # more than an arena holds
    assert bench.next() == TransferDone(TransferId(1), (True,) * 6)
    assert [len(names) for _, names in store.calls] == [4, 2]
    bench.look(0, 7, 5)
    assert bench.next() == TransferDone(TransferId(2), (True, False, True))
    bench.get((5, 4, 3, 2, 7, 0), (8, 9, 10, 11, 12, 13))
    assert bench.next() == TransferDone(TransferId(3), (True, True, True, True, False, True))
    assert bench.firsts == [1, 2, 3, 4, 5, 6, 7, 8, 6, 5, 4, 3, 13, 1, 15, 16]
    block = BLOCK_BYTES
    assert bench.transfers.tally() == StoreTally(
        stored_blocks=6, stored_bytes=6 * block, fetched_blocks=5, fetched_bytes=5 * block, missing_blocks=1
    )


def test_another_process_with_the_same_layout_finds_it_and_one_with_another_does_not(
    bench: Bench, store: MemoryStore
) -> None:
    bench.put(0)
    bench.next()
    assert list(store.objects) == NAMES[:1]
    other = Bench(store)
    other.get((0,), (3,))
    assert other.next() == TransferDone(TransferId(1), (True,))
    assert other.firsts[3] == 1
    other.transfers.close()


def test_what_finds_no_room_is_told_and_counted_and_fails_nothing(
    bench: Bench, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.objects_max = 2
    bench.put(0, 1, 2, 3)
    assert bench.next() == TransferDone(TransferId(1), (True, True, False, False))
    assert bench.transfers.tally() == StoreTally(stored_blocks=2, stored_bytes=2 * BLOCK_BYTES, unstored_blocks=2)
    bench.put(4)
    bench.next()
    assert [record.message for record in caplog.records] == [
        "the store has no room; KV that does not fit is computed again when it is needed"
    ], "once, not once a haul"


def test_a_store_that_is_full_says_so_once_and_once_when_it_has_room_again(
    bench: Bench, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton.store")
    for objects_max in (4, 1, 2, 2, 16, 16):
        store.objects_max = objects_max
        store.clear()
        bench.put(0, 1, 2)
        bench.next()
    assert [record.message for record in caplog.records] == [
        "the store has no room; KV that does not fit is computed again when it is needed",
        "the store has room again",
    ]


def test_buffers_of_all_calls_lie_in_the_one_arena_that_was_attached(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[memoryview] = []
    get, put = store.get, store.put

    def seen_get(names: list[str], into: list[memoryview]) -> list[int]:
        buffers.extend(into)
        return get(names, into)

    def seen_put(names: list[str], objects: list[memoryview]) -> list[bool]:
        buffers.extend(objects)
        return put(names, objects)

    monkeypatch.setattr(store, "get", seen_get)
    monkeypatch.setattr(store, "put", seen_put)
    bench = Bench(store, threads=3)
    (arena,) = store.arenas
    assert arena.nbytes == 6 * 4 * OBJECT_BYTES
    store.hang("put", "get")
    hauls = [bench.put(at) for at in range(3)] + [bench.get((at,), (at,)) for at in range(3)]
    store.wait_inside(len(hauls))
    begin = address(arena)
    places = sorted(address(buffer) - begin for buffer in buffers)
    assert places == [thread * 4 * OBJECT_BYTES for thread in range(6)], "each thread has a part of it"
    assert all(buffer.nbytes == HEADER_BYTES + BLOCK_BYTES for buffer in buffers)
    store.go_on()
    bench.transfers.close()


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


# ── what is bad ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def spoil(data: bytes, how: str) -> bytes:
    match how:
        case "a bit":
            return data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]
        case "cut":
            return data[:-1]
        case "too long":
            return data + b"!"
        case "empty":
            return b""
        case "noise":
            return bytes(len(data))
        case _:
            return data[:6] + b"\xff\xff" + data[8:]


@pytest.mark.parametrize(
    ("how", "flaw"),
    [
        ("a bit", "checksum"),
        ("cut", "torn"),
        ("too long", "torn"),
        ("empty", "torn"),
        ("noise", "not ours"),
        ("a version of later", "version"),
    ],
)
def test_what_is_bad_never_reaches_a_row_and_is_dropped_and_counted(
    bench: Bench, store: MemoryStore, how: str, flaw: str
) -> None:
    bench.put(0, 1, 2)
    bench.next()
    store.objects[NAMES[1]] = spoil(store.objects[NAMES[1]], how)
    bench.get((0, 1, 2), (8, 9, 10))
    assert bench.next() == TransferDone(TransferId(2), (True, False, True))
    assert bench.firsts[8:11] == [1, 10, 3], "the row is as it was"
    assert bench.transfers.tally().bad == {flaw: 1}
    assert store.dropped == [NAMES[1]]
    assert NAMES[1] not in store.objects
    bench.put(1)
    assert bench.next() == TransferDone(TransferId(3), (True,))
    bench.get((1,), (9,))
    assert bench.next() == TransferDone(TransferId(4), (True,)), "what was computed again takes its place"


def test_blocks_that_changed_places_are_not_taken_for_each_other(bench: Bench, store: MemoryStore) -> None:
    bench.put(0, 1)
    bench.next()
    store.objects[NAMES[0]], store.objects[NAMES[1]] = store.objects[NAMES[1]], store.objects[NAMES[0]]
    bench.get((0, 1), (8, 9))
    assert bench.next() == TransferDone(TransferId(2), (False, False))
    assert bench.firsts[8:10] == [9, 10]
    assert bench.transfers.tally().bad == {"other key": 2}


def test_a_block_of_another_layout_is_not_taken(bench: Bench, store: MemoryStore) -> None:
    foreign: queue.SimpleQueue[StorageEvent] = queue.SimpleQueue()
    other = StoreTransfers(store, bench.memory, OTHER_LAYOUT, foreign.put)
    other.start(Put(TransferId(1), KEYS[:1], numbers(0)))
    assert foreign.get(timeout=DEADLINE_S) == TransferDone(TransferId(1), (True,))
    other.close()
    assert NAMES[0] not in store.objects, "it has another name"
    store.objects[NAMES[0]] = store.objects.pop(object_name(OTHER_LAYOUT, KEYS[0]))
    bench.get((0,), (8,))
    assert bench.next() == TransferDone(TransferId(1), (False,))
    assert bench.transfers.tally().bad == {"other layout": 1}


def test_what_else_came_is_good_even_if_the_bad_cannot_be_dropped(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(store)
    bench.put(0, 1)
    bench.next()
    store.objects[NAMES[0]] = b"?"

    def drop(_names: list[str]) -> None:
        store.fails = "read-only"
        store.look([])

    monkeypatch.setattr(store, "drop", drop)
    bench.get((0, 1), (8, 9))
    assert bench.next() == TransferDone(TransferId(2), (False, True))
    assert bench.firsts[9] == 2
    bench.transfers.close()


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, HEADER_BYTES + BLOCK_BYTES - 1), flip=st.integers(1, 255))
def test_no_flipped_byte_anywhere_is_served(at: int, flip: int) -> None:
    store = MemoryStore()
    bench = Bench(store)
    bench.put(0)
    bench.next()
    whole = bytearray(store.objects[NAMES[0]])
    whole[at] ^= flip
    store.objects[NAMES[0]] = bytes(whole)
    bench.get((0,), (8,))
    assert bench.next() == TransferDone(TransferId(2), (False,))
    assert bench.firsts[8] == 9
    assert sum(bench.transfers.tally().bad.values()) == 1
    bench.transfers.close()


# ── a store that fails ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_fails_fails_the_haul_with_its_reason(
    bench: Bench, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton.store")
    store.fails = "refused"
    bench.put(0)
    bench.look(0)
    bench.get((0,), (1,))
    told = [bench.next() for _ in range(3)]
    assert sorted(event.transfer for event in told) == [1, 2, 3]
    assert all(isinstance(event, TransferFailed) and event.reason == "refused" for event in told)
    store.fails = ""
    bench.look(0)
    assert bench.next() == TransferDone(TransferId(4), (False,))
    assert bench.transfers.tally().errors == 3
    assert [record.message for record in caplog.records] == [
        "the store fails, and KV is computed again meanwhile: refused",
        "the store works again",
    ], "once each, not once a haul"


class Odd(MemoryStore):
    """Its library raises what it likes, or answers less than it was asked."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def _odd(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return []

    def look(self, names: Sequence[str]) -> list[bool]:
        return self._odd()

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        return self._odd()

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        return self._odd()

    def attach(self, arena: memoryview) -> None:
        self._odd()

    def close(self) -> None:
        self._odd()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("who am I?"), "RuntimeError: who am I?"),
        (ValueError("zip()"), "ValueError: zip()"),
        (InvariantViolated("ours"), "InvariantViolated: ours"),
        (BadStore("gone"), "gone"),
        (None, "the store answers for 0 of 1 objects"),
    ],
)
def test_whatever_a_store_raises_or_leaves_out_fails_the_haul_and_no_thread(error: Exception | None, reason: str) -> None:
    bench = Bench(Odd(error))
    for _ in range(2):  # the same threads again
        assert bench.next_of(bench.look(0)) == reason
        assert bench.next_of(bench.get((0,), (8,))) == reason
        assert bench.next_of(bench.put(0)) == reason
    assert bench.firsts[8] == 9
    bench.transfers.close()


def test_what_no_store_should_raise_is_logged_with_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.store")
    bench = Bench(Odd(RuntimeError("who am I?")))
    for _ in range(3):
        bench.look(0)
        bench.next()
    erred, fails = caplog.records
    assert (erred.levelno, erred.exc_info is not None) == (logging.ERROR, True)
    assert fails.message == "the store fails, and KV is computed again meanwhile: RuntimeError: who am I?"
    bench.transfers.close()


def test_what_else_came_is_good_even_if_dropping_the_bad_raises(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(store)
    bench.put(0, 1)
    bench.next()
    store.objects[NAMES[0]] = b"?"

    def drop(_names: list[str]) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(store, "drop", drop)
    bench.get((0, 1), (8, 9))
    assert bench.next() == TransferDone(TransferId(2), (False, True))
    bench.transfers.close()


# ── a store that hangs ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fence_is_answered_while_the_store_hangs_and_nothing_arrives_afterwards(bench: Bench, store: MemoryStore) -> None:
    bench.put(0)
    bench.next()
    store.hang("get")
    haul = bench.get((0,), (8,))
    store.wait_inside(1)
    assert bench.transfers.fence(haul)
    assert bench.next() == TransferFenced(haul)
    store.go_on()
    assert bench.retried(lambda: bench.get((7,), (9,))).came == (False,), "by the same thread, which has come back"
    assert bench.firsts[8] == 9
    assert not bench.transfers.fence(haul), "it is over"


def test_a_fence_that_finds_rows_being_written_is_answered_when_they_no_longer_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(0, 1, 2)
    bench.next()
    reached: queue.SimpleQueue[None] = queue.SimpleQueue()
    gate = threading.Semaphore(0)
    copyto = np.copyto

    def gated(target: Bytes2d, source: Bytes2d) -> None:
        reached.put(None)
        assert gate.acquire(timeout=DEADLINE_S)
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", gated)
    haul = bench.get((0, 1, 2), (8, 9, 10))
    gate.release()
    for _ in range(2):
        reached.get(timeout=DEADLINE_S)
    assert bench.transfers.fence(haul)
    assert bench.is_quiet, "the second row is being written"
    gate.release()
    assert bench.next() == TransferFenced(haul)
    assert bench.firsts[8:11] == [1, 2, 11], "the third never was"


def test_what_is_put_is_what_the_rows_held_although_they_are_reused_after_the_fence(
    bench: Bench, store: MemoryStore
) -> None:
    store.hang("put")
    haul = bench.put(0)
    store.wait_inside(1)
    assert bench.transfers.fence(haul)
    assert bench.next() == TransferFenced(haul)
    bench.memory.rows[0] = 77
    store.go_on()
    bench.retried(lambda: bench.put(1))
    assert bench.retried(lambda: bench.get((0,), (8,))).came == (True,)
    assert bench.firsts[8] == 1


def test_what_waits_behind_a_hanging_store_is_let_go_of_at_once(bench: Bench, store: MemoryStore) -> None:
    store.hang("put")
    bench.put(0)
    store.wait_inside(1)
    haul = bench.put(1)
    assert bench.transfers.fence(haul)
    assert bench.next() == TransferFenced(haul)
    store.go_on()
    assert bench.next() == TransferDone(TransferId(1), (True,))
    bench.put(2)
    assert bench.next() == TransferDone(TransferId(3), (True,))
    assert [names for call, names in store.calls] == [(NAMES[0],), (NAMES[2],)], "the one that waited was never put"


def test_a_fence_between_two_parts_ends_the_haul_there(bench: Bench, store: MemoryStore) -> None:
    store.hang("put")
    haul = bench.put(*range(9))
    store.wait_inside(1)
    bench.transfers.fence(haul)
    assert bench.next() == TransferFenced(haul)
    store.go_on()
    bench.retried(lambda: bench.put(12))
    assert [len(names) for _, names in store.calls] == [4, 1]


def test_while_all_threads_are_lost_hauls_fail_at_once_and_work_again_when_the_store_returns(store: MemoryStore) -> None:
    bench = Bench(store, threads=2)
    store.hang("put")
    first, second, third = bench.put(0), bench.put(1), bench.put(2)
    store.wait_inside(2)
    bench.transfers.fence(first)
    assert bench.next() == TransferFenced(first)
    assert bench.is_quiet, "the second may return, and the third waits for that"
    bench.transfers.fence(second)
    assert [bench.next(), bench.next()] == [TransferFenced(second), TransferFailed(third, STORE_HANGS)]
    fourth = bench.put(3)
    assert bench.next() == TransferFailed(fourth, STORE_HANGS)
    fifth = bench.look(0)
    assert bench.next() == TransferDone(fifth, (False,)), "looking has a thread of its own"
    assert bench.transfers.tally().errors == 2
    store.go_on()
    assert bench.retried(lambda: bench.put(4)).came == (True,)
    bench.transfers.close()
    assert store.closed


def test_no_more_wait_than_may(bench: Bench, store: MemoryStore) -> None:
    store.hang("put")
    for _ in range(9):
        bench.put(0)
        store.wait_inside(1)
    assert bench.is_quiet
    haul = bench.put(1)
    assert bench.next() == TransferFailed(haul, "too many transfers wait for the store")
    store.go_on()
    assert [bench.next().transfer for _ in range(9)] == list(range(1, 10))


def test_a_haul_that_was_never_ordered_is_not_known(bench: Bench) -> None:
    assert not bench.transfers.fence(TransferId(99))
    assert bench.is_quiet


def test_rows_that_are_not_there_are_a_bug_and_say_so(bench: Bench) -> None:
    with pytest.raises(InvariantViolated):
        bench.get((0,), (ROWS,))
    with pytest.raises(InvariantViolated):
        bench.put(-1)


def test_closing_does_not_wait_for_a_store_that_hangs(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.store_transfers.CLOSE_S", 0.01)
    bench = Bench(store)
    store.hang("get")
    bench.get((0,), (8,))
    store.wait_inside(1)
    bench.transfers.close()
    assert not store.closed, "somebody is still inside"
    store.go_on()


def test_closing_waits_no_longer_for_many_threads_that_hang_than_for_one(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(store, threads=3)
    store.hang("get", "put")
    hauls = [bench.get((at,), (at,)) for at in range(3)] + [bench.put(at) for at in range(3)]
    store.wait_inside(len(hauls))
    clock_s, really_join = 100.0, threading.Thread.join

    def join(thread: threading.Thread, timeout: float) -> None:
        nonlocal clock_s
        if "look" in thread.name:
            really_join(thread, DEADLINE_S)
        else:
            clock_s += timeout

    with monkeypatch.context() as patched:
        patched.setattr("baton.kv.store_transfers.time.monotonic", lambda: clock_s)
        patched.setattr(threading.Thread, "join", join)
        bench.transfers.close()
    assert clock_s == 100.0 + CLOSE_S
    assert not store.closed
    store.go_on()
