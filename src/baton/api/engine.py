"""What the HTTP surface needs of an engine: the protocol that `node` implements and tests can implement in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.api.original_request import OriginalRequest
from baton.core.engine.ended import Bill
from baton.core.engine.gauges import DraftGauges, PeerTraffic, SchedulerGauges, StoreTraffic
from baton.core.engine.request import FinishReason, Submission
from baton.core.handover.faults import PdFault

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
class StreamEnd:
    reason: FinishReason
    cached_tokens: int
    """Prompt tokens that the prefix cache already had."""
    bill: Bill = field(default_factory=Bill)
    fault: PdFault | None = None
    """With the reason RESCHEDULE."""
    places: tuple[str, ...] = ()
    """Instances that had it, one after the other, where a router carried it."""


@dataclass(frozen=True, slots=True)
class TokenBurst:
    """Tokens that arrived together. `ended` is set on the last burst of a stream, which may carry no token."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each token when asked for, else empty."""
    ended: StreamEnd | None
    cached_tokens: int | None = None
    """As in `StreamEnd`, but early: an answer cut off by a stop string need not wait for its end. None: not known yet."""


Sink = Callable[[TokenBurst | Exception], None]


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


@dataclass(frozen=True, slots=True)
class Gauges:
    """What `/metrics` and the access log show of the engine, all read at one moment."""

    scheduler: SchedulerGauges = field(default_factory=SchedulerGauges)
    drafts: DraftGauges = field(default_factory=DraftGauges)
    peers: PeerTraffic = field(default_factory=PeerTraffic)
    store: StoreTraffic = field(default_factory=StoreTraffic)
    role: str = "mixed"
    victim_policy: str = ""
    fleet_preemptions: int | None = None
    """Of all instances behind a router, whatever their cause; None where this is no router."""

    @property
    def preemptions(self) -> dict[str, int]:
        """By cause: `growth` (another request needed the blocks), `self` (it could not grow itself), `any` at a router."""
        known = {"growth": self.scheduler.preemptions_for_others, "self": self.scheduler.preemptions_of_self}
        return known if self.fleet_preemptions is None else known | {"any": self.fleet_preemptions}


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    async def submit(self, group: Sequence[Submission], origin: OriginalRequest | None = None) -> list[TokenStream]:
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
