"""Finds the cached blocks of the tokens that a request starts with. Looking up changes nothing."""

from __future__ import annotations

import numpy as np

from baton.core.engine.plan import NO_INT32S
from baton.core.engine.prefix import Key
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.request import Phase, Submission, Tokens
from baton.core.engine.reserve import blocks_for
from baton.core.engine.running_set import RunningSet

NO_HIT = PrefixHit(NO_INT32S, None, 0)


class PrefixLookup:
    def __init__(self, running: RunningSet) -> None:
        self._slots = running.slots
        self._pool = running.pool
        self._block_size = running.config.block_size
        self._prefix_cache = running.config.prefix_cache

    def keys_of(self, submission: Submission, tokens: Tokens) -> list[Key]:
        """The root and, with the cache on, the key of each full block."""
        cached = tokens if self._prefix_cache else tokens[:0]
        return self._pool.prefix.keys_of(cached, submission.salt, self._block_size)

    def keys_to_start(self, submission: Submission, leader: Request | None) -> list[Key]:
        """The leader's keys for the prompt that both share, unless outputs were generated elsewhere."""
        if leader is None or len(submission.generated):
            return self.keys_of(submission, submission.known)
        return leader.keys[: 1 + len(submission.prompt) // self._block_size]

    def find(self, request: Request) -> PrefixHit:
        if request.scores_prompt:
            return NO_HIT
        block_size, tokens = self._block_size, request.tokens_at_start
        # Even a full hit computes the last token: its logits choose the next one.
        usable = (tokens - 1) // block_size
        found = self._pool.prefix.longest(request.keys[1 : usable + 1]) if self._prefix_cache else []
        blocks = np.array(found, dtype=np.int32)
        tail = (tokens - 1) % block_size
        source = self._tail_of_leader(request) if tail and len(found) == usable else None
        computed = len(found) * block_size + (tail if source is not None else 0)
        return PrefixHit(blocks, source, computed)

    def _tail_of_leader(self, request: Request) -> int | None:
        """The block in which a sibling choice still holds the end of the same prompt."""
        leader = request.leader
        if leader is None or len(request.outputs) or leader.slot is None or leader.phase is not Phase.RUNNING_DECODE:
            return None
        last = len(request.submission.prompt) - 1
        if int(self._slots.computed[leader.slot]) < last:
            return None
        return int(self._slots.table[leader.slot, last // self._block_size])

    def blocks_to_take(self, tokens: int, hit: PrefixHit) -> int:
        """The amount by which `pool.available` falls once a request has a row with room for `tokens`."""
        return blocks_for(tokens, self._block_size) - len(hit.blocks) + self._pool.unreferenced(hit.blocks)

    def keys_after(self, request: Request, hit: PrefixHit) -> list[Key]:
        """Keys of the blocks that would have to be computed and need not be, were their KV elsewhere."""
        if request.scores_prompt:
            return []
        usable = (request.tokens_at_start - 1) // self._block_size
        return request.keys[1 + len(hit.blocks) : usable + 1]
