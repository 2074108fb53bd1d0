"""What every executor (scripted, CPU, CUDA) offers. One contract test suite runs against all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """The sizes that scheduler and executor must agree on."""

    slots: int
    blocks: int
    block_size: int
    context_tokens: int
    """Longest sequence a slot may hold."""
    burst: int = 1
    """Most tokens one decode may yield in one step."""


class KvView(NamedTuple):
    """The KV pool as bytes. Whoever reads or writes blocks of it must own them."""

    pool: npt.NDArray[np.uint8]
    """[blocks, bytes a block]"""
    layers: tuple[tuple[int, int], ...]
    """Where each layer begins and ends within a block."""
    dtype: str


NO_KV = KvView(np.empty((0, 0), dtype=np.uint8), (), "none")
"""Of an executor that keeps none, or has given it back."""

LayerDone = Callable[[int, int], None]
"""`(step, layer)`: the KV that this step computes in this layer is written. On the executor's thread, layers rising."""

Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""So many zeroed bytes for the KV pool, for whoever wants to choose where they lie."""


def zeroed(size: int) -> npt.NDArray[np.uint8]:
    """Memory of this process alone. Mapped on first touch, so a pool costs what was written to it."""
    return np.zeros(size, dtype=np.uint8)


def spans(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where parts of these sizes begin and end when they lie one after the other."""
    ends = list(itertools.accumulate(sizes))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


class Executor(Protocol):
    """Runs plans in the order they are launched. At most `shape.slots` slots, block ids in range(`shape.blocks`)."""

    shape: ExecutorShape
    vocabulary: int
    """Number of token ids the model can take and yield."""
    fingerprint: bytes
    """Changes whenever the KV of the same tokens would: weights, architecture, dtype, block layout."""
    on_layer: LayerDone | None
    """Told of each layer of each step that computes. Set before the first launch; None costs nothing."""

    @property
    def kv(self) -> KvView:
        """Until `close`."""

    def launch(self, plan: StepPlan) -> None:
        """Queue a step and return without waiting for it."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. An error inside the step is raised here."""

    def close(self) -> None:
        """Finish what is launched and give back threads and memory. Idempotent."""
