"""Formats of weights beside each other: speed, memory, and how far the model's opinion of a text moves from bfloat16's.

A GGUF file is measured as bfloat16, as it is, and converted as int8 and int4; a folder of safetensors likewise, without the
second. Every format is loaded alone, in this process. Perplexity and the most likely next token are those of TEXT, which
was written for this and is in nobody's training data.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from tokenizers import Tokenizer

from baton.bench.step_plans import StepPlans, stop_of
from baton.core.engine.plan import Chunk, StepPlan, StepResult
from baton.core.engine.request import Sampling, frozen_tokens
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.gguf_folder import gguf_in
from baton.node.models import resolve_model
from baton.node.stage_progress import StageNames
from benchmarks.options import JsonIfGiven, ModelArgument
from benchmarks.runner import Columns, Experiment, MeasurementFailed, Progress, Report, run_benchmark, table_of

BLOCK_SIZE = 32
CONTEXT_TOKENS = 512
PROMPT_TOKENS = 64
WARM_STEPS = 2
TEXT = """The ferry to the island leaves at seven in the morning, and again at noon if the wind allows it. On the day I first
took it there was no wind at all. The captain, a short woman with a grey scarf, collected the tickets herself and told each
passenger where to sit, because the boat was old and leaned to the left. Behind me a boy counted gulls. He reached forty-one
before his sister told him that he had counted the same bird three times, and then he began again from one.

Halfway across the engine stopped. Nobody spoke. The captain opened a wooden hatch, climbed down with a lamp in her hand, and
we heard her hit something twice with a hammer. When she came back up she wiped her hands on the scarf and said that the
engine was twenty-six years older than she was, and that it needed to be reminded of its work now and then. A moment later it
started, coughed, and carried us on towards the harbour, where a man with a cart full of onions was waiting for the mail.

I stayed for nine days. In the evenings I wrote down what I had seen: the price of bread, the names of the dogs, the order in
which the lamps along the quay were lit. It was not much, but when I read it again years later I could smell the onions."""

Steps = Annotated[int, typer.Option(min=2, max=1000, help="Decode steps of each measurement.")]
Streams = Annotated[str, typer.Option(help="Sequences that decode at once, with commas between.")]


class FormatLine(msgspec.Struct, frozen=True):
    name: str
    details: str
    weight_bytes: int
    tokens_per_s: dict[int, float]
    """By the number of streams, of the median step."""
    perplexity: float
    agreement: float
    """Share of the text's tokens after which the most likely token is that of the first format."""


class FormatsReport(Report, kw_only=True):
    model: str
    text_tokens: int
    lines: list[FormatLine]


@dataclasses.dataclass(frozen=True, slots=True)
class Opinion:
    """What a model thinks of the text."""

    perplexity: float
    best: list[int]
    """The most likely token after each."""


def formats(model: ModelArgument = "smollm2", steps: Steps = 20, streams: Streams = "1,8", json: JsonIfGiven = None) -> None:
    """Measure a model in every format of weights: speed, memory, perplexity and agreement with bfloat16."""

    def prepare(progress: Progress) -> Experiment[FormatsReport]:
        ways, counts = _ways(model, progress), sorted({int(count) for count in streams.split(",")})
        return Experiment(len(ways), partial(_measured, model, ways, steps, counts, progress))

    run_benchmark(prepare, show, json)


def _ways(model: str, progress: Progress) -> dict[str, tuple[Path, str]]:
    """Folder and --quantization by the name of the line."""
    floats, kept = (resolve_model(model, StageNames(progress.say), as_safetensors=way) for way in (True, False))
    ways = {"bfloat16": (floats, "none")}
    if gguf_in(kept) is not None:
        ways["as in the file"] = (kept, "auto")
    return ways | {"int8": (floats, "int8"), "int4": (floats, "int4")}


def _measured(
    model: str, ways: dict[str, tuple[Path, str]], steps: int, streams: Sequence[int], progress: Progress
) -> FormatsReport:
    lines: list[FormatLine] = []
    wanted: list[int] = []
    for name, (folder, quantization) in ways.items():
        progress.doing(name)
        meter = FormatMeter(folder, quantization, max(streams))
        try:
            opinion = meter.opinion()
            wanted = wanted or opinion.best
            speeds = {count: meter.tokens_per_s(count, steps) for count in streams}
            lines.append(
                FormatLine(
                    name=name,
                    details=meter.executor.details,
                    weight_bytes=meter.executor.weight_bytes,
                    tokens_per_s=speeds,
                    perplexity=opinion.perplexity,
                    agreement=float(np.mean(np.equal(opinion.best, wanted))),
                )
            )
        finally:
            meter.executor.close()
        progress.done()
    return FormatsReport(model=model, text_tokens=len(wanted), lines=lines)


class FormatMeter:
    """One format, loaded."""

    def __init__(self, folder: Path, quantization: str, slots: int) -> None:
        self.executor = TorchCpuExecutor.load(
            folder, quantization=quantization, slots=slots, block_size=BLOCK_SIZE, context_tokens=CONTEXT_TOKENS,
            blocks=slots * CONTEXT_TOKENS // BLOCK_SIZE,
        )  # fmt: skip
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._plans = StepPlans(BLOCK_SIZE, (0, self.executor.vocabulary))

    def opinion(self) -> Opinion:
        tokens = self._tokenizer.encode(TEXT).ids[: CONTEXT_TOKENS - 1]
        sampling = Sampling(seed=0, temperature=0.0, prompt_logprobs=1)
        start = self._plans.start(0, len(tokens), 0, len(tokens) + 1, 0, sampling)
        start = dataclasses.replace(start, tokens=frozen_tokens(tokens))
        result = self._do(self._plans.plan(starts=(start,), chunks=(Chunk(0, start.epoch, 0, len(tokens), True),)))
        self._do(self._plans.plan(stops=(stop_of(start),)))
        if not result.prompt_logprobs:
            raise MeasurementFailed("the executor gave no log-probabilities of the text")
        chosen = np.concatenate([part.chosen for part in result.prompt_logprobs])
        best = np.concatenate([part.top_ids[:, 0] for part in result.prompt_logprobs])
        return Opinion(float(np.exp(-chosen.mean())), best.tolist())

    def tokens_per_s(self, streams: int, steps: int) -> float:
        limit = PROMPT_TOKENS + steps + WARM_STEPS + 2
        blocks = -(-limit // BLOCK_SIZE)
        starts = tuple(self._plans.start(slot, PROMPT_TOKENS, 0, limit, slot * blocks) for slot in range(streams))
        chunks = tuple(Chunk(start.slot, start.epoch, 0, PROMPT_TOKENS, True) for start in starts)
        self._do(self._plans.plan(starts=starts, chunks=chunks))
        slots = np.arange(streams, dtype=np.int32)
        epochs = np.array([start.epoch for start in starts], dtype=np.int64)
        seconds = []
        for _ in range(WARM_STEPS + steps):
            began_s = time.perf_counter()
            self._do(self._plans.plan(decode_slots=slots, decode_epochs=epochs))
            seconds.append(time.perf_counter() - began_s)
        self._do(self._plans.plan(stops=tuple(stop_of(start) for start in starts)))
        return float(streams / np.median(seconds[WARM_STEPS:]))

    def _do(self, plan: StepPlan) -> StepResult:
        self.executor.launch(plan)
        return self.executor.collect()


def show(console: Console, report: FormatsReport) -> None:
    columns: Columns[FormatLine] = [
        ("weights", lambda line: line.name),
        ("MiB", lambda line: f"{line.weight_bytes / 2**20:.0f}"),
        ("tokens/s, by streams", lambda line: ", ".join(f"{n}: {rate:.0f}" for n, rate in line.tokens_per_s.items())),
        ("perplexity", lambda line: f"{line.perplexity:.2f}"),
        ("same best token", lambda line: f"{line.agreement:.1%}"),
    ]
    console.print(table_of(f"{report.model}, a text of {report.text_tokens + 1} tokens", columns, report.lines))
