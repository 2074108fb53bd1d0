"""Gauges and counters of an engine, as sent to the front end and the router and shown by `/metrics`."""

from __future__ import annotations

from msgspec import Struct

from baton.core.bounds import Long, NotNegative
from baton.core.engine.blocks import BlockGauges


class HandoverGauges(Struct, array_like=True, frozen=True, gc=False):
    """Hand-overs of one instance, in either role. All but the first two only grow."""

    peers: Long = 0
    """Sessions that are up."""
    open: Long = 0
    """Hand-overs in progress."""
    made: Long = 0
    """Adopted by the decode side."""
    refused: Long = 0
    not_delivered: Long = 0
    preempted: Long = 0
    timed_out: Long = 0


class StorageGauges(Struct, array_like=True, frozen=True, gc=False):
    """KV outside the pool, in blocks. All but the first three and `breaker_open` only grow."""

    host_rows: Long = 0
    """Rows of host memory."""
    host_used: Long = 0
    transfers: Long = 0
    """Transfers in progress."""
    saved: Long = 0
    """Copied from the pool to host memory."""
    unsaved: Long = 0
    """Not copied: no room, too many in progress, or the copy failed."""
    loaded: Long = 0
    """Copied back from host memory."""
    fetched: Long = 0
    """Fetched from the store to host memory."""
    stored: Long = 0
    """Written from host memory to the store."""
    unstored: Long = 0
    recompute_cheaper: Long = 0
    """Neither saved nor fetched, because computing them again is quicker."""
    failed: Long = 0
    """Transfers that failed."""
    late: Long = 0
    """Transfers that were late and fenced."""
    breaker_open: Long = 0
    """1 while the circuit breaker keeps orders from the store."""
    breaker_opened: Long = 0


class SchedulerGauges(Struct, array_like=True, frozen=True, gc=False):
    """Sent with each step and each pulse. The order of the fields is their order on the wire."""

    running: Long = 0
    waiting: Long = 0
    free_blocks: Long = 0
    evictable_blocks: Long = 0
    running_blocks: Long = 0
    leased_blocks: Long = 0
    receiving_blocks: Long = 0
    prefix_queries: Long = 0
    """Prompt tokens looked up."""
    prefix_hits: Long = 0
    """Prompt tokens found."""
    stale_results: Long = 0
    steps: Long = 0
    preemptions_for_others: Long = 0
    """Requests that yielded so that another could grow."""
    preemptions_of_self: Long = 0
    """Requests that yielded because they themselves could not grow."""
    recomputed_tokens: Long = 0
    chunk_prefill_unsatisfied: Long = 0
    """Passes in which the next chunk of a started prefill did not fit."""
    reserve_ratio: NotNegative = 0.0
    handovers: HandoverGauges = HandoverGauges()
    leaving_blocks: Long = 0
    storage: StorageGauges = StorageGauges()
    sat_out_rows: Long = 0
    """Decodes with a constraint that yielded nothing in a step, because their mask was not there in time."""

    @property
    def blocks(self) -> BlockGauges:
        """Blocks by state; they sum to the pool."""
        return BlockGauges(
            self.free_blocks,
            self.evictable_blocks,
            self.running_blocks,
            self.leased_blocks,
            self.receiving_blocks,
            self.leaving_blocks,
        )

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool; 0 before the first report."""
        used = self.running_blocks + self.leased_blocks + self.receiving_blocks + self.leaving_blocks
        return self.free_blocks + self.evictable_blocks + used

    @property
    def preemptions(self) -> int:
        return self.preemptions_for_others + self.preemptions_of_self


class DraftGauges(Struct, frozen=True, gc=False):
    """Draft tokens of all steps since the start."""

    fed: Long = 0
    """Computed along with decodes; 0 without speculative decoding."""
    accepted: Long = 0
    """Drafts that were accepted."""


class PeerTraffic(Struct, tag="peer_traffic", frozen=True, gc=False):
    """Traffic with peers since the start; sent when it has changed."""

    refused: dict[str, int] = {}
    """Refused connections and frames, by reason."""
    arrived_bytes: int = 0
    """Bytes of KV received."""


class KvEventTraffic(Struct, tag="kv_event_traffic", frozen=True, gc=False):
    """KV events published since the start; sent when it has changed."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    """How often readers were told to forget everything: at the start, and where they could not be told what changed."""
    replays: int = 0
    """Requests of readers for what they missed."""


class StoreTraffic(Struct, tag="store_traffic", frozen=True, gc=False):
    """Traffic between the pool, host memory and the store since the start; sent when it has changed."""

    saved_bytes: int = 0
    """From the pool to host memory."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    """From host memory to the store."""
    fetched_bytes: int = 0
    missing_blocks: int = 0
    """Blocks that the store was asked for and did not have."""
    errors: int = 0
    """Calls of the store that failed."""
    bad_blocks: dict[str, int] = {}
    """Blocks found in the store and rejected, by reason."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of StepSizes."""


class StepSizes(Struct, tag="step_sizes", frozen=True, gc=False):
    """Tokens of the steps since the start; sent when they have changed, once a second at most."""

    counts: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    """Steps by bucket of STEP_TOKENS, and those beyond the last."""
    tokens: int = 0
