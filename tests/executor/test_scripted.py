"""The scripted executor draws from all cells, those that an earlier draw has read included."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.engine.plan import Chunk, Start, StepPlan
from baton.core.engine.request import Sampling
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor, undisturbed

PROMPT = (5, 3, 8, 1, 4, 2)
VOCABULARY = 97
STEPS = 8
SAMPLING = Sampling(seed=7)


def drawn(spoilt_before: int | None, block: int = 0) -> list[int]:
    """The tokens of one request; before a step, one bit of a block of its prompt is flipped."""
    executor = ScriptedExecutor(ExecutorShape(1, 4, 4, 16), VOCABULARY)
    blocks = np.arange(4, dtype=np.int32)
    start = Start(0, 1, np.array(PROMPT, dtype=np.int32), len(PROMPT), 0, 16, SAMPLING, blocks)
    chunk = Chunk(0, 1, 0, len(PROMPT), True)
    tokens: list[int] = []
    for step in range(1, STEPS + 1):
        if step == spoilt_before:
            executor.kv.pool[block, 0] ^= 1
        decodes = np.array([0] if step > 1 else [], dtype=np.int32)
        first = (start,), (chunk,)
        starts, chunks = first if step == 1 else ((), ())
        epochs = np.ones(len(decodes), dtype=np.int64)
        executor.launch(StepPlan(step, step - 1, starts=starts, chunks=chunks, decode_slots=decodes, decode_epochs=epochs))
        tokens += executor.collect().tokens.tolist()
    return tokens


def test_a_run_yields_the_undisturbed_tokens() -> None:
    assert drawn(None) == undisturbed(PROMPT, SAMPLING, STEPS, VOCABULARY)


@pytest.mark.parametrize("step", range(2, STEPS + 1))
def test_a_cell_that_changes_after_it_was_read_changes_the_next_draw(step: int) -> None:
    expected = drawn(None)
    tokens = drawn(step)
    assert tokens[: step - 1] == expected[: step - 1]
    assert tokens[step - 1 :] != expected[step - 1 :]
