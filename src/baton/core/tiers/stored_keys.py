"""Keys that the store was last known to have. It may have dropped them since: an entry is believed for five minutes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from baton.core.engine.prefix import Key

BELIEVED_US = 300_000_000
"""Time for which an entry is believed: the store may evict, or have been emptied."""
KEPT_PER_ROW = 4


class StoredKeys:
    def __init__(self, host_rows: int) -> None:
        self._known: OrderedDict[Key, int] = OrderedDict()
        """Key → time at which the store last had it, the oldest first."""
        self._known_max = KEPT_PER_ROW * host_rows
        """Remember at most 4 × host_rows stored keys."""

    def remember(self, key: Key, now_us: int) -> None:
        self._known[key] = now_us
        self._known.move_to_end(key)
        if len(self._known) > self._known_max:
            self._known.popitem(last=False)

    def forget(self, keys: Iterable[Key]) -> None:
        """The store is not believed to have these any more."""
        for key in keys:
            self._known.pop(key, None)

    def clear(self) -> None:
        self._known.clear()

    def has(self, key: Key, now_us: int) -> bool:
        """Whether the store had it within the last BELIEVED_US."""
        known_us = self._known.get(key)
        return known_us is not None and now_us - known_us < BELIEVED_US
