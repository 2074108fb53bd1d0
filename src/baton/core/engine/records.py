"""The scheduler's record of a request and the result of a step: values without decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from baton.core.engine.ended import Bill, EndedRequest, StartedRequest
from baton.core.engine.plan import NO_INT32S, NO_INT64S, Int32s, Int64s, Logprobs
from baton.core.engine.prefix import Key
from baton.core.engine.request import NO_TOKENS, FinishReason, Phase, PromptLogprobs, Serial, Submission, Tokens
from baton.core.handover.faults import PdFault


@dataclass(slots=True, eq=False)
class Request:
    """An open request. `phase` is its one state."""

    serial: Serial
    submission: Submission
    limit: int
    keys: list[Key]
    """The root, then the key of each full block of the tokens it starts with."""
    since_us: int
    """Time at which it entered its current stage (queue, prefill, decode)."""
    phase: Phase = Phase.WAITING
    epoch: int = 0
    """Number of times it was started."""
    slot: int | None = None
    outputs: Tokens = field(default_factory=lambda: NO_TOKENS)
    """Outputs before its last start, from elsewhere or from before a preemption; while it runs, its slot has them all."""
    followers: list[Request] = field(default_factory=list)
    """Sibling choices that wait for this one's prompt blocks."""
    leader: Request | None = None
    ends_as: FinishReason | None = None
    """The reason it ends with once the executor acknowledges its stop. None: it will be resumed."""
    keep: int | None = None
    """Number of outputs that count, if the front end cut the answer at a stop string."""
    fault: PdFault | None = None
    """Why the attempt ends, if the request itself is not the cause."""
    prefills_here: bool = False
    """No peer is asked to prefill it, or no longer."""
    is_prefetched: bool = False
    """The store was asked for the KV of the tokens it starts with."""
    prefetched_again: int = 0
    """Number of times it was asked again when the request could have been admitted."""
    pinned: bool = False
    """A transfer may read its blocks: they are freed only after it ends."""
    bill: Bill = field(default_factory=Bill)
    found_tokens: int = 0
    """Positions that were cached at the last start."""
    computed_ever: int = 0
    """Leading positions whose KV has been computed at some time."""

    @property
    def tokens_at_start(self) -> int:
        return len(self.submission.prompt) + len(self.outputs)

    @property
    def preemptions(self) -> int:
        """How often it was preempted, here and elsewhere."""
        return self.submission.preemptions + self.bill.preemptions

    @property
    def cached_of_prompt(self) -> int:
        """As reported to the client: outputs generated elsewhere are not part of its prompt."""
        return min(self.bill.cached_tokens, len(self.submission.prompt))

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be reported: then every prompt position is computed."""
        return self.submission.sampling.prompt_logprobs is not None and not len(self.outputs)

    @property
    def is_fresh(self) -> bool:
        """Nothing was generated for it here before its last start."""
        return len(self.outputs) == len(self.submission.generated)


class PrefixHit(Struct, frozen=True):
    """Tokens a starting request need not compute: whole cached blocks, then part of a sibling's last block."""

    blocks: Int32s
    copy_from: int | None
    computed: int


class Settled(Struct, frozen=True, gc=False):
    """The result of one step, for the front end. Row i yields `counts[i]` of `tokens`, row after row.

    A row without tokens has log-probabilities of its prompt.
    """

    serials: Int64s
    counts: Int32s
    tokens: Tokens
    logprobs: tuple[Logprobs, ...]
    """`row` indexes this object's rows; each has one line per token of its row."""
    started: tuple[StartedRequest, ...]
    ended: tuple[EndedRequest, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """`row` indexes this object's rows."""


NOTHING_SETTLED = Settled(NO_INT64S, NO_INT32S, NO_INT32S, (), (), ())
