"""The executor on a CUDA device: the contract of `executor.contract`, with the slots on the device.

Owns the model, the KV pool and the slots. The host knows only what plans say (the epoch of each slot, the computed part of
its prompt); the device knows how many tokens a decode has, and reports it with the results. So a step is launched while the
one before it computes, without waiting.

One thread launches, in the order of plans; the collecting thread waits for the device. A third thread calls `on_layer` for
each written layer before the step can be collected.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.core.engine.plan import StepPlan, StepResult
from baton.core.errors import InvariantViolated
from baton.core.start_stage import OnStage, no_stages
from baton.executor.constraints.compiled_cache import NO_CONSTRAINTS, CompiledConstraints, MakeBackends, no_backends
from baton.executor.contract import NO_KV, ExecutorShape, LayerDone
from baton.executor.cuda.chunks import mixed_sizes
from baton.executor.cuda.drafted_runner import mixed_row_sizes, row_sizes
from baton.executor.cuda.drafting import propose_on_device
from baton.executor.cuda.fuse import TOLERANCE, fuse_for_cuda
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import ProductScratch
from baton.executor.cuda.runner import ModelRunner, buckets_upto
from baton.executor.cuda.sizing import NoRoomForKv, blocks_that_fit
from baton.executor.cuda.slots import DeviceSlots
from baton.executor.cuda.step import LaunchedStep, StepRunner
from baton.executor.cuda.warming import warm_up
from baton.executor.drafts import DraftProposer, NaiveProposer
from baton.executor.fingerprint import fingerprint_of
from baton.executor.kv_pool import kv_bytes_per_block
from baton.executor.model_loading import LoadedModel, load_model
from baton.executor.model_support import UnsupportedModel

log = logging.getLogger(__name__)

ATTENTIONS = ("auto", "triton")
NOTHING_RAN = 0
"""The `base_step` of the first plan of an executor."""
NAIVE = NaiveProposer()


@dataclass(frozen=True, slots=True)
class _Step:
    launched: LaunchedStep
    tellings: list[Future[None]] = field(default_factory=list)
    """The pending calls of `on_layer`."""

    def result(self) -> StepResult:
        result = self.launched.result()
        for telling in self.tellings:  # their events precede the step's end; re-raises an error of `on_layer`
            telling.result()
        return result


class TorchCudaExecutor:
    def __init__(
        self,
        stepper: StepRunner,
        loaded: LoadedModel,
        shape: ExecutorShape,
        fingerprint: bytes,
        details: str,
        constraints: CompiledConstraints = NO_CONSTRAINTS,
    ) -> None:
        self.shape = shape
        self.constraints = constraints
        """Its backends for constraints, and what they have compiled."""
        self.details = details
        """For the operator: the device and how it computes."""
        self.vocabulary = loaded.vocabulary
        self.fingerprint = fingerprint
        self.on_layer: LayerDone | None = None
        self._stepper: StepRunner | None = stepper
        self.kv = stepper.kv
        self._stream = torch.cuda.Stream()
        self._last_step = NOTHING_RAN
        self._in_doubt = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-executor")
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-layers")
        self._launched: deque[Future[_Step]] = deque()

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str = "bfloat16",
        slots: int = 256,
        block_size: int = 16,
        blocks: int | None = None,
        kv_memory_bytes: int | None = None,
        context_tokens: int | None = None,
        step_tokens: int = 8192,
        burst: int = 1,
        proposer: DraftProposer = NAIVE,
        constrained_burst: int = 0,
        attention: str = "auto",
        batch_invariant: bool = False,
        graphs: bool = True,
        backends: MakeBackends = no_backends,
        on_stage: OnStage = no_stages,
    ) -> TorchCudaExecutor:
        """Load a model folder. Without `blocks` or `kv_memory_bytes` the pool takes the memory that is left."""
        on_stage("loading the weights")
        loaded = load_model(path, dtype, "cuda", context_tokens)
        shape = ExecutorShape(
            slots=slots,
            blocks=blocks or 0,
            block_size=block_size,
            context_tokens=min(context_tokens or loaded.context_tokens, loaded.context_tokens),
            burst=burst,
            constrained_burst=constrained_burst,
        )
        return cls.of(
            loaded, shape, step_tokens=step_tokens, kv_memory_bytes=kv_memory_bytes, proposer=proposer,
            attention=attention, batch_invariant=batch_invariant, graphs=graphs, backends=backends, on_stage=on_stage,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        shape: ExecutorShape,
        *,
        step_tokens: int = 8192,
        kv_memory_bytes: int | None = None,
        proposer: DraftProposer = NAIVE,
        attention: str = "auto",
        batch_invariant: bool = False,
        graphs: bool = True,
        backends: MakeBackends = no_backends,
        on_stage: OnStage = no_stages,
    ) -> TorchCudaExecutor:
        """An executor of a model on the device. Where the shape names no blocks, as many as fit.

        `proposer` is used only where the shape allows more than one token per decode; it runs on the device.
        """
        _check_attention(attention, loaded)
        device = loaded.model.device
        with torch.inference_mode():
            scratch = ProductScratch(device, batch_invariant)
            # A rehearsal of the largest step puts all its tokens into one sequence.
            fuse_for_cuda(loaded, scratch, max(shape.context_tokens + shape.burst_max, step_tokens))
            if not shape.blocks:
                on_stage("measuring what the largest step needs")
                shape = blocks_that_fit(loaded, shape, scratch, step_tokens, kv_memory_bytes)
            constraints = CompiledConstraints(backends(loaded.vocabulary))
            stepper = _build(loaded, shape, scratch, step_tokens, proposer, constraints)
            if graphs:
                on_stage("capturing graphs of steps")
                stepper.runner.capture(buckets_upto(shape.slots))
                stepper.runner.capture_mixed(mixed_sizes(step_tokens, shape.slots))
                if stepper.drafted is not None:
                    stepper.drafted.capture(row_sizes(stepper.drafted.rows_max))
                    stepper.drafted.capture_mixed(mixed_row_sizes(step_tokens, stepper.drafted.rows_max))
            on_stage("warming up")
            warm_up(stepper, shape, step_tokens)
            torch.cuda.synchronize()  # steps run on another stream than the one that made their buffers
        way = "batch-invariant" if batch_invariant else "triton"
        layout = f"block outermost, {way}, block_size={shape.block_size}"
        fingerprint = fingerprint_of(loaded.mark, _name(loaded.dtype), layout)
        details = _details(device, stepper.runner.has_graphs, batch_invariant)
        return cls(stepper, loaded, shape, fingerprint, details, constraints)

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(self._thread.submit(self._run, plan))

    def collect(self) -> StepResult:
        if not self._launched:
            raise InvariantViolated("collect without a launched step would wait for ever")
        return self._launched.popleft().result().result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._watcher.shutdown(wait=True)
        if self._stepper is not None:
            torch.cuda.synchronize()
            self.kv = NO_KV
            self._stepper.release()
            self._stepper = None

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> _Step:
        if self._in_doubt or self._stepper is None:
            raise InvariantViolated(f"step {plan.step} follows one that failed; what the slots hold is unknown")
        if plan.base_step != self._last_step:
            raise InvariantViolated(
                f"step {plan.step} builds on {plan.base_step}, but the last one here was {self._last_step}"
            )
        self._in_doubt = True
        tellings: list[Future[None]] = []
        with torch.cuda.stream(self._stream):
            launched = self._stepper.launch(plan, self._written(plan.step, tellings))
        self._last_step = plan.step
        self._in_doubt = False
        return _Step(launched, tellings)

    def _written(self, step: int, tellings: list[Future[None]]) -> Callable[[int], None] | None:
        """Called while a step is launched: the kernels launched so far write this layer's KV."""
        tell = self.on_layer
        if tell is None:
            return None

        def written(layer: int) -> None:
            event = torch.cuda.Event()
            event.record()
            tellings.append(self._watcher.submit(_tell_when, event, tell, step, layer))

        return written


def _tell_when(event: torch.cuda.Event, tell: LayerDone, step: int, layer: int) -> None:
    event.synchronize()
    tell(step, layer)


def _check_attention(attention: str, loaded: LoadedModel) -> None:
    if attention not in ATTENTIONS:
        raise ValueError(f"attention on CUDA is one of {', '.join(ATTENTIONS)}, not {attention!r}")
    if loaded.dtype not in TOLERANCE:
        raise UnsupportedModel(str(loaded.model.config.model_type), f"{_name(loaded.dtype)}, which CUDA has no kernels for")
    log.info("attention: triton")


def _details(device: torch.device, has_graphs: bool, batch_invariant: bool) -> str:
    parts = [f"{torch.cuda.get_device_name(device)} (CUDA)", "triton attention"]
    parts.append("steps as CUDA graphs" if has_graphs else "no CUDA graphs")
    if batch_invariant:
        parts.append("batch-invariant")
    return ", ".join(parts)


def _build(
    loaded: LoadedModel,
    shape: ExecutorShape,
    scratch: ProductScratch,
    step_tokens: int,
    proposer: DraftProposer,
    constraints: CompiledConstraints,
) -> StepRunner:
    device = loaded.model.device
    slots = DeviceSlots(shape, device)
    pool = _pool(loaded, shape, device)
    propose = propose_on_device(proposer, slots.tokens, slots.known, shape.burst - 1)
    runner = ModelRunner(loaded, shape, slots, pool, scratch, step_tokens, propose)
    log.info(
        "KV pool on the device: %d blocks, %.1f GiB",
        shape.blocks,
        shape.blocks * kv_bytes_per_block(loaded.layers, shape.block_size, loaded.dtype) / (1 << 30),
    )
    return StepRunner(loaded, shape, slots, pool, runner, scratch.invariant, step_tokens, constraints)


def _pool(loaded: LoadedModel, shape: ExecutorShape, device: torch.device) -> CudaPool:
    try:
        return CudaPool(loaded.layers, shape.blocks, shape.block_size, loaded.dtype, device)
    except torch.OutOfMemoryError:
        told = f"the device has no room for {shape.blocks} blocks of KV; those who share it need a --kv-memory each"
        raise NoRoomForKv(told) from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
