"""The settings of a router's decisions, as one frozen and validated value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from baton.core.config import AtLeastOne
from baton.core.setting import BadConfig, Bounds, Panel, Setting, Unit, check_bounds

ENGINE_LATE_US = 3_000_000
"""An engine that is silent but runs, on a machine that is busy, has at least this long."""


class RoutingPolicy(StrEnum):
    """The way to choose an instance for a request."""

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
            "preempt-retry-count", Panel.CARRYING,
            "How often a request may move because an instance had no room for it; the last move stays and resumes in place.",
            0,
        ),
    ] = 3  # fmt: skip
    """Most times that a choice continues elsewhere because an instance had no room for it (codes 408, 500 and 502). The last
    move resumes in place, so that the choice never ends for want of blocks; 0: every attempt does."""
    preempt_retry_exclude_decode: Annotated[
        bool,
        Setting(
            "preempt-retry-exclude-decode", Panel.CARRYING, "It then avoids that instance while another has room."
        ),
    ] = True  # fmt: skip
    loss_retry_count: Annotated[
        int,
        Setting("loss-retry-count", Panel.CARRYING, "How often a request may move because its instance was lost.", 0),
    ] = 8
    """Most times that a choice continues elsewhere because its instance, or KV being sent to it, was lost."""
    fruitless_loss_count: Annotated[
        int,
        Setting(
            "fruitless-loss-count", Panel.CARRYING,
            "It ends at so many losses in a row without a token: it may cause them.", 1,
        ),
    ] = 4  # fmt: skip
    backoff_us: AtLeastOne = 20_000
    """Delay of the first retry of a choice; doubles, less a jitter of up to half. The first retry after a loss has none."""
    backoff_us_max: AtLeastOne = 1_000_000
    deadline_us: Annotated[
        int,
        Setting(
            "request-timeout", Panel.CARRYING,
            "Seconds that a request may wait for an instance to accept it; after that time it resumes in place.", 1,
            unit=Unit.SECONDS,
        ),
        Bounds(least=1),
    ] = 600_000_000  # fmt: skip
    """Counted from arrival. A request that no instance has accepted then ends with an error; one that was accepted goes on
    to its end, and each attempt that begins later resumes in place."""
    absent_us: Annotated[
        int,
        Setting(
            "absent-timeout", Panel.CARRYING, "Seconds that a new request waits while no instance is there.", 0,
            unit=Unit.SECONDS,
        ),
        Bounds(least=0),
    ] = 10_000_000  # fmt: skip
    """Longest time that a request without a token waits while there is no instance."""
    expected_instances: Annotated[
        int,
        Setting(
            "expect-instances", Panel.INSTANCES,
            "How many instances that answer requests are being started: until they have come, requests wait for them.", 0,
        ),
    ] = 0  # fmt: skip
    """Until as many have served once, and for `start_us` at most, the absence of instances ends no request."""
    start_us: Annotated[
        int,
        Setting(
            "start-timeout", Panel.INSTANCES, "Seconds that requests wait for --expect-instances, from the start.", 0,
            unit=Unit.SECONDS,
        ),
        Bounds(least=0),
    ] = 600_000_000  # fmt: skip
    waiting_max: Annotated[
        int,
        Setting(
            "max-waiting", Panel.LIMITS, "Choices that may wait for a place; beyond it clients get 429 with Retry-After.", 1
        ),
    ] = 1024
    """Most choices that wait for a place; beyond it new requests are refused."""
    ahead: Annotated[float, Bounds(above=0)] = 2.0
    """Most open choices at an instance, as a multiple of its slots; further choices wait at the router."""
    retry_rate: Annotated[float, Bounds(above=0)] = 50.0
    """Retries per second, of all choices together, once `retry_burst` is used up; further retries wait."""
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
    """An instance without a sign of life, or with an engine that is silent and does not run, for this long is removed."""
    deaf_us: AtLeastOne = 2_000_000
    """An instance that says that nothing of this router has reached it for this long is removed. Several times the interval
    of the router's signs of life."""
    drain_us: AtLeastOne = 30_000_000
    """Choices still open at a draining instance after this long continue elsewhere."""
    orphan_grace_us: Annotated[
        int,
        Setting(
            "orphan-grace", Panel.INSTANCES,
            "Seconds that instances keep requests after this router was lost, to be resumed.", 0.1, unit=Unit.SECONDS,
        ),
        Bounds(least=1),
    ] = 10_000_000  # fmt: skip
    """Time for which a request without a client is kept after a router was lost."""
    key_concurrency: Annotated[
        int | None,
        Setting("key-concurrency", Panel.LIMITS, "Choices that one API key may have open. Default: any number.", 1),
    ] = None
    """Most open choices of one tenant."""
    key_tokens_per_minute: Annotated[
        int | None,
        Setting(
            "key-tokens-per-minute", Panel.LIMITS,
            "Tokens, prompt and answer, that one API key may use. Default: any number.", 1,
        ),
    ] = None  # fmt: skip
    """Tokens, prompt and generated, that one tenant may use per minute."""
    model: str = "the model of this router"
    """Name of the model, for display."""
    model_mark: bytes = b""
    """Prefix that the fingerprint of every instance must have; empty: any."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.suspect_us < 2 * self.beat_us:
            raise BadConfig(f"suspect_us ({self.suspect_us}) must be at least twice beat_us ({self.beat_us})")

    def engine_suspect_us(self, runs: bool) -> int:
        """Silence after which an engine is given up; `runs`: its process uses a CPU or waits for one."""
        return max(self.suspect_us, ENGINE_LATE_US) if runs else self.suspect_us
