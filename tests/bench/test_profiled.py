"""A profile charges each layer with what it uses, and what is nobody's is not lost."""

from __future__ import annotations

import time

from baton.bench.profile_by_layer import ELSEWHERE, LAYERS, profiled
from baton.sim.fuzzed_run import run_seed


def test_the_layers_of_a_simulated_world_share_the_time() -> None:
    verdict, found = profiled(lambda: run_seed(1))
    assert verdict.broken is None
    seconds = {share.layer: share.seconds for share in found}
    assert list(seconds) == list(LAYERS)
    assert all(seconds[layer] > 0 for layer in ("core", "wire", "executor", "sim/world.py", "sim/device.py", "sim"))


def test_time_outside_of_every_layer_is_elsewhere() -> None:
    _, found = profiled(lambda: time.sleep(0.01))
    assert max(found, key=lambda share: share.seconds).layer == ELSEWHERE
