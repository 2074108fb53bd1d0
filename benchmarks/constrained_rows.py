"""What unconstrained requests lose beside constrained ones: decode steps of one batch with and without constraints.

    free     rows without a constraint in all slots of the batch
    mixed    the same number of rows, every other one with a JSON schema

Both batches are in one executor, and their steps take turns one by one, so that a busy machine hits both. An unconstrained
row gets one token a step in either, so its throughput is the reciprocal of a step's time. The masks alone are timed
afterwards, by feeding the tokens that came to fresh matchers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console

from baton.bench.machine import OtherLoad
from baton.bench.stats import median, percentile
from baton.bench.step_plans import StepPlans, stop_of
from baton.core.engine.plan import Int32s, Int64s, Start, StepPlan, StepResult
from baton.core.engine.request import Constraint, Sampling
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import words_of
from baton.executor.contract import Executor
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.node.engine_setup import constraint_backends
from benchmarks.options import JsonIfGiven, ModelArgument, Pairs
from benchmarks.runner import (
    Columns,
    Experiment,
    MeasurementFailed,
    Progress,
    Report,
    Rounds,
    Spread,
    alternating,
    model_folder,
    notes_on_other_load,
    print_remarks,
    run_benchmark,
    shown_ratio,
    shown_spread,
    table_of,
)

BatchRows = Annotated[int, typer.Option("--rows", min=2, max=256, help="Rows of a batch; every other one is constrained.")]
Steps = Annotated[int, typer.Option(min=4, max=1000, help="Steps of each batch in a round.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="Of all rows.")]
Burst = Annotated[
    int, typer.Option(min=1, max=16, help="Tokens a constrained row may yield in a step: forced ones, drafted.")
]

PROMPT_TOKENS, BLOCK_SIZE, WARM_UP_STEPS = 64, 32, 4
LIMIT = 0.03
"""Most that an unconstrained row may lose."""
PEOPLE = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "surname": {"type": "string", "maxLength": 24},
            "colour": {"enum": ["red", "green", "blueish"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["surname", "colour", "age"],
        "additionalProperties": False,
    },
}
"""Goes on for longer than any run."""


class RowsRound(msgspec.Struct, frozen=True):
    free_ms: float
    """Median time of a step without constrained rows."""
    mixed_ms: float
    free_cpu_ms: float
    """Median CPU time of such a step, of all threads: masks that others compute while the model computes are in it."""
    mixed_cpu_ms: float
    constrained_tokens_a_step: float
    mask_us: list[float]
    """Of each mask of the round, on one thread."""
    load: OtherLoad

    @property
    def ratio(self) -> float:
        """Throughput of unconstrained rows beside constrained ones ÷ without these."""
        return self.free_ms / self.mixed_ms

    @property
    def cpu_ratio(self) -> float:
        """The same by CPU time, which a busy machine disturbs less."""
        return self.free_cpu_ms / self.mixed_cpu_ms


class RowsReport(Report, kw_only=True):
    model: str
    rows: int
    temperature: float
    burst: int
    rounds: list[RowsRound]

    @property
    def lost(self) -> float:
        return 1 - median([each.ratio for each in self.rounds])


def constrained_rows(
    model: ModelArgument = "smollm2",
    rows: BatchRows = 32,
    steps: Steps = 24,
    temperature: Temperature = 1.0,
    burst: Burst = 1,
    pairs: Pairs = 5,
    json: JsonIfGiven = None,
) -> None:
    """Time decode steps on a CPU with and without constrained rows, in turns."""

    def prepare(progress: Progress) -> Experiment[RowsReport]:
        folder = model_folder(model, progress)
        return Experiment(pairs, partial(_measured, model, folder, rows, steps, temperature, burst, pairs, progress))

    run_benchmark(prepare, show, json)


def _measured(
    model: str, folder: Path, rows: int, steps: int, temperature: float, burst: int, pairs: int, progress: Progress
) -> RowsReport:
    progress.doing("loading")
    executor = _executor(folder, rows, steps, burst)
    rounds = Rounds(progress, pairs)
    measured: list[RowsRound] = []
    try:
        batches = _Batches(executor, rows, steps, _constraint(executor.constraints), temperature)
        for number in range(pairs):
            progress.doing(f"round {number + 1} of {pairs}")
            measured.append(batches.round(rounds.look(), is_reversed=bool(number % 2)))
            last = measured[-1]
            shown = f"free {last.free_ms:.2f} ms a step, mixed {last.mixed_ms:.2f} ms"
            progress.say(f"{shown}, ratio {last.ratio:.3f}, by CPU time {last.cpu_ratio:.3f}")
            progress.done()
    finally:
        executor.close()
    notes = notes_on_other_load(rounds.loads)
    return RowsReport(notes=notes, model=model, rows=rows, temperature=temperature, burst=burst, rounds=measured)


def _executor(folder: Path, rows: int, steps: int, burst: int) -> TorchCpuExecutor:
    tokens = _limit(steps, burst) + burst
    return TorchCpuExecutor.load(
        folder, slots=2 * rows, block_size=BLOCK_SIZE, blocks=2 * rows * -(-tokens // BLOCK_SIZE), context_tokens=tokens,
        constrained_burst=burst, backends=lambda vocabulary: constraint_backends(folder, vocabulary),
    )  # fmt: skip


def _limit(steps: int, burst: int) -> int:
    return PROMPT_TOKENS + (steps + WARM_UP_STEPS) * burst + 1


def _constraint(constraints: CompiledConstraints) -> Constraint:
    # Imported here because the backend is optional.
    from llguidance import LLMatcher

    if not constraints.versions:
        raise MeasurementFailed("the tokenizer of this model is of no use for constraints")
    name, version = constraints.versions[0]
    return Constraint(name, version, LLMatcher.grammar_from_json_schema(json.dumps(PEOPLE)))


@dataclass(frozen=True, slots=True)
class _Batch:
    starts: tuple[Start, ...]

    @property
    def slots(self) -> Int32s:
        return np.array([start.slot for start in self.starts], dtype=np.int32)

    @property
    def epochs(self) -> Int64s:
        return np.array([start.epoch for start in self.starts], dtype=np.int64)


class _Batches:
    """Runs rounds of two batches in the slots of one executor."""

    def __init__(
        self, executor: TorchCpuExecutor, rows: int, steps: int, constraint: Constraint, temperature: float
    ) -> None:
        self._executor = executor
        self._rows, self._steps = rows, steps
        self._constraint, self._temperature = constraint, temperature
        self._plans = StepPlans(BLOCK_SIZE, (0, executor.vocabulary))
        self._seed = 0

    def round(self, load: OtherLoad, is_reversed: bool) -> RowsRound:
        free, mixed = self._batch(0, is_constrained=False), self._batch(self._rows, is_constrained=True)
        sides = (mixed, free) if is_reversed else (free, mixed)
        spent: dict[int, list[tuple[float, float]]] = {id(side): [] for side in sides}
        outputs: list[list[int]] = [[] for _ in mixed.starts]
        self._do(self._plans.plan(starts=(*free.starts, *mixed.starts)))
        for step, side in alternating(sides, WARM_UP_STEPS + self._steps):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            result = self._do(self._plans.plan(decode_slots=side.slots, decode_epochs=side.epochs))
            if step >= WARM_UP_STEPS:
                spent[id(side)].append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
            if side is mixed:
                _append(outputs, result)
        self._do(self._plans.plan(stops=tuple(stop_of(start) for start in (*free.starts, *mixed.starts))))
        answers = outputs[::2]
        return RowsRound(
            free_ms=median([wall_s for wall_s, _ in spent[id(free)]]) * 1e3,
            mixed_ms=median([wall_s for wall_s, _ in spent[id(mixed)]]) * 1e3,
            free_cpu_ms=median([cpu_s for _, cpu_s in spent[id(free)]]) * 1e3,
            mixed_cpu_ms=median([cpu_s for _, cpu_s in spent[id(mixed)]]) * 1e3,
            constrained_tokens_a_step=sum(map(len, answers)) / (WARM_UP_STEPS + self._steps),
            mask_us=list(self._mask_us(answers)),
            load=load,
        )

    def _batch(self, first: int, *, is_constrained: bool) -> _Batch:
        """Sequences whose KV is zeros, which take as long to attend to as any."""
        burst = self._executor.shape.burst_max
        limit, starts = _limit(self._steps, burst), list[Start]()
        blocks = -(-limit // BLOCK_SIZE)
        for nth in range(self._rows):
            self._seed += 1
            held = self._constraint if is_constrained and nth % 2 == 0 else None
            wish = Sampling(seed=self._seed, temperature=self._temperature, constraint=held)
            slot = first + nth
            starts.append(self._plans.start(slot, PROMPT_TOKENS, PROMPT_TOKENS - 1, limit, slot * blocks, wish))
        return _Batch(tuple(starts))

    def _do(self, plan: StepPlan) -> StepResult:
        return _collected(self._executor, plan)

    def _mask_us(self, answers: Sequence[Sequence[int]]) -> Iterator[float]:
        words = np.zeros(words_of(self._executor.vocabulary), dtype=np.uint32)
        for answer in answers:
            matcher = self._executor.constraints.matcher(self._constraint, np.empty(0, dtype=np.int32))
            for token in answer:
                began_s = time.perf_counter()
                matcher.mask(words)
                yield (time.perf_counter() - began_s) * 1e6
                if not matcher.consume(token):
                    raise MeasurementFailed("a constrained row yielded a token that its constraint does not allow")


def _collected(executor: Executor, plan: StepPlan) -> StepResult:
    executor.launch(plan)
    return executor.collect()


def _append(outputs: list[list[int]], result: StepResult) -> None:
    at = 0
    for row, count in enumerate(result.counts.tolist()):
        if not count:
            raise MeasurementFailed("a row of a step yielded nothing")
        outputs[row] += result.tokens[at : at + count].tolist()
        at += count


def show(console: Console, report: RowsReport) -> None:
    masks = [mask for each in report.rounds for mask in each.mask_us]
    columns: Columns[RowsReport] = [
        ("", lambda report: f"{report.rows} rows, half of them constrained"),
        ("free, ms a step", lambda report: shown_spread([each.free_ms for each in report.rounds])),
        ("mixed, ms a step", lambda report: shown_spread([each.mixed_ms for each in report.rounds])),
        ("throughput, mixed ÷ free", lambda report: shown_ratio(Spread.of([each.ratio for each in report.rounds]))),
        ("by CPU time", lambda report: shown_ratio(Spread.of([each.cpu_ratio for each in report.rounds]))),
        (
            "tokens a constrained row and step",
            lambda report: shown_spread([2 * each.constrained_tokens_a_step / report.rows for each in report.rounds]),
        ),
        ("a mask, µs p50 / p99", lambda _: f"{median(masks):,.0f} / {percentile(sorted(masks), 0.99):,.0f}"),
    ]
    console.print(table_of(f"{report.model}, temperature {report.temperature:g}, burst {report.burst}", columns, [report]))
    verdict = "within" if report.lost <= LIMIT else "beyond"
    console.print(f"unconstrained rows lose {report.lost:.1%}: {verdict} the limit of {LIMIT:.0%}")
    print_remarks(console, report)
