"""The settings of an engine process, as one frozen value that travels to it as JSON."""

from __future__ import annotations

import msgspec

from baton.core.config import ReservePolicy, VictimPolicy


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str
    """Where the front end listens for the engine."""
    model_folder: str | None
    """None runs the scripted executor, which has no model."""
    prefix_secret: bytes
    log_level: str = "info"
    dtype: str = "bfloat16"
    attention: str = "auto"
    threads: int | None = None
    slots: int = 64
    block_size: int = 16
    blocks: int | None = None
    """Size of the KV pool; None takes what `kv_memory_bytes` holds."""
    kv_memory_bytes: int = 2 << 30
    context_tokens: int | None = None
    step_tokens: int = 2048
    depth: int = 2
    burst: int = 1
    waiting_max: int = 1024
    prefix_cache: bool = True
    reserve: ReservePolicy = ReservePolicy.NEW_TOKEN_RATIO
    ratio_initial: float = 0.7
    ratio_decay: float = 0.001
    ratio_floor: float = 0.1
    ratio_clip_tokens: int = 4096
    fixed_blocks: int = 16
    fixed_blocks_decay: float = 0.025
    victims: VictimPolicy = VictimPolicy.NEWEST
    max_preemptions: int = 8
    step_ms: float = 0.0
    """Scripted only: how long a step takes at least."""
