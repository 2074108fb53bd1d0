"""The end of a request and its bill: values sent from the engine to the front end, the router and the client."""

from __future__ import annotations

from msgspec import Struct

from baton.core.bounds import Count, Long
from baton.core.engine.request import FinishReason, Serial
from baton.core.handover.faults import PdFault


class Bill(Struct, array_like=True, gc=False):
    """The bill of a request so far. Not frozen: the scheduler adds to it while the request is open."""

    cached_tokens: Long = 0
    """Tokens that were cached at the first start, of the prompt and of outputs generated elsewhere."""
    computed_tokens: Long = 0
    """Tokens whose KV was computed here for the first time; outputs generated elsewhere count like the prompt."""
    recomputed_tokens: Long = 0
    """Tokens whose KV was computed again after a preemption."""
    restored_tokens: Long = 0
    """Tokens whose KV came from host memory or the store."""
    preemptions: Long = 0
    queue_us: Long = 0
    prefill_us: Long = 0
    transfer_us: Long = 0
    """Time from the ask to the adoption of a prefill done elsewhere, minus its queue and prefill time there."""
    decode_us: Long = 0
    attempts: Long = 0
    """Times a peer was asked to prefill it; at a router: times it was placed."""


class StartedRequest(Struct, array_like=True, frozen=True, gc=False):
    """A request that has just got its first token."""

    serial: Serial
    cached_tokens: Count


class EndedRequest(Struct, array_like=True, frozen=True, gc=False):
    serial: Serial
    reason: FinishReason
    generated_tokens: Count
    bill: Bill
    fault: PdFault | None = None
    """Why the attempt ended early, with the reason RESCHEDULE."""

    @property
    def cached_tokens(self) -> int:
        return self.bill.cached_tokens
