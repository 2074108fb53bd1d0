"""Who owns each block of KV: the one ledger, from which every gauge is read.

A block has a reference count, perhaps a pin and perhaps a name in the prefix index. Its state follows from those three and
is stored nowhere:

    pinned                         leased (granted to a peer's prefill) or receiving (its KV is arriving)
    referenced by a row            running
    referenced by copies only      leaving     (being copied to host memory; comes back when that is over)
    no references, named           evictable   (cached; goes when room is needed, least recently used first, leaves first)
    no references, no name         free

`take` is the only thing that evicts; looking a prefix up and holding its blocks never does. A pinned block has an owner, who
takes the pin away when nothing outside the engine can write to it any more; until then it cannot be dropped. A copy that
reads blocks has a reference to each (`lend`), so that nobody writes there before it has let go (`give_back`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.errors import InvariantViolated


class Pin(IntEnum):
    """What keeps a block from being dropped."""

    NONE = 0
    LEASED = 1
    RECEIVING = 2


@dataclass(frozen=True, slots=True)
class BlockGauges:
    free: int
    evictable: int
    running: int
    leased: int = 0
    """Granted to a peer's prefill of which nothing has arrived."""
    receiving: int = 0
    """KV of a peer's prefill, or from host memory, is arriving in them."""
    leaving: int = 0
    """Nobody uses them, and they are still being copied to host memory."""


class BlockPool:
    def __init__(self, blocks: int, prefix: PrefixIndex) -> None:
        self.blocks = blocks
        self.prefix = prefix
        self._references = np.zeros(blocks, dtype=np.int32)
        self._named = np.zeros(blocks, dtype=np.bool_)
        self._lent = np.zeros(blocks, dtype=np.int32)
        """How many of the references are copies'."""
        self._lent_in_all = 0
        self.leaving = 0
        """Blocks that only copies refer to."""
        self._pins = np.zeros(blocks, dtype=np.int8)
        self._pinned = dict.fromkeys(Pin, 0)
        """How many blocks have each pin; not kept for NONE."""
        self._free = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        """A stack: the first `_free_count` entries are the free blocks."""
        self._free_count = blocks
        self._evictable_count = 0
        self._used_at = [0] * blocks
        """When a block lost its last reference, in ticks of `_clock`. A list: it is read and written one by one."""
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []
        """Heap of (used_at, block). Entries go stale when a block is held again or gains a child; they are skipped."""

    @property
    def available(self) -> int:
        """How many blocks `take` could give."""
        return self._free_count + self._evictable_count

    def gauges(self) -> BlockGauges:
        leased, receiving = self._pinned[Pin.LEASED], self._pinned[Pin.RECEIVING]
        running = self.blocks - self._free_count - self._evictable_count - leased - receiving - self.leaving
        return BlockGauges(self._free_count, self._evictable_count, running, leased, receiving, self.leaving)

    def references(self) -> npt.NDArray[np.int32]:
        """A copy, for the laws."""
        return self._references.copy()

    def lent(self) -> npt.NDArray[np.int32]:
        """A copy, for the laws."""
        return self._lent.copy()

    def pins(self) -> npt.NDArray[np.int8]:
        """A copy, for the laws."""
        return self._pins.copy()

    def pinned(self, blocks: Int32s) -> Int32s:
        """Those of these that have a pin."""
        return blocks[self._pins[blocks] > 0]

    def pin(self, blocks: Int32s, pin: Pin) -> None:
        """These blocks, which have one owner and one and the same pin so far, are pinned otherwise from here on."""
        if not len(blocks):
            return
        before = Pin(int(self._pins[blocks[0]]))
        self._pinned[before] -= len(blocks)
        self._pinned[pin] += len(blocks)
        self._pins[blocks] = pin

    def free_blocks(self) -> Int32s:
        """A copy, for the laws."""
        return self._free[: self._free_count].copy()

    def take(self, count: int) -> Int32s:
        """`count` blocks with one reference each, evicting what is cached where nothing is free."""
        if count > self.available:
            raise InvariantViolated(f"{count} blocks asked for, {self.available} available")
        if self._free_count < count:
            self._evict(count - self._free_count)
        self._free_count -= count
        taken = self._free[self._free_count : self._free_count + count].copy()
        self._references[taken] = 1
        return taken

    def unreferenced(self, blocks: Int32s) -> int:
        """How many of these would leave `available` if they were held."""
        return int(np.count_nonzero(self._references[blocks] == 0))

    def exclusive(self, blocks: Int32s) -> int:
        """How many of these would come back if their only holder dropped them."""
        return int(np.count_nonzero(self._references[blocks] == 1))

    def hold(self, blocks: Int32s) -> None:
        """One more reference to each of these distinct, named blocks."""
        self._evictable_count -= self.unreferenced(blocks)
        self.leaving -= self._read_only_by_copies(blocks)
        self._references[blocks] += 1

    def lend(self, blocks: Int32s) -> None:
        """A copy reads these distinct, named blocks, which rows hold."""
        self._references[blocks] += 1
        self._lent[blocks] += 1
        self._lent_in_all += len(blocks)

    def give_back(self, blocks: Int32s) -> None:
        """The copy has let go of these, given in sequence order."""
        self.leaving -= self._read_only_by_copies(blocks)
        self._lent[blocks] -= 1
        self._lent_in_all -= len(blocks)
        if int(self._lent[blocks].min(initial=0)) < 0:
            raise InvariantViolated("a block was given back more often than it was lent")
        self._release(blocks)

    def _read_only_by_copies(self, blocks: Int32s) -> int:
        """How many of these only copies refer to."""
        if not self._lent_in_all:
            return 0  # as nearly always
        lent = self._lent[blocks]
        return int(np.count_nonzero((lent > 0) & (self._references[blocks] == lent)))

    def drop(self, blocks: Int32s) -> None:
        """One reference less to each of these distinct blocks, given in sequence order."""
        if np.count_nonzero(self._pins[blocks]):
            raise InvariantViolated("a block was dropped while it may still be written from outside")
        self._release(blocks)

    def _release(self, blocks: Int32s) -> None:
        self._references[blocks] -= 1
        if int(self._references[blocks].min(initial=0)) < 0:
            raise InvariantViolated("a block was dropped more often than it was held")
        self.leaving += self._read_only_by_copies(blocks)
        idle = blocks[self._references[blocks] == 0]
        unnamed = idle[~self._named[idle]]
        self._push_free(unnamed)
        # The tail of a sequence first: of two blocks dropped together, the deeper one is the older and goes first.
        self._retire(idle[self._named[idle]][::-1].tolist())

    def publish(self, keys: Sequence[Key], parents: Sequence[Key], blocks: Sequence[int]) -> None:
        """Name blocks that are in use; where a name is taken, nothing happens."""
        self._named[self.prefix.publish(keys, parents, blocks)] = True

    def _push_free(self, blocks: Int32s) -> None:
        self._free[self._free_count : self._free_count + len(blocks)] = blocks
        self._free_count += len(blocks)

    def _retire(self, blocks: list[int]) -> None:
        used_at = self._used_at
        for clock, block in enumerate(blocks, start=self._clock + 1):
            used_at[block] = clock
        self._clock += len(blocks)
        self._evictable_count += len(blocks)
        for block in self.prefix.leaves(blocks):
            self._push_leaf(block)

    def _push_leaf(self, block: int) -> None:
        if len(self._leaves) > 2 * self.blocks:
            self._leaves = [entry for entry in self._leaves if self._is_evictable_leaf(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (self._used_at[block], block))

    def _is_evictable(self, block: int) -> bool:
        return bool(self._named[block]) and not self._references[block]

    def _is_evictable_leaf(self, used_at: int, block: int) -> bool:
        return self._used_at[block] == used_at and self._is_evictable(block) and self.prefix.is_leaf(block)

    def _evict(self, count: int) -> None:
        """Least recently used first, and leaves of a chain before their parents."""
        evicted: list[int] = []
        parent: int | None = None
        """A leaf since its last child went."""
        while len(evicted) < count:
            block = self._oldest_of(parent)
            parent = self.prefix.forget(block)
            self._named[block] = False
            evicted.append(block)
            if parent is not None and not self._is_evictable(parent):
                parent = None
        if parent is not None:
            self._push_leaf(parent)
        self._evictable_count -= count
        self._push_free(np.array(evicted, dtype=np.int32))

    def _oldest_of(self, new_leaf: int | None) -> int:
        """The oldest leaf, one that has just become one included: mostly that one, and then the heap is left alone."""
        if new_leaf is not None:
            if not self._leaves or (self._used_at[new_leaf], new_leaf) < self._leaves[0]:
                return new_leaf
            self._push_leaf(new_leaf)
        return self._oldest_leaf()

    def _oldest_leaf(self) -> int:
        while self._leaves:
            used_at, block = heapq.heappop(self._leaves)
            if self._is_evictable_leaf(used_at, block):
                return block
        # Two requests that computed the same prefix at once can leave a cached parent whose only children are in use.
        idle = np.flatnonzero(self._named & (self._references == 0)).tolist()
        return min(idle, key=self._used_at.__getitem__)
