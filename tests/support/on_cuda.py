"""Executors of the same tiny models on a CUDA device and on the CPU, and a worker whose KV goes beyond the pool.

Needs no more than torch, transformers, triton and xxhash, so that it works on a machine with a GPU and little else.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from baton.core.config import WorkerConfig
from baton.core.engine.worker import Effect
from baton.core.tiers.transfers import CopyIn, CopyOut, FenceTransfer, Get, Look, Put, StorageEvent, TransferFenced
from baton.executor.constraints.compiled_cache import MakeBackends, no_backends
from baton.executor.contract import Executor, ExecutorShape, KvView
from baton.executor.drafts import DraftProposer, NaiveProposer
from baton.executor.model_loading import load_shape
from baton.executor.model_shapes import ModelShape, note_shape
from tests.support.driver import IDLE_PASSES_MAX, Driver, shape_of

if TYPE_CHECKING:
    from baton.kv.block_access import Bytes, Bytes2d
    from baton.kv.store import Store
    from baton.kv.transfer_contract import KvLayout

NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEP_TOKENS = 2560
WAIT_S = 60.0
NAIVE = NaiveProposer()
TINY = ("tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-gemma2", "tiny-qwen3-moe")


def on_cuda(
    name: str,
    shape: ExecutorShape,
    dtype: str = "float32",
    *,
    invariant: bool = False,
    proposer: DraftProposer = NAIVE,
    graphs: bool = True,
    backends: MakeBackends = no_backends,
) -> Executor:
    from baton.executor.cuda.executor import TorchCudaExecutor

    loaded = load_shape(name, dtype, "cuda")
    return TorchCudaExecutor.of(
        loaded, shape, step_tokens=STEP_TOKENS, proposer=proposer, batch_invariant=invariant, graphs=graphs,
        backends=backends,
    )  # fmt: skip


def on_cpu(
    name: str,
    shape: ExecutorShape,
    folder: Path,
    dtype: str = "float32",
    *,
    invariant: bool = False,
    proposer: DraftProposer = NAIVE,
) -> Executor:
    from baton.executor.cpu.executor import TorchCpuExecutor

    note_shape(folder, ModelShape(name))
    return TorchCpuExecutor.load(
        folder, dtype=dtype, slots=shape.slots, blocks=shape.blocks, block_size=shape.block_size,
        context_tokens=shape.context_tokens, burst=shape.burst, proposer=proposer, batch_invariant=invariant,
    )  # fmt: skip


@contextmanager
def closing(executor: Executor) -> Iterator[Executor]:
    try:
        yield executor
    finally:
        executor.close()


def blocks_as_bytes(kv: KvView, blocks: list[int]) -> Bytes2d:
    """What lies in these blocks, wherever the pool is."""
    if kv.device is None:
        return kv.pool[blocks]
    host = np.zeros((len(blocks), kv.block_bytes), dtype=np.uint8)
    kv.device.read(np.array(blocks, np.int32), np.arange(len(blocks), dtype=np.int32), host, 0, kv.block_bytes)
    return host


def put_block(kv: KvView, block: int, data: Bytes) -> None:
    if kv.device is None:
        kv.pool[block] = data
    else:
        kv.device.write(np.array([block], np.int32), np.zeros(1, np.int32), data[None].copy(), 0, kv.block_bytes)


def layout_of(executor: Executor) -> KvLayout:
    from baton.kv.transfer_contract import KvLayout

    sizes = tuple(end - begin for begin, end in executor.kv.layers)
    return KvLayout(executor.fingerprint, executor.kv.dtype, executor.shape.block_size, sizes)


class StoringDriver(Driver):
    """A worker with host memory and a store, moved by the threads that move them in an engine."""

    def __init__(self, config: WorkerConfig, executor: Executor, store: Store | None = None) -> None:
        from baton.kv.block_access import HostBlocks
        from baton.kv.host_memory import HostCopier, HostMemory
        from baton.kv.store_transfers import StoreTransfers

        super().__init__(config, executor)
        blocks = executor.kv.device or HostBlocks(executor.kv.pool)
        host = HostMemory(config.tiers.host_rows, blocks.block_bytes, blocks.allocate)
        self._told: queue.SimpleQueue[StorageEvent] = queue.SimpleQueue()
        self._copier = HostCopier(blocks, host, self._told.put)
        self._store_transfers = (
            None if store is None else StoreTransfers(store, host, layout_of(executor).digest, self._told.put)
        )
        self._open = 0
        self.orders: Counter[str] = Counter()
        """How many of each kind there were."""

    def _take(self, effect: Effect) -> None:
        if isinstance(effect, CopyOut | CopyIn | Look | Get | Put):
            self._open += 1
            self.orders[type(effect).__name__] += 1
        match effect:
            case CopyOut() | CopyIn():
                self._copier.copy(effect)
            case Look() | Get() | Put():
                assert self._store_transfers is not None
                self._store_transfers.start(effect)
            case FenceTransfer(haul):
                known = self._copier.fence(haul) or (self._store_transfers is not None and self._store_transfers.fence(haul))
                if not known:
                    self._told.put(TransferFenced(haul))
            case _:
                super()._take(effect)

    def run(self, steps_max: int = 100_000) -> None:
        """Time stands still while bytes move, so that nothing is late."""
        idle_passes = 0
        for _ in range(steps_max):
            if self.worker.is_idle and not self._open:
                return
            if self._open and (not self._told.empty() or not (self.is_due or self.in_flight)):
                self._open -= 1
                self.send(self._told.get(timeout=WAIT_S))
            elif self.is_due:
                self.tick()
            elif self.in_flight:
                self.settle_one()
            else:
                idle_passes += 1
                if idle_passes > IDLE_PASSES_MAX:
                    raise RuntimeError(f"deadlock: {self.worker.gauges()}")
                self.now_us = self.worker.next_deadline() or self.now_us
        raise RuntimeError("did not finish")

    def close(self) -> None:
        self._copier.close()
        if self._store_transfers is not None:
            self._store_transfers.close()


def first_difference(given: list[int], wanted: list[int]) -> str:
    """For a message; empty where there is none."""
    for at, (ours, theirs) in enumerate(zip(given, wanted, strict=False)):
        if ours != theirs:
            return f"token {at} is {ours}, not {theirs}; before it: {given[max(0, at - 5) : at]}"
    return "" if len(given) == len(wanted) else f"{len(given)} tokens, not {len(wanted)}"


def assert_alike(given: list[list[int]], wanted: list[list[int]], what: str = "") -> None:
    told = [
        f"{number}: {text}"
        for number, pair in enumerate(zip(given, wanted, strict=True))
        if (text := first_difference(*pair))
    ]
    assert not told, f"{what} {told}"


Make = Callable[[WorkerConfig], Executor]
"""An executor of the sizes that a worker wants."""


def shaped(make: Callable[[ExecutorShape], Executor]) -> Make:
    return lambda config: make(shape_of(config))
