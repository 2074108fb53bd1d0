"""The functions of BFCL, compiled as a forced call would be: as they are, and with the names of types that JSON schema has.

Reads the wheel of the package `bfcl-eval` (`pip download --no-deps bfcl-eval`), or a folder that it was unpacked to. A
function counts once for each name with the same parameters. Data sets that BFCL itself does not use are left out.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer
from rich.console import Console

from baton.api.constraint_jobs import ConstraintJob
from baton.api.constraints.wanted import ConstraintRefused, WantedTool
from baton.api.parsers.choosing import ToolParserChoice
from baton.executor.constraints.constraint_error import ConstraintError
from baton.executor.constraints.llguidance_grammars import compiled, matching_tokenizer
from baton.node.scripted_text import BYTE_VOCABULARY, byte_tokenizer
from benchmarks.runner import BadBenchmarkOptions

DATA = "data"
LEFT_OUT = frozenset({"possible_answer", "unused_datasets"})
TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object",
    "list": "array", "tuple": "array", "Array": "array", "ArrayList": "array", "Queue": "array", "Stack": "array",
    "float": "number", "double": "number",
    "byte": "integer", "short": "integer", "long": "integer", "Bigint": "integer",
    "bool": "boolean", "Boolean": "boolean",
    "any": "string", "Any": "string", "char": "string", "String": "string",
}  # fmt: skip
"""BFCL's own names of types, of Python, Java and JavaScript."""

Function = dict[str, Any]


class BfclCounts(msgspec.Struct, frozen=True):
    functions: int
    """Different ones."""
    compiled_as_they_are: int
    compiled: int
    """With the names of types replaced."""
    refused: dict[str, int]
    """With the names of types replaced: reason → functions."""
    refused_functions: list[str]


def bfcl_counts(path: Path) -> BfclCounts:
    functions = distinct(path)
    if not functions:
        raise BadBenchmarkOptions(f"{path} has no functions of BFCL")
    tokenizer = matching_tokenizer(byte_tokenizer(), BYTE_VOCABULARY, [BYTE_VOCABULARY - 1])
    whole = sum(why_refused(one["name"], one["parameters"], tokenizer) is None for one in functions)
    found = [(one["name"], why_refused(one["name"], replaced(one["parameters"]), tokenizer)) for one in functions]
    reasons = Counter(reason for _, reason in found if reason is not None)
    return BfclCounts(
        functions=len(functions),
        compiled_as_they_are=whole,
        compiled=len(functions) - reasons.total(),
        refused=dict(reasons.most_common()),
        refused_functions=[name for name, reason in found if reason is not None],
    )


def distinct(path: Path) -> list[Function]:
    found: dict[str, Function] = {}
    for text in _texts(path):
        for row in _rows_in(text):
            for function in _functions_in(row):
                found.setdefault(json.dumps([function["name"], function["parameters"]], sort_keys=True), function)
    return list(found.values())


def _texts(path: Path) -> Iterator[str]:
    """The files of questions and of functions."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            if _is_used(file.relative_to(path)):
                yield file.read_text(encoding="utf-8")
    elif path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".json") and _is_used(Path(name)):
                    yield wheel.read(name).decode()
    else:
        raise BadBenchmarkOptions(f"{path} is neither a wheel of bfcl-eval nor a folder")


def _is_used(path: Path) -> bool:
    return DATA in path.parts and LEFT_OUT.isdisjoint(path.parts)


def _rows_in(text: str) -> list[object]:
    """One row a line, or one value in all."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def _functions_in(row: object) -> Iterator[Function]:
    """A row is a question with its functions, or a function."""
    if not isinstance(row, dict):
        return
    listed = row.get("function", row)
    for one in listed if isinstance(listed, list) else [listed]:
        if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("parameters"), dict):
            yield one


def replaced(schema: Any) -> Any:
    if isinstance(schema, list):
        return [replaced(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    named = {"type": TYPES.get(kind, kind)} if isinstance(kind, str) else {}
    return {key: replaced(value) for key, value in schema.items()} | named


def why_refused(name: str, parameters: dict[str, object], tokenizer: LLTokenizer) -> str | None:
    """None: a forced call of this function compiles."""
    tool = WantedTool(name, parameters)
    job = ConstraintJob(tools=(tool,), tool_choice="required", tool_parser=ToolParserChoice.HERMES)
    try:
        source = job.grammar({})
        if source is not None:
            compiled(tokenizer, source)
    except ConstraintRefused as refusal:
        return refusal.reason
    except ConstraintError as error:
        return str(error).partition("\n")[0]
    return None


def show_bfcl(console: Console, counts: BfclCounts) -> None:
    console.print(
        f"BFCL: {counts.compiled:,} of {counts.functions:,} functions compile with the names of types replaced,"
        f" {counts.compiled_as_they_are:,} as they are"
    )
    console.print(*(f"{count:4} {reason}" for reason, count in counts.refused.items()), sep="\n", markup=False)
    console.print(f"refused: {', '.join(counts.refused_functions)}", markup=False, soft_wrap=True)
