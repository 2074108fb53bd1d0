"""Runs a few artificial requests through a new executor, so that kernels are compiled before the first real request."""

from __future__ import annotations

import numpy as np

from baton.core.engine.plan import NO_INT32S, NO_INT64S, Chunk, Start, StepPlan, Stop
from baton.core.engine.request import Sampling, frozen_tokens
from baton.executor.contract import ExecutorShape
from baton.executor.cuda.step import StepRunner

LENGTHS = (10, 24, 50, 100, 300)
"""Lengths of prompts, on either side of the sizes at which products change their kernel."""
WISHES = (
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=0, temperature=1.0),
    Sampling(seed=0, temperature=1.0, top_p=0.9),
    Sampling(seed=0, temperature=1.0, top_k=20),
)
DECODES = 2


def warm_up(stepper: StepRunner, shape: ExecutorShape, step_tokens: int) -> None:
    """Prefill each request beside the decodes of those before it, then decode all, then stop all. Done twice: with
    `on_layer` chunks run kernel by kernel, without it they are padded and captured where possible. A third time with masks,
    if there may be constraints, and a fourth with rows for what they force."""
    plans = _plans(shape, step_tokens, [])
    for written in (_of_no_interest, None):
        for plan in plans:
            stepper.launch(plan, written).result()
    for forced in [False] * stepper.takes_constraints + [True] * (stepper.drafted is not None):
        stepper.masks_all, stepper.forces_all = True, forced
        for plan in plans:
            stepper.launch(plan, None).result()
    stepper.masks_all = stepper.forces_all = False


def _of_no_interest(_layer: int) -> None: ...


def _plans(shape: ExecutorShape, step_tokens: int, started: list[Start]) -> list[StepPlan]:
    plans, first_block = [], 0
    for slot, length in enumerate(LENGTHS[: shape.slots]):
        blocks = -(-(length + len(LENGTHS) + DECODES) * shape.burst // shape.block_size) + 1
        fits = length + len(LENGTHS) + DECODES <= shape.context_tokens and length <= step_tokens
        if not fits or first_block + blocks > shape.blocks:
            break
        table = np.arange(first_block, first_block + blocks, dtype=np.int32)[: -(-shape.context_tokens // shape.block_size)]
        first_block += blocks
        wish = WISHES[slot % len(WISHES)]
        start = Start(slot, 1, frozen_tokens(range(length)), length, 0, shape.context_tokens, wish, table)
        plans.append(_plan(started, (start,), (Chunk(slot, 1, 0, length, True),)))
        started.append(start)
    plans += [_plan(started) for _ in range(DECODES if started else 0)]
    return [*plans, StepPlan(0, 0, stops=tuple(Stop(start.slot, 1) for start in started))]


def _plan(decoding: list[Start], starts: tuple[Start, ...] = (), chunks: tuple[Chunk, ...] = ()) -> StepPlan:
    slots = np.array([start.slot for start in decoding], dtype=np.int32) if decoding else NO_INT32S
    epochs = np.ones(len(slots), dtype=np.int64) if decoding else NO_INT64S
    return StepPlan(0, 0, starts=starts, chunks=chunks, decode_slots=slots, decode_epochs=epochs)
