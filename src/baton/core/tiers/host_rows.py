"""Rows of host memory and the prefixes whose KV they hold: the ledger of the second tier.

A row is *free*, *filling* (a transfer writes it; look-ups do not find it), or *ready* under one key. A ready row is not
evicted while a transfer reads it; other ready rows are evicted when room is needed, least recently used first. Looking up
changes nothing; only `take` evicts.

Of rows that became ready together, the deeper one of a chain counts as older: it is of no use without those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from baton.core.engine.plan import NO_INT32S, Int32s
from baton.core.engine.prefix import Key
from baton.core.errors import InvariantViolated


class HostRows:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._ready: OrderedDict[Key, int] = OrderedDict()
        """Least recently used first."""
        self._filling: dict[Key, int] = {}
        self._readers = [0] * rows
        self._free = list(range(rows - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.rows - len(self._free)

    def __contains__(self, key: Key) -> bool:
        return key in self._ready or key in self._filling

    def run(self, keys: Sequence[Key]) -> Int32s:
        """The rows of the longest leading run of keys that are ready."""
        if not self._ready:
            return NO_INT32S
        rows = []
        for key in keys:
            row = self._ready.get(key)
            if row is None:
                break
            rows.append(row)
        return np.array(rows, dtype=np.int32)

    def row_of(self, key: Key) -> int | None:
        """The row of a ready key."""
        return self._ready.get(key)

    def take(self, keys: Sequence[Key]) -> Int32s:
        """Take rows to fill for these keys, which have none: for as many from the first on as there is room."""
        self._evict(len(keys) - len(self._free))
        taken = []
        for key in keys[: len(self._free)]:
            if key in self:
                raise InvariantViolated("a prefix was to be brought into host memory that is there already")
            self._filling[key] = row = self._free.pop()
            taken.append(row)
        return np.array(taken, dtype=np.int32)

    def filled(self, keys: Sequence[Key]) -> None:
        """These rows, given in sequence order, are filled."""
        for key in reversed(keys):
            self._ready[key] = self._filling.pop(key)

    def spoilt(self, keys: Iterable[Key]) -> None:
        """Filling these failed, and nothing writes to their rows any more."""
        self._free.extend(self._filling.pop(key) for key in keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """These ready keys, given in sequence order, were used."""
        for key in reversed(keys):
            self._ready.move_to_end(key)

    def read(self, keys: Sequence[Key]) -> None:
        """A transfer reads these ready rows."""
        self.touch(keys)
        for key in keys:
            self._readers[self._ready[key]] += 1

    def let_go(self, keys: Iterable[Key]) -> None:
        """The transfer does not read them any more."""
        for key in keys:
            row = self._ready[key]
            if not self._readers[row]:
                raise InvariantViolated(f"host row {row} was let go of more often than it was read")
            self._readers[row] -= 1

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        idle = (key for key, row in self._ready.items() if not self._readers[row])
        for key in [key for key, _ in zip(idle, range(count), strict=False)]:
            self._free.append(self._ready.pop(key))

    def audit(self, reading: Sequence[Key]) -> None:
        """For the laws: every row is in one place, and has as many readers as transfers that read it."""
        rows = sorted([*self._free, *self._filling.values(), *self._ready.values()])
        if rows != list(range(self.rows)):
            raise InvariantViolated("a row of host memory is in two places, or in none")
        readers = [0] * self.rows
        for key in reading:
            readers[self._ready[key]] += 1
        if readers != self._readers:
            raise InvariantViolated("rows of host memory have other numbers of readers than transfers that read them")
