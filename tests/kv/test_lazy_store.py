"""A store that is down as an instance starts is used as soon as it is there."""

from __future__ import annotations

import pytest

from baton.kv.lazy_store import LazyStore
from baton.kv.store import BadStore, Store, StoreFailed
from tests.support.memory_store import MemoryStore


def test_a_store_is_opened_when_it_is_used_and_again_until_that_works() -> None:
    inner, troubles = MemoryStore(), [StoreFailed("down"), BadStore("its folder is a file now")]

    def opener() -> Store:
        if troubles:
            raise troubles.pop(0)
        return inner

    store = LazyStore("memory", opener)
    arena = memoryview(bytearray(64))
    store.attach(arena)
    with pytest.raises(StoreFailed, match="down"):
        store.look(["a"])
    with pytest.raises(StoreFailed, match="its folder"):
        store.put(["a"], [arena])
    assert store.put(["a"], [arena]) == [True]
    assert inner.arenas == [arena], "it learns of what was attached before it was there"
    later = memoryview(bytearray(8))
    store.attach(later)
    assert inner.arenas == [arena, later]
    assert (store.look(["a", "b"]), store.get(["a"], [arena])) == ([True, False], [64])
    assert (list(store.names()), store.stat().objects) == ([("a", 64)], 1)
    store.drop(["a"])
    assert store.clear() == 0
    store.close()
    assert inner.closed


def test_one_that_never_opened_closes() -> None:
    def opener() -> Store:
        raise StoreFailed("down")

    LazyStore("memory", opener).close()


def test_whatever_opening_raises_is_a_failure_and_it_is_tried_again() -> None:
    inner, troubles = MemoryStore(), [RuntimeError("a bug of the library"), UnicodeError("label too long")]

    def opener() -> Store:
        if troubles:
            raise troubles.pop(0)
        return inner

    store = LazyStore("memory", opener)
    for reason in ("RuntimeError: a bug of the library", "UnicodeError: label too long"):
        with pytest.raises(StoreFailed, match=reason):
            store.look(["a"])
    assert store.look(["a"]) == [False]
