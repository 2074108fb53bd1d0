"""The settings of a router's decisions, as one frozen and validated value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from baton.core.config import AtLeastOne
from baton.core.setting import BadConfig, Bounds, Panel, Setting, Unit, check_bounds


class RoutingPolicy(StrEnum):
    """How an instance is chosen for a request."""

    CACHE_AWARE = "cache-aware"
    POWER_OF_TWO = "power-of-two"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    policy: Annotated[
        RoutingPolicy,
        Setting(
            "policy", Panel.INSTANCES,
            "Who gets a request: cache-aware (weighs the prefix that an instance has against its load), power-of-two, "
            "round-robin or random.",
            metavar="POLICY",
        ),
    ] = RoutingPolicy.CACHE_AWARE  # fmt: skip
    preempt_retry_count: Annotated[
        int,
        Setting(
            "preempt-retry-count", Panel.CARRYING, "How often a request may move because an instance had no room for it.", 0
        ),
    ] = 3
    """How often a choice may go on elsewhere because an instance had no room for it (codes 500 and 502)."""
    preempt_retry_exclude_decode: Annotated[
        bool,
        Setting(
            "preempt-retry-exclude-decode", Panel.CARRYING, "It then avoids that instance while there is another."
        ),
    ] = True  # fmt: skip
    loss_retry_count: Annotated[
        int,
        Setting("loss-retry-count", Panel.CARRYING, "How often a request may move because its instance was lost.", 0),
    ] = 8
    """How often a choice may go on elsewhere because its instance, or the KV on its way to it, was lost."""
    fruitless_loss_count: Annotated[
        int,
        Setting(
            "fruitless-loss-count", Panel.CARRYING,
            "It ends at so many losses in a row without a token: it may cause them.", 1,
        ),
    ] = 4  # fmt: skip
    backoff_us: AtLeastOne = 20_000
    """Before the first retry of a choice; doubles, less a jitter of up to half. After a loss the first one is at once."""
    backoff_us_max: AtLeastOne = 1_000_000
    deadline_us: Annotated[
        int,
        Setting(
            "request-timeout", Panel.CARRYING,
            "Seconds after which a request is neither placed nor moved any more; an answer that flows goes on.", 1,
            unit=Unit.SECONDS,
        ),
        Bounds(least=1),
    ] = 600_000_000  # fmt: skip
    """From arrival. What waits for a place or for its first token then ends with an error; an answer that flows goes on
    until it would have to move."""
    absent_us: Annotated[
        int,
        Setting(
            "absent-timeout", Panel.CARRYING, "Seconds that a new request waits while no instance is there.", 0,
            unit=Unit.SECONDS,
        ),
        Bounds(least=0),
    ] = 10_000_000  # fmt: skip
    """How long a body that has no token yet waits for an instance while none is there."""
    waiting_max: Annotated[
        int,
        Setting(
            "max-waiting", Panel.LIMITS, "Choices that may wait for a place; beyond it clients get 429 with Retry-After.", 1
        ),
    ] = 1024
    """Choices that wait for a place; beyond it new bodies are refused."""
    ahead: Annotated[float, Bounds(above=0)] = 2.0
    """Choices open at an instance, as a multiple of its slots, beyond which newcomers wait here instead of there."""
    retry_rate: Annotated[float, Bounds(above=0)] = 50.0
    """Retries a second, of all choices together, once `retry_burst` of them are used up; the others wait their turn."""
    retry_burst: AtLeastOne = 512
    beat_us: AtLeastOne = 200_000
    suspect_us: Annotated[
        int,
        Setting(
            "suspect-after", Panel.INSTANCES,
            "Seconds without a sign of life after which an instance is taken out.", 0.4, unit=Unit.SECONDS,
        ),
        Bounds(least=1),
    ] = 600_000  # fmt: skip
    """An instance or its engine that gave no sign of life for this long is taken out."""
    stuck_us: AtLeastOne = 60_000_000
    """An engine that computes and finishes no step for this long is taken out."""
    drain_us: AtLeastOne = 30_000_000
    """What is still open at a draining instance after this long goes on elsewhere."""
    orphan_grace_us: Annotated[
        int,
        Setting(
            "orphan-grace", Panel.INSTANCES,
            "Seconds that instances keep requests after this router was lost, to be resumed.", 0.1, unit=Unit.SECONDS,
        ),
        Bounds(least=1),
    ] = 10_000_000  # fmt: skip
    """How long a request without a client is kept after a router was lost."""
    key_concurrency: Annotated[
        int | None,
        Setting("key-concurrency", Panel.LIMITS, "Choices that one API key may have open. Default: any number.", 1),
    ] = None
    """Choices that one tenant may have open."""
    key_tokens_per_minute: Annotated[
        int | None,
        Setting(
            "key-tokens-per-minute", Panel.LIMITS,
            "Tokens, prompt and answer, that one API key may use. Default: any number.", 1,
        ),
    ] = None  # fmt: skip
    """Tokens, prompt and generated, that one tenant may use."""
    model: str = "the model of this router"
    """For people."""
    model_mark: bytes = b""
    """What the fingerprint of every instance begins with; empty where it is not known."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.suspect_us < 2 * self.beat_us:
            raise BadConfig(f"suspect_us ({self.suspect_us}) must be at least twice beat_us ({self.beat_us})")
