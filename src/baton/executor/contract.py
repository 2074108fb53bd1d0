"""What every executor (scripted, CPU, CUDA) offers. One contract test suite runs against all of them."""

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


class DeviceBlocks(Protocol):
    """A KV pool in memory that the host cannot address, for whoever copies blocks out of it and into it.

    From any thread, several at once; steps that compute meanwhile are not held up. A call returns when its bytes are where
    they belong. Whoever calls owns the blocks: no step in flight writes what is read, or touches what is written. `host` is
    [rows, bytes a block], and what lies at an offset in a block lies at the same offset in a row.
    """

    blocks: int
    block_bytes: int
    run_bytes: int
    """So much in one call is as quick as it gets; who may have to stop in between asks for no more."""

    def read(self, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        """Bytes [begin, end) of block `blocks[i]` into row `rows[i]`."""

    def write(self, blocks: Int32s, rows: Int32s, host: Bytes, begin: int, end: int) -> None:
        """Bytes [begin, end) of row `rows[i]` into block `blocks[i]`."""

    def allocate(self, size: int) -> Bytes:
        """Zeroed host memory of the kind that is quickest to copy from and to."""

    def share(self) -> bytes:
        """What opens our blocks in another process of this host, to read; nothing where that cannot be."""

    def open(self, handle: bytes, blocks: int) -> RemoteDeviceBlocks | str:
        """Another's, so many of the same length. A string says why it cannot be."""

    def digests(self, blocks: Int32s, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        """[spans, blocks]: a hash of these bytes of each block, which differs if any of its words does."""


class RemoteDeviceBlocks(Protocol):
    """The blocks of another process, on a device that ours can read."""

    def pull(self, sources: Int32s, targets: Int32s, begin: int, end: int) -> None:
        """Bytes [begin, end) of their block `sources[i]` into our block `targets[i]`. Returns when they are there."""

    def close(self) -> None: ...


class KvView(NamedTuple):
    """The KV pool as bytes. Whoever reads or writes blocks of it must own them."""

    pool: Bytes
    """[blocks, bytes a block]; none where the host cannot address them."""
    layers: tuple[tuple[int, int], ...]
    """Where each layer begins and ends within a block."""
    dtype: str
    device: DeviceBlocks | None = None
    """The way to blocks that the host cannot address."""

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
"""Of an executor that keeps none, or has given it back."""

LayerDone = Callable[[int, int], None]
"""`(step, layer)`: the KV that this step computes in this layer is written. On a thread of the executor's, layers rising."""

Allocate = Callable[[int], Bytes]
"""So many zeroed bytes for the KV pool, for whoever wants to choose where they lie."""


def zeroed(size: int) -> Bytes:
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
