"""What a simulated run leaves behind: values that reports, plots and timelines are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Outcome(StrEnum):
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
class Journey:
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
    decode_us: int = 0
    outcome: Outcome | None = None

    @property
    def ttft_us(self) -> int | None:
        return None if self.first_us is None else self.first_us - self.arrived_us

    @property
    def tpot_us(self) -> float | None:
        """Mean time between tokens after the first."""
        if self.first_us is None or self.ended_us is None or self.output_tokens < 2:
            return None
        return (self.ended_us - self.first_us) / (self.output_tokens - 1)


class Look(NamedTuple):
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


class StepSpan(NamedTuple):
    """One step on one device."""

    instance: int
    step: int
    begin_us: int
    end_us: int
    decodes: int
    prefill_tokens: int


@dataclass(slots=True)
class RunRecord:
    label: str
    seed: int
    instances: int
    pool_blocks: int
    """Of each instance."""
    block_size: int
    end_us: int = 0
    steps: int = 0
    busy_us: list[int] = field(default_factory=list)
    """How long each instance's device computed."""
    journeys: list[Journey] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    spans: list[StepSpan] = field(default_factory=list)
    spans_left_out: int = 0
    wall_s: float = 0.0
    """How long the simulation itself took."""
