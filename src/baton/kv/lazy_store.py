"""A store that is opened when it is first used, and again until that works.

So an instance that starts while its store is down, or hangs, serves without it, and has it as soon as it is there. Until
then calls fail or hang, as those of any store may; how often one is tried is for the caller to decide. `attach` and `close`
do neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from baton.kv.store import BadStore, Store, StoreFailed, StoreStat
from baton.kv.store_guard import StoreGuard


class LazyStore:
    def __init__(self, kind: str, opener: Callable[[], Store]) -> None:
        self.kind = kind
        self._opener = opener
        self._store: Store | None = None
        self._arenas: list[memoryview] = []
        self._opening = threading.Lock()
        """May be held for long."""
        self._guard = StoreGuard()
        self._lock = threading.Lock()
        """Over the arenas, and whether the store is there."""

    def look(self, names: Sequence[str]) -> list[bool]:
        return self._opened().look(names)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        return self._opened().get(names, into)

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        return self._opened().put(names, objects)

    def drop(self, names: Sequence[str]) -> None:
        self._opened().drop(names)

    def attach(self, arena: memoryview) -> None:
        with self._lock:
            self._arenas.append(arena)
            if self._store is not None:
                self._store.attach(arena)

    def names(self) -> Iterator[tuple[str, int]]:
        return self._opened().names()

    def stat(self) -> StoreStat:
        return self._opened().stat()

    def clear(self) -> int:
        return self._opened().clear()

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()

    def open(self) -> Store:
        """Raises BadStore where there can be no such store; whoever only uses it sees one that fails."""
        with self._opening, self._guard.guarded():
            return self._store or self._open()

    def _open(self) -> Store:
        store = self._opener()
        with self._lock:
            for arena in self._arenas:
                store.attach(arena)
            self._store = store
        return store

    def _opened(self) -> Store:
        try:
            return self.open()
        except BadStore as error:
            raise StoreFailed(str(error)) from error
