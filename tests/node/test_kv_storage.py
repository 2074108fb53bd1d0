"""KV beyond the pool: orders reach the right part, fences are answered, bad settings are refused."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.core.config import BadConfig
from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import KEY_BYTES, Key
from baton.core.errors import BatonError, InvariantViolated
from baton.core.tiers.transfers import (
    CopyIn,
    CopyOut,
    FenceTransfer,
    Get,
    Look,
    Put,
    StorageEvent,
    TransferDone,
    TransferFenced,
    TransferId,
)
from baton.executor.contract import ExecutorShape
from baton.kv.block_access import HostBlocks
from baton.kv.store import BadStore, Store, StoreFailed
from baton.kv.transfer_contract import KvLayout
from baton.node import kv_storage as module
from baton.node.engine_setup import worker_config
from baton.node.kv_storage import KvStorage, check_storage, open_kv_store
from baton.node.service import ServeSettings
from baton.node.settings import EngineSettings
from tests.support.memory_store import DEADLINE_S, MemoryStore

LAYOUT = KvLayout(b"model", "float32", 4, (32, 32))
BLOCKS, ROWS = 6, 4
KEYS = tuple(Key(bytes([number]) * KEY_BYTES) for number in range(1, 5))


class Bench:
    def __init__(self, store: Store | None) -> None:
        self.pool = np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8), LAYOUT.block_bytes).reshape(BLOCKS, -1)
        self._told: queue.SimpleQueue[StorageEvent] = queue.SimpleQueue()
        self.storage = KvStorage(HostBlocks(self.pool), LAYOUT, ROWS, store, self._told.put)

    def next(self) -> StorageEvent:
        return self._told.get(timeout=DEADLINE_S)


def numbers(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


def settings(**more: object) -> EngineSettings:
    return EngineSettings("", None, b"", **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make log lines visible, whatever an earlier command has done to the logger."""
    monkeypatch.setattr(logging.getLogger("baton"), "propagate", True)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def bench(store: MemoryStore) -> Iterator[Bench]:
    made = Bench(store)
    yield made
    store.go_on()
    made.storage.close()


def test_a_block_goes_to_the_store_and_comes_back_into_the_pool_of_another_instance(
    bench: Bench, store: MemoryStore
) -> None:
    other = Bench(store)
    bench.storage.carry_out(CopyOut(TransferId(1), numbers(4), numbers(2)))
    assert bench.next() == TransferDone(TransferId(1), (True,))
    bench.storage.carry_out(Put(TransferId(2), KEYS[:1], numbers(2)))
    assert bench.next() == TransferDone(TransferId(2), (True,))
    other.storage.carry_out(Look(TransferId(1), KEYS[:2]))
    assert other.next() == TransferDone(TransferId(1), (True, False))
    other.storage.carry_out(Get(TransferId(2), KEYS[:1], numbers(0)))
    assert other.next() == TransferDone(TransferId(2), (True,))
    other.storage.carry_out(CopyIn(TransferId(3), numbers(0), numbers(1)))
    assert other.next() == TransferDone(TransferId(3), (True,))
    assert other.pool[:, 0].tolist() == [1, 5, 3, 4, 5, 6]
    wrote, read = bench.storage.traffic(), other.storage.traffic()
    assert (wrote.saved_bytes, wrote.stored_bytes, read.fetched_bytes, read.loaded_bytes) == (64, 64, 64, 64)
    assert (wrote.errors, wrote.missing_blocks, sum(wrote.bad_blocks.values())) == (0, 0, 0)
    assert {"torn", "checksum", "other key", "other layout"} <= set(wrote.bad_blocks), "all flaws from the start"
    other.storage.close()
    assert store.closed


def test_a_fence_is_answered_for_whomever_and_for_nobody(bench: Bench, store: MemoryStore) -> None:
    store.hang("put")
    bench.storage.carry_out(Put(TransferId(1), KEYS[:1], numbers(2)))
    store.wait_inside(1)
    for haul in (1, 1, 99):
        bench.storage.carry_out(FenceTransfer(TransferId(haul)))
        assert bench.next() == TransferFenced(TransferId(haul))
    bench.storage.carry_out(CopyOut(TransferId(2), numbers(4), numbers(2)))
    assert bench.next() == TransferDone(TransferId(2), (True,)), "copies do not wait for the store"


def test_without_a_store_there_is_host_memory_alone() -> None:
    bench = Bench(None)
    bench.storage.carry_out(CopyOut(TransferId(1), numbers(4), numbers(2)))
    assert bench.next() == TransferDone(TransferId(1), (True,))
    assert bench.storage.traffic().bad_blocks == {}
    with pytest.raises(InvariantViolated, match="there is none"):
        bench.storage.carry_out(Look(TransferId(2), KEYS[:1]))
    bench.storage.close()


# ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_store_is_opened_where_none_is_set() -> None:
    assert open_kv_store(settings()) is None


def test_a_folder_is_opened_with_its_limit(tmp_path: Path) -> None:
    store = open_kv_store(settings(kv_store=f"file:{tmp_path}/kv", kv_store_limit_bytes=1 << 20))
    assert store is not None
    assert (tmp_path / "kv").is_dir()
    assert store.stat().limit_bytes == 1 << 20
    store.close()


def test_a_store_that_cannot_be_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadStore, match="is a file, not a folder"):
        open_kv_store(settings(kv_store=f"file:{tmp_path}/file"))


def test_a_store_that_is_down_is_told_and_used_when_it_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: MemoryStore
) -> None:
    store.fails = "connection refused"
    monkeypatch.setattr(module, "open_store", lambda *_, **__: store)
    opened = open_kv_store(settings(kv_store="valkey://me:secret@localhost:1/0"))
    assert opened is not None
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (
            logging.WARNING,
            "the store valkey://localhost:1/0 fails; serving begins without it: connection refused",
        )
    ]
    store.fails = ""
    assert opened.look(["a"]) == [False]


def test_one_that_cannot_even_be_opened_now_is_opened_later(monkeypatch: pytest.MonkeyPatch, store: MemoryStore) -> None:
    troubles = [StoreFailed("no master")]

    def opener(*_: object, **__: object) -> Store:
        if troubles:
            raise troubles.pop()
        return store

    monkeypatch.setattr(module, "open_store", opener)
    opened = open_kv_store(settings(kv_store="mooncake://localhost:1"))
    assert opened is not None
    assert opened.look(["a"]) == [False]


@pytest.mark.parametrize("call", ["open", "look"])
def test_a_library_that_raises_what_it_likes_does_not_end_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: MemoryStore, call: str
) -> None:
    def odd(*_: object, **__: object) -> Store:
        raise RuntimeError("a bug")

    monkeypatch.setattr(store, "look", odd)
    monkeypatch.setattr(module, "open_store", odd if call == "open" else lambda *_, **__: store)
    assert open_kv_store(settings(kv_store="valkey://localhost:1/0")) is not None
    erred, told = caplog.records
    assert (erred.levelno, erred.exc_info is not None) == (logging.ERROR, True)
    assert told.message == "the store valkey://localhost:1/0 fails; serving begins without it: RuntimeError: a bug"


def test_a_store_that_hangs_does_not_hold_up_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: MemoryStore
) -> None:
    gate = threading.Event()

    def opener(*_: object, **__: object) -> Store:
        assert gate.wait(DEADLINE_S)
        return store

    monkeypatch.setattr(module, "open_store", opener)
    opened = open_kv_store(settings(kv_store="file:/nfs"), wait_s=0.01)
    assert opened is not None
    assert "has not answered in 0.01 s" in caplog.text
    bench = Bench(opened)
    bench.storage.carry_out(Put(TransferId(1), KEYS[:1], numbers(2)))
    bench.storage.carry_out(FenceTransfer(TransferId(1)))
    assert bench.next() == TransferFenced(TransferId(1)), "also while it is being opened"
    gate.set()
    bench.storage.carry_out(Look(TransferId(2), KEYS[:1]))
    assert bench.next() == TransferDone(TransferId(2), (False,))
    assert len(store.arenas) == 1, "it learns of memory that was attached before it was there"
    bench.storage.close()


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (settings(kv_store="somewhere"), "is not the address of a store"),
        (settings(kv_store="file:"), "names no folder"),
        (settings(kv_store_limit_bytes=1), "--kv-store-limit is only for --kv-store"),
        (settings(kv_store="file:/kv", host_memory_bytes=0), "--kv-store needs --host-memory"),
        (settings(kv_store="file:/kv", prefix_cache=False), "--kv-store needs the prefix cache"),
        (settings(host_memory_bytes=1, prefix_cache=False), "--host-memory needs the prefix cache"),
    ],
)
def test_settings_that_cannot_work_are_told_before_anything_is_loaded(engine: EngineSettings, said: str) -> None:
    with pytest.raises(BatonError, match=said):
        ServeSettings(engine=engine)


def test_settings_that_can_are_not() -> None:
    for engine in (settings(), settings(host_memory_bytes=1), settings(kv_store="file:/kv", kv_store_limit_bytes=1)):
        check_storage(engine)


SHAPE = ExecutorShape(slots=4, blocks=8, block_size=4, context_tokens=32)


def test_host_memory_is_as_many_rows_as_whole_blocks_fit() -> None:
    config = worker_config(
        settings(
            kv_store="file:/kv", host_memory_bytes=1000, save_preempted=False, save_finished=False, cache_outputs=False
        ),
        SHAPE,
        block_bytes=64,
    )
    tiers = config.tiers
    assert (tiers.host_rows, tiers.store) == (15, True)
    assert (tiers.save_preempted, tiers.save_finished, tiers.cache_outputs) == (False, False, False)
    assert worker_config(settings(), SHAPE, block_bytes=64).tiers.host_rows == 0
    assert worker_config(settings(host_memory_bytes=1000), SHAPE).tiers.host_rows == 0, "there is no KV to keep"


def test_host_memory_without_room_for_a_block_is_told() -> None:
    with pytest.raises(BadConfig, match="--host-memory of 63 bytes has no room for one block of 64"):
        worker_config(settings(host_memory_bytes=63), SHAPE, block_bytes=64)


def test_a_folder_that_others_may_write_is_no_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    opened = open_kv_store(settings(kv_store=f"file:{folder}"))
    assert opened is not None
    opened.close()
    folder.chmod(0o777)
    with pytest.raises(BadStore, match="can be written by everybody"):
        open_kv_store(settings(kv_store=f"file:{folder}"))
