"""What a simulated run leaves behind: values that reports, plots and timelines are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class RequestOutcome(StrEnum):
    """How a request ended for its client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """Scheduler and executor disagreed about it; may be tried again."""
    REFUSED = "refused"
    LOST = "lost"
    """Its instance is gone; may be tried again."""


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it, and what it cost."""

    index: int
    arrived_us: int
    input_tokens: int
    instance: int | None = None
    first_us: int | None = None
    """When the first token reached the client."""
    ended_us: int | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    transfer_us: int = 0
    """Of a prefill done elsewhere: from the ask to the adoption, less what it waited and computed there."""
    decode_us: int = 0
    attempts: int = 0
    """How often a peer was asked to prefill it."""
    outcome: RequestOutcome | None = None

    @property
    def ttft_us(self) -> int | None:
        return None if self.first_us is None else self.first_us - self.arrived_us

    @property
    def tpot_us(self) -> float | None:
        """Mean time between tokens after the first."""
        if self.first_us is None or self.ended_us is None or self.output_tokens < 2:
            return None
        return (self.ended_us - self.first_us) / (self.output_tokens - 1)


class InstanceSample(NamedTuple):
    """One instance at one moment."""

    at_us: int
    instance: int
    running: int
    waiting: int
    free_blocks: int
    evictable_blocks: int
    running_blocks: int
    preemptions: int
    """Since its start."""
    reserve_ratio: float
    leased_blocks: int = 0
    """Granted to a peer's prefill, be its KV arriving or not."""


class StepSpan(NamedTuple):
    """One step on one device."""

    instance: int
    step: int
    begin_us: int
    end_us: int
    decodes: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class HandoverTotals:
    """What one instance did for or through its peers."""

    made: int
    """Hand-overs that came to their end here; each counts at its giver and at its taker."""
    refused: int
    failed: int
    """Ended otherwise: not delivered, preempted, too late."""
    bytes: int
    """Of KV that left or came."""
    busy_us: int
    """How long its link carried them."""


@dataclass(slots=True)
class PassMeter:
    """CPU time of one instance's worker: of this machine and this run, nothing that the run depends on."""

    passes: int = 0
    """That planned a step."""
    plan_ns: int = 0
    """In those."""
    settle_ns: int = 0
    idle_passes: int = 0
    """That planned nothing."""
    idle_ns: int = 0


@dataclass(slots=True)
class RunRecord:
    label: str
    seed: int
    instances: int
    pool_blocks: int
    """Of each instance, unless `pools` says otherwise."""
    block_size: int
    end_us: int = 0
    steps: int = 0
    steps_each: list[int] = field(default_factory=list)
    """By instance."""
    busy_us: list[int] = field(default_factory=list)
    """How long each instance's device computed."""
    roles: list[str] = field(default_factory=list)
    """Of each instance; empty: all do everything."""
    pools: list[int] = field(default_factory=list)
    """Blocks of each instance; empty: all have `pool_blocks`."""
    handed: list[HandoverTotals] = field(default_factory=list)
    """One an instance, where roles differ."""
    took_us: list[int] = field(default_factory=list)
    """Of each hand-over, from the ask to the adoption."""
    meters: list[PassMeter] = field(default_factory=list)
    """One an instance, where passes were metered."""
    journeys: list[RequestRecord] = field(default_factory=list)
    looks: list[InstanceSample] = field(default_factory=list)
    spans: list[StepSpan] = field(default_factory=list)
    spans_left_out: int = 0
    wall_s: float = 0.0
    """How long the simulation itself took."""

    def pool_of(self, instance: int) -> int:
        return self.pools[instance] if self.pools else self.pool_blocks
