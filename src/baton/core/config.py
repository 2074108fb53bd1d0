"""The settings of the deciding code, as one frozen and validated value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.core.errors import BatonError


class ReservePolicy(StrEnum):
    NEW_TOKEN_RATIO = "new-token-ratio"  # noqa: S105  a policy, no password
    FIXED_BLOCKS = "fixed-blocks"
    NONE = "none"


class VictimPolicy(StrEnum):
    NEWEST = "newest"
    CHEAPEST = "cheapest"


class PrefillPath(StrEnum):
    """How an instance that only prefills plans its steps."""

    SHORT = "short"
    GENERAL = "general"


class OnPreempt(StrEnum):
    """What becomes of a request that an instance cannot hold, or whose hand-over failed."""

    RESUME = "resume"
    """It goes back into this instance's own queue, and its prefill is done here."""
    RESCHEDULE = "reschedule"
    """The attempt ends with everything generated so far, for a router to go on from elsewhere."""


class BringBack(StrEnum):
    """When KV that lies in host memory or in the store is fetched rather than computed again."""

    CHEAPEST = "cheapest"
    """When that is quicker, by measured rates."""
    ALWAYS = "always"


class BadConfig(BatonError):
    """A setting, or a pair of settings, that cannot work; the message names them."""


@dataclass(frozen=True, slots=True)
class Role:
    """What an instance does, as data: nothing compares names of roles."""

    name: str
    serves: bool
    """Takes requests of clients, and decodes."""
    takes: bool
    """Has peers that prefill for it."""
    gives: bool
    """Prefills for peers, and hands over."""


MIXED = Role("mixed", serves=True, takes=False, gives=False)
PREFILL = Role("prefill", serves=False, takes=False, gives=True)
DECODE = Role("decode", serves=True, takes=True, gives=False)
ROLES = {role.name: role for role in (MIXED, PREFILL, DECODE)}


@dataclass(frozen=True, slots=True)
class HandoverConfig:
    lease_us: int = 2_000_000
    """How long leased blocks wait without a sign of the giver."""
    renew_us: int = 500_000
    """How often a giver says that it is still at it."""
    deadline_us: int = 60_000_000
    """Longest time from the ask to the adoption."""
    retry_after_us: int = 100_000
    """What a refused giver is told."""
    local_tokens: int = 16
    """A prompt with no more than so many uncached tokens is prefilled where it decodes."""
    vocabulary: int = 1 << 31
    """A first token must be below this."""

    def __post_init__(self) -> None:
        for name in ("lease_us", "renew_us", "deadline_us", "retry_after_us"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.local_tokens < 0:
            raise BadConfig(f"local_tokens must not be negative, but is {self.local_tokens}")
        if self.renew_us * 2 > self.lease_us:
            raise BadConfig(
                f"renew_us ({self.renew_us}) must be at most half of lease_us ({self.lease_us}), so that one may be late"
            )


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where KV goes that the pool has no room for."""

    host_rows: int = 0
    """Blocks that host memory holds; 0: there are no other tiers."""
    store: bool = False
    """A store lies behind the host's memory."""
    save_preempted: bool = True
    save_finished: bool = True
    cache_outputs: bool = True
    """What was generated is saved too, not only prompts."""
    bring_back: BringBack = BringBack.CHEAPEST
    haul_blocks: int = 16
    """Most blocks that one order moves: they are free, or there, when all of them are."""
    hauls_max: int = 8
    """Most orders to the store at once, of each kind."""
    copy_us: int = 1_000_000
    """How long a copy between device and host may take before it is fenced."""
    look_us: int = 100_000
    get_us: int = 1_000_000
    put_us: int = 5_000_000
    depart_us: int = 500_000
    """How long the end of a request that goes elsewhere waits for its KV to be stored."""
    failures_max: int = 3
    """So many failures of the store in a row, and it is left alone for a while."""
    retry_us: int = 1_000_000
    retry_us_max: int = 30_000_000

    def __post_init__(self) -> None:
        for name in ("haul_blocks", "hauls_max", "failures_max"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("copy_us", "look_us", "get_us", "put_us", "depart_us", "retry_us"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.host_rows < 0:
            raise BadConfig(f"host_rows must not be negative, but is {self.host_rows}")
        if self.retry_us_max < self.retry_us:
            raise BadConfig(f"retry_us_max ({self.retry_us_max}) must be at least retry_us ({self.retry_us})")
        if self.store and not self.host_rows:
            raise BadConfig("a store needs host memory: everything passes through it on its way there and back")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    slots: int
    """Most requests that run at once."""
    blocks: int
    """Size of the KV pool."""
    block_size: int = 16
    """Token positions a block."""
    context_tokens: int = 8192
    """Longest sequence, prompt and outputs together."""
    step_tokens: int = 2048
    """Most tokens that one step may feed."""
    burst: int = 1
    """Most tokens that one decode may yield in one step."""
    depth: int = 2
    """How many steps may be in flight: 2 plans one while another computes."""
    waiting_max: int = 1024
    """Longest queue; beyond it a submission is refused."""
    prefix_cache: bool = True
    reserve: ReservePolicy = ReservePolicy.NEW_TOKEN_RATIO
    ratio_initial: float = 0.7
    ratio_decay: float = 0.001
    """Subtracted from the ratio in each pass."""
    ratio_floor: float = 0.1
    ratio_clip_tokens: int = 4096
    """Remaining tokens beyond this are not reserved for."""
    fixed_blocks: int = 16
    fixed_blocks_decay: float = 0.025
    victims: VictimPolicy = VictimPolicy.NEWEST
    max_preemptions: int = 8
    """A request that yielded this often is no longer a victim, and comes back only with its whole need reserved."""
    role: Role = MIXED
    prefill_path: PrefillPath = PrefillPath.SHORT
    on_preempt: OnPreempt = OnPreempt.RESUME
    handover: HandoverConfig = HandoverConfig()
    tiers: TierConfig = TierConfig()

    def __post_init__(self) -> None:
        for name in ("slots", "blocks", "block_size", "context_tokens", "step_tokens", "burst", "depth", "waiting_max"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.ratio_floor <= self.ratio_initial <= 1:
            raise BadConfig(
                f"ratio_floor ({self.ratio_floor}) and ratio_initial ({self.ratio_initial}) must rise within 0 … 1"
            )
        for name in ("ratio_decay", "ratio_clip_tokens", "fixed_blocks", "fixed_blocks_decay", "max_preemptions"):
            if not getattr(self, name) >= 0:  # written so that NaN fails too
                raise BadConfig(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.tiers.host_rows and not self.prefix_cache:
            raise BadConfig("KV in host memory and in a store is found by the names of the prefix cache, which is off")
        if self.burst > self.block_size:
            raise BadConfig(f"burst ({self.burst}) must not be larger than block_size ({self.block_size})")
        if self.step_tokens < self.slots * self.burst:
            raise BadConfig(
                f"step_tokens ({self.step_tokens}) must be at least slots × burst ({self.slots} × {self.burst}), "
                "so that every running request can decode in every step"
            )

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
