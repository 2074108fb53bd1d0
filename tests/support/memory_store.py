"""A store in memory that hangs, fails, lies and fills up when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from baton.kv.store import MISSING, OVERSIZED, StoreFailed, StoreStat

DEADLINE_S = 20


class MemoryStore:
    kind = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.dropped: list[str] = []
        self.arenas: list[memoryview] = []
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.fails = ""
        """Why every call fails, while it does."""
        self.objects_max: int | None = None
        self.closed = False
        self._news = threading.Condition()
        self._hangs: set[str] = set()
        self._inside = 0

    # ── what a test does to it ───────────────────────────────────────────────────────────────────────────────────────────

    def hang(self, *calls: str) -> None:
        """These calls do not return until `go_on`."""
        with self._news:
            self._hangs |= set(calls)

    def go_on(self) -> None:
        with self._news:
            self._hangs.clear()
            self._news.notify_all()

    def wait_inside(self, count: int) -> None:
        """Until so many calls hang."""
        with self._news:
            if not self._news.wait_for(lambda: self._inside >= count, DEADLINE_S):
                raise TimeoutError(f"{self._inside} calls hang, not {count}")

    def _called(self, call: str, names: Sequence[str]) -> None:
        with self._news:
            self.calls.append((call, tuple(names)))
            self._inside += 1
            self._news.notify_all()
            self._news.wait_for(lambda: call not in self._hangs)
            self._inside -= 1
        if self.fails:
            raise StoreFailed(self.fails)

    # ── what a store does ────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, names: Sequence[str]) -> list[bool]:
        self._called("look", names)
        return [name in self.objects for name in names]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        self._called("get", names)
        return [self._get(name, buffer) for name, buffer in zip(names, into, strict=True)]

    def _get(self, name: str, buffer: memoryview) -> int:
        found = self.objects.get(name)
        if found is None:
            return MISSING
        if len(found) > len(buffer):
            return OVERSIZED
        buffer[: len(found)] = found
        return len(found)

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        before = [bytes(one) for one in objects]
        self._called("put", names)
        if before != [bytes(one) for one in objects]:
            raise RuntimeError("what is being put was written to")
        return [self._put(name, data) for name, data in zip(names, before, strict=True)]

    def _put(self, name: str, data: bytes) -> bool:
        if self.objects_max is not None and len(self.objects) >= self.objects_max:
            return False
        self.objects[name] = data
        return True

    def drop(self, names: Sequence[str]) -> None:
        self._called("drop", names)
        self.dropped += names
        for name in names:
            self.objects.pop(name, None)

    def attach(self, arena: memoryview) -> None:
        self.arenas.append(arena)

    def names(self) -> Iterator[tuple[str, int]]:
        return ((name, len(data)) for name, data in self.objects.items())

    def stat(self) -> StoreStat:
        return StoreStat(self.kind, len(self.objects), sum(map(len, self.objects.values())), None)

    def clear(self) -> int:
        count = len(self.objects)
        self.objects.clear()
        return count

    def close(self) -> None:
        self.closed = True
