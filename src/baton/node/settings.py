"""The settings of an engine process, as one frozen value that travels to it as JSON."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from baton.core.config import MIXED, ROLES, BringBack, OnPreempt, PrefillPath, ReservePolicy, VictimPolicy

DEFAULT_PEER_PORT = 8100
CPU_KV_BYTES = 2 << 30
STAGING_BYTES = 1 << 30
"""Host memory of an instance with a store for which none is set: what is on its way there and back lies in it."""


class OnDevice(StrEnum):
    """Where the model computes."""

    AUTO = "auto"
    """CUDA where torch sees such a device."""
    CPU = "cpu"
    CUDA = "cuda"


class Speculate(StrEnum):
    """Who guesses tokens ahead of a decode."""

    OFF = "off"
    NAIVE = "naive"
    """Nobody, but every decode is planned and computed as if somebody did."""
    NGRAM = "ngram"
    """What is known of the sequence: it may repeat itself."""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str
    """Where the front end listens for the engine."""
    model_folder: str | None
    """None runs the scripted executor, which has no model."""
    prefix_secret: bytes
    log_level: str = "info"
    device: OnDevice = OnDevice.AUTO
    dtype: str = "bfloat16"
    attention: str = "auto"
    batch_invariant: bool = False
    """The same bits whatever else is in the batch."""
    threads: int | None = None
    slots: int = 64
    block_size: int = 16
    blocks: int | None = None
    """Size of the KV pool; None takes what `kv_memory_bytes` holds."""
    kv_memory_bytes: int | None = None
    """None: what the largest step leaves of a CUDA device; on a CPU, CPU_KV_BYTES."""
    context_tokens: int | None = None
    step_tokens: int = 2048
    depth: int = 2
    speculate: Speculate = Speculate.OFF
    draft_tokens: int = 4
    """The most that are guessed for one decode."""
    ngram_min: int = 2
    ngram_max: int = 5
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
    role: str = MIXED.name
    peers: tuple[str, ...] = ()
    """HOST:PORT of each instance that prefills for this one."""
    peer_host: str = "127.0.0.1"
    """Where this one listens: for peers if it prefills, for KV if it decodes."""
    peer_port: int | None = None
    """Of the listener for peers; 0 picks a free one, None takes DEFAULT_PEER_PORT."""
    router: str | None = None
    """HOST:PORT where a router lets instances in; None where clients come to this one alone."""
    name: str = ""
    """What the router calls this instance, over all its lives."""
    cluster_key: bytes = b""
    transfer: str = "auto"
    on_preempt: OnPreempt = OnPreempt.RESUME
    prefill_path: PrefillPath = PrefillPath.SHORT
    prefill_timeout_s: float = 60.0
    lease_s: float = 2.0
    host_memory_bytes: int | None = None
    """For KV that the pool has no room for. None: STAGING_BYTES with a store, else nothing."""
    kv_store: str | None = None
    """The address of a store, as `kv.store` reads it."""
    kv_store_limit_bytes: int | None = None
    save_preempted: bool = True
    save_finished: bool = True
    cache_outputs: bool = True
    bring_back: BringBack = BringBack.CHEAPEST
    step_ms: float = 0.0
    """Scripted only: how long a step takes at least."""

    @property
    def burst(self) -> int:
        """The most tokens that one decode may yield in one step."""
        return 1 if self.speculate is Speculate.OFF else 1 + self.draft_tokens

    @property
    def host_bytes(self) -> int:
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        return 0 if self.kv_store is None else STAGING_BYTES

    @property
    def has_peers(self) -> bool:
        role = ROLES[self.role]
        return role.takes or role.gives

    @property
    def needs_key(self) -> bool:
        """Others prove themselves to this instance, or it to them."""
        return self.has_peers or self.router is not None
