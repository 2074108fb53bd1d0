"""The engine interface of the HTTP API, implemented by `node` and `router` and by in-memory fakes in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.api.logprob_columns import TokenLogprob
from baton.api.original_request import OriginalRequest
from baton.api.tracing.stage_notes import ChoiceHistory
from baton.core.engine.ended import Bill
from baton.core.engine.gauges import DraftGauges, KvEventTraffic, PeerTraffic, SchedulerGauges, StepSizes, StoreTraffic
from baton.core.engine.request import FinishReason, PromptLogprobs, Submission
from baton.core.handover.faults import PdFault

ROUTER = "router"
"""Role of a router, which computes nothing."""
UNKNOWN_CONTEXT = 2**31 - 1
"""Context length reported by a router before any instance has joined."""


class EngineDead(Exception):
    """The engine has stopped; the message says why. Every open request ends with this error."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    reason: FinishReason
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    bill: Bill = field(default_factory=Bill)
    fault: PdFault | None = None
    """Set with the finish reason RESCHEDULE."""
    places: tuple[str, ...] = ()
    """Names of the instances that ran it, in order; only from a router."""
    history: ChoiceHistory | None = None
    """What was noted of it, for its trace; notes may still be added. None: nothing is."""


@dataclass(frozen=True, slots=True)
class TokenBurst:
    """Tokens that arrived together. The last burst of a stream has `ended` and may have no token."""

    tokens: tuple[int, ...]
    logprobs: Sequence[TokenLogprob]
    """One per token when requested, else empty."""
    ended: StreamEnd | None
    cached_tokens: int | None = None
    """As in `StreamEnd`, available before the end for answers cut by a stop string. None: not known yet."""
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    """Where requested: they come before the first token or with it, in order of position. Positions may come again."""


Sink = Callable[[TokenBurst | Exception], None]


class TokenStream(Protocol):
    """The tokens of one submission. Call `abort` to stop reading before the end."""

    def pour(self, sink: Sink) -> None:
        """Call back with every burst from the first to the one with `ended`, or with the error that ends the stream.

        Called once. Callbacks instead of awaiting: waking a task for every hop of a token would be the largest cost of it.
        """

    def stop(self, keep: int) -> None:
        """End the answer after `keep` tokens, since a stop string was found. Idempotent.

        Later bursts are ignored, except the one with `ended`, which always comes and has the bill.
        """

    def abort(self) -> None:
        """Cancel. Idempotent, and a no-op after the end. As after `stop`, a burst with `ended` still comes."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Limits of the model and the engine that requests are checked against. They may change at run time."""

    context_tokens: int
    vocabulary: int
    slots: int
    blocks: int
    block_size: int
    carries: bool = False
    """Whether this is a router: open requests survive their instances and a restart of the router. Events then have ids
    for resuming, and an attempt that ends early is an error, since every instance was tried."""
    prefix_cache: bool = True
    """Whether the KV of prompts that begin alike is reused. A router is not told, and shows the default."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Engine state shown by `/metrics` and the access log, read at one moment."""

    scheduler: SchedulerGauges = field(default_factory=SchedulerGauges)
    drafts: DraftGauges = field(default_factory=DraftGauges)
    peers: PeerTraffic = field(default_factory=PeerTraffic)
    store: StoreTraffic = field(default_factory=StoreTraffic)
    step_sizes: StepSizes = field(default_factory=StepSizes)
    stalls: int = 0
    """Engines that stood still and were given up: this one, or those of a router's instances."""
    kv_events: KvEventTraffic = field(default_factory=KvEventTraffic)
    role: str = "mixed"
    victim_policy: str = ""
    fleet_preemptions: int | None = None
    """Preemptions on all instances behind a router, of any cause; None for a single engine."""

    @property
    def preemptions(self) -> dict[str, int]:
        """By cause: `growth` (another request needed the blocks), `self` (it could not grow itself), `any` at a router."""
        known = {"growth": self.scheduler.preemptions_for_others, "self": self.scheduler.preemptions_of_self}
        return known if self.fleet_preemptions is None else known | {"any": self.fleet_preemptions}


@dataclass(frozen=True, slots=True)
class NotServing:
    """Why an engine, or a fleet, serves nobody."""

    reason: str
    detail: str = ""
    """What may name instances, files or hosts: told to those only who hold a key."""
    is_stall: bool = False

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    async def submit(self, group: Sequence[Submission], origin: OriginalRequest | None = None) -> list[TokenStream]:
        """Accept the whole group or raise `Refused`; raises EngineDead when the engine has stopped.

        `origin` lets a router restore the request after a restart.
        """

    @property
    def death(self) -> NotServing | None:
        """Why the engine is dead, or None while it lives."""

    @property
    def draining(self) -> bool: ...

    @property
    def gauges(self) -> Gauges:
        """Must be cheap: read at every scrape and every finished request."""
