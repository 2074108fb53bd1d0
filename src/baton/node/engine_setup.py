"""Makes an executor and a worker's configuration from the settings of an engine process."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.core.config import (
    ROLES,
    BadConfig,
    HandoverConfig,
    HandoverSettings,
    SchedulerSettings,
    TierConfig,
    TierSettings,
    WorkerConfig,
)
from baton.core.engine.plan import StepPlan, StepResult
from baton.executor.contract import Allocate, Executor, ExecutorShape, KvView, LayerDone, zeroed
from baton.executor.drafts import DraftProposer, NaiveProposer, NgramProposer
from baton.executor.scripted import ScriptedExecutor
from baton.node.devices import choose_device, find_devices
from baton.node.scripted_text import BYTE_VOCABULARY
from baton.node.settings import CPU_KV_BYTES, DeviceChoice, EngineSettings, SpeculateMethod

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCRIPTED_LAYERS = 4
"""Several, so that hand-overs of the scripted executor are sent by layer."""
RENEWALS_A_LEASE = 4


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    executor: Executor
    details: str
    """A line about it for the operator."""
    tried_step_us: int = 0
    """The longest step, as far as it was tried; 0: not tried."""


def build_executor(settings: EngineSettings, allocate: Allocate = zeroed) -> BuiltExecutor:
    """The configured executor."""
    proposer = build_proposer(settings)  # first: loading a model takes long, and the settings may be wrong
    if settings.model_folder is None:
        return BuiltExecutor(_scripted(settings, allocate), "scripted executor, no model", round(settings.step_ms * 1000))
    device = choose_device(settings, find_devices())
    if settings.threads is not None:
        import torch

        torch.set_num_threads(settings.threads)
    folder = Path(settings.model_folder)
    build = _on_cuda if device is DeviceChoice.CUDA else partial(_on_cpu, allocate=allocate)
    built = build(settings, folder, proposer)
    details = f"{settings.dtype} on {built.details}" + (f", {proposer}" if settings.burst > 1 else "")
    return replace(built, details=details)


def _on_cpu(settings: EngineSettings, folder: Path, proposer: DraftProposer, allocate: Allocate) -> BuiltExecutor:
    # Imported here because torch takes seconds, and the scripted executor must not pay for it.
    from baton.executor.cpu.executor import TorchCpuExecutor

    executor = TorchCpuExecutor.load(
        folder,
        dtype=settings.dtype,
        slots=settings.slots,
        block_size=settings.block_size,
        blocks=settings.blocks,
        kv_memory_bytes=CPU_KV_BYTES if settings.kv_memory_bytes is None else settings.kv_memory_bytes,
        context_tokens=settings.context_tokens,
        attention=settings.attention,
        allocate=allocate,
        burst=settings.burst,
        proposer=proposer,
    )
    return BuiltExecutor(executor, "CPU", executor.try_step(settings.step_tokens))


def _on_cuda(settings: EngineSettings, folder: Path, proposer: DraftProposer) -> BuiltExecutor:
    # Imported here because it imports triton, which is not installed everywhere.
    from baton.executor.cuda.executor import TorchCudaExecutor

    executor = TorchCudaExecutor.load(
        folder,
        dtype=settings.dtype,
        slots=settings.slots,
        block_size=settings.block_size,
        blocks=settings.blocks,
        kv_memory_bytes=settings.kv_memory_bytes,
        context_tokens=settings.context_tokens,
        step_tokens=settings.step_tokens,
        burst=settings.burst,
        proposer=proposer,
        attention=settings.attention,
        batch_invariant=settings.batch_invariant,
    )
    return BuiltExecutor(executor, executor.details)


def build_proposer(settings: EngineSettings) -> DraftProposer:
    """The configured draft proposer, checked against the sizes that bound a decode."""
    if settings.burst > 1:
        _check_drafts(settings)
    if settings.speculate is not SpeculateMethod.NGRAM:
        return NaiveProposer()
    return NgramProposer(settings.draft_tokens, settings.ngram_min, settings.ngram_max)


def _check_drafts(settings: EngineSettings) -> None:
    if settings.burst > settings.block_size:
        raise BadConfig(
            f"--draft-tokens ({settings.draft_tokens}) must be less than --block-size ({settings.block_size}), "
            "so that a decode never needs more than one new block"
        )
    if settings.step_tokens < settings.slots * settings.burst:
        raise BadConfig(
            f"--max-num-batched-tokens ({settings.step_tokens}) must be at least --max-num-seqs × (1 + --draft-tokens) "
            f"({settings.slots} × {settings.burst}), so that every running request can decode in every step"
        )


def _scripted(settings: EngineSettings, allocate: Allocate) -> Executor:
    shape = ExecutorShape(
        slots=settings.slots,
        blocks=settings.blocks or 4096,
        block_size=settings.block_size,
        context_tokens=settings.context_tokens or 8192,
        burst=settings.burst,
    )
    # Also under a router, whatever the role: the instances of a fleet have one model.
    layers = 1 if settings.router is None and not settings.has_peers else SCRIPTED_LAYERS
    return PacedExecutor(ScriptedExecutor(shape, BYTE_VOCABULARY, layers, allocate), settings.step_ms / 1000)


class PacedExecutor:
    """Delays the steps of another executor to a minimum duration, with the layers spread over that time."""

    def __init__(self, inner: Executor, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self._written: list[tuple[int, int]] = []
        self.shape = inner.shape
        self.vocabulary = inner.vocabulary
        self.fingerprint = inner.fingerprint
        self.on_layer: LayerDone | None = None
        inner.on_layer = lambda step, layer: self._written.append((step, layer))

    @property
    def kv(self) -> KvView:
        return self._inner.kv

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        self._written.clear()
        result = self._inner.collect()
        parts = max(1, len(self._written))
        for part in range(parts):
            if self._step_s:
                time.sleep(self._step_s / parts)
            if self.on_layer is not None and self._written:
                self.on_layer(*self._written[part])
        return result

    def close(self) -> None:
        self._inner.close()


def worker_config(settings: EngineSettings, shape: ExecutorShape, block_bytes: int = 0) -> WorkerConfig:
    """`block_bytes`: KV bytes of a block; 0 where the executor keeps no KV, and then none is stored elsewhere."""
    handover = _shared(settings, HandoverSettings) | {"renew_us": round(settings.lease_us / RENEWALS_A_LEASE)}
    sizes = {"slots": shape.slots, "block_size": shape.block_size}  # of the executor
    return WorkerConfig(
        **_shared(settings, SchedulerSettings) | sizes,
        blocks=shape.blocks,
        context_tokens=shape.context_tokens,
        burst=shape.burst,
        role=ROLES[settings.role],
        handover=HandoverConfig(**handover),
        tiers=_tiers(settings, block_bytes) if block_bytes else TierConfig(),
    )


def _shared(settings: EngineSettings, declared: type[DataclassInstance]) -> dict[str, Any]:
    """The settings whose names are fields of `declared`."""
    return {field.name: getattr(settings, field.name) for field in fields(declared)}


def _tiers(settings: EngineSettings, block_bytes: int) -> TierConfig:
    rows = settings.host_bytes // block_bytes
    if settings.host_bytes and not rows:
        raise BadConfig(f"--host-memory of {settings.host_bytes} bytes has no room for one block of {block_bytes}")
    return TierConfig(**_shared(settings, TierSettings), host_rows=rows, store=settings.kv_store is not None)
