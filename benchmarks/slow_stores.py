"""Stores with artificial delays.

Data is kept in another store. `release` ends all waiting, so that threads can be joined.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from baton.kv.store import Store, StoreFailed, StoreStat

T = TypeVar("T")


class DelayedStore:
    """Every call takes `times` as long as the store behind it needs for it."""

    def __init__(self, inner: Store, times: float) -> None:
        self.kind = inner.kind
        self._inner = inner
        self._times = times
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def look(self, names: Sequence[str]) -> list[bool]:
        return self._delayed(lambda: self._inner.look(names))

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        return self._delayed(lambda: self._inner.get(names, into))

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        return self._delayed(lambda: self._inner.put(names, objects))

    def drop(self, names: Sequence[str]) -> None:
        self._delayed(lambda: self._inner.drop(names))

    def attach(self, arena: memoryview) -> None:
        self._inner.attach(arena)

    def names(self) -> Iterator[tuple[str, int]]:
        return self._inner.names()

    def stat(self) -> StoreStat:
        return self._inner.stat()

    def clear(self) -> int:
        return self._inner.clear()

    def close(self) -> None:
        self._inner.close()

    def _delayed(self, call: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        answer = call()
        self._released.wait(self.delay_s(time.perf_counter() - began_s))
        return answer

    def delay_s(self, spent_s: float) -> float:
        """Further delay of a call that took `spent_s`."""
        return (self._times - 1) * spent_s


class SilentStore(DelayedStore):
    """Calls block until `release`, then fail."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, times=1)

    def _delayed(self, call: Callable[[], T]) -> T:  # noqa: ARG002  nobody is asked
        self._released.wait()
        raise StoreFailed("it has been silent all the time")
