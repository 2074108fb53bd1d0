"""Times the scheduler with a preemption in every step, compared with a run of as many rows without any.

Owns the load that makes it so. Each request holds somewhat fewer blocks than all rows together take in one step, and the
pool is full: what one victim gives back never lasts until the step after the next.

    rows / block_size      blocks that a step takes: as many as a request of `rows` tokens holds
    ¾ rows - 64            tokens of a prompt; the rest is what a request grows by while it is timed

Nobody is admitted in a pass that preempted, so the running set loses a row a step. A window of steps therefore starts with
half a window more rows than asked for and ends with half a window less. Quiet and preempting windows alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np

from baton.bench.scheduler import InstantEngine
from baton.bench.stats import median
from baton.core.config import WorkerConfig
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.engine.worker import Worker
from baton.core.errors import InvariantViolated

BLOCK_SIZE = 16
WINDOW_STEPS = 64
WARM_UP_STEPS = 24
ANSWER_TOKENS = 1984
ROWS_MIN = 64


class PreemptingTiming(msgspec.Struct, frozen=True):
    rows: int
    steps: int
    """Steps timed of each kind."""
    preemptions: int
    """Preemptions in the timed steps."""
    steps_without: int
    """Steps of the preempting kind without a preemption."""
    quiet_us: float
    quiet_us_p99: float
    preempting_us: float
    preempting_us_p99: float
    ratio: float
    """Median ratio over pairs of windows."""
    ratio_min: float
    ratio_max: float


def time_preempting(rows: int, steps: int, advance: Callable[[], None] = lambda: None) -> PreemptingTiming:
    """CPU microseconds a step, quiet and while each step preempts; `advance` is called after each of the windows."""
    if rows < ROWS_MIN:
        raise ValueError(f"at least {ROWS_MIN} rows, not {rows}")
    window = min(WINDOW_STEPS, rows // 4)
    quiet: list[list[float]] = []
    preempting: list[list[float]] = []
    yields: list[int] = []
    for _ in range(windows_of(rows, steps)):
        spent_us, yielded = _time_window(rows, window, is_full=False)
        if any(yielded):
            raise InvariantViolated(f"{sum(yielded)} requests were preempted in a pool with room for all")
        quiet.append(spent_us)
        advance()
        spent_us, yielded = _time_window(rows, window, is_full=True)
        preempting.append(spent_us)
        yields += yielded
        advance()
    ratios = [float(np.mean(after) / np.mean(before)) for before, after in zip(quiet, preempting, strict=True)]
    calm, busy = np.concatenate(quiet), np.concatenate(preempting)
    return PreemptingTiming(
        rows=rows,
        steps=len(busy),
        preemptions=sum(yields),
        steps_without=yields.count(0),
        quiet_us=float(calm.mean()),
        quiet_us_p99=float(np.percentile(calm, 99)),
        preempting_us=float(busy.mean()),
        preempting_us_p99=float(np.percentile(busy, 99)),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def windows_of(rows: int, steps: int) -> int:
    """Number of window pairs with at least `steps` steps of each kind."""
    return -(-steps // min(WINDOW_STEPS, rows // 4))


def _time_window(rows: int, window: int, *, is_full: bool) -> tuple[list[float], list[int]]:
    """(microseconds, preemptions) of each of `window` steps."""
    engine = _loaded_engine(rows + window // 2 if is_full else rows, is_full=is_full)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    while is_full and not _preemptions(engine.worker):
        engine.step()
    totals = [_preemptions(engine.worker)]
    spent_us = []
    for _ in range(window):
        began = time.thread_time_ns()  # CPU time, so that other processes do not change the ratio
        engine.step()
        spent_us.append((time.thread_time_ns() - began) / 1000)
        totals.append(_preemptions(engine.worker))
    return spent_us, [after - before for before, after in pairwise(totals)]


def _loaded_engine(rows: int, *, is_full: bool) -> InstantEngine:
    """An engine in which all rows decode and fill their blocks at different steps. A full pool lasts for the warm-up."""
    lengths = [max(BLOCK_SIZE, rows * 3 // 4 - 64) + row % BLOCK_SIZE for row in range(rows)]
    held = sum(-(-length // BLOCK_SIZE) for length in lengths)
    spare = (WARM_UP_STEPS if is_full else ANSWER_TOKENS) * -(-rows // BLOCK_SIZE)
    config = WorkerConfig(
        slots=rows, blocks=held + spare, block_size=BLOCK_SIZE, context_tokens=lengths[-1] + 2 * ANSWER_TOKENS,
        step_tokens=sum(lengths), depth=1, waiting_max=rows,
        # Nothing is reserved, so that the pool can be filled; the ratio is still computed each time.
        ratio_initial=0.0, ratio_floor=0.0,
    )  # fmt: skip
    engine = InstantEngine(config)
    draws = np.random.default_rng(0)
    sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=(2,))
    for number, length in enumerate(lengths):
        prompt = frozen_tokens(draws.integers(1000, size=length))
        engine.submit(Submission(RequestId(str(number)), prompt, sampling, ANSWER_TOKENS))
    engine.step()
    if waiting := engine.worker.gauges().waiting:
        raise InvariantViolated(f"{waiting} requests did not fit the pool that was made for them")
    return engine


def _preemptions(worker: Worker) -> int:
    gauges = worker.gauges()
    return gauges.preemptions_for_others + gauges.preemptions_of_self
