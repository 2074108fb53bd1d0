from __future__ import annotations

import threading

import pytest

from baton.kv.store import StoreFailed
from benchmarks.slow_stores import DelayedStore, SilentStore
from tests.support.memory_store import MemoryStore

NAME = f"{'0' * 16}/{'1' * 32}"


def test_a_delayed_store_answers_the_same_and_takes_so_many_times_as_long() -> None:
    store = DelayedStore(MemoryStore(), times=5)
    assert store.put([NAME], [memoryview(b"kept")]) == [True]
    into = bytearray(4)
    assert store.get([NAME], [memoryview(into)]) == [4]
    assert bytes(into) == b"kept"
    store.drop([NAME])
    assert store.look([NAME]) == [False]
    assert store.delay_s(0.5) == 2.0


def test_a_delayed_store_that_is_released_delays_no_more() -> None:
    store = DelayedStore(MemoryStore(), times=1e9)
    store.release()
    assert store.look([NAME]) == [False]  # else it would take hours


def test_a_silent_store_answers_nobody_until_it_is_released() -> None:
    store, failed = SilentStore(MemoryStore()), threading.Event()

    def ask() -> None:
        with pytest.raises(StoreFailed):
            store.look([NAME])
        failed.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert not failed.is_set()
    store.release()
    asking.join(10)
    assert failed.is_set()
