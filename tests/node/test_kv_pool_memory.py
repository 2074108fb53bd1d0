"""Access to an instance's KV: the pool itself, or copies and a mirror where the pool is on a device."""

from __future__ import annotations

import os

import numpy as np

from baton.core.engine.plan import StepPlan, StepResult
from baton.executor.contract import ExecutorShape, KvView, LayerDone
from baton.executor.scripted import ScriptedExecutor
from baton.kv.shared_memory import release_pool
from baton.node.kv_pool_memory import PoolMemory, blocks_of, layout_of
from baton.node.settings import EngineSettings
from tests.support.devices import DeviceLike

SHAPE = ExecutorShape(slots=2, blocks=6, block_size=4, context_tokens=32)
PREFILLS = EngineSettings("", None, b"", role="prefill")


class OnDevice:
    """A scripted executor whose pool is reached only by copies."""

    vocabulary = 97
    fingerprint = b"on a device"
    shape = SHAPE

    def __init__(self) -> None:
        self._inner = ScriptedExecutor(SHAPE, self.vocabulary, layers=3)
        self.on_layer: LayerDone | None = None
        self.kv = KvView.on_device(DeviceLike(self._inner.kv.pool), self._inner.kv.layers, self._inner.kv.dtype)

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()


def test_a_view_knows_its_sizes_wherever_the_pool_lies() -> None:
    inner, outer = ScriptedExecutor(SHAPE, 97, layers=3).kv, OnDevice().kv
    assert (inner.blocks, inner.block_bytes) == (outer.blocks, outer.block_bytes) == (6, 3 * 4 * 8)
    assert outer.pool.size == 0


def test_blocks_are_copied_the_same_wherever_the_pool_lies() -> None:
    for executor in (ScriptedExecutor(SHAPE, 97, layers=3), OnDevice()):
        blocks, rows = blocks_of(executor), np.zeros((2, 96), dtype=np.uint8)
        rows[1] = np.arange(96)
        blocks.write(np.array([4], dtype=np.int32), np.array([1], dtype=np.int32), rows, 8, 96)
        rows[0] = 255
        blocks.read(np.array([4], dtype=np.int32), np.array([0], dtype=np.int32), rows, 0, 96)
        assert rows[0].tolist() == [0] * 8 + list(range(8, 96))


def test_a_pool_in_host_memory_is_what_transfers_work_on() -> None:
    pool = PoolMemory(PREFILLS)
    executor = ScriptedExecutor(SHAPE, 97, layers=3, allocate=pool.allocate)
    memory = pool.of(executor)
    assert np.shares_memory(memory.pool, executor.kv.pool)
    assert memory.mirror is None
    assert memory.layout == layout_of(executor)
    assert memory.fd is not None, "a peer on this host may map what it is to read"
    release_pool(memory)


def test_a_pool_on_a_device_has_a_mirror_that_costs_nothing_yet() -> None:
    executor = OnDevice()
    memory = PoolMemory(PREFILLS).of(executor)
    assert memory.mirror is not None
    assert memory.sharing is executor.kv.device
    assert memory.pool.shape == (6, 96)
    assert memory.layout.layer_bytes == (32, 32, 32)
    assert memory.fd is not None
    assert os.fstat(memory.fd).st_blocks == 0
    release_pool(memory)
