"""The executor on a CUDA device: the contract of `executor.contract`, with the slots on the device.

It owns the model, the KV pool and the slots. The host keeps only what plans tell it (who is in which slot, which of its
prompt is computed); how far a decode has come is known to the device alone, and told with the results. So a step is launched
while the one before it computes, and waits for nothing.

Two threads: one launches, in the order of plans; whoever collects waits for the device. What layers of a step are written
is told by a third, to whoever asked (`on_layer`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from baton.core.errors import InvariantViolated
from baton.core.plan import StepPlan, StepResult
from baton.executor.contract import NO_KV, ExecutorShape, LayerDone
from baton.executor.cuda.fuse import fuse_for_cuda
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import Workbench
from baton.executor.cuda.runner import Runner, buckets_upto
from baton.executor.cuda.sizing import blocks_that_fit
from baton.executor.cuda.slots import DeviceSlots
from baton.executor.cuda.step import Launched, Stepper
from baton.executor.cuda.warming import warm_up
from baton.executor.fingerprint import fingerprint_of
from baton.executor.kv import kv_bytes_per_block
from baton.executor.loading import LoadedModel, load_model

log = logging.getLogger(__name__)

NOTHING_RAN = 0
"""The `base_step` of the first plan an executor ever gets."""


class TorchCudaExecutor:
    def __init__(self, stepper: Stepper, loaded: LoadedModel, shape: ExecutorShape, fingerprint: bytes) -> None:
        self.shape = shape
        self.vocabulary = loaded.vocabulary
        self.fingerprint = fingerprint
        self.on_layer: LayerDone | None = None
        self._stepper: Stepper | None = stepper
        self.kv = stepper.kv
        self._stream = torch.cuda.Stream()
        self._last_step = NOTHING_RAN
        self._in_doubt = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-executor")
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-layers")
        self._launched: deque[Future[Launched]] = deque()

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
        batch_invariant: bool = False,
        graphs: bool = True,
    ) -> TorchCudaExecutor:
        """Read a model folder. Without `blocks` or `kv_memory_bytes` the pool takes what the device has left."""
        loaded = load_model(path, dtype, "cuda")
        shape = ExecutorShape(
            slots=slots,
            blocks=blocks or 0,
            block_size=block_size,
            context_tokens=min(context_tokens or loaded.context_tokens, loaded.context_tokens),
            burst=burst,
        )
        return cls.of(
            loaded, shape, step_tokens=step_tokens, kv_memory_bytes=kv_memory_bytes, batch_invariant=batch_invariant,
            graphs=graphs,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        shape: ExecutorShape,
        *,
        step_tokens: int = 8192,
        kv_memory_bytes: int | None = None,
        attention: str = "auto",
        batch_invariant: bool = False,
        graphs: bool = True,
    ) -> TorchCudaExecutor:
        """Of a model on the device. Where the shape names no blocks, as many as fit."""
        device = loaded.model.device
        log.info("attention: %s", "triton" if attention == "auto" else attention)
        with torch.inference_mode():
            bench = Workbench(device, batch_invariant)
            fuse_for_cuda(loaded, bench)
            if not shape.blocks:
                shape = blocks_that_fit(loaded, shape, bench, step_tokens, kv_memory_bytes)
            stepper = _build(loaded, shape, bench, step_tokens)
            if graphs:
                stepper.runner.capture(buckets_upto(shape.slots))
            warm_up(stepper, shape, step_tokens)
        way = "batch-invariant" if batch_invariant else "triton"
        layout = f"block outermost, {way}, block_size={shape.block_size}"
        return cls(stepper, loaded, shape, fingerprint_of(loaded.mark, _name(loaded.dtype), layout))

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
    def _run(self, plan: StepPlan) -> Launched:
        if self._in_doubt or self._stepper is None:
            raise InvariantViolated(f"step {plan.step} follows one that failed; what the slots hold is unknown")
        if plan.base_step != self._last_step:
            raise InvariantViolated(
                f"step {plan.step} builds on {plan.base_step}, but the last one here was {self._last_step}"
            )
        self._in_doubt = True
        with torch.cuda.stream(self._stream):
            launched = self._stepper.launch(plan, self._written(plan.step))
        self._last_step = plan.step
        self._in_doubt = False
        return launched

    def _written(self, step: int) -> Callable[[int], None] | None:
        """Told, while a step is launched, that a layer's KV is written by what was launched so far."""
        tell = self.on_layer
        if tell is None:
            return None

        def written(layer: int) -> None:
            event = torch.cuda.Event()
            event.record()
            self._watcher.submit(_tell_when, event, tell, step, layer)

        return written


def _tell_when(event: torch.cuda.Event, tell: LayerDone, step: int, layer: int) -> None:
    event.synchronize()
    tell(step, layer)


def _build(loaded: LoadedModel, shape: ExecutorShape, bench: Workbench, step_tokens: int) -> Stepper:
    device = loaded.model.device
    slots = DeviceSlots(shape, device)
    pool = CudaPool(loaded.layers, shape.blocks, shape.block_size, loaded.dtype, device)
    runner = Runner(loaded, shape, slots, pool, bench, step_tokens)
    log.info(
        "KV pool on the device: %d blocks, %.1f GiB",
        shape.blocks,
        shape.blocks * kv_bytes_per_block(loaded.layers, shape.block_size, loaded.dtype) / (1 << 30),
    )
    return Stepper(loaded, shape, slots, pool, runner, bench.invariant, step_tokens)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
