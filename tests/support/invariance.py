"""One prompt, computed alone, in company and in pieces: the bits of its KV and its tokens, to be compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from baton.executor.contract import Executor, ExecutorShape
from tests.support.on_cuda import blocks_as_bytes, first_difference
from tests.support.planner import Planner

SHAPE = ExecutorShape(slots=24, blocks=256, block_size=16, context_tokens=256)
PROMPT = np.random.default_rng(5).integers(0, 320, 150).tolist()
NEW_TOKENS = 12
WHOLE_BLOCKS = (len(PROMPT) + NEW_TOKENS - 1) // SHAPE.block_size
"""With KV of all their positions, when the last token is drawn."""


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    blocks: np.ndarray


class Machine:
    """One executor for run after run."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._planner = Planner(executor)

    def run(self, chunk_tokens: int = 1 << 30, company: int = 0, company_first: bool = False, computed: int = 0) -> Run:
        planner = self._planner
        planner.clear()
        planner.chunk_tokens = chunk_tokens
        others = [np.random.default_rng(seed).integers(0, 320, 7 * seed + 1).tolist() for seed in range(company)]
        before = others if company_first else []
        for slot, prompt in enumerate(before):
            planner.add(prompt, NEW_TOKENS + slot % 5, slot=slot)
        lane = planner.add(PROMPT, NEW_TOKENS, slot=len(before), computed=computed)
        for slot, prompt in enumerate(others[len(before) :], start=len(before) + 1):
            planner.add(prompt, NEW_TOKENS + slot % 5, slot=slot)
        planner.run()
        return Run(lane.outputs, blocks_as_bytes(self.executor.kv, lane.blocks[:WHOLE_BLOCKS]))


def assert_same(machine: Machine, given: Run, wanted: Run) -> None:
    assert given.tokens == wanted.tokens, first_difference(given.tokens, wanted.tokens)
    if (given.blocks == wanted.blocks).all():
        return
    told = []
    for layer, (begin, end) in enumerate(machine.executor.kv.layers):
        ours, theirs = (run.blocks[:, begin:end].reshape(-1).view(np.uint16) for run in (given, wanted))
        told.append(f"layer {layer}: {int((ours != theirs).sum())} of {ours.size} numbers")
    pytest.fail(f"KV differs in {', '.join(told)}")
