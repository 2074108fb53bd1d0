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


class BadConfig(BatonError):
    """A setting, or a pair of settings, that cannot work; the message names them."""


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
