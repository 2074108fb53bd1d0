"""Decode steps that forced tokens save: tool calls of a model, with the tokens that the grammar forces as drafts.

Each tool is called once, by force, in the form of Hermes. A step yields one token more than there are drafts that the masked
draw agrees with; without drafts it yields one, so that a call takes as many steps as it has tokens, and no second run is
needed. Tools are those of `agents`, and functions of BFCL where its wheel is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from msgspec.structs import replace
from rich.console import Console
from tokenizers import Tokenizer

from baton.api.constraint_jobs import ConstraintJob
from baton.api.constraints.wanted import ConstraintRefused, WantedTool
from baton.api.parsers.choosing import ToolParserChoice
from baton.bench.step_plans import StepPlans, stop_of
from baton.core.engine.plan import Chunk, Start, StepPlan, StepResult
from baton.core.engine.request import Constraint, Sampling, frozen_tokens
from baton.executor.constraints.llguidance_grammars import NAME, VERSION, read_eos_ids
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.node.engine_setup import CONSTRAINED_BURST, constraint_backends
from benchmarks.agent_script import TOOLS
from benchmarks.bfcl import distinct, replaced
from benchmarks.options import JsonIfGiven, ModelArgument
from benchmarks.runner import Columns, Experiment, MeasurementFailed, Progress, Report, model_folder, run_benchmark, table_of

BLOCK_SIZE = 32
PROMPT_TOKENS_MAX = 512
PROMPT = "You have the tool {name}: {description}\nCall it.\n"

Bfcl = Annotated[Path | None, typer.Option(help="Wheel of bfcl-eval, or a folder that it was unpacked to.")]
Functions = Annotated[int, typer.Option(min=1, help="So many functions of BFCL, evenly spread over them.")]
MaxTokens = Annotated[int, typer.Option(min=8, help="Of a call.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="Of all calls.")]


class ForcedCall(msgspec.Struct, frozen=True):
    tool: str
    source: str
    """`agents` or `BFCL`."""
    tokens: int = 0
    """That decode steps yielded."""
    steps: int = 0
    """Decode steps that yielded some."""
    is_ended: bool = False
    """Else it was cut at the limit."""


class ForcedTokensReport(Report, kw_only=True):
    model: str
    calls: list[ForcedCall]


class Wanted(msgspec.Struct, frozen=True):
    call: ForcedCall
    prompt: str
    grammar: str


def forced_tokens(
    model: ModelArgument = "smollm2",
    bfcl: Bfcl = None,
    functions: Functions = 20,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    json: JsonIfGiven = None,
) -> None:
    """Count decode steps of forced tool calls with and without drafts of forced tokens."""

    def prepare(progress: Progress) -> Experiment[ForcedTokensReport]:
        folder = model_folder(model, progress)
        calls = [*agent_calls(), *([] if bfcl is None else bfcl_calls(bfcl, functions))]
        return Experiment(len(calls), partial(_counted, model, folder, calls, max_tokens, temperature, progress))

    run_benchmark(prepare, show, json)


def agent_calls() -> list[Wanted]:
    return [_wanted("agents", tool.name, tool.description, tool.schema) for tool in TOOLS]


def bfcl_calls(path: Path, count: int) -> list[Wanted]:
    """Of the functions that compile once the names of types are replaced."""
    found: list[Wanted] = []
    every = distinct(path)
    for one in every[:: max(1, len(every) // count)]:
        try:
            found.append(_wanted("BFCL", one["name"], one.get("description", ""), replaced(one["parameters"])))
        except ConstraintRefused:
            continue
    return found[:count]


def _wanted(source: str, name: str, description: str, parameters: dict[str, object]) -> Wanted:
    job = ConstraintJob(
        tools=(WantedTool(name, parameters),), tool_choice="required", parallel=False, tool_parser=ToolParserChoice.HERMES
    )
    grammar = job.grammar({})
    if grammar is None:
        raise MeasurementFailed(f"a call of {name} is not constrained")
    return Wanted(ForcedCall(name, source), PROMPT.format(name=name, description=description), grammar)


def _counted(
    model: str, folder: Path, calls: Sequence[Wanted], max_tokens: int, temperature: float, progress: Progress
) -> ForcedTokensReport:
    progress.doing("loading")
    counter = CallCounter(folder, max_tokens, temperature)
    counted: list[ForcedCall] = []
    try:
        for wanted in calls:
            progress.doing(wanted.call.tool)
            counted.append(counter.counted(wanted))
            progress.done()
    finally:
        counter.close()
    return ForcedTokensReport(model=model, calls=counted)


class CallCounter:
    """Runs one call after the other in one slot, as an engine with the burst that serves would."""

    def __init__(self, folder: Path, max_tokens: int, temperature: float) -> None:
        self._limit = PROMPT_TOKENS_MAX + max_tokens
        self._max_tokens, self._temperature = max_tokens, temperature
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._stops = tuple(read_eos_ids(folder, self._tokenizer))
        self._executor = TorchCpuExecutor.load(
            folder, slots=1, block_size=BLOCK_SIZE, blocks=-(-self._limit // BLOCK_SIZE), context_tokens=self._limit,
            constrained_burst=CONSTRAINED_BURST, backends=lambda vocabulary: constraint_backends(folder, vocabulary),
        )  # fmt: skip
        self._plans = StepPlans(BLOCK_SIZE, (0, self._executor.vocabulary))

    def close(self) -> None:
        self._executor.close()

    def counted(self, wanted: Wanted) -> ForcedCall:
        start = self._start(wanted)
        chunk = Chunk(start.slot, start.epoch, 0, start.prompt_tokens, True)
        self._do(self._plans.plan(starts=(start,), chunks=(chunk,)))
        slots, epochs = np.array([start.slot], dtype=np.int32), np.array([start.epoch], dtype=np.int64)
        tokens = steps = 0
        is_ended = False
        while tokens < self._max_tokens - 1 and not is_ended:
            yielded = self._do(self._plans.plan(decode_slots=slots, decode_epochs=epochs)).tokens.tolist()
            ends = [at for at, token in enumerate(yielded) if token in self._stops]
            is_ended = bool(ends)
            tokens += ends[0] + 1 if ends else len(yielded)
            steps += bool(yielded)  # where its mask is late, a row sits a step out
        self._do(self._plans.plan(stops=(stop_of(start),)))
        return replace(wanted.call, tokens=tokens, steps=steps, is_ended=is_ended)

    def _start(self, wanted: Wanted) -> Start:
        ids = self._tokenizer.encode(wanted.prompt).ids[:PROMPT_TOKENS_MAX]
        sampling = Sampling(
            seed=1, temperature=self._temperature, stop_token_ids=self._stops,
            constraint=Constraint(NAME, VERSION, wanted.grammar),
        )  # fmt: skip
        drawn = self._plans.start(0, len(ids), 0, len(ids) + self._max_tokens, 0, sampling)
        return dataclasses.replace(drawn, tokens=frozen_tokens(ids))

    def _do(self, plan: StepPlan) -> StepResult:
        self._executor.launch(plan)
        return self._executor.collect()


def show(console: Console, report: ForcedTokensReport) -> None:
    columns: Columns[ForcedCall] = [
        ("tool", lambda call: call.tool if call.is_ended else f"{call.tool} (cut)"),
        ("steps without drafts", lambda call: f"{call.tokens:,}"),
        ("steps with forced drafts", lambda call: f"{call.steps:,}"),
        ("saved", lambda call: shown_saving([call])),
    ]
    console.print(table_of(f"{report.model}, up to {CONSTRAINED_BURST} tokens a step", columns, report.calls))
    for source in dict.fromkeys(call.source for call in report.calls):
        calls = [call for call in report.calls if call.source == source]
        console.print(f"{source}: {len(calls)} calls, {shown_saving(calls)} of all decode steps saved")


def shown_saving(calls: Sequence[ForcedCall]) -> str:
    tokens = sum(call.tokens for call in calls)
    return f"{1 - sum(call.steps for call in calls) / tokens:.0%}" if tokens else "–"
