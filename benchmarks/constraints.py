"""llguidance and xgrammar on JSON schemas: compile time, mask time, wrong accepts and rejects, crashes, answers that end.

Each backend gets the schemas twice: as Baton's gate rewrites them, and as they are. A child process does the work, and is
started again behind a schema that crashed it or took too long. Random answers are written with llguidance behind the gate
only: that is what is served, and judged. A wrong accept, a matcher that gives up, an answer that ended and is not valid, a
crash or a time-out is a failure, and so are a refusal that names no keyword and masks of more than 1 ms at the 99th
percentile; of a file of schemas, so are fewer than 90 % accepted or fewer than 95 % of their answers ended. With
`--tiny-model` a real server answers the accepted schemas too (`tiny_answers`).
"""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.api.constraints.schema_reader import REFUSED, RESTRICTING
from benchmarks.bfcl import BfclCounts, bfcl_counts, show_bfcl
from benchmarks.options import JsonIfGiven
from benchmarks.runner import (
    BadBenchmarkOptions,
    Columns,
    Experiment,
    MeasurementFailed,
    Progress,
    Report,
    run_benchmark,
    table_of,
)
from benchmarks.tiny_answers import FINISHED_MIN, TinyAnswerCounts, judged_answers, show_tiny_answers, tiny_answers

VOCABULARY = 32_000
END = "<|end|>"
SUITE = "suite"
SIDES = (("llguidance", "gate"), ("llguidance", "raw"), ("xgrammar", "raw"), ("xgrammar", "gate"))
SERVED = SIDES[0]
ACCEPTED_MIN = 0.9
MASK_US_MAX = 1_000
"""At the 99th percentile."""
QUOTED = re.compile(r"'([^']+)'")
KEYWORDS = RESTRICTING | {*REFUSED, "dependentRequired"} | {"false"}  # a whole schema, which has no other name
BACKEND_NAMES = ("llguidance", "xgrammar")

Row = dict[str, Any]


class BackendCounts(msgspec.Struct, frozen=True):
    backend: str
    schemas: str
    """`gate`: rewritten by the gate; `raw`: as they are."""
    count: int
    accepted: int
    refused: dict[str, int]
    """By the gate or the backend, reason → schemas."""
    unnamed: list[str]
    """Schemas whose refusal names no keyword, each with the reason."""
    crashed: list[str]
    timed_out: list[str]
    valid: int
    invalid: int
    wrong_accepts: int
    schemas_with_wrong_accepts: int
    wrong_rejects: int
    failed: int
    """Instances and random answers in which the matcher gave up."""
    schemas_with_failed: list[str]
    gate_us: tuple[float, float]
    """Median and 99th percentile."""
    compile_us: tuple[float, float]
    mask_us: tuple[float, float]
    masks_over_1_ms: int
    finished: int
    finished_invalid: list[str]
    """Schemas whose answer ended and is not valid."""


class ConstraintsReport(Report, kw_only=True):
    vocabulary: int
    sides: dict[str, list[BackendCounts]]
    """By file of schemas."""
    tiny: dict[str, TinyAnswerCounts] = msgspec.field(default_factory=dict)
    """By file of schemas, where a tiny model was to answer them."""
    bfcl: BfclCounts | None = None


def constraints(
    schemas: Annotated[
        Path | None,
        typer.Option(envvar="BATON_JSON_SCHEMAS", dir_okay=False, help="Rows of schemas and instances, .jsonl.gz."),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(envvar="BATON_JSON_SCHEMA_SUITE", file_okay=False, help="Folder of a draft in JSON-Schema-Test-Suite."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="tokenizer.json, byte-level [one trained on the spot].")
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Take each schema of this number only; xgrammar takes minutes for all.")
    ] = 1,
    bfcl: Annotated[
        Path | None,
        typer.Option(help="Wheel of bfcl-eval, or a folder that it was unpacked to: its functions are compiled."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Only this one: llguidance or xgrammar.")] = None,
    tiny_model: Annotated[
        bool, typer.Option("--tiny-model", help="Have a tiny random model answer the accepted schemas, from a server.")
    ] = False,
    json_file: JsonIfGiven = None,
) -> None:
    """Compare constrained decoding of both backends on JSON schemas; compile the functions of BFCL."""

    def prepare(progress: Progress) -> Experiment[ConstraintsReport]:
        inputs, chosen = _inputs(schemas, suite), _sides(backend)
        if not inputs and bfcl is None:
            raise BadBenchmarkOptions("no schemas were named: use --schemas FILE, --suite DIR or --bfcl WHEEL")
        taken = {name: rows[::every] for name, rows in inputs.items()}
        count = len(inputs) * (len(chosen) + tiny_model) + (bfcl is not None)
        return Experiment(count, lambda: _report(taken, chosen, tokenizer, bfcl, tiny_model, progress))

    run_benchmark(prepare, _show, json_file)


def _sides(backend: str | None) -> tuple[tuple[str, str], ...]:
    chosen = tuple(side for side in SIDES if backend in (None, side[0]))
    if not chosen:
        raise BadBenchmarkOptions(f"there is no backend {backend}: use {' or '.join(BACKEND_NAMES)}")
    return chosen


def _inputs(schemas: Path | None, suite: Path | None) -> dict[str, list[Row]]:
    for path in (schemas, suite):
        if path is not None and not path.exists():
            raise BadBenchmarkOptions(f"{path} does not exist")
    inputs = {} if schemas is None else {schemas.name: _rows_of(schemas)}
    if suite is not None:
        inputs[SUITE] = list(suite_rows(suite))
    return inputs


def _rows_of(file: Path) -> list[Row]:
    with gzip.open(file) as lines:
        return [json.loads(line) for line in lines]


def suite_rows(folder: Path) -> Iterator[Row]:
    """The required tests: files of the folder itself."""
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_text()):
            yield {"name": f"{file.stem}: {case['description']}", "schema": case["schema"], "tests": case["tests"]}


def _report(
    inputs: dict[str, list[Row]],
    chosen: Sequence[tuple[str, str]],
    tokenizer: Path | None,
    bfcl: Path | None,
    has_tiny_model: bool,
    progress: Progress,
) -> ConstraintsReport:
    counts = None
    if bfcl is not None:
        progress.doing("compiling the functions of BFCL")
        counts = bfcl_counts(bfcl)
        progress.done()
    if not inputs:
        return ConstraintsReport(vocabulary=0, sides={}, bfcl=counts)
    report = _measured(inputs, chosen, tokenizer, progress)
    tiny = _answered(inputs, progress) if has_tiny_model else {}
    failures = [*report.failures, *(text for name in tiny for text in judged_answers(tiny[name], name != SUITE))]
    return msgspec.structs.replace(report, bfcl=counts, tiny=tiny, failures=failures)


def _answered(inputs: dict[str, list[Row]], progress: Progress) -> dict[str, TinyAnswerCounts]:
    found: dict[str, TinyAnswerCounts] = {}
    for name, rows in inputs.items():
        progress.doing(f"{name}: a tiny model")
        found[name] = tiny_answers(rows)
        progress.say(str(found[name]))
        progress.done()
    return found


def _measured(
    inputs: dict[str, list[Row]], chosen: Sequence[tuple[str, str]], file: Path | None, progress: Progress
) -> ConstraintsReport:
    with tempfile.TemporaryDirectory() as folder:
        path = file or Path(folder) / "tokenizer.json"
        if file is None:
            progress.doing("training a vocabulary")
            _train(path)
        tokenizer = Tokenizer.from_file(str(path))
        end = tokenizer.token_to_id(END)
        if end is None:
            raise MeasurementFailed(f"the tokenizer has no token {END}")
        sides: dict[str, list[BackendCounts]] = {}
        for name, rows in inputs.items():
            for backend, gate in chosen:
                progress.doing(f"{name}: {backend}, {gate}")
                results = _results(rows, [backend, str(path), str(end), gate])
                sides.setdefault(name, []).append(counted(backend, gate, rows, results))
                progress.say(str(sides[name][-1]))
                progress.done()
        failures = [
            text for name, found in sides.items() for side in found for text in judged(side, has_floors=name != SUITE)
        ]
        return ConstraintsReport(vocabulary=tokenizer.get_vocab_size(), sides=sides, failures=failures)


def _train(path: Path) -> None:
    """Byte-level BPE on Python's standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.save(str(path))


def _results(rows: Sequence[Row], arguments: list[str]) -> list[Row]:
    """One result for each row; a child that died is started again for the rest."""
    results: list[Row] = []
    while len(results) < len(rows):
        results += _child_results(rows[len(results) :], arguments)
    return results


def _child_results(rows: Sequence[Row], arguments: list[str]) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.constraint_backends", *arguments]
    results: list[Row] = []
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        if child.stdin is None or child.stdout is None:
            raise MeasurementFailed("the child has no pipes")
        with child:
            for row in rows:
                try:
                    child.stdin.write(json.dumps(row).encode() + b"\n")
                    child.stdin.flush()
                except BrokenPipeError:
                    break
                line = child.stdout.readline()
                if not line:
                    break
                results.append(json.loads(line))
        if len(results) == len(rows):
            return results
        if child.returncode >= 0:
            errors.seek(0)
            raise MeasurementFailed(f"{' '.join(arguments)}: {errors.read()[-2000:].decode(errors='replace')}")
    how = "timed_out" if child.returncode == -signal.SIGPROF else "crashed"
    return [*results, {how: child.returncode}]


def counted(backend: str, gate: str, rows: Sequence[Row], results: Sequence[Row]) -> BackendCounts:
    done = [result for result in results if "compile_us" in result]
    reasons = [result.get("refused") or result.get("not_compiled") for result in results]
    masks = [mask for result in done for mask in result["mask_us"]]
    named = list(zip(rows, results, strict=True))
    return BackendCounts(
        backend=backend,
        schemas=gate,
        count=len(rows),
        accepted=len(done),
        refused=dict(Counter(reason for reason in reasons if reason).most_common()),
        unnamed=[
            f"{row['name']}: {reason}"
            for row, reason in zip(rows, reasons, strict=True)
            if reason and not KEYWORDS.intersection(QUOTED.findall(reason))
        ],
        crashed=[row["name"] for row, result in named if "crashed" in result],
        timed_out=[row["name"] for row, result in named if "timed_out" in result],
        valid=sum(result["valid"] for result in done),
        invalid=sum(result["invalid"] for result in done),
        wrong_accepts=sum(result["wrong_accepts"] for result in done),
        schemas_with_wrong_accepts=sum(result["wrong_accepts"] > 0 for result in done),
        wrong_rejects=sum(result["wrong_rejects"] for result in done),
        failed=sum(result["failed"] for result in done),
        schemas_with_failed=[row["name"] for row, result in named if result.get("failed")],
        gate_us=_middle_and_high([result["gate_us"] for result in done]),
        compile_us=_middle_and_high([result["compile_us"] for result in done]),
        mask_us=_middle_and_high(masks),
        masks_over_1_ms=sum(mask > 1_000 for mask in masks),
        finished=sum(result.get("is_finished", False) for result in done),
        finished_invalid=[row["name"] for row, result in named if result.get("is_invalid")],
    )


def judged(side: BackendCounts, has_floors: bool) -> list[str]:
    """What is wrong with the side that is served; of another side, nothing is asked."""
    if (side.backend, side.schemas) != SERVED:
        return []
    counts = {
        "wrong accepts": side.wrong_accepts,
        f"matchers that gave up ({', '.join(side.schemas_with_failed)})": side.failed,
        f"answers that ended and are not valid ({', '.join(side.finished_invalid)})": len(side.finished_invalid),
        "crashes and time-outs": len(side.crashed) + len(side.timed_out),
        f"refusals that name no keyword ({', '.join(side.unnamed)})": len(side.unnamed),
    }
    found = [f"{count} {what}" for what, count in counts.items() if count]
    if side.mask_us[1] > MASK_US_MAX:
        found.append(f"a mask takes {side.mask_us[1]:,.0f} µs at the 99th percentile, more than {MASK_US_MAX:,}")
    if has_floors and side.accepted < ACCEPTED_MIN * side.count:
        found.append(f"{side.accepted} of {side.count} schemas accepted, fewer than {ACCEPTED_MIN:.0%}")
    if has_floors and side.finished < FINISHED_MIN * side.accepted:
        found.append(f"{side.finished} of {side.accepted} answers ended, fewer than {FINISHED_MIN:.0%}")
    return found


def _middle_and_high(values: list[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]


def _show(console: Console, report: ConstraintsReport) -> None:
    columns: Columns[BackendCounts] = [
        ("backend, schemas", lambda side: f"{side.backend}, {side.schemas}"),
        ("accepted", lambda side: f"{side.accepted} of {side.count}"),
        ("crashes, time-outs", lambda side: f"{len(side.crashed)}, {len(side.timed_out)}"),
        ("wrong accepts", lambda side: f"{side.wrong_accepts} of {side.invalid}"),
        ("wrong rejects", lambda side: f"{side.wrong_rejects} of {side.valid}"),
        ("matchers that gave up", lambda side: f"{side.failed}"),
        ("compile µs p50/p99", lambda side: _pair(side.compile_us)),
        ("mask µs p50/p99", lambda side: _pair(side.mask_us)),
        ("finished, invalid", lambda side: f"{side.finished}, {len(side.finished_invalid)}" if side.finished else "–"),
    ]
    for name, sides in report.sides.items():
        console.print(table_of(f"{name}, {report.vocabulary} tokens", columns, sides))
        for side in sides:
            if side.schemas == "gate" and side.backend == "llguidance":
                console.print(*(f"{count:4} {reason}" for reason, count in side.refused.items()), sep="\n", markup=False)

    for name, counts in report.tiny.items():
        show_tiny_answers(console, name, counts)
    if report.bfcl is not None:
        show_bfcl(console, report.bfcl)
    for failure in report.failures:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:,.0f} / {values[1]:,.0f}"
