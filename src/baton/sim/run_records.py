"""Records of a simulated run, from which reports, plots and timelines are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class RequestOutcome(StrEnum):
    """The end of a request as its client sees it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """Scheduler and executor disagreed about it; may be retried."""
    REFUSED = "refused"
    LOST = "lost"
    """It could not be continued: its instance was lost, or it had no room left anywhere; may be retried."""


@dataclass(slots=True)
class SimulatedRequest:
    """One request as its client saw it, and what it cost."""

    index: int
    arrived_us: int
    input_tokens: int
    instance: int | None = None
    first_us: int | None = None
    """Time at which the first token reached the client."""
    ended_us: int | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    transfer_us: int = 0
    """Of a prefill by a peer: from the ask to the adoption, less queueing and computing there."""
    decode_us: int = 0
    attempts: int = 0
    """Number of times a peer was asked to prefill it."""
    outcome: RequestOutcome | None = None
    ended_because: str = ""
    """Why it was refused or lost, as its client is told."""

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
    """Number since the instance started."""
    reserve_ratio: float
    leased_blocks: int = 0
    """Blocks leased for a peer's prefill, whether its KV arrives yet or not."""


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
    """Hand-overs of one instance with its peers."""

    made: int
    """Hand-overs completed; each counts at its giver and at its taker."""
    refused: int
    failed: int
    """Not delivered, preempted or timed out."""
    bytes: int
    """KV sent and received."""
    busy_us: int
    """Time in which its network cards moved KV."""


@dataclass(slots=True)
class PassMeter:
    """CPU time of one instance's worker on this machine; the run does not depend on it."""

    passes: int = 0
    """Passes that planned a step."""
    plan_ns: int = 0
    """CPU time of those passes."""
    settle_ns: int = 0
    idle_passes: int = 0
    """Passes that planned nothing."""
    idle_ns: int = 0


@dataclass(slots=True)
class RunRecord:
    label: str
    seed: int
    instances: int
    pool_blocks: int
    """Blocks of each instance, unless `pools` is set."""
    block_size: int
    end_us: int = 0
    steps: int = 0
    steps_each: list[int] = field(default_factory=list)
    """By instance."""
    busy_us: list[int] = field(default_factory=list)
    """By instance: time in which its device computed."""
    roles: list[str] = field(default_factory=list)
    """By instance; empty: all are mixed."""
    pools: list[int] = field(default_factory=list)
    """Blocks of each instance; empty: all have `pool_blocks`."""
    handed: list[HandoverTotals] = field(default_factory=list)
    """By instance; empty if all are mixed."""
    took_us: list[int] = field(default_factory=list)
    """Duration of each hand-over, from the ask to the adoption."""
    meters: list[PassMeter] = field(default_factory=list)
    """By instance; empty if passes were not metered."""
    requests: list[SimulatedRequest] = field(default_factory=list)
    samples: list[InstanceSample] = field(default_factory=list)
    spans: list[StepSpan] = field(default_factory=list)
    spans_left_out: int = 0
    wall_s: float = 0.0
    """Real time of the simulation."""

    def pool_of(self, instance: int) -> int:
        return self.pools[instance] if self.pools else self.pool_blocks
