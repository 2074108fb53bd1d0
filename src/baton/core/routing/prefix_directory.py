"""The prefixes cached at each instance, by block key: those it reported and, for a short while, those expected of it.

Each instance has a bit. A key stands for its whole prefix, so one walk along the keys of a prompt, with a mask of the
instances that had all keys so far, finds the longest prefix of every instance. The keys of one instance are bounded by its
pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.core.engine.change_journal import CachedKeysChanged
from baton.core.routing.events import Session

ASSUMED_US = 10_000_000
"""Time for which the prefix of a placed prompt is assumed to be cached before the instance has reported it."""


@dataclass(slots=True, eq=False)
class _Holder:
    bit: int
    keys_max: int
    said: dict[bytes, None] = field(default_factory=dict)
    """In the order of the reports; the oldest is dropped when there are too many."""
    assumed: dict[bytes, int] = field(default_factory=dict)
    """Key → time until which it is assumed."""


class PrefixDirectory:
    def __init__(self) -> None:
        self._holders: dict[Session, _Holder] = {}
        self._by_bit: dict[int, Session] = {}
        self._said: dict[bytes, int] = {}
        self._assumed: dict[bytes, int] = {}
        self._expiry: deque[tuple[int, Session, Sequence[bytes]]] = deque()

    def __len__(self) -> int:
        """Keys that instances have reported."""
        return len(self._said)

    def open(self, session: Session, blocks: int) -> None:
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        self._by_bit[bit] = session
        self._holders[session] = _Holder(bit, blocks)

    def close(self, session: Session) -> None:
        """The session has ended: forget its keys."""
        holder = self._holders.pop(session)
        del self._by_bit[holder.bit]
        _clear(self._said, holder.said, holder.bit)
        _clear(self._assumed, holder.assumed, holder.bit)

    def hear(self, session: Session, names: CachedKeysChanged) -> None:
        holder = self._holders[session]
        bit, said = holder.bit, holder.said
        if names.fresh:
            _clear(self._said, said, bit)
            said.clear()
        for key in names.forgotten:
            if key in said:
                del said[key]
                _clear(self._said, (key,), bit)
        masks = self._said
        for key in names.named:
            said[key] = None
            masks[key] = masks.get(key, 0) | bit
        while len(said) > holder.keys_max:
            oldest = next(iter(said))
            del said[oldest]
            _clear(masks, (oldest,), bit)

    def assume(self, session: Session, keys: Sequence[bytes], now_us: int) -> None:
        """A prompt with these keys was placed at this instance."""
        holder = self._holders[session]
        keys = keys[: holder.keys_max - len(holder.assumed)]
        until_us = now_us + ASSUMED_US
        for key in keys:
            holder.assumed[key] = until_us
            self._assumed[key] = self._assumed.get(key, 0) | holder.bit
        if keys:
            self._expiry.append((until_us, session, keys))

    def expire(self, now_us: int) -> None:
        while self._expiry and self._expiry[0][0] <= now_us:
            _, session, keys = self._expiry.popleft()
            holder = self._holders.get(session)
            if holder is None:
                continue
            over = [key for key in keys if holder.assumed.get(key, now_us + 1) <= now_us]
            for key in over:
                del holder.assumed[key]
            _clear(self._assumed, over, holder.bit)

    def longest(self, keys: Sequence[bytes]) -> dict[Session, int]:
        """The number of leading blocks that each instance holds; those with none are left out."""
        said, assumed, found = self._said, self._assumed, dict[Session, int]()
        having = -1
        depth = 0
        for depth, key in enumerate(keys):
            mask = said.get(key, 0) | assumed.get(key, 0)
            if having & mask != having:
                if depth:
                    self._note(found, having & ~mask, depth)
                having = having & mask if depth else mask
                if not having:
                    return found
        if keys:
            self._note(found, having, depth + 1)
        return found

    def _note(self, found: dict[Session, int], mask: int, depth: int) -> None:
        while mask:
            bit = mask & -mask
            found[self._by_bit[bit]] = depth
            mask ^= bit


def _clear(masks: dict[bytes, int], keys: Iterable[bytes], bit: int) -> None:
    for key in keys:
        left = masks[key] & ~bit
        if left:
            masks[key] = left
        else:
            del masks[key]
