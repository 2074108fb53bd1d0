"""The latest preemptions, with cause and estimated cost: facts for the log. Nothing is decided from them."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from baton.core.engine.request import RequestId

RECENT_MAX = 256


class Preemption(Struct, frozen=True, gc=False):
    """A running request gave its blocks back."""

    request_id: RequestId
    cause: str
    """`growth`: another request needed the blocks; `self`: it could not grow itself."""
    preemptions: int
    """Of this request so far, here and elsewhere."""
    way: str
    """The quickest way to bring it back: compute, host, store, or move to another instance."""
    compute_tokens: int
    """Tokens whose KV is computed again on that way."""
    restore_blocks: int
    """Blocks whose KV is copied back on that way."""
    cost_us: int
    """Estimate, by the rates measured so far."""


class RecentPreemptions:
    def __init__(self) -> None:
        self.total = 0
        """Since the start: who has seen fewer reads the last ones of `latest`."""
        self.latest: deque[Preemption] = deque(maxlen=RECENT_MAX)

    def add(self, preemption: Preemption) -> None:
        self.total += 1
        self.latest.append(preemption)
