"""A simulated device computes steps in order: a layer is told when it can be read, and nothing runs behind a hung step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.core.engine.plan import StepResult
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor
from baton.sim.device import SimulatedDevice
from baton.sim.world import Host, World
from tests.support.planner import Planner

STEP_US = 1_000
SHAPE = ExecutorShape(slots=1, blocks=4, block_size=4, context_tokens=16, burst=1)


class FlatSteps:
    def step_us(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return STEP_US


class Reader:
    """Awaits some steps, and reads the first block at each layer of theirs."""

    def __init__(self, executor: ScriptedExecutor, *awaited: int) -> None:
        self.executor = executor
        self.awaited = awaited
        self.read: list[tuple[int, int, bytes]] = []
        """(step, layer, the bytes of the first block then)."""

    def awaits(self, step: int) -> bool:
        return step in self.awaited

    def layers_us(self, takes_us: int) -> Sequence[int]:
        return [takes_us // 3, 2 * takes_us // 3]

    def layer_done(self, step: int, layer: int) -> None:
        self.read.append((step, layer, self.first_block()))

    def step_done(self, step: int) -> None: ...

    def first_block(self) -> bytes:
        return bytes(self.executor.kv.pool[0].tobytes())


class Bench:
    """A device with three steps in flight, each of three tokens of one prompt; the second completes the first block."""

    def __init__(self, *awaited: int) -> None:
        self.world = World(1, events_max=1_000)
        self.host = Host(self.world, "instance 0")
        self.executor = ScriptedExecutor(SHAPE, layers=2)
        self.results: list[StepResult] = []
        self.device = SimulatedDevice(self.host, self.executor, FlatSteps(), self.results.append)
        self.device.signals = self.reader = Reader(self.executor, *awaited)
        planner = Planner(self.executor, chunk_tokens=3)
        planner.add(list(range(9)), 1)
        for _ in range(3):
            self.device.launch(planner.plan())

    def run(self, until_us: int = 1_000_000) -> None:
        while self.world.next_us is not None and self.world.next_us <= until_us:
            self.world.step()

    def pause(self) -> None:
        """Stand still until long after all steps should have ended."""
        self.host.pause()
        self.run()
        self.host.resume()


@pytest.mark.parametrize("awaited", [(2,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("paused_us", [None, 0, STEP_US // 2, STEP_US + 1, 2 * STEP_US - 1])
def test_a_layer_is_told_when_what_its_step_completes_can_be_read(awaited: tuple[int, ...], paused_us: int | None) -> None:
    bench = Bench(*awaited)
    if paused_us is not None:
        bench.run(paused_us)
        bench.pause()
    bench.run()
    assert [result.step for result in bench.results] == [1, 2, 3]
    assert [(step, layer) for step, layer, _ in bench.reader.read] == [(step, layer) for step in awaited for layer in (0, 1)]
    assert {data for step, _, data in bench.reader.read if step > 1} == {bench.reader.first_block()}


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("heals", [False, True])
def test_the_steps_behind_one_that_hangs_never_begin(pauses: bool, heals: bool) -> None:
    bench, hung = Bench(2, 3), list[int]()
    bench.device.hangs, bench.device.when_hung = True, lambda: hung.append(bench.world.now_us)
    bench.run(STEP_US)
    if pauses:
        bench.pause()
    if heals:
        bench.device.heal()
    bench.run()
    assert hung == [STEP_US]
    assert (bench.results, bench.reader.read) == ([], [])
    assert not bench.executor.kv.pool.any()
