"""Answers of a tiny random model to JSON schemas, from `baton serve`: how many end, and whether those are valid.

The model has random float64 weights and a vocabulary of bytes, so a token is a byte. What closes a string, an object or a
list is made likelier by `logit_bias`; everything else is as a client has it: the gate, the compile process, the engine and
its masks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from baton.bench.stats import median
from baton.bench.tiny_model import make_tiny
from baton.node.scripted_text import byte_tokenizer
from benchmarks.constraint_backends import TOKENS_MAX, judge_of, satisfies
from benchmarks.health import get, serving

FINISHED_MIN = 0.95
"""Of accepted schemas."""
CLOSING = '"}]'
BIAS = 5.0
AT_ONCE = 8
CONTEXT_TOKENS = TOKENS_MAX + 64
OPTIONS = ("--port", "0", "--device", "cpu", "--dtype", "float64", "--threads", "1", "--kv-memory", "128M")
ANSWER_S_MAX = 600.0

Row = dict[str, Any]


class TinyAnswer(msgspec.Struct, frozen=True):
    name: str
    status: int
    finish: str = ""
    tokens: int = 0
    is_valid: bool = False


class TinyAnswerCounts(msgspec.Struct, frozen=True):
    accepted: int
    refused: int
    finished: int
    """By themselves, within the limit of tokens."""
    cut: list[str]
    """Schemas whose answers did not end."""
    invalid: list[str]
    """Schemas whose answer ended and is not valid."""
    failed: list[str]
    """Schemas whose answer ended in another way, or with an error of the server."""
    median_tokens: float
    """Of those that ended."""


def tiny_answers(rows: Sequence[Row]) -> TinyAnswerCounts:
    """Schemas in a dialect of their own, which nothing can judge, are left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        make_tiny(folder, CONTEXT_TOKENS)
        with serving("serve", str(folder), *OPTIONS) as (_, url), ThreadPoolExecutor(AT_ONCE) as clients:
            return counted(list(clients.map(lambda row: _answer(url, row), _judged(rows))))


def _judged(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if judge_of(row["schema"]) is not None)


def _answer(url: str, row: Row) -> TinyAnswer:
    body = {
        "prompt": "hi",
        "guided_json": row["schema"],
        "max_tokens": TOKENS_MAX,
        "temperature": 1.0,
        "seed": 1,
        "logit_bias": {str(token): BIAS for token in byte_tokenizer().encode(CLOSING).ids},
    }
    answer = get(f"{url}/v1/completions", body, ANSWER_S_MAX)
    if answer.status != 200:
        return TinyAnswer(row["name"], answer.status)
    said = answer.json()
    choice = said["choices"][0]
    valid = satisfies(judge_of(row["schema"]), choice["text"])
    return TinyAnswer(row["name"], 200, choice["finish_reason"], said["usage"]["completion_tokens"], valid)


def counted(answers: Sequence[TinyAnswer]) -> TinyAnswerCounts:
    accepted = [one for one in answers if one.status == 200]
    finished = [one for one in accepted if one.finish == "stop"]
    refused = [one for one in answers if one.status == 400]
    return TinyAnswerCounts(
        accepted=len(accepted),
        refused=len(refused),
        finished=len(finished),
        cut=[one.name for one in accepted if one.finish == "length"],
        invalid=[one.name for one in finished if not one.is_valid],
        failed=[one.name for one in answers if one.status not in (200, 400) or one.finish not in ("", "stop", "length")],
        median_tokens=median([float(one.tokens) for one in finished]) if finished else 0.0,
    )


def judged_answers(counts: TinyAnswerCounts, has_floor: bool) -> list[str]:
    found = [
        f"tiny model: {len(names)} answers {what} ({', '.join(names)})"
        for what, names in (("ended and are not valid", counts.invalid), ("failed", counts.failed))
        if names
    ]
    if has_floor and counts.finished < FINISHED_MIN * counts.accepted:
        found.append(f"tiny model: {counts.finished} of {counts.accepted} answers ended, fewer than {FINISHED_MIN:.0%}")
    return found


def show_tiny_answers(console: Console, name: str, counts: TinyAnswerCounts) -> None:
    console.print(
        f"{name}, a tiny random model: {counts.finished} of {counts.accepted} answers ended within {TOKENS_MAX} tokens"
        f" (median {counts.median_tokens:.0f}), {len(counts.invalid)} of them not valid; {counts.refused} schemas refused",
        soft_wrap=True,
    )
    console.print(f"cut: {', '.join(counts.cut)}", markup=False, soft_wrap=True)
