"""What the HTTP surface needs of an engine: the protocol that `node` implements and tests can implement in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.api.original_request import Origin
from baton.core.engine.request import FinishReason, Submission

ROUTER = "router"
"""The role of one that computes nothing."""
UNKNOWN_CONTEXT = 2**31 - 1
"""Of an engine that cannot say yet how long a sequence may be."""


class EngineDead(Exception):
    """The engine is gone; the message says why. Every open request ends with it."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Alternatives (id, log-probability), most likely first."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What a request cost; answers carry it as `usage.baton` when asked."""

    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    computed_tokens: int = 0
    """Tokens whose KV was computed for the first time."""
    recomputed_tokens: int = 0
    """Tokens whose KV had to be computed again after a preemption."""
    restored_tokens: int = 0
    """Tokens whose KV came from host memory or the store."""
    preemptions: int = 0
    attempts: int = 0
    """How often a peer was asked to prefill it; 0 where it was prefilled here."""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    """From asking a peer to having its prefill here, less what it waited and computed there."""
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an attempt in which one instance prefills and another decodes ended early. It may always be tried again."""

    code: int
    """500 refused, 501 KV not delivered, 502 preempted, 408 the prefill never arrived."""
    stage: str
    message: str
    """Begins with `PD Error`; shown to the client."""


@dataclass(frozen=True, slots=True)
class Ended:
    reason: FinishReason
    cached_tokens: int
    """Prompt tokens that the prefix cache already had."""
    bill: Bill = field(default_factory=Bill)
    fault: Fault | None = None
    """With the reason RESCHEDULE."""
    places: tuple[str, ...] = ()
    """Instances that had it, one after the other, where a router carried it."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Tokens that arrived together. `ended` is set on the last burst of a stream, which may carry no token."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each token when asked for, else empty."""
    ended: Ended | None
    cached_tokens: int | None = None
    """As in `Ended`, but early: an answer that a stop string cut off need not wait for its `Ended`. None: not known yet."""


Sink = Callable[[Burst | Exception], None]


class TokenStream(Protocol):
    """The tokens of one submission. Losing interest before the end must be followed by `abort`."""

    def pour(self, sink: Sink) -> None:
        """Give it every burst from the first one on, as it comes, up to the one with `ended`, or the error that ends it.

        Called once. Not awaited for: a token that had to wake a task for each hop would cost more than all else done to it.
        """

    def stop(self, keep: int) -> None:
        """A stop string was found: the answer ends after `keep` tokens. Idempotent.

        Later bursts mean nothing but for the one with `ended`, which always comes and has the bill.
        """

    def abort(self) -> None:
        """The client is gone. Idempotent, and a no-op after the end. As after `stop`, a burst with `ended` still comes."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the model and the engine that requests are checked against. They may change while it lives."""

    context_tokens: int
    vocabulary: int
    slots: int
    blocks: int
    block_size: int
    carries: bool = False
    """A fleet behind a router: what is open survives its instances, and the router too. So events carry ids by which a
    client goes on after a restart; and an attempt that ends early has been tried everywhere, which is an error."""


BLOCK_STATES = ("free", "evictable", "running", "leased", "receiving", "leaving")


@dataclass(frozen=True, slots=True)
class Handovers:
    """Prefills done for a peer or by one. All but the first two only grow."""

    peers: int = 0
    """Sessions that are up."""
    open: int = 0
    """Under way."""
    made: int = 0
    refused: int = 0
    not_delivered: int = 0
    preempted: int = 0
    timed_out: int = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """KV beyond the pool, in blocks unless it says otherwise. All but the first three and `breaker_open` only grow."""

    host_blocks: int = 0
    """Room in host memory."""
    host_used: int = 0
    open: int = 0
    """Transfers under way."""
    saved: int = 0
    """From the pool to host memory."""
    unsaved: int = 0
    loaded: int = 0
    """From host memory to the pool."""
    stored: int = 0
    """From host memory to the store."""
    unstored: int = 0
    fetched: int = 0
    """From the store to host memory."""
    missing: int = 0
    """That the store was asked for and did not have."""
    bad: Mapping[str, int] = field(default_factory=dict)
    """Found in the store and not used, by what was wrong with them."""
    recompute_cheaper: int = 0
    failed: int = 0
    """Transfers that failed."""
    late: int = 0
    """Transfers that were given up as too slow."""
    errors: int = 0
    """Transfers that the store failed."""
    breaker_open: int = 0
    """1 while the store is left alone."""
    breaker_opened: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    fetched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """What `/metrics` and the access log show of the engine, all read at one moment."""

    running: int = 0
    waiting: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Blocks by state, of BLOCK_STATES; the states sum to the pool."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache since the start."""
    prefix_hits: int = 0
    """Prompt tokens that the prefix cache had."""
    stale_results: int = 0
    steps: int = 0
    preemptions: Mapping[str, int] = field(default_factory=dict)
    """By cause: `growth` (another request needed the blocks) or `self` (it could not grow itself)."""
    victim_policy: str = ""
    recomputed_tokens: int = 0
    chunk_prefill_unsatisfied: int = 0
    """Passes in which the next chunk of a started prefill did not fit."""
    reserve_ratio: float = 0.0
    role: str = "mixed"
    handovers: Handovers = field(default_factory=Handovers)
    storage: Storage = field(default_factory=Storage)
    refused_connections: Mapping[str, int] = field(default_factory=dict)
    """Connections and frames of peers, by reason."""
    arrived_bytes: int = 0
    """KV that peers have sent."""
    draft_tokens: int = 0
    """Guesses that were computed along with decodes, since the start; 0 where nobody guesses."""
    accepted_draft_tokens: int = 0
    """Those that proved right."""


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    async def submit(self, group: Sequence[Submission], origin: Origin | None = None) -> list[TokenStream]:
        """Accept all of the group or raise `Refused`; raises EngineDead when there is nobody to accept.

        `origin` is for an engine that may have to answer for the request in another process.
        """

    @property
    def death(self) -> str | None:
        """Why the engine is dead, or None while it lives."""

    @property
    def draining(self) -> bool: ...

    @property
    def gauges(self) -> Gauges:
        """Cheap: it is read at every scrape and at every finished request."""
