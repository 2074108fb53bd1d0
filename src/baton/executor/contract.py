"""The protocol of every executor (scripted, CPU, CUDA). One contract test suite runs against all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Int32s, StepPlan, StepResult

Bytes = npt.NDArray[np.uint8]


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
    constrained_burst: int = 0
    """The same for a slot with a constraint, where it is more than `burst`."""

    @property
    def burst_max(self) -> int:
        return max(self.burst, self.constrained_burst)


class DeviceBlocks(Protocol):
    """Copies blocks of a KV pool in memory that the host cannot address. Safe to call from several threads at once.

    Steps that compute meanwhile are not delayed. A call returns when its bytes are in place. The caller owns the blocks: no
    step in flight writes what is read, or touches what is written. `host` is [rows, bytes a block], with the same offsets
    in a row as in a block.
    """

    blocks: int
    block_bytes: int
    run_bytes: int
    """Bytes per call beyond which larger calls are no faster. A caller that may be fenced copies no more at a time."""

    def read(self, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        """Bytes [begin, end) of block `blocks[i]` into row `rows[i]`."""

    def write(self, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        """Bytes [begin, end) of row `rows[i]` into block `blocks[i]`."""

    def allocate(self, size: int) -> Bytes:
        """Zeroed host memory of the kind that copies fastest, such as pinned memory."""

    def share(self) -> bytes:
        """A handle that opens our blocks for reading in another process of this host; empty where that is impossible."""

    def open(self, handle: bytes, blocks: int) -> RemoteDeviceBlocks | str:
        """Open `blocks` blocks of another process, of the same length as ours. A string says why that is impossible."""

    def digests(self, blocks: Int32s, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        """[spans, blocks]: a hash of these bytes of each block; changing any one word changes it."""


class RemoteDeviceBlocks(Protocol):
    """The blocks of another process, on a device that ours can read."""

    def pull(self, sources: Int32s, targets: Int32s, begin: int, end: int) -> None:
        """Bytes [begin, end) of their block `sources[i]` into our block `targets[i]`. Returns when they are there."""

    def close(self) -> None: ...


class KvView(NamedTuple):
    """The KV pool as bytes. A caller must own the blocks that it reads or writes."""

    pool: Bytes
    """[blocks, bytes a block]; empty where the host cannot address them."""
    layers: tuple[tuple[int, int], ...]
    """[begin, end) of each layer inside a block."""
    dtype: str
    device: DeviceBlocks | None = None
    """Copies blocks that the host cannot address; None where it can."""

    @classmethod
    def on_device(cls, device: DeviceBlocks, layers: tuple[tuple[int, int], ...], dtype: str) -> KvView:
        return cls(_NO_BYTES, layers, dtype, device)

    @property
    def blocks(self) -> int:
        return int(self.pool.shape[0]) if self.device is None else self.device.blocks

    @property
    def block_bytes(self) -> int:
        return int(self.pool.shape[1]) if self.device is None else self.device.block_bytes


_NO_BYTES: Bytes = np.empty((0, 0), dtype=np.uint8)

NO_KV = KvView(_NO_BYTES, (), "none")
"""The view of an executor that has no KV, or has released it."""

LayerDone = Callable[[int, int], None]
"""`(step, layer)`: this step has written its KV of this layer. Called on a thread of the executor, layers ascending."""

Allocate = Callable[[int], Bytes]
"""Allocates the given number of zeroed bytes for the KV pool."""


def zeroed(size: int) -> Bytes:
    """Private zero memory, whose pages are mapped when they are first written."""
    return np.zeros(size, dtype=np.uint8)


def spans(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[begin, end) of consecutive parts of these sizes."""
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
    """Called for each layer of each step that computes. Set it before the first launch; None costs nothing."""

    @property
    def kv(self) -> KvView:
        """The pool; valid until `close`."""

    def launch(self, plan: StepPlan) -> None:
        """Queue a step and return without waiting for it."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. An error inside the step is raised here."""

    def close(self) -> None:
        """Finish the launched steps and release threads and memory. Idempotent."""
