"""The settings of the deciding code, as frozen and validated values.

SchedulerSettings, HandoverSettings and TierSettings are what an operator sets. The settings of an engine process inherit
them, and so do WorkerConfig, HandoverConfig and TierConfig, which add what follows from the model and the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from baton.core.setting import BadConfig as BadConfig
from baton.core.setting import Bounds, Panel, Setting, Unit, check_bounds

AtLeastOne = Annotated[int, Bounds(least=1)]


class ReservePolicy(StrEnum):
    NEW_TOKEN_RATIO = "new-token-ratio"  # noqa: S105  a policy, no password
    FIXED_BLOCKS = "fixed-blocks"
    NONE = "none"


class VictimPolicy(StrEnum):
    NEWEST = "newest"
    CHEAPEST = "cheapest"


class PrefillPath(StrEnum):
    """The way in which an instance that only prefills plans its steps."""

    SHORT = "short"
    GENERAL = "general"


class OnPreempt(StrEnum):
    """Handling of a request that an instance cannot hold, or whose hand-over failed."""

    RESUME = "resume"
    """Put it back into this instance's own queue, and prefill it here."""
    RESCHEDULE = "reschedule"
    """End the attempt with everything generated so far, for a router to continue elsewhere."""


class BringBack(StrEnum):
    """Policy for fetching KV from host memory or the store instead of computing it again."""

    CHEAPEST = "cheapest"
    """Fetch if that is quicker by measured rates."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Role:
    """The capabilities of an instance, as data: code tests these, not the name."""

    name: str
    serves: bool
    """Accepts requests of clients, and decodes."""
    takes: bool
    """Has peers that prefill for it."""
    gives: bool
    """Prefills for peers and hands the KV over."""


MIXED = Role("mixed", serves=True, takes=False, gives=False)
PREFILL = Role("prefill", serves=False, takes=False, gives=True)
DECODE = Role("decode", serves=True, takes=True, gives=False)
ROLES = {role.name: role for role in (MIXED, PREFILL, DECODE)}


# ── hand-overs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class HandoverSettings:
    deadline_us: Annotated[
        int,
        Setting("prefill-timeout", Panel.PEERS, "Seconds that decode waits for a peer's prefill.", 0.1, unit=Unit.SECONDS),
        Bounds(least=1),
    ] = 60_000_000
    """Longest time from the ask to the adoption."""
    lease_us: Annotated[
        int,
        Setting(
            "lease", Panel.PEERS, "Seconds that blocks wait for a peer of which nothing is heard.", 0.1, unit=Unit.SECONDS
        ),
        Bounds(least=1),
    ] = 2_000_000
    """Time for which leased blocks wait without a message from the prefill side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverConfig(HandoverSettings):
    renew_us: AtLeastOne = 500_000
    """Interval at which the prefill side renews a lease."""
    local_tokens: Annotated[int, Bounds(least=0)] = 16
    """A prompt with at most this many uncached tokens is prefilled where it decodes."""
    vocabulary: int = 1 << 31
    """A first token must be below this."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.renew_us * 2 > self.lease_us:
            raise BadConfig(
                f"renew_us ({self.renew_us}) must be at most half of lease_us ({self.lease_us}), so that one may be late"
            )


# ── KV beyond the pool ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    save_preempted: Annotated[
        bool,
        Setting("save-preempted", Panel.TIERS, "Keep the KV of requests that yield, to go on from here or elsewhere."),
    ] = True
    save_finished: Annotated[
        bool, Setting("save-finished", Panel.TIERS, "Keep the KV of requests that end, for others that begin alike.")
    ] = True
    cache_outputs: Annotated[
        bool, Setting("cache-outputs", Panel.TIERS, "Keep the KV of generated tokens too, not only of prompts.")
    ] = True
    bring_back: Annotated[
        BringBack,
        Setting("bring-back", Panel.TIERS, "Fetch KV when that is quicker than computing it (cheapest), or always."),
    ] = BringBack.CHEAPEST


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig(TierSettings):
    """Host memory and the store, for KV beyond the pool."""

    host_rows: Annotated[int, Bounds(least=0)] = 0
    """Blocks that fit into host memory; 0: there are no other tiers."""
    store: bool = False
    """There is a store behind host memory."""
    transfer_blocks: AtLeastOne = 16
    """Most blocks in one order; they become available together."""
    transfers_max: AtLeastOne = 8
    """Most open orders to the store of each kind."""
    copy_us: AtLeastOne = 1_000_000
    """Time limit of a copy between device and host; after it the copy is fenced."""
    look_us: AtLeastOne = 100_000
    get_us: AtLeastOne = 1_000_000
    put_us: AtLeastOne = 5_000_000
    depart_us: AtLeastOne = 500_000
    """Longest time that the end of a request that continues elsewhere waits for its KV to be stored."""
    failures_max: AtLeastOne = 3
    """Failures in a row after which the store is not used for a while."""
    retry_us: AtLeastOne = 1_000_000
    retry_us_max: int = 30_000_000

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.retry_us_max < self.retry_us:
            raise BadConfig(f"retry_us_max ({self.retry_us_max}) must be at least retry_us ({self.retry_us})")
        if self.store and not self.host_rows:
            raise BadConfig("a store needs host memory: everything passes through it on its way there and back")


# ── scheduling ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    waiting_max: Annotated[
        int,
        Setting(
            "max-waiting", Panel.LIMITS, "Longest queue; beyond it clients get 429 with Retry-After.", 1,
            after="served-model-name",
        ),
    ] = 1024  # fmt: skip
    slots: Annotated[int, Setting("max-num-seqs", Panel.KV, "Most requests that run at once.", 1)] = 64
    step_tokens: Annotated[
        int,
        Setting("max-num-batched-tokens", Panel.KV, "Most tokens one step may feed; longer prompts are cut into chunks.", 1),
    ] = 2048
    block_size: Annotated[int, Setting("block-size", Panel.KV, "Token positions a KV block.", 1)] = 16
    prefix_cache: Annotated[bool, Setting("prefix-cache", Panel.KV, "Reuse the KV of prompts that begin alike.")] = True
    depth: Annotated[int, Setting("plan-ahead", Panel.KV, "Steps in flight: 2 plans one while another computes.", 1, 3)] = 2
    reserve: Annotated[
        ReservePolicy,
        Setting(
            "reserve", Panel.PRESSURE,
            "What running requests keep free to grow into. More: fewer preemptions, smaller batches.",
        ),
    ] = ReservePolicy.NEW_TOKEN_RATIO  # fmt: skip
    ratio_initial: Annotated[
        float,
        Setting(
            "ratio-initial", Panel.PRESSURE, "new-token-ratio: share of the remaining outputs reserved at the start.", 0, 1
        ),
    ] = 0.7
    ratio_decay: Annotated[
        float, Setting("ratio-decay", Panel.PRESSURE, "new-token-ratio: what the share falls by a pass.", 0)
    ] = 0.001
    ratio_floor: Annotated[float, Setting("ratio-floor", Panel.PRESSURE, "new-token-ratio: the least share.", 0, 1)] = 0.1
    ratio_clip_tokens: Annotated[
        int,
        Setting(
            "ratio-clip-tokens", Panel.PRESSURE, "new-token-ratio: remaining tokens beyond this are not reserved for.", 0
        ),
    ] = 4096
    fixed_blocks: Annotated[
        int,
        Setting("fixed-blocks", Panel.PRESSURE, "fixed-blocks: blocks a running request reserves after a preemption.", 0),
    ] = 16
    fixed_blocks_decay: Annotated[
        float, Setting("fixed-blocks-decay", Panel.PRESSURE, "fixed-blocks: what those fall by a pass, down to 0.", 0)
    ] = 0.025
    victims: Annotated[
        VictimPolicy,
        Setting("victims", Panel.PRESSURE, "Who yields: the newest, or the one that is cheapest to compute again."),
    ] = VictimPolicy.NEWEST
    max_preemptions: Annotated[
        int, Setting("max-preemptions", Panel.PRESSURE, "A request that yielded this often is no longer a victim.", 0)
    ] = 8
    """A request preempted this often is no longer a victim, and is admitted again only with its whole need promised."""
    on_preempt: Annotated[
        OnPreempt,
        Setting(
            "on-preempt", Panel.PRESSURE,
            "What it cannot hold: resume here later, or end with pd_reschedule to go on elsewhere. "
            "Default: reschedule under a router, else resume.",
            is_optional=True,
        ),
    ] = OnPreempt.RESUME  # fmt: skip
    prefill_path: Annotated[
        PrefillPath,
        Setting("prefill-path", Panel.PEERS, "How prefill plans its steps: short, or general as other instances do."),
    ] = PrefillPath.SHORT


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(SchedulerSettings):
    blocks: AtLeastOne
    """Size of the KV pool."""
    context_tokens: AtLeastOne = 8192
    """Longest sequence, prompt and outputs together."""
    burst: AtLeastOne = 1
    """Most tokens that one decode may yield in one step."""
    constrained_burst: Annotated[int, Bounds(least=0)] = 0
    """The same for a request with a constraint, where it is more than `burst`: the tokens that its grammar forces."""
    constraint_backends: tuple[tuple[str, str], ...] = ()
    """Name and version of each backend that the executor has for constraints."""
    kv_events: bool = False
    """Keep the tokens of cached blocks, and report which blocks come and go (`Worker.block_events`)."""
    role: Role = MIXED
    handover: HandoverConfig = HandoverConfig()
    tiers: TierConfig = TierConfig()

    def __post_init__(self) -> None:
        if not 0 <= self.ratio_floor <= self.ratio_initial <= 1:
            raise BadConfig(
                f"ratio_floor ({self.ratio_floor}) and ratio_initial ({self.ratio_initial}) must rise within 0 … 1"
            )
        check_bounds(self)
        if self.tiers.host_rows and not self.prefix_cache:
            raise BadConfig("KV in host memory and in a store is found by the names of the prefix cache, which is off")
        if self.kv_events and not self.prefix_cache:
            raise BadConfig("KV events tell what is in the prefix cache, which is off")
        if self.burst_max > self.block_size:
            raise BadConfig(f"burst ({self.burst_max}) must not be larger than block_size ({self.block_size})")
        if self.step_tokens < self.slots * self.burst_max:
            raise BadConfig(
                f"step_tokens ({self.step_tokens}) must be at least slots × burst ({self.slots} × {self.burst_max}), "
                "so that every running request can decode in every step"
            )

    @property
    def burst_max(self) -> int:
        """Most tokens that any decode may yield in one step."""
        return max(self.burst, self.constrained_burst)

    @property
    def pool_tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def sequence_tokens_max(self) -> int:
        """The longest sequence that could ever run."""
        return min(self.context_tokens, self.pool_tokens)

    @property
    def table_width(self) -> int:
        return -(-self.sequence_tokens_max // self.block_size)
