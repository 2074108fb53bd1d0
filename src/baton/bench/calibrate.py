"""Measures the executor of this machine step by step, and makes a step-time model of it.

Owns the grid of steps, the driving of an executor through them, and the fit. The executor is driven by StepPlans, two in
flight as in service, with no server around it. KV is not computed but copied into place from one real block: a step reads
the same bytes, and a grid of long contexts takes seconds instead of minutes.

    visit of a trial:   launch ─ launch ─ collect ─ launch ─ collect ─ …      a step's time lies between two collects

The grid is walked several times and each trial keeps its median, so that a short load by other processes does not distort
one part of the model. Steps that mix chunks and decodes are measured but not fitted: they show the error of the model on
unseen steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.bench.child_processes import Child, ChildFailed, free_port, started
from baton.bench.client import RequestRecord, ServerUnreachable, TargetServer, first_model, open_http
from baton.bench.load import ClosedLoopRate, LoadPlan, run_load
from baton.bench.scheduler import time_scheduler
from baton.bench.stats import median
from baton.bench.step_plans import StepPlans, stop_of
from baton.bench.workload import Recipe, Round, TokenRange, WorkloadShape, fixed_sessions
from baton.core.engine.plan import Chunk, Copy, RowOutcome, Start, StepPlan, StepResult, Stop
from baton.core.errors import BatonError
from baton.executor.contract import Executor
from baton.node.baton_command import baton_command
from baton.sim.step_times import MeasuredStep, Roofline, StepTimes, StepTimesFile

IN_FLIGHT = 2
"""Steps in flight, as in service: one computes while the next waits in the executor."""
LARGE_STEP_TOKENS = 512
"""Steps with at least this many tokens are timed once per visit, without warm-up."""
SMALL_STEPS = 4
"""Steps per visit of a smaller trial; the first is warm-up."""
DRAWN_FROM = (1000, 20_000)
"""Range of token ids in prompts, when the vocabulary is large enough."""
KNEES_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_US = 1e-6
"""Smallest cost in a model; the fit may find 0."""


class CannotCalibrate(BatonError):
    """A row of a trial computed nothing, or the executor has too little room; the message says which."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A step to measure: `decodes` decodes at a context, and chunks of `sequences` sequences that begin at a position."""

    decodes: int = 0
    context_tokens: int = 0
    """Of each decode."""
    sequences: int = 0
    chunk_tokens: int = 0
    begin_tokens: int = 0

    @property
    def prefill_tokens(self) -> int:
        return self.sequences * self.chunk_tokens

    @property
    def is_mixed(self) -> bool:
        return bool(self.decodes and self.sequences)

    @property
    def is_large(self) -> bool:
        return self.prefill_tokens >= LARGE_STEP_TOKENS

    def blocks(self, block_size: int) -> int:
        decodes = self.decodes * -(-(self.context_tokens + SMALL_STEPS) // block_size)
        return decodes + self.sequences * -(-(self.begin_tokens + self.chunk_tokens + 1) // block_size)

    def point(self, us: float) -> MeasuredStep:
        pairs = self.chunk_tokens * self.begin_tokens + self.chunk_tokens * (self.chunk_tokens + 1) // 2
        return MeasuredStep(
            decodes=self.decodes,
            decode_context=self.decodes * self.context_tokens,
            prefill_tokens=self.prefill_tokens,
            prefill_pairs=self.sequences * pairs,
            us=us,
        )

    def __str__(self) -> str:
        parts = [f"{self.decodes} decodes at {self.context_tokens}"] if self.decodes else []
        if self.sequences:
            parts.append(
                f"{self.sequences} × {self.chunk_tokens} prefill" + f" at {self.begin_tokens}" * (self.begin_tokens > 0)
            )
        return ", ".join(parts)


DECODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (64, 256, 768)
LONG_CONTEXT, LONG_CONTEXT_DECODES = 2048, (1, 8, 24)
QUICK_DECODES, QUICK_CONTEXTS = (1, 4, 16, 32, 64), (64, 256, 768)
PREFILLS = (
    (1, 16, 0), (1, 16, 512), (1, 64, 0), (1, 64, 1024), (1, 128, 0), (1, 256, 0), (2, 128, 0), (1, 512, 0), (4, 128, 0),
    (1, 512, 1536), (1, 1024, 0), (8, 128, 0), (1, 2048, 0), (4, 512, 0), (16, 128, 0),
)  # fmt: skip
"""(sequences, tokens of each, position at which each begins)"""
QUICK_PREFILLS = ((1, 16, 0), (1, 128, 0), (4, 128, 0), (1, 512, 0), (1, 512, 1536), (4, 512, 0), (16, 128, 0))
MIXED = ((16, 192, 2, 128), (60, 160, 1, 64), (48, 192, 4, 128), (32, 576, 1, 512), (32, 192, 12, 128))
"""(decodes, their context, sequences, tokens of each)"""


def make_grid(executor: Executor, step_tokens: int, quick: bool = False) -> list[Trial]:
    """Every trial that fits the executor and the token budget, cheap ones first."""
    decodes, contexts = (QUICK_DECODES, QUICK_CONTEXTS) if quick else (DECODES, CONTEXTS)
    trials = [Trial(rows, context) for rows in decodes for context in contexts]
    if not quick:
        trials += [Trial(rows, LONG_CONTEXT) for rows in LONG_CONTEXT_DECODES]
    trials += [Trial(0, 0, *prefill) for prefill in (QUICK_PREFILLS if quick else PREFILLS)]
    trials += [Trial(*mixed) for mixed in MIXED]
    fitting = [trial for trial in trials if _fits(trial, executor, step_tokens)]
    if not any(trial.decodes for trial in fitting) or not any(trial.sequences for trial in fitting):
        raise CannotCalibrate("the executor has too few slots, KV blocks or positions for any step of the grid")
    return fitting


def _fits(trial: Trial, executor: Executor, step_tokens: int) -> bool:
    shape = executor.shape
    longest = max(trial.context_tokens + SMALL_STEPS, trial.begin_tokens + trial.chunk_tokens + 1)
    return (
        trial.decodes + trial.sequences <= shape.slots
        and trial.blocks(shape.block_size) <= shape.blocks
        and longest <= shape.context_tokens
        and trial.decodes + trial.prefill_tokens <= step_tokens
    )


def monotonic_us() -> float:
    return time.perf_counter_ns() / 1000


class CalibrationStepper:
    """Drives one executor through trials; owns step numbers, epochs and which block goes where."""

    def __init__(self, executor: Executor, clock_us: Callable[[], float] = monotonic_us) -> None:
        self._executor = executor
        self._clock_us = clock_us
        token_ids = DRAWN_FROM if executor.vocabulary > DRAWN_FROM[1] else (0, executor.vocabulary)
        self._plans = StepPlans(executor.shape.block_size, token_ids)

    def fill(self, blocks: int) -> None:
        """Write KV into the first `blocks` blocks; pages never written would read faster than memory."""
        size = self._executor.shape.block_size
        start = self._plans.start(0, size, 0, size + 1, 0)
        chunk = Chunk(0, start.epoch, 0, size, samples=True)
        copies = tuple(Copy(0, target) for target in range(1, blocks))
        prefill = self._plans.plan(starts=(start,), chunks=(chunk,))
        self._run(iter([prefill, self._plans.plan(stops=(stop_of(start),), copies=copies)]))

    def warm(self, trial: Trial) -> None:
        """Run one step, not timed: the first step of a size allocates buffers that later ones reuse."""
        self._run(self._trial_plans(trial, 1), trial)

    def visit(self, trial: Trial) -> list[float]:
        """Microseconds of each timed step."""
        steps = 1 if trial.is_large else SMALL_STEPS
        times_us = self._run(self._trial_plans(trial, steps), trial)
        return times_us[:1] if trial.is_large else times_us[1:steps]

    def _trial_plans(self, trial: Trial, steps: int) -> Iterator[StepPlan]:
        """Plans with the same decodes and new prefill sequences in every step; the last plan stops all."""
        blocks = 0
        decoding: list[Start] = []
        # The mean context of the timed steps is the trial's.
        known = max(1, trial.context_tokens - steps // 2)
        for slot in range(trial.decodes):
            decoding.append(self._plans.start(slot, known, known - 1, known + steps, blocks))
            blocks += len(decoding[-1].blocks)
        starts, stops = decoding, list[Stop]()
        slots = np.arange(trial.decodes, dtype=np.int32)
        epochs = np.array([start.epoch for start in decoding], dtype=np.int64)
        for _ in range(steps):
            fed = self._chunked(trial, blocks)
            yield self._plans.plan(
                stops=tuple(stops),
                starts=(*starts, *fed),
                chunks=tuple(Chunk(new.slot, new.epoch, new.computed, len(new.tokens), samples=True) for new in fed),
                decode_slots=slots,
                decode_epochs=epochs,
            )
            starts, stops = [], [stop_of(start) for start in fed]
        yield self._plans.plan(stops=(*stops, *(stop_of(start) for start in decoding)))

    def _chunked(self, trial: Trial, blocks: int) -> list[Start]:
        fed: list[Start] = []
        length = trial.begin_tokens + trial.chunk_tokens
        for number in range(trial.sequences):
            fed.append(self._plans.start(trial.decodes + number, length, trial.begin_tokens, length + 1, blocks))
            blocks += len(fed[-1].blocks)
        return fed

    def _run(self, plans: Iterator[StepPlan], trial: Trial | None = None) -> list[float]:
        times_us: list[float] = []
        in_flight = 0
        before_us = self._clock_us()
        plan = next(plans, None)
        while plan is not None or in_flight:
            if plan is not None and in_flight < IN_FLIGHT:
                self._executor.launch(plan)
                in_flight += 1
                plan = next(plans, None)
                continue
            result = self._executor.collect()
            in_flight -= 1
            now_us = self._clock_us()
            times_us.append(now_us - before_us)
            before_us = now_us
            _check(result, trial)
        return times_us


def _check(result: StepResult, trial: Trial | None) -> None:
    """Raise when a row of the step computed nothing."""
    idle = ~np.isin(result.outcomes, (RowOutcome.TOKENS, RowOutcome.PREEMPTED))
    if idle.any():
        raise CannotCalibrate(
            f"{trial or 'filling the KV pool'}: {int(idle.sum())} of {len(idle)} rows computed nothing "
            f"({RowOutcome(int(result.outcomes[idle][0])).name.lower()})"
        )


@dataclass(slots=True)
class MeasuredTrial:
    trial: Trial
    times_us: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:
        return median(self.times_us)

    @property
    def spread(self) -> float:
        """Maximum ÷ minimum."""
        return max(self.times_us) / min(self.times_us)


class Survey:
    """Walks a grid of trials on one executor, any number of times; every size is warmed up first."""

    def __init__(self, executor: Executor, trials: Sequence[Trial], clock_us: Callable[[], float] = monotonic_us) -> None:
        self._trials = trials
        self._stepper = CalibrationStepper(executor, clock_us)
        self._stepper.fill(max(trial.blocks(executor.shape.block_size) for trial in trials))
        for trial in trials:
            if not trial.is_large:
                self._stepper.warm(trial)

    def walk(self, advance: Callable[[Trial], None] = lambda _trial: None) -> list[MeasuredTrial]:
        walked = []
        for trial in self._trials:
            walked.append(MeasuredTrial(trial, self._stepper.visit(trial)))
            advance(trial)
        return walked


def joined(walks: Sequence[Sequence[MeasuredTrial]]) -> list[MeasuredTrial]:
    """Merge several walks of one grid."""
    same = zip(*walks, strict=True)
    return [MeasuredTrial(visits[0].trial, [us for visit in visits for us in visit.times_us]) for visits in same]


def measure(
    executor: Executor,
    trials: Sequence[Trial],
    budget_s: float,
    clock_us: Callable[[], float] = monotonic_us,
    advance: Callable[[Trial], None] = lambda _trial: None,
) -> list[MeasuredTrial]:
    """Walk the grid at least once, and repeat while another walk fits into the time budget."""
    began_us = clock_us()
    survey = Survey(executor, trials, clock_us)
    walks: list[list[MeasuredTrial]] = []
    while True:
        walk_us = clock_us()
        walks.append(survey.walk(advance))
        now_us = clock_us()
        if (now_us - began_us) + (now_us - walk_us) > budget_s * 1e6:
            return joined(walks)


HOST_ROWS = (8, 64)
HOST_STEPS, HOST_RUNS = 100, 3


def host_costs_us() -> tuple[float, float]:
    """Host time of planning and of the message to the front end: (per step, per row), in microseconds."""
    # The minimum of several runs: other load on the machine only adds time.
    few, many = (min(time_scheduler(rows, HOST_STEPS).us_per_step for _ in range(HOST_RUNS)) for rows in HOST_ROWS)
    row_us = max(0.0, (many - few) / (HOST_ROWS[1] - HOST_ROWS[0]))
    return max(0.0, few - row_us * HOST_ROWS[0]), row_us


DELIVERY_REQUESTS, DELIVERY_TOKENS = 64, 64
DELIVERY_IDS = TokenRange(1, 250)
START_LIMIT_S, POLL_S = 120.0, 0.1


def delivery_cost_us() -> float:
    """Cost of one token outside the engine, when front end and client share the cores of the executor.

    CPU time of both, with a scripted engine behind them, spread over all cores: what they take, the executor's threads lose.
    """
    with _scripted_server(step_ms=40) as (child, target):
        _send(target, 2, 16, DELIVERY_TOKENS)
        ours_s, theirs_s = time.process_time(), child.cpu_s()
        _send(target, DELIVERY_REQUESTS, 16, DELIVERY_TOKENS)
        spent_s = time.process_time() - ours_s + child.cpu_s() - theirs_s
    return spent_s * 1e6 / (DELIVERY_REQUESTS * DELIVERY_TOKENS) / (os.cpu_count() or 1)


ADMISSION_RUNS = 3


def admission_costs_us(loads: Sequence[tuple[int, int]]) -> list[float]:
    """Microseconds of a request from its client to the engine, for each load of (concurrent requests, tokens in each).

    Requests pass one after the other: with an engine whose steps take no time, the last one has its token when all have
    been made, sent, parsed and submitted.
    """
    with _scripted_server(step_ms=0) as (_, target):
        _send(target, DELIVERY_REQUESTS, 16, 1)
        return [
            median([_last_first_s(_send(target, *load, 1)) * 1e6 / load[0] for _ in range(ADMISSION_RUNS)]) for load in loads
        ]


def _last_first_s(records: Sequence[RequestRecord]) -> float:
    return max(record.first_s or 0.0 for record in records) - min(record.sent_s for record in records)


def _send(target: TargetServer, requests: int, input_tokens: int, output_tokens: int) -> list[RequestRecord]:
    plan = LoadPlan(target, ClosedLoopRate(requests), Recipe(0, DELIVERY_IDS), seconds_max=START_LIMIT_S)
    result = asyncio.run(run_load(plan, fixed_sessions(requests, Round(input_tokens, output_tokens), WorkloadShape())))
    if any(record.error is not None for record in result.records):
        raise CannotCalibrate("requests to a scripted server failed, so what serving costs beside the engine is not known")
    return result.records


@contextlib.contextmanager
def _scripted_server(step_ms: int) -> Iterator[tuple[Child, TargetServer]]:
    serve = baton_command("serve", "--executor", "scripted", "--step-ms", str(step_ms))
    port = free_port()
    quiet = ["--log-level", "warning", "--no-access-log", "--no-prefix-cache", "--port", str(port)]
    with started("baton serve", [*serve, *quiet], {}) as child:
        yield child, TargetServer(f"http://127.0.0.1:{port}", asyncio.run(_wait_for_model(child, port)))


async def _wait_for_model(child: Child, port: int) -> str:
    async with open_http(1) as http:
        while True:
            child.check_alive()
            try:
                return await first_model(http, f"http://127.0.0.1:{port}")
            except ServerUnreachable as error:
                if time.perf_counter() - child.started_s > START_LIMIT_S:
                    raise ChildFailed(f"baton serve did not answer within {START_LIMIT_S:g} s") from error
                await asyncio.sleep(POLL_S)


class ModelSizes(msgspec.Struct, frozen=True):
    """Sizes of the model. The fit finds the rates."""

    weight_bytes: float
    token_flop: float
    kv_bytes_per_token: float
    pair_flop: float


def model_sizes(folder: Path, dtype: str) -> ModelSizes:
    """Read from a model folder's configuration and the headers of its weights."""
    # Imported here because these take seconds, and a wrong option should be reported at once.
    from safetensors import safe_open
    from transformers import AutoConfig

    from baton.executor.model_loading import DTYPES
    from baton.executor.model_support import optional_attribute, text_config

    parameters = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as weights:
            parameters += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    config = text_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    head_dim = optional_attribute(config, "head_dim", None) or int(config.hidden_size) // heads
    kv_heads = optional_attribute(config, "num_key_value_heads", None) or heads
    table = int(config.vocab_size) * int(config.hidden_size)
    item_bytes = DTYPES[dtype].itemsize
    return ModelSizes(
        # A table of its own for embeddings is looked up, not multiplied with; a tied one also gives the logits, row by row.
        weight_bytes=float(item_bytes * (parameters if config.tie_word_embeddings else parameters - table)),
        token_flop=2.0 * (parameters - table * (1 if config.tie_word_embeddings else 2)),
        kv_bytes_per_token=2.0 * int(str(kv_heads)) * int(str(head_dim)) * layers * item_bytes,
        pair_flop=4.0 * heads * int(str(head_dim)) * layers,
    )


def fit_roofline(measured: Sequence[MeasuredTrial], sizes: ModelSizes) -> Roofline:
    """The roofline with the least relative error over the steps that are not mixed.

    With the knee (the tokens at which products take as long as reading the weights) given, a step's time is linear in what
    is unknown; so every knee is tried.
    """
    points = [one.trial.point(one.us) for one in measured if not one.trial.is_mixed]
    fits = [(*_fit_with_knee(points, knee), knee) for knee in KNEES_TOKENS]
    _, costs, knee = min(fits, key=lambda fitted: fitted[0])
    launch_us, token_us, row_us, context_us, pair_us = costs
    token_us, context_us, pair_us = max(token_us, LEAST_US), max(context_us, LEAST_US), max(pair_us, LEAST_US)
    rate = _rounded(sizes.token_flop / token_us * 1e6)
    return Roofline(
        launch_us=round(launch_us, 1),
        weight_bytes=sizes.weight_bytes,
        weight_bytes_per_s=_rounded(sizes.weight_bytes / (token_us * knee) * 1e6),
        token_flop=sizes.token_flop,
        decode_flop_per_s=rate,
        prefill_flop_per_s=rate,
        row_us=round(row_us, 2),
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        kv_bytes_per_s=_rounded(sizes.kv_bytes_per_token / context_us * 1e6),
        pair_flop=sizes.pair_flop,
        attention_flop_per_s=_rounded(sizes.pair_flop / pair_us * 1e6),
    )


def _rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def _fit_with_knee(points: Sequence[MeasuredStep], knee: int) -> tuple[float, tuple[float, ...]]:
    """Squared relative error, and launch, token, row, context and pair in microseconds."""
    rows = np.array(
        [
            (1.0, max(knee, point.decodes + point.prefill_tokens), point.decodes, point.decode_context, point.prefill_pairs)
            for point in points
        ]
    )
    relative = rows / np.array([point.us for point in points])[:, None]
    return _least_squares_from_zero(relative, np.ones(len(points)))


def _least_squares_from_zero(
    matrix: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> tuple[float, tuple[float, ...]]:
    """Non-negative least squares by trying each set of columns: with five columns there are thirty-one."""
    columns = matrix.shape[1]
    best = (math.inf, (0.0,) * columns)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            some = list(chosen)
            found = np.linalg.lstsq(matrix[:, some] / scale[some], wanted, rcond=None)[0] / scale[some]
            if (found < 0).any():
                continue
            error = float(np.square(matrix[:, some] @ found - wanted).sum())
            if error < best[0]:
                costs = np.zeros(columns)
                costs[some] = found
                best = (error, tuple(costs.tolist()))
    return best


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """One measured trial and its predictions."""

    measured: MeasuredTrial
    roofline_error: float
    """Prediction of the roofline alone ÷ measured − 1."""
    model_error: float
    """Prediction of the whole model ÷ measured − 1."""


@dataclass(frozen=True, slots=True)
class Calibration:
    file: StepTimesFile
    rows: list[CalibrationRow]

    def worst(self, mixed: bool) -> float:
        """Largest error: of the roofline on fitted trials, or of the model on mixed ones."""
        errors = [
            row.model_error if mixed else row.roofline_error for row in self.rows if row.measured.trial.is_mixed is mixed
        ]
        return max((abs(error) for error in errors), default=0.0)


def calibrate(
    measured: Sequence[MeasuredTrial], sizes: ModelSizes, name: str, measured_on: str, host_us: float, host_row_us: float
) -> Calibration:
    roofline = fit_roofline(measured, sizes)
    points = tuple(one.trial.point(round(one.us, 1)) for one in measured if not one.trial.is_mixed)
    file = StepTimesFile(
        name=name, measured_on=measured_on, roofline=roofline, host_us=round(host_us, 1),
        host_row_us=round(host_row_us, 2), points=points,
    )  # fmt: skip
    alone = StepTimes(msgspec.structs.replace(file, points=(), host_us=0.0, host_row_us=0.0))
    whole = StepTimes(msgspec.structs.replace(file, host_us=0.0, host_row_us=0.0))
    return Calibration(file, [CalibrationRow(one, _error(alone, one), _error(whole, one)) for one in measured])


def _error(model: StepTimes, one: MeasuredTrial) -> float:
    point = one.trial.point(one.us)
    said = model.step_us(point.decodes, point.decode_context, point.prefill_tokens, point.prefill_pairs)
    return said / one.us - 1.0
