"""Publishes full blocks in the prefix cache, at the settling of the step that filled them.

Remembers how many leading blocks of each slot were published, and the key of the last one. The last sampled token has no KV
yet, so `computed`, not `known`, decides which blocks are full.
"""

from __future__ import annotations

from baton.core.engine.blocks import BlockPool
from baton.core.engine.masks import any_true
from baton.core.engine.plan import Int64s
from baton.core.engine.prefix import Key
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.slots import Slots


class PrefixPublisher:
    def __init__(self, slots: Slots, pool: BlockPool, block_size: int) -> None:
        self._slots = slots
        self._pool = pool
        self._block_size = block_size
        self._tips: list[Key] = [Key(b"")] * slots.slots
        """The key of the last block that each slot has published."""

    def start(self, slot: int, request: Request, hit: PrefixHit) -> None:
        self._slots.published[slot] = len(hit.blocks)
        self._tips[slot] = request.keys[len(hit.blocks)]

    def unpublished(self, at: Int64s) -> tuple[Int64s, Int64s]:
        """Rows with full blocks that are not published: those with exactly one block of outputs, and all others."""
        slots, size = self._slots, self._block_size
        full = slots.computed[at] // size
        more = full > slots.published[at]
        if not any_true(more):
            return at[:0], at[:0]
        at, full = at[more], full[more]
        next_is_output = slots.published[at] * size >= slots.prompt[at]
        plain = (full == slots.published[at] + 1) & next_is_output
        return at[plain], at[~plain]

    def publish_outputs(self, at: Int64s) -> None:
        """Publish the next block of each row, which holds outputs only: the usual case, done for all rows together."""
        if not len(at):
            return
        slots, next_block = self._slots, self._slots.published[at]
        data = slots.output_blocks(at, next_block * self._block_size - slots.prompt[at], self._block_size)
        rows = at.tolist()
        tips = [self._tips[slot] for slot in rows]
        keys = self._pool.prefix.chain_each(tips, data)
        self._pool.publish(keys, tips, slots.table[at, next_block].tolist())
        if (contents := self._pool.prefix.contents) is not None:
            width = len(data) // len(rows)
            contents.add(keys, tips, [data[begin : begin + width] for begin in range(0, len(data), width)], first=False)
        for slot, key in zip(rows, keys, strict=True):
            self._tips[slot] = key
        slots.published[at] += 1

    def publish_all(self, slot: int, request: Request) -> None:
        """Publish every full block of a row, whether it holds prompt, outputs or both."""
        slots = self._slots
        first, upto = int(slots.published[slot]), int(slots.computed[slot]) // self._block_size
        chain = [self._tips[slot], *request.keys[first + 1 : upto + 1]]
        for index in range(first + len(chain) - 1, upto):
            chain.append(self._pool.prefix.chain(chain[-1], self._tokens(slot, request, index * self._block_size)))
        self._pool.publish(chain[1:], chain[:-1], slots.table[slot, first:upto].tolist())
        if (contents := self._pool.prefix.contents) is not None:
            held = [self._tokens(slot, request, index * self._block_size) for index in range(first, upto)]
            contents.add(chain[1:], chain[:-1], held, first=first == 0)
        slots.published[slot] = upto
        self._tips[slot] = chain[-1]

    def _tokens(self, slot: int, request: Request, begin: int) -> bytes:
        prompt, end = request.submission.prompt, begin + self._block_size
        split = len(prompt)
        head = prompt[begin : min(split, end)].tobytes() if begin < split else b""
        return head + self._slots.output_bytes(slot, max(begin, split) - split, end - split) if end > split else head
