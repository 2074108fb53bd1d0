"""What the scheduler remembers of a request and tells of a step: values without decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.engine.blocks import BlockGauges
from baton.core.engine.plan import Int32s, Int64s, Logprobs
from baton.core.engine.prefix import Key
from baton.core.engine.request import NO_TOKENS, FinishReason, Phase, Serial, Submission, Tokens
from baton.core.handover.messages import PdFault


@dataclass(slots=True)
class Bill:
    """What a request cost so far."""

    cached_tokens: int = 0
    """Tokens that need not be computed at the first start: of the prompt, and of what was generated elsewhere."""
    computed_tokens: int = 0
    """Tokens whose KV was computed for the first time here; what was generated elsewhere counts as the prompt does."""
    recomputed_tokens: int = 0
    """Tokens whose KV had to be computed again after a preemption."""
    restored_tokens: int = 0
    """Tokens whose KV came from host memory or the store."""
    preemptions: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    transfer_us: int = 0
    """From the ask to the adoption of a prefill done elsewhere, less what it waited and computed there."""
    decode_us: int = 0
    attempts: int = 0
    """How often a peer was asked to prefill it."""


@dataclass(slots=True, eq=False)
class Request:
    """An open request. `phase` is its one state."""

    serial: Serial
    submission: Submission
    limit: int
    keys: list[Key]
    """The root, then the name of each full block of the tokens it starts with."""
    since_us: int
    """When it entered the stage (queue, prefill, decode) that it is in."""
    phase: Phase = Phase.WAITING
    epoch: int = 0
    """How often it was started."""
    slot: int | None = None
    outputs: Tokens = field(default_factory=lambda: NO_TOKENS)
    """What it was given before its last start, elsewhere or before it was preempted; while it runs, the slot knows."""
    followers: list[Request] = field(default_factory=list)
    """Sibling choices that wait for this one's prompt blocks."""
    leader: Request | None = None
    ends_as: FinishReason | None = None
    """Set with an order to stop that ends it: how, when the executor acknowledges. None: it will be resumed."""
    keep: int | None = None
    """How many outputs count, where the front end cut the answer (a stop string)."""
    fault: PdFault | None = None
    """Why the attempt ends, where that was not its own doing."""
    prefills_here: bool = False
    """No peer is asked to prefill it (any more)."""
    is_sought: bool = False
    """The store was asked for what it starts with."""
    sought_again: int = 0
    """How often since then, when it could have been let in."""
    pinned: bool = False
    """A transfer may read its blocks: they come back when that is over, too."""
    bill: Bill = field(default_factory=Bill)
    found_tokens: int = 0
    """Positions that the cache had at the last start."""
    computed_ever: int = 0
    """Leading positions whose KV has existed at some time."""

    @property
    def tokens_at_start(self) -> int:
        return len(self.submission.prompt) + len(self.outputs)

    @property
    def cached_of_prompt(self) -> int:
        """What the client is told: what was generated elsewhere is no part of its prompt."""
        return min(self.bill.cached_tokens, len(self.submission.prompt))

    @property
    def is_fresh(self) -> bool:
        """Nothing was generated for it here before its last start."""
        return len(self.outputs) == len(self.submission.generated)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a starting request need not compute: whole cached blocks, then part of a sibling's last block."""

    blocks: Int32s
    copy_from: int | None
    computed: int


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request whose first token has just come."""

    serial: Serial
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EndedRequest:
    serial: Serial
    reason: FinishReason
    generated_tokens: int
    bill: Bill
    fault: PdFault | None = None
    """What ended the attempt, with the reason RESCHEDULE."""

    @property
    def cached_tokens(self) -> int:
        return self.bill.cached_tokens


@dataclass(frozen=True, slots=True)
class Settled:
    """What one step brought, for the front end. Row i yields `counts[i]` of `tokens`, row after row."""

    serials: Int64s
    counts: Int32s
    tokens: Tokens
    logprobs: tuple[Logprobs, ...]
    """Their `row` indexes this object's rows, and they have as many lines as the row has tokens."""
    started: tuple[StartedRequest, ...]
    ended: tuple[EndedRequest, ...]


@dataclass(frozen=True, slots=True)
class HandoverGauges:
    """Hand-overs of one instance, in either role. All but the first two only grow."""

    peers: int = 0
    """Sessions that are up."""
    open: int = 0
    """Under way."""
    made: int = 0
    """Adopted by the taker."""
    refused: int = 0
    not_delivered: int = 0
    preempted: int = 0
    timed_out: int = 0


@dataclass(frozen=True, slots=True)
class StorageGauges:
    """KV outside the pool, in blocks. All but the first three and `breaker_open` only grow."""

    host_rows: int = 0
    host_used: int = 0
    hauls: int = 0
    """Orders that are open."""
    saved: int = 0
    """Copied to host memory."""
    unsaved: int = 0
    """Not copied: no room, too many under way, or the copy failed."""
    loaded: int = 0
    """Copied back from host memory."""
    fetched: int = 0
    """Brought from the store to host memory."""
    stored: int = 0
    unstored: int = 0
    recompute_cheaper: int = 0
    """Neither saved nor brought back, because computing them again is quicker."""
    failed: int = 0
    """Orders that failed."""
    late: int = 0
    """Orders that took too long, and were fenced."""
    breaker_open: int = 0
    """1 while the store is left alone."""
    breaker_opened: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerGauges:
    running: int
    waiting: int
    blocks: BlockGauges
    prefix_queries: int
    """Prompt tokens looked up."""
    prefix_hits: int
    """Prompt tokens found."""
    stale_results: int
    steps: int
    preemptions_for_others: int
    """Requests that yielded so that another could grow."""
    preemptions_of_self: int
    """Requests that yielded because they themselves could not grow."""
    recomputed_tokens: int
    chunk_prefill_unsatisfied: int
    """Passes in which the next chunk of a started prefill did not fit."""
    reserve_ratio: float
    broken_rows: int = 0
    """Rows on which scheduler and executor disagreed; each ended its request with an error, unless it was ending anyway."""
    handovers: HandoverGauges = HandoverGauges()
    storage: StorageGauges = StorageGauges()
    draft_tokens: int = 0
    """Guesses that were fed along with decodes."""
    accepted_draft_tokens: int = 0
    """Those that proved right."""
