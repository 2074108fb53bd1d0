"""The settings of the deciding code, as one frozen and validated value."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import BatonError


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

    def __post_init__(self) -> None:
        for name in ("slots", "blocks", "block_size", "context_tokens", "step_tokens", "burst", "depth", "waiting_max"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} must be at least 1, not {getattr(self, name)}")
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
