"""Reference counts of the KV blocks: the one ledger from which every gauge is read.

A block has a reference count, perhaps a pin and perhaps a key in the prefix index. Its state follows from those three and
is stored nowhere:

    pinned                         leased (granted to a peer's prefill) or receiving (its KV is arriving)
    referenced by a row            running
    referenced by copies only      leaving     (being copied to host memory; comes back when that is over)
    no references, cached          evictable   (goes when room is needed, least recently used first, leaves first)
    no references, not cached      free

Only `take` evicts; looking a prefix up and holding its blocks never does. A pinned block has an owner, which removes the pin
once nothing outside the engine can write to the block; until then it cannot be dropped. A copy that reads blocks holds a
reference to each (`hold_for_copy`), so that no row gets them before the copy has ended (`end_copy`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.core.engine.masks import any_true
from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.errors import InvariantViolated


class Pin(IntEnum):
    """Why a block cannot be dropped."""

    NONE = 0
    LEASED = 1
    RECEIVING = 2


class BlockGauges(NamedTuple):
    """A tuple: made for every gauge and law, and four times as quickly as a frozen dataclass."""

    free: int
    evictable: int
    running: int
    leased: int = 0
    """Granted to a peer's prefill; no KV has arrived yet."""
    receiving: int = 0
    """KV of a peer's prefill, or from host memory, is arriving."""
    leaving: int = 0
    """No row uses them; they are still being copied to host memory."""


class BlockPool:
    def __init__(self, blocks: int, prefix: PrefixIndex) -> None:
        self.blocks = blocks
        self.prefix = prefix
        self._references = np.zeros(blocks, dtype=np.int32)
        self._cached = np.zeros(blocks, dtype=np.bool_)
        self._copy_references = np.zeros(blocks, dtype=np.int32)
        """References that belong to copies, per block."""
        self._copy_references_total = 0
        self.leaving = 0
        """Blocks that only copies refer to."""
        self._pins = np.zeros(blocks, dtype=np.int8)
        self._pinned = dict.fromkeys(Pin, 0)
        """Blocks with each pin; NONE is not counted."""
        self._free = np.arange(blocks - 1, -1, -1, dtype=np.int32)
        """A stack: the first `_free_count` entries are the free blocks."""
        self._free_count = blocks
        self._evictable_count = 0
        self._used_at = [0] * blocks
        """Clock tick at which a block lost its last reference. A list: it is read and written one by one."""
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []
        """Heap of (used_at, block). Entries go stale when a block is held again or gains a child; they are skipped."""

    @property
    def available(self) -> int:
        """Blocks that `take` could return now."""
        return self._free_count + self._evictable_count

    def gauges(self) -> BlockGauges:
        leased, receiving = self._pinned[Pin.LEASED], self._pinned[Pin.RECEIVING]
        running = self.blocks - self._free_count - self._evictable_count - leased - receiving - self.leaving
        return BlockGauges(self._free_count, self._evictable_count, running, leased, receiving, self.leaving)

    @property
    def referenced(self) -> int:
        """Blocks with references, counted anew; for the laws."""
        return int(np.count_nonzero(self._references))

    def references(self) -> npt.NDArray[np.int32]:
        """A copy, for the laws."""
        return self._references.copy()

    def copy_references(self) -> npt.NDArray[np.int32]:
        """A copy, for the laws."""
        return self._copy_references.copy()

    def pins(self) -> npt.NDArray[np.int8]:
        """A copy, for the laws."""
        return self._pins.copy()

    def pinned(self, blocks: Int32s) -> Int32s:
        """The pinned ones of these blocks."""
        return blocks[self._pins[blocks] > 0]

    def pin(self, blocks: Int32s, pin: Pin) -> None:
        """Change the pin of these blocks, which have one owner and the same pin."""
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
        """Return `count` blocks with one reference each, evicting cached blocks when too few are free."""
        if count > self.available:
            raise InvariantViolated(f"{count} blocks asked for, {self.available} available")
        if self._free_count < count:
            self._evict(count - self._free_count)
        self._free_count -= count
        taken = self._free[self._free_count : self._free_count + count].copy()
        self._references[taken] = 1
        return taken

    def unreferenced(self, blocks: Int32s) -> int:
        """Number of these blocks that would leave `available` if they were held."""
        return int(np.count_nonzero(self._references[blocks] == 0))

    def exclusive(self, blocks: Int32s) -> int:
        """Number of these blocks that would become available if their only holder dropped them."""
        return int(np.count_nonzero(self._references[blocks] == 1))

    def hold(self, blocks: Int32s) -> None:
        """Add a reference to each of these distinct, cached blocks."""
        self._evictable_count -= self.unreferenced(blocks)
        self.leaving -= self._read_only_by_copies(blocks)
        self._references[blocks] += 1

    def hold_for_copy(self, blocks: Int32s) -> None:
        """A copy reads these distinct, cached blocks, which rows hold."""
        self._references[blocks] += 1
        self._copy_references[blocks] += 1
        self._copy_references_total += len(blocks)

    def end_copy(self, blocks: Int32s) -> None:
        """The copy has ended; blocks are given in sequence order."""
        self.leaving -= self._read_only_by_copies(blocks)
        self._copy_references[blocks] -= 1
        self._copy_references_total -= len(blocks)
        if any_true(self._copy_references[blocks] < 0):
            raise InvariantViolated("a block was given back more often than it was lent")
        self._release(blocks)

    def _read_only_by_copies(self, blocks: Int32s) -> int:
        """Number of these blocks that only copies refer to."""
        if not self._copy_references_total:
            return 0  # nearly always
        copy_references = self._copy_references[blocks]
        return int(np.count_nonzero((copy_references > 0) & (self._references[blocks] == copy_references)))

    def drop(self, blocks: Int32s) -> None:
        """Remove a reference from each of these distinct blocks, given in sequence order."""
        if np.count_nonzero(self._pins[blocks]):
            raise InvariantViolated("a block was dropped while it may still be written from outside")
        self._release(blocks)

    def _release(self, blocks: Int32s) -> None:
        left = self._references[blocks] - 1
        if any_true(left < 0):
            raise InvariantViolated("a block was dropped more often than it was held")
        self._references[blocks] = left
        self.leaving += self._read_only_by_copies(blocks)
        idle = blocks[left == 0]
        cached = self._cached[idle]
        self._push_free(idle[~cached])
        # The tail of a sequence first: of blocks dropped together, the deeper one counts as older and is evicted first.
        self._retire(idle[cached][::-1].tolist())

    def publish(self, keys: Sequence[Key], parents: Sequence[Key], blocks: Sequence[int]) -> None:
        """Publish blocks that are in use under keys; a key that is already taken is skipped."""
        self._cached[self.prefix.publish(keys, parents, blocks)] = True

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
        return bool(self._cached[block]) and not self._references[block]

    def _is_evictable_leaf(self, used_at: int, block: int) -> bool:
        return self._used_at[block] == used_at and self._is_evictable(block) and self.prefix.is_leaf(block)

    def _evict(self, count: int) -> None:
        """Evict the least recently used, leaves of a chain before their parents."""
        evicted: list[int] = []
        parent: int | None = None
        """Set if it became a leaf when its last child was evicted."""
        while len(evicted) < count:
            block = self._oldest_of(parent)
            parent = self.prefix.forget(block)
            self._cached[block] = False
            evicted.append(block)
            if parent is not None and not self._is_evictable(parent):
                parent = None
        if parent is not None:
            self._push_leaf(parent)
        self._evictable_count -= count
        self._push_free(np.array(evicted, dtype=np.int32))

    def _oldest_of(self, new_leaf: int | None) -> int:
        """The oldest leaf, `new_leaf` included: usually that is the oldest, and the heap is not touched."""
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
        idle = np.flatnonzero(self._cached & (self._references == 0)).tolist()
        return min(idle, key=self._used_at.__getitem__)
