"""Makes an executor and a worker's configuration from the settings of an engine process."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
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
from baton.core.errors import BatonError
from baton.core.start_stage import OnStage, no_stages
from baton.executor.constraints.compiled_cache import NO_CONSTRAINTS, CompiledConstraints, DeferredBackend
from baton.executor.constraints.contract import ConstraintBackend, ConstraintError
from baton.executor.constraints.scripted_backend import ScriptedBackend
from baton.executor.contract import Allocate, Executor, ExecutorShape, KvView, LayerDone, zeroed
from baton.executor.drafts import DraftProposer, NaiveProposer, NgramProposer
from baton.executor.scripted import ScriptedExecutor
from baton.node.devices import NAMES, choose_device, find_devices
from baton.node.model_memory import OutOfMemory, check_gpu_memory, check_memory
from baton.node.scripted_text import BYTE_VOCABULARY
from baton.node.settings import CPU_KV_BYTES, DeviceChoice, EngineSettings, ForcedDrafts, SpeculateMethod

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

CONSTRAINED_BURST = 8
"""Most tokens that a decode with a constraint yields in one step, of which its grammar forces all but one."""
MASKS_S_LEAST = 0.005
"""Time that a step of the scripted executor has for masks, where it is to take less itself."""
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
    constraints: CompiledConstraints = NO_CONSTRAINTS
    """What it has compiled, and compiles with."""


def build_executor(settings: EngineSettings, allocate: Allocate = zeroed, on_stage: OnStage = no_stages) -> BuiltExecutor:
    """The configured executor."""
    proposer = build_proposer(settings)  # first: loading a model takes long, and the settings may be wrong
    if settings.model_folder is None:
        return _scripted(settings, allocate)
    on_stage("importing torch")
    device = choose_device(settings, find_devices(settings.device))
    if settings.threads is not None:
        import torch

        torch.set_num_threads(settings.threads)
    folder = Path(settings.model_folder)
    build = _on_cuda if device is DeviceChoice.CUDA else partial(_on_cpu, allocate=allocate)
    with _told_in_one_line(NAMES[device]):
        built = build(settings, folder, proposer, on_stage=on_stage)
    details = f"{settings.dtype} on {built.details}" + (f", {proposer}" if settings.burst > 1 else "")
    return replace(built, details=details)


class CannotBuild(BatonError):
    """A library failed while the executor was made."""


@contextlib.contextmanager
def _told_in_one_line(device: str) -> Iterator[None]:
    """What libraries raise becomes one line; where it comes from is logged at debug."""
    import torch

    try:
        yield
    except BatonError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(
            f"{device} memory ran out while the model was loaded; take less for KV (--kv-memory, --kv-blocks), a smaller "
            "--dtype, or stop what else uses it"
        ) from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CannotBuild(f"{device}: {type(error).__name__}: {reason} (--log-level debug shows where)") from error


def _on_cpu(
    settings: EngineSettings, folder: Path, proposer: DraftProposer, allocate: Allocate, on_stage: OnStage
) -> BuiltExecutor:
    # Imported here because torch takes seconds, and the scripted executor must not pay for it.
    from baton.executor.light_transformers import import_transformers

    import_transformers()
    from baton.executor.cpu.executor import TorchCpuExecutor

    check_memory(settings, folder)
    executor = TorchCpuExecutor.load(
        folder,
        dtype=settings.dtype,
        slots=settings.slots,
        block_size=settings.block_size,
        blocks=settings.blocks,
        kv_memory_bytes=CPU_KV_BYTES if settings.kv_memory_bytes is None else settings.kv_memory_bytes,
        context_tokens=settings.context_tokens,
        attention=settings.attention,
        quantization=settings.quantization,
        batch_invariant=settings.batch_invariant,
        allocate=allocate,
        burst=settings.burst,
        proposer=proposer,
        constrained_burst=constrained_burst(settings),
        backends=partial(constraint_backends, folder),
        on_stage=on_stage,
    )
    on_stage("trying a step")
    return BuiltExecutor(executor, executor.details, executor.try_step(settings.step_tokens), executor.constraints)


def constraint_backends(folder: Path, vocabulary: int) -> list[ConstraintBackend]:
    """The backends for a model; none, with a warning, if its tokenizer is of no use for constraints."""
    # Imported here because it imports tokenizers, and the scripted executor must not wait for that.
    from baton.executor.constraints.llguidance_backend import LlguidanceBackend

    try:
        return [LlguidanceBackend.of_folder(folder, vocabulary)]
    except ConstraintError as error:
        log.warning("requests with constraints will be refused: %s", error)
        return []


def _byte_backend() -> ConstraintBackend:
    from baton.executor.constraints.llguidance_backend import LlguidanceBackend
    from baton.executor.constraints.llguidance_grammars import matching_tokenizer
    from baton.node.scripted_text import byte_tokenizer

    return LlguidanceBackend(matching_tokenizer(byte_tokenizer(), BYTE_VOCABULARY, [BYTE_VOCABULARY - 1]))


def constrained_burst(settings: EngineSettings, drafts_forced: bool = True) -> int:
    """How many tokens a decode with a constraint may yield: what fits into one block, and into a step with all slots.
    0: as many as others. `drafts_forced`: whether the device does, unless the settings say."""
    if settings.forced_drafts is ForcedDrafts.OFF or (settings.forced_drafts is ForcedDrafts.AUTO and not drafts_forced):
        return 0
    return min(CONSTRAINED_BURST, settings.block_size, settings.step_tokens // settings.slots)


def _on_cuda(settings: EngineSettings, folder: Path, proposer: DraftProposer, on_stage: OnStage) -> BuiltExecutor:
    check_gpu_memory(settings, folder, gpu_bytes())
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
        constrained_burst=constrained_burst(settings, drafts_forced=False),
        attention=settings.attention,
        batch_invariant=settings.batch_invariant,
        backends=partial(constraint_backends, folder),
        on_stage=on_stage,
    )
    return BuiltExecutor(executor, executor.details, constraints=executor.constraints)


def gpu_bytes() -> int:
    """Memory of the GPU in all, whoever uses it now."""
    import torch

    _, whole = torch.cuda.mem_get_info()
    return whole


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


def _scripted(settings: EngineSettings, allocate: Allocate) -> BuiltExecutor:
    shape = ExecutorShape(
        slots=settings.slots,
        blocks=settings.blocks or 4096,
        block_size=settings.block_size,
        context_tokens=settings.context_tokens or 8192,
        burst=settings.burst,
        constrained_burst=constrained_burst(settings),
    )
    # Also under a router, whatever the role: the instances of a fleet have one model.
    layers = 1 if settings.router is None and not settings.has_peers else SCRIPTED_LAYERS
    backend = DeferredBackend("llguidance", version("llguidance"), _byte_backend)
    constraints = CompiledConstraints([ScriptedBackend(), backend])
    step_s = settings.step_ms / 1000
    clock = MaskClock(max(step_s, MASKS_S_LEAST))
    scripted = ScriptedExecutor(shape, BYTE_VOCABULARY, layers, allocate, constraints, clock.is_late)
    executor = PacedExecutor(scripted, step_s, clock)
    return BuiltExecutor(executor, "scripted executor, no model", round(settings.step_ms * 1000), constraints)


class MaskClock:
    """Whether a step has spent its time for masks. There is time for one mask in every step."""

    def __init__(self, masks_s: float) -> None:
        self._masks_s = masks_s
        self._until_s: float | None = None
        """None before the first mask of a step."""

    def restart(self) -> None:
        """A step begins."""
        self._until_s = None

    def is_late(self) -> bool:
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + self._masks_s
        return now_s > self._until_s


class PacedExecutor:
    """Delays the steps of another executor to a minimum duration, with the layers spread over that time."""

    def __init__(self, inner: Executor, step_s: float, clock: MaskClock) -> None:
        self._inner = inner
        self._step_s = step_s
        self._clock = clock
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
        self._clock.restart()
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


def warn_of_small_pool(settings: EngineSettings, config: WorkerConfig, block_bytes: int) -> None:
    """Say so where the pool holds less than the longest sequence; at WARNING where that length or the pool was asked for."""
    if config.pool_tokens >= config.context_tokens:
        return
    is_length_asked = settings.context_tokens is not None
    is_asked = is_length_asked or settings.kv_memory_bytes is not None or settings.blocks is not None
    blocks = -(-config.context_tokens // config.block_size)
    wanted = f"--kv-memory {blocks * block_bytes}" if block_bytes else f"--kv-blocks {blocks}"
    log.log(
        logging.WARNING if is_asked else logging.INFO,
        "the KV pool holds sequences of %d tokens, and %s is %d: longer requests are refused; %s holds the longest",
        config.pool_tokens, "--max-model-len" if is_length_asked else "the model's context", config.context_tokens, wanted,
    )  # fmt: skip


def worker_config(
    settings: EngineSettings,
    shape: ExecutorShape,
    block_bytes: int = 0,
    constraint_backends: tuple[tuple[str, str], ...] = (),
) -> WorkerConfig:
    """`block_bytes`: KV bytes of a block; 0 where the executor keeps no KV, and then none is stored elsewhere."""
    handover = _shared(settings, HandoverSettings) | {"renew_us": round(settings.lease_us / RENEWALS_A_LEASE)}
    sizes = {"slots": shape.slots, "block_size": shape.block_size}  # of the executor
    return WorkerConfig(
        **_shared(settings, SchedulerSettings) | sizes,
        blocks=shape.blocks,
        context_tokens=shape.context_tokens,
        burst=shape.burst,
        constrained_burst=shape.constrained_burst,
        constraint_backends=constraint_backends,
        kv_events=settings.kv_events_endpoint is not None,
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
