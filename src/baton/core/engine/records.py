"""What the scheduler remembers of a request and tells of a step: values without decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.engine.ended import Bill, EndedRequest, StartedRequest
from baton.core.engine.plan import NO_INT32S, NO_INT64S, Int32s, Int64s, Logprobs
from baton.core.engine.prefix import Key
from baton.core.engine.request import NO_TOKENS, FinishReason, Phase, Serial, Submission, Tokens
from baton.core.handover.faults import PdFault


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
class PrefixHit:
    """What a starting request need not compute: whole cached blocks, then part of a sibling's last block."""

    blocks: Int32s
    copy_from: int | None
    computed: int


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


NOTHING_SETTLED = Settled(NO_INT64S, NO_INT32S, NO_INT32S, (), (), ())
